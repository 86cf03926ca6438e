//! One file per command: its arguments and what it does with them.

pub(crate) mod bench;
pub(crate) mod cancel;
pub(crate) mod collect_env;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod db;
pub(crate) mod doctor;
pub(crate) mod errors;
pub(crate) mod files;
pub(crate) mod list;
pub(crate) mod logs;
pub(crate) mod man;
pub(crate) mod models;
pub(crate) mod pause;
pub(crate) mod prepare;
pub(crate) mod results;
pub(crate) mod resume;
pub(crate) mod retry;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod show;
pub(crate) mod status;
pub(crate) mod submit;
pub(crate) mod validate;
pub(crate) mod version;
pub(crate) mod worker;
