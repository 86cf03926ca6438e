//! Workers: who lives, where, and which models each has.

use async_trait::async_trait;
use overnight_types::{Timestamp, WorkerId};

use crate::Error;

/// A worker that starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewWorker {
    /// New at every process start.
    pub id: WorkerId,
    /// The machine.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// Models whose items it can run now; none without an engine, `["*"]` for a remote
    /// engine that serves any.
    pub models: Vec<String>,
    /// Models that it serves once its engine is loaded, or built anew.
    pub may_load: Vec<String>,
}

/// A worker that has reported within its time to live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveWorker {
    /// As registered.
    pub worker: NewWorker,
    /// Registered.
    pub started_at: Timestamp,
    /// Last report.
    pub seen_at: Timestamp,
}

/// Rows of workers.
#[async_trait]
pub trait Workers {
    /// Records a worker, or refreshes its report and models.
    async fn report_worker(&self, worker: &NewWorker) -> Result<(), Error>;

    /// Drops a worker that stops.
    async fn remove_worker(&self, id: WorkerId) -> Result<(), Error>;

    /// Workers whose last report is at most 60 s old, oldest first.
    async fn list_live_workers(&self) -> Result<Vec<LiveWorker>, Error>;

    /// All workers recorded on this host, live or not: their lock files tell which are dead.
    async fn list_workers_on_host(&self, host: &str) -> Result<Vec<NewWorker>, Error>;
}
