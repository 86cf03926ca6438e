//! Items as they are shown: state, outcome, input and output of each, results
//! while a job runs, and failures grouped by code.
//!
//! Invariant: what is shown follows from shard rows, segment rows, segment records
//! and the input; nothing is stored for a view. Only committed outcomes are shown.
//! Work is bounded per call: shards that cannot match are passed over by their rows.
//! Start with [`list`]; one item is [`find`], its lines in order [`results()`].

mod detail;
mod error;
mod groups;
mod records;
mod results;
mod retry;
mod view;

pub use detail::{ItemDetail, ItemRef, find};
pub use error::Error;
pub use groups::{ErrorExample, ErrorGroup, error_groups};
pub use results::{ResultsCursor, ResultsOrder, ResultsPage, ResultsQuery, results};
pub use retry::{RetryFilter, RetryPlan, discard_leftovers, plan_retry, preview_retry};
pub use view::{ItemPage, ItemQuery, ItemView, list};
