//! One file per command: its arguments and what it does with them.

pub(crate) mod cancel;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod errors;
pub(crate) mod files;
pub(crate) mod list;
pub(crate) mod man;
pub(crate) mod models;
pub(crate) mod pause;
pub(crate) mod prepare;
pub(crate) mod results;
pub(crate) mod resume;
pub(crate) mod retry;
pub(crate) mod show;
pub(crate) mod status;
pub(crate) mod version;
