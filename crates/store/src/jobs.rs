//! Jobs: what is asked for, where it stands, and the guarded moves that doors make.

use std::time::Duration;

use async_trait::async_trait;
use overnight_types::{
    Ending, Endpoint, FileId, ItemIndex, JobId, JobState, OutcomeCounts, Timestamp, Usage, job::UnknownWord,
};

use crate::{Error, Guarded, Page};

/// A job about to be recorded, in `validating`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewJob {
    /// Its id.
    pub id: JobId,
    /// What its items are for.
    pub endpoint: Endpoint,
    /// A present file of purpose `batch`.
    pub input_file_id: FileId,
    /// As given on the wire, for example `24h`.
    pub completion_window: String,
    /// The same as a length; the job expires this long after creation.
    pub window: Duration,
    /// A JSON object as text, or none.
    pub metadata: Option<String>,
    /// For people.
    pub name: Option<String>,
    /// Lower runs first.
    pub priority: i32,
    /// How long published files stay, from their creation; `None` keeps them.
    pub output_expires_after: Option<Duration>,
}

/// Makes a repeated create return the first answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// As sent, 1…255 characters.
    pub key: String,
    /// Of the canonical parameters.
    pub params_sha256: [u8; 32],
}

/// What a create did.
#[derive(Debug, Clone, PartialEq)]
pub enum InsertJob {
    /// A new job.
    Created(Job),
    /// The key was used with the same parameters: the first job as it is now.
    Existing(Job),
    /// The key was used with other parameters.
    KeyReused,
    /// The input file is not there (any more).
    NoInput,
}

/// A recorded job.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// What its items are for.
    pub endpoint: Endpoint,
    /// The model that all items name; set when intake ends.
    pub model: Option<String>,
    /// The input.
    pub input_file_id: FileId,
    /// The input's size.
    pub input_bytes: u64,
    /// The input's hash.
    pub input_sha256: [u8; 32],
    /// As given.
    pub completion_window: String,
    /// The same as a length.
    pub window: Duration,
    /// A JSON object as text.
    pub metadata: Option<String>,
    /// For people.
    pub name: Option<String>,
    /// Lower runs first.
    pub priority: i32,
    /// How long published files stay.
    pub output_expires_after: Option<Duration>,
    /// Where it stands.
    pub state: JobState,
    /// How it will end, or ended; set from `finalizing` or `cancelling` on.
    pub ending: Option<Ending>,
    /// How running items are treated once it is cancelling.
    pub cancel_mode: CancelMode,
    /// Set while paused.
    pub paused_at: Option<Timestamp>,
    /// 1 for the first run, +1 for each re-opening.
    pub round: u32,
    /// By the database's clock, as all the following.
    pub created_at: Timestamp,
    /// End of intake.
    pub in_progress_at: Option<Timestamp>,
    /// End of the window.
    pub expires_at: Timestamp,
    /// All outcomes known, or the window closed.
    pub finalizing_at: Option<Timestamp>,
    /// Ended.
    pub completed_at: Option<Timestamp>,
    /// Ended.
    pub failed_at: Option<Timestamp>,
    /// Ended.
    pub expired_at: Option<Timestamp>,
    /// Cancel accepted.
    pub cancelling_at: Option<Timestamp>,
    /// Ended.
    pub cancelled_at: Option<Timestamp>,
    /// Items; 0 until intake ends.
    pub num_items: u64,
    /// Shards; 0 until intake ends.
    pub num_shards: u32,
    /// Drawn on entering `finalizing` or `cancelling`. A door shows it only once
    /// the job is terminal and the file has a line.
    pub output_file_id: Option<FileId>,
    /// As above, for the error file.
    pub error_file_id: Option<FileId>,
    /// Set once the job is terminal (after intake); before that ask [`Jobs::find_progress`].
    pub final_counts: Option<OutcomeCounts>,
    /// Set with `final_counts`.
    pub final_usage: Option<Usage>,
    /// Intake's errors as the wire's JSON object; set in `failed`.
    pub errors: Option<String>,
    /// How far intake has come, bytes.
    pub intake_offset: u64,
    /// Intake's own notes between pieces, opaque JSON.
    pub intake_notes: Option<String>,
}

/// What happens to running items on cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CancelMode {
    /// They may finish, for up to the drain limit.
    #[default]
    Drain,
    /// They stop at the next engine step.
    Now,
}

impl CancelMode {
    /// Every value.
    pub const ALL: &'static [Self] = &[Self::Drain, Self::Now];

    /// The word in the database.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Now => "now",
        }
    }
}

impl std::str::FromStr for CancelMode {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let mode = Self::ALL.iter().copied().find(|mode| mode.as_str() == text);
        mode.ok_or_else(|| UnknownWord { what: "cancel mode", text: text.to_owned() })
    }
}

/// Which jobs to list, newest first by (created_at, id).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobQuery {
    /// Start after this job in the order.
    pub after: Option<JobId>,
    /// Most rows.
    pub limit: u32,
    /// Only these states; empty for all.
    pub states: Vec<JobState>,
    /// Only this model.
    pub model: Option<String>,
    /// Only jobs created at or after this moment.
    pub since: Option<Timestamp>,
}

/// Sums over a job's shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Of the outcomes so far.
    pub counts: OutcomeCounts,
    /// Of the completed outcomes so far.
    pub usage: Usage,
    /// Shards by state: ready, leased, done.
    pub shards_ready: u32,
    /// Leased shards.
    pub shards_leased: u32,
    /// Done shards.
    pub shards_done: u32,
    /// Items that wait for a retry.
    pub items_waiting: u64,
    /// Retries used of the job's budget.
    pub retries_used: u64,
    /// Runnable jobs of the same model with a shard that is ready, which a claim by
    /// priority serves before this one. `None` for a job that is not runnable: in
    /// another state, paused, or past its window, and where it was not asked for.
    pub jobs_ahead: Option<u32>,
}

/// Whether progress tells [`Progress::jobs_ahead`], which costs a look at every runnable
/// job of the same models: for jobs that are shown, not for sums over all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobsAhead {
    /// Counted.
    Count,
    /// Left `None`.
    Skip,
}

/// Which items of an ended job run again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReopenItems {
    /// All that did not complete: undone, cancelled, expired and failed ones.
    NotCompleted,
    /// Only these of the items that did not complete; undone ones that are left
    /// out get `leftover_segments` so that `done` alone says what runs.
    Selected(Vec<ItemIndex>),
}

/// Re-opens an ended job.
#[derive(Debug, Clone, PartialEq)]
pub struct Reopen {
    /// What runs again.
    pub items: ReopenItems,
    /// A new window, text and length; the job's own when `None`. It starts now.
    pub window: Option<(String, Duration)>,
    /// Segments, durable already, with the `batch_expired` or `batch_cancelled`
    /// lines of undone items that a selective retry leaves out: for each shard that
    /// has such items exactly one, under the shard's epoch and `next_seq` as read,
    /// holding exactly those items, all marked failed. A shard that has moved on
    /// since makes the re-opening lost; any other mismatch is refused.
    pub leftover_segments: Vec<crate::NewSegment>,
}

/// What a re-opening did.
#[derive(Debug, Clone, PartialEq)]
pub struct Reopened {
    /// The job in its new round.
    pub job: Job,
    /// Items whose outcome is kept.
    pub num_kept: u64,
    /// Items that failed and run again.
    pub num_failed_again: u64,
    /// Items that had no outcome and run now.
    pub num_unfinished: u64,
}

/// What a piece of a purge did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Purged {
    /// Jobs whose last row went: their objects can go.
    pub jobs: Vec<JobId>,
    /// The limit was reached, so that rows may be left: call again.
    pub has_more: bool,
}

/// Rows of jobs, and the moves that doors make.
#[async_trait]
pub trait Jobs {
    /// Records a job and its idempotency key in one transaction; its intake is then due.
    async fn insert_job(&self, job: NewJob, key: Option<IdempotencyKey>) -> Result<InsertJob, Error>;

    /// One job.
    async fn find_job(&self, id: JobId) -> Result<Option<Job>, Error>;

    /// Jobs, newest first. An `after` that is not known is [`Error::Missing`].
    async fn list_jobs(&self, query: JobQuery) -> Result<Page<Job>, Error>;

    /// Sums over the job's shards; zeros before intake ends. `Missing` without the job.
    async fn find_progress(&self, id: JobId) -> Result<Progress, Error>;

    /// Sets `paused_at` in `validating` and `in_progress`. Applied again when paused already.
    async fn pause_job_if_active(&self, id: JobId) -> Result<Guarded<JobState, Job>, Error>;

    /// Clears `paused_at`; applied too when it was not set and the job is not terminal.
    async fn unpause_job_if_active(&self, id: JobId) -> Result<Guarded<JobState, Job>, Error>;

    /// Takes a `validating` or `in_progress` job to `cancelling`, draws the file
    /// ids, and makes its finalize due: at once with `Now` or when nothing is
    /// leased, else after `drain`. On `cancelling` it may only sharpen `Drain`
    /// to `Now`; on `cancelled` it is applied and changes nothing.
    async fn cancel_job_if_active(
        &self,
        id: JobId,
        mode: CancelMode,
        drain: Duration,
    ) -> Result<Guarded<JobState, Job>, Error>;

    /// Opens a new round of a completed, expired or cancelled job: `done = done &
    /// !failed` for what runs again, `failed` cleared, epochs raised, timestamps
    /// and file ids back to null. A job that was cancelled before intake ended
    /// goes back to `validating`. Lost in any other state; also lost (with the
    /// state) when no item would run, or when the input file is deleted or expired.
    /// The retry budget starts anew. Usage of outcomes that run again stays in
    /// [`Progress::usage`] until finalize has the exact sum.
    async fn reopen_job_if_ended(&self, id: JobId, reopen: Reopen) -> Result<Guarded<JobState, Reopened>, Error>;

    /// Releases every lease of a running job whose worker's row is not live, at once.
    async fn release_lost_leases(&self, id: JobId) -> Result<u32, Error>;

    /// Takes up to `limit` jobs past their window to `finalizing` (those still
    /// validating only once intake has ended), fencing their leases. Returns them.
    async fn expire_due_jobs(&self, limit: u32) -> Result<Vec<JobId>, Error>;

    /// Hides a terminal job; its rows go in bounded pieces by [`Jobs::purge_deleted_jobs`].
    async fn delete_job_if_terminal(&self, id: JobId) -> Result<Guarded<JobState, ()>, Error>;

    /// Hides up to `limit` jobs that ended at least `kept` ago, the longest ended first, with
    /// the files that they published in any round, and with their input unless another
    /// job that is not hidden names it. A file with an expiry of its own stays until then. A
    /// job whose webhook event is being tried stays until that is delivered or given up.
    /// Returns how many jobs were hidden.
    async fn delete_jobs_ended_for(&self, kept: Duration, limit: u32) -> Result<u32, Error>;

    /// Deletes at most `limit` rows of deleted jobs, a job's own row last.
    async fn purge_deleted_jobs(&self, limit: u32) -> Result<Purged, Error>;

    /// Of these ids, those that have a row (deleted ones too): objects of the others are nobody's.
    async fn known_jobs(&self, ids: &[JobId]) -> Result<Vec<JobId>, Error>;

    /// Outcome counts by kind over all shards, for a job that is not terminal too;
    /// equals [`Progress::counts`]. Here so that doors need one call for a page of jobs.
    async fn find_progress_of(&self, ids: &[JobId], ahead: JobsAhead) -> Result<Vec<(JobId, Progress)>, Error>;
}
