//! Shards: claim, renew, commit, release. The durable path's heart.

use std::time::Duration;

use async_trait::async_trait;
use overnight_types::{
    Bitmap, Epoch, FailedTry, ItemIndex, JobId, JobState, ShardIndex, ShardState, Timestamp, Usage, WorkerId,
};

use crate::{CancelMode, Error, Guarded, Job, NewSegment};

/// A shard's name and the epoch under which somebody writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ShardKey {
    /// Its job.
    pub job: JobId,
    /// Its index.
    pub shard: ShardIndex,
    /// The lease's epoch.
    pub epoch: Epoch,
}

/// A shard as intake cuts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewShard {
    /// Its index.
    pub shard: ShardIndex,
    /// First item.
    pub first_item: ItemIndex,
    /// How many items, at least 1.
    pub num_items: u32,
    /// Physical line of its first byte, from 1. Blank lines may lie between items.
    pub first_line: u64,
    /// First byte in the input object.
    pub byte_offset: u64,
    /// Bytes up to the end of its last item's line; blank lines around shards belong to none.
    pub byte_len: u64,
    /// Hash of its items' lines as intake read them; `None` in rows of a release that
    /// took none, whose lines are fed unchecked.
    pub lines_hash: Option<u64>,
}

/// A recorded shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Its job.
    pub job: JobId,
    /// How it was cut.
    pub cut: NewShard,
    /// Where it stands.
    pub state: ShardState,
    /// Not claimed before this moment.
    pub not_before: Timestamp,
    /// Of its latest lease; 0 before the first.
    pub epoch: Epoch,
    /// Who holds it.
    pub owner: Option<WorkerId>,
    /// End of the lease.
    pub lease_until: Option<Timestamp>,
    /// Consecutive leases that ran out without a commit.
    pub crashes: u32,
    /// The item that ran alone when the latest lease was taken back, or that runs
    /// alone now. A claimed shard that has one goes on in isolation, with this item first.
    pub probe_item: Option<ItemIndex>,
    /// Leases that ran out while `probe_item` ran alone under them.
    pub probe_deaths: u32,
    /// Sequence number of its next segment.
    pub next_seq: u32,
    /// Bit per item that has an outcome.
    pub done: Bitmap,
    /// Bit per item whose outcome is a failure; a subset of `done`.
    pub failed: Bitmap,
    /// Over completed outcomes.
    pub usage: Usage,
}

/// An item that waits for a retry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The item.
    pub item: ItemIndex,
    /// Tries so far.
    pub attempts: u32,
    /// Not tried before this moment.
    pub not_before: Timestamp,
    /// HTTP status of the last try, when there was an answer.
    pub http_status: Option<u16>,
    /// Stable code of the last error.
    pub code: String,
    /// The last error in words.
    pub message: String,
    /// The tries before the last one, oldest first, at most [`FailedTry::KEPT_MAX`].
    pub earlier: Vec<FailedTry>,
}

impl Fault {
    /// Every failed try that is known, oldest first; the last one included.
    pub fn tries(&self) -> Vec<FailedTry> {
        let message = self.message.chars().take(FailedTry::MESSAGE_CHARS_MAX).collect();
        let last = FailedTry { number: self.attempts, http_status: self.http_status, code: self.code.clone(), message };
        self.earlier.iter().cloned().chain([last]).collect()
    }
}

/// A fault about to be recorded; it replaces the item's older one, which becomes the
/// last of its earlier tries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewFault {
    /// The item.
    pub item: ItemIndex,
    /// Tries so far.
    pub attempts: u32,
    /// Wait from now by the database's clock.
    pub delay: Duration,
    /// HTTP status of the last try, when there was an answer.
    pub http_status: Option<u16>,
    /// Stable code of the last error.
    pub code: String,
    /// The last error in words, at most 1,000 characters.
    pub message: String,
}

/// Asks for a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimShard {
    /// Who asks.
    pub worker: WorkerId,
    /// Lease time.
    pub ttl: Duration,
    /// Models at hand; a job for another model is not claimed. `None`: any model
    /// (a remote engine that serves whatever it is asked for).
    pub models: Option<Vec<String>>,
    /// Take the oldest runnable job instead of the first by priority and deadline;
    /// set on every eighth claim so that none starves.
    pub oldest: bool,
}

/// A lease of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardLease {
    /// The job as it was at the claim.
    pub job: Job,
    /// The shard as it is under this lease.
    pub shard: Shard,
    /// Items that wait for a retry.
    pub faults: Vec<Fault>,
    /// Retries used by the whole job so far.
    pub retries_used: u64,
}

impl ShardLease {
    /// What this lease writes under.
    pub fn key(&self) -> ShardKey {
        ShardKey { job: self.shard.job, shard: self.shard.cut.shard, epoch: self.shard.epoch }
    }
}

/// What a commit did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The shard has no undone item left and is done.
    pub shard_done: bool,
    /// The job's state after the commit: `finalizing` when this was its last item.
    pub job_state: JobState,
}

/// What a worker must know about a job that it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobSignal {
    /// The job.
    pub job: JobId,
    /// Where it stands.
    pub state: JobState,
    /// Whether it is paused.
    pub paused: bool,
    /// How to treat running items when it is cancelling.
    pub cancel_mode: CancelMode,
    /// Its round.
    pub round: u32,
}

/// Leases of shards and what is written under them.
#[async_trait]
pub trait Shards {
    /// Leases one shard: picks a runnable job (in progress, not paused, in its
    /// window, model at hand; by priority, then deadline, then age), then its first
    /// shard that is ready and due, or whose lease is over. Raises the epoch and
    /// records an attempt; a lease that ran out without a commit raises `crashes`.
    async fn claim_shard(&self, claim: &ClaimShard) -> Result<Option<ShardLease>, Error>;

    /// Moves the end of these leases to `ttl` from now; returns those that are lost.
    async fn extend_shards(&self, worker: WorkerId, keys: &[ShardKey], ttl: Duration) -> Result<Vec<ShardKey>, Error>;

    /// In one transaction guarded by `epoch, state = leased, next_seq`: sets the
    /// segment's bits, moves counts and usage, inserts its row, drops the faults
    /// of its items, sets `crashes` and the probe back, and ends the shard when
    /// nothing is undone. Lost as well when an item of it is done already, or when
    /// the job is neither in progress nor cancelling.
    async fn commit_segment_if_leased(
        &self,
        key: ShardKey,
        segment: &NewSegment,
    ) -> Result<Guarded<ShardState, Committed>, Error>;

    /// Records faults and counts them on the job's retry budget; the lease stays.
    /// Answers with the retries that the whole job has used by then, whoever used them.
    async fn record_faults_if_leased(
        &self,
        key: ShardKey,
        faults: &[NewFault],
    ) -> Result<Guarded<ShardState, u64>, Error>;

    /// Gives a lease back. The shard is claimable after `delay`. Not counted as a crash,
    /// except with `Lost`: what ran the items died under the lease, which then counts as
    /// one that ran out.
    async fn release_shard_if_leased(
        &self,
        key: ShardKey,
        delay: Duration,
        why: crate::AttemptEnd,
    ) -> Result<Guarded<ShardState, ()>, Error>;

    /// Names the item that is about to run alone under this lease. If the lease then
    /// runs out, `probe_deaths` rises; a lease that ran out before it named the item
    /// again does not count. Another item, or none, starts `probe_deaths` at 0; so
    /// does any commit, which also takes the name away. A release keeps both.
    async fn set_probe_if_leased(
        &self,
        key: ShardKey,
        item: Option<ItemIndex>,
    ) -> Result<Guarded<ShardState, ()>, Error>;

    /// Releases at once every shard and step lease of workers known to be dead on
    /// this host. Each counts as a crash, as expiry would. Returns how many.
    async fn release_leases_of_dead(&self, workers: &[WorkerId]) -> Result<u32, Error>;

    /// Takes back leases that ran out, oldest first, at most `limit`; each counts as
    /// a crash, as a claim would count it. Called again and again by the sweep, so
    /// that no shard stays leased because nobody claims. Returns how many.
    async fn release_expired_leases(&self, limit: u32) -> Result<u32, Error>;

    /// States of the jobs that a worker holds, in one query.
    async fn find_job_signals(&self, jobs: &[JobId]) -> Result<Vec<JobSignal>, Error>;

    /// One shard.
    async fn find_shard(&self, job: JobId, shard: ShardIndex) -> Result<Option<Shard>, Error>;

    /// The shard that holds an item.
    async fn find_shard_of_item(&self, job: JobId, item: ItemIndex) -> Result<Option<Shard>, Error>;

    /// Shards by index from `from` on, at most `limit`.
    async fn list_shards(&self, job: JobId, from: ShardIndex, limit: u32) -> Result<Vec<Shard>, Error>;

    /// Faults of a job's items in an index range, by index.
    async fn list_faults(&self, job: JobId, from: ItemIndex, to: ItemIndex, limit: u32) -> Result<Vec<Fault>, Error>;
}
