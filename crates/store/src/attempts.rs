//! Attempts: one row per claim of a shard, for people; pruned a week after the job's end.

use async_trait::async_trait;
use overnight_types::{Epoch, JobId, ShardIndex, Timestamp, WorkerId};

use crate::Error;

/// Why a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttemptEnd {
    /// Every item of the shard has its outcome.
    Done,
    /// Given back: shutdown, pause or cancel.
    Released,
    /// Given back: only items that wait for a retry are left.
    Waiting,
    /// Given back: trouble that is not the items' (engine, store, disk).
    Trouble,
    /// The lease ran out, its worker was found dead, or the worker's engine broke down.
    Lost,
    /// Taken back by finalize, expiry or a re-opening.
    Fenced,
}

impl AttemptEnd {
    /// Every value.
    pub const ALL: &'static [Self] =
        &[Self::Done, Self::Released, Self::Waiting, Self::Trouble, Self::Lost, Self::Fenced];

    /// The word in the database.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Released => "released",
            Self::Waiting => "waiting",
            Self::Trouble => "trouble",
            Self::Lost => "lost",
            Self::Fenced => "fenced",
        }
    }

    /// Reads the word.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|end| end.as_str() == text)
    }
}

/// One try at a shard by one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The job.
    pub job: JobId,
    /// The shard.
    pub shard: ShardIndex,
    /// The lease's epoch.
    pub epoch: Epoch,
    /// Who held it.
    pub worker: WorkerId,
    /// Claimed.
    pub started_at: Timestamp,
    /// Ended; `None` while it runs.
    pub ended_at: Option<Timestamp>,
    /// Why it ended.
    pub end: Option<AttemptEnd>,
}

/// Rows of attempts.
#[async_trait]
pub trait Attempts {
    /// Attempts at one shard, newest first, at most `limit`.
    async fn list_attempts(&self, job: JobId, shard: ShardIndex, limit: u32) -> Result<Vec<Attempt>, Error>;

    /// Drops attempts of jobs that ended more than a week ago, at most `limit`. Returns how many.
    async fn prune_attempts(&self, limit: u32) -> Result<u32, Error>;
}
