//! The outbox: ends of jobs that are to be told outside, each written in the
//! transaction of the end, so that no end is told that did not happen and none is lost.
//!
//! Invariant: an event stays open until it is delivered or given up; while one try at
//! it is under way, no other one starts. Rows go with their job.

use std::time::Duration;

use async_trait::async_trait;
use overnight_types::{EventId, JobId, Timestamp};

use crate::{Error, Guarded};

/// An event under one try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxEvent {
    /// The same over all tries.
    pub id: EventId,
    /// The job that ended.
    pub job: JobId,
    /// `batch.completed`, `batch.failed`, `batch.expired` or `batch.cancelled`.
    pub kind: String,
    /// When the job ended.
    pub created_at: Timestamp,
    /// How long ago that was, by the database's clock.
    pub age: Duration,
    /// Tries so far, this one included.
    pub attempts: u32,
}

/// Where an event stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutboxState {
    /// Waits for a try, or is under one.
    Open,
    /// Somebody acknowledged it.
    Delivered,
    /// Every try failed; nobody tries any more.
    GivenUp,
}

/// Rows of the outbox.
#[async_trait]
pub trait Outbox {
    /// Takes the event that has been due for longest, for one try. Nobody else gets it
    /// before `hold` is over; if by then nothing was recorded, it is due again.
    async fn claim_event(&self, hold: Duration) -> Result<Option<OutboxEvent>, Error>;

    /// Records that it was acknowledged, whichever try that was of.
    async fn deliver_event_if_undelivered(&self, event: EventId) -> Result<Guarded<OutboxState>, Error>;

    /// Makes it due again in `delay`. Lost when another try has begun since.
    async fn retry_event_if_claimed(&self, event: &OutboxEvent, delay: Duration)
    -> Result<Guarded<OutboxState>, Error>;

    /// Ends the tries at it and says why in the job's events, as `webhook_given_up`. Lost
    /// when another try has begun since.
    async fn give_up_event_if_claimed(&self, event: &OutboxEvent, reason: &str) -> Result<Guarded<OutboxState>, Error>;
}
