//! The contract for durable state: one trait per aggregate, its errors, and the
//! conformance suite that defines what each method promises.
//!
//! Invariant: every state change is one guarded update; losing the guard is an
//! answer ([`Guarded::Lost`]), not an error. The database's clock decides leases,
//! expiry and due times, so no method takes a moment from its caller.
//! Knows nothing about SQL, objects, the engine, HTTP or apalis.
//! Start with [`Shards`]: claim, commit, release.

#![warn(missing_docs, clippy::unwrap_used)]

pub mod attempts;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod error;
pub mod events;
pub mod files;
pub mod jobs;
pub mod outbox;
pub mod segments;
pub mod shards;
pub mod steps;
pub mod workers;

use async_trait::async_trait;

pub use attempts::{Attempt, AttemptEnd, Attempts};
pub use error::Error;
pub use events::{Event, Events};
pub use files::{File, FileOrder, FilePurpose, FileQuery, Files, NewFile};
pub use jobs::{
    CancelMode, IdempotencyKey, InsertJob, Job, JobQuery, Jobs, JobsAhead, NewJob, Progress, Purged, Reopen,
    ReopenItems, Reopened,
};
pub use outbox::{Outbox, OutboxEvent, OutboxState};
pub use segments::{NewSegment, Segment, SegmentCursor, SegmentSelection, Segments};
pub use shards::{ClaimShard, Committed, Fault, JobSignal, NewFault, NewShard, Shard, ShardKey, ShardLease, Shards};
pub use steps::{IntakeEnd, IntakeProgress, Published, StepKind, StepLease, Steps};
pub use workers::{LiveWorker, NewWorker, Workers};

/// What a guarded update did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a lost guard means that nothing was written"]
pub enum Guarded<S, T = ()> {
    /// The guard held and the change is durable.
    Applied(T),
    /// The guard did not hold; nothing was written.
    Lost {
        /// The row's state now; `None` when the row is gone.
        now: Option<S>,
    },
}

impl<S, T> Guarded<S, T> {
    /// Whether the change was written.
    pub fn is_applied(&self) -> bool {
        matches!(self, Guarded::Applied(_))
    }

    /// The applied value, if the guard held.
    pub fn applied(self) -> Option<T> {
        match self {
            Guarded::Applied(value) => Some(value),
            Guarded::Lost { .. } => None,
        }
    }
}

/// One page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The rows, in the order asked for.
    pub rows: Vec<T>,
    /// Whether more rows follow the last one.
    pub has_more: bool,
}

/// A wait for a wake-up.
pub type Woken = std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'static>>;

/// Tells waiting loops that something may be due. A lost wake-up costs a delay
/// (the poll interval), never an item.
pub trait Wake: Send + Sync {
    /// Resolves when a job or shard may have become due since this call, whenever it
    /// is polled first: ask for it before looking, wait after.
    fn woken(&self) -> Woken;
}

/// The whole contract, as one object.
#[async_trait]
pub trait Store:
    Files
    + Jobs
    + Steps
    + Shards
    + Segments
    + Attempts
    + Workers
    + Events
    + Outbox
    + Wake
    + std::fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// Which database this is, for people: `sqlite` or `postgres`.
    fn backend(&self) -> &'static str;

    /// The database's clock.
    async fn now(&self) -> Result<overnight_types::Timestamp, Error>;

    /// The id of the objects that this database names: `mine` from the first call on, which
    /// keeps it; the one kept in every later one.
    async fn keep_objects_id(&self, mine: uuid::Uuid) -> Result<uuid::Uuid, Error>;

    /// Forgets the id, so that the next call keeps another. Returns whether one was kept.
    async fn forget_objects_id(&self) -> Result<bool, Error>;

    /// Proves that the database answers and that its structure is whole
    /// (SQLite: `pragma quick_check`, references, the schema version), and that
    /// counts are those of the bits and segments of what they count. Returns
    /// findings in words; empty means sound.
    async fn check(&self) -> Result<Vec<String>, Error>;

    /// Bytes that the database takes on disk, its log included.
    async fn size_bytes(&self) -> Result<u64, Error>;

    /// Closes every connection, once running calls are done. Calls after it fail.
    async fn close(&self);
}
