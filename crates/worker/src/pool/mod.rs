//! apalis's worker pool over our own tables: `backend` claims due work, `monitor`
//! runs it. Nothing else in the crate names apalis.

mod backend;
mod monitor;

pub(crate) use backend::Source;
pub(crate) use monitor::run;
