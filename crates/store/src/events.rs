//! Events: the audit trail of jobs, written in the transaction of the change.

use async_trait::async_trait;
use overnight_types::{JobId, Timestamp};

use crate::Error;

/// One change of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Order of events over the whole database.
    pub seq: u64,
    /// The job.
    pub job: JobId,
    /// When, by the database's clock.
    pub at: Timestamp,
    /// What: `created`, `in_progress`, `paused`, `reopened`, `completed`, ….
    pub what: String,
    /// More, in words; may be empty.
    pub note: String,
}

/// Rows of events.
#[async_trait]
pub trait Events {
    /// Events of a job after `after`, oldest first, at most `limit`.
    async fn list_events(&self, job: JobId, after: u64, limit: u32) -> Result<Vec<Event>, Error>;
}
