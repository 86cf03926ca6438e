//! Lifecycle steps: long work on a whole job, under a lease of the job.

use std::time::Duration;

use async_trait::async_trait;
use overnight_types::{Epoch, JobState, OutcomeCounts, Timestamp, Usage, WorkerId};

use crate::{Error, Guarded, Job, NewFile, NewShard};

/// What is due for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StepKind {
    /// Read and check the input, cut it into shards.
    Intake,
    /// Publish the files and end the job.
    Finalize,
}

/// A lease of a job for one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepLease {
    /// What to do.
    pub kind: StepKind,
    /// The job as it was at the claim.
    pub job: Job,
    /// Who holds it.
    pub worker: WorkerId,
    /// Fences every write of this step.
    pub epoch: Epoch,
    /// By the database's clock.
    pub lease_until: Timestamp,
}

/// How far intake has come; recorded with the shards cut so far, so that a killed
/// intake goes on from here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntakeProgress {
    /// Bytes read and settled.
    pub offset: u64,
    /// Opaque JSON of intake's own (errors kept, run objects, line and item numbers).
    pub notes: String,
}

/// How intake ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IntakeEnd {
    /// The job moves to `in_progress`.
    Valid {
        /// The model that every item names.
        model: String,
        /// Items in all.
        num_items: u64,
        /// Shards in all; equals the rows recorded.
        num_shards: u32,
    },
    /// The job moves to `failed`; its shard rows go.
    Invalid {
        /// The wire's `errors` object.
        errors: String,
    },
}

/// What finalize published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The output file, when it has a line. Its id is the job's drawn one.
    pub output: Option<NewFile>,
    /// The error file, when it has a line.
    pub error: Option<NewFile>,
    /// Sums to the job's items.
    pub counts: OutcomeCounts,
    /// Over completed outcomes.
    pub usage: Usage,
}

/// Steps on whole jobs.
#[async_trait]
pub trait Steps {
    /// Leases the most overdue step: intake of a `validating` job that is not
    /// paused, or finalize of a `finalizing` or `cancelling` one, whose due time
    /// has come and whose step lease is free or over. Raises the step's epoch.
    async fn claim_step(&self, worker: WorkerId, ttl: Duration) -> Result<Option<StepLease>, Error>;

    /// Moves the lease's end to `ttl` from now.
    async fn extend_step_if_leased(&self, lease: &StepLease, ttl: Duration) -> Result<Guarded<JobState, ()>, Error>;

    /// Gives the lease back; the step is due again after `delay`.
    async fn release_step_if_leased(&self, lease: &StepLease, delay: Duration) -> Result<Guarded<JobState, ()>, Error>;

    /// Records intake's progress and the shards cut since the last record, in one
    /// transaction. Lost when the lease is, or when the job left `validating`.
    async fn record_intake_if_leased(
        &self,
        lease: &StepLease,
        progress: IntakeProgress,
        shards: Vec<NewShard>,
    ) -> Result<Guarded<JobState, ()>, Error>;

    /// Takes intake back to its start: no shard, offset 0, no notes. For notes that
    /// this version cannot read. Answers with the job as it is then; the lease stays.
    async fn restart_intake_if_leased(&self, lease: &StepLease) -> Result<Guarded<JobState, Job>, Error>;

    /// Ends intake. A job past its window goes on to `finalizing` as expired at once.
    async fn finish_intake_if_leased(&self, lease: &StepLease, end: IntakeEnd)
    -> Result<Guarded<JobState, Job>, Error>;

    /// Before finalize reads: takes every leased shard of the job back to ready
    /// with its epoch raised, so that no commit can come any more.
    async fn fence_shards_if_leased(&self, lease: &StepLease) -> Result<Guarded<JobState, ()>, Error>;

    /// Ends the job: file rows, terminal state, its timestamp, final counts and the
    /// outbox event in one transaction; faults are dropped. Refused when the counts
    /// are not those of the shards' bits, undone items counting as the job's ending:
    /// the accounting is closed at every end.
    async fn finish_job_if_leased(
        &self,
        lease: &StepLease,
        published: Published,
    ) -> Result<Guarded<JobState, Job>, Error>;
}
