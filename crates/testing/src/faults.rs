//! A store that fails as told: the n-th call of a method, before or after its
//! effect, or for ever until told otherwise; or that stops in front of a call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use overnight_store::*;
use overnight_types::{EventId, FileId, ItemIndex, JobId, JobState, ShardIndex, ShardState, Timestamp, WorkerId};
use tokio::sync::Notify;

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failing {
    /// It is unavailable; nothing was done.
    Before,
    /// It was done, and its answer is lost.
    After,
    /// It never answers, and nothing was done: its caller died before it.
    HangBefore,
    /// It was done and never answers: its caller died after it.
    HangAfter,
}

#[derive(Debug)]
struct Plan {
    method: &'static str,
    /// Calls to let through first.
    skip: u32,
    /// Calls to fail after that.
    count: u32,
    failing: Failing,
}

#[derive(Debug, Default)]
struct State {
    plans: Vec<Plan>,
    calls: HashMap<&'static str, u32>,
    hung: u32,
    pauses: HashMap<&'static str, Pause>,
    clock_behind: Duration,
}

/// A caller that stands before a call, as a stopped process does, until let go on.
#[derive(Debug, Clone)]
pub struct Pause {
    reached: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl Pause {
    /// Resolves once the caller stands there.
    pub async fn reached(&self) {
        self.reached.notified().await;
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.go_on.notify_one();
    }
}

/// A [`Store`] with faults. Clones share them.
#[derive(Debug, Clone)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    state: Arc<Mutex<State>>,
    hanging: Arc<Notify>,
}

impl FaultyStore {
    /// Passes every call on until told otherwise.
    pub fn new(inner: Arc<dyn Store>) -> Self {
        Self { inner, state: Arc::default(), hanging: Arc::default() }
    }

    /// Fails `count` calls of `method` after the next `skip`.
    pub fn fail(&self, method: &'static str, skip: u32, count: u32, failing: Failing) {
        self.lock().plans.push(Plan { method, skip, count, failing });
    }

    /// Stops the next caller of `method` before the call.
    pub fn pause(&self, method: &'static str) -> Pause {
        let pause = Pause { reached: Arc::default(), go_on: Arc::default() };
        self.lock().pauses.insert(method, pause.clone());
        pause
    }

    /// Lets the database say that it is so much earlier: the machine's clock has jumped ahead.
    pub fn set_clock_behind(&self, behind: Duration) {
        self.lock().clock_behind = behind;
    }

    /// Fails no call from now on. Calls that hang stay so.
    pub fn heal(&self) {
        self.lock().plans.clear();
    }

    /// How often a method was called.
    pub fn calls(&self, method: &str) -> u32 {
        self.lock().calls.get(method).copied().unwrap_or(0)
    }

    /// Calls that hang.
    pub fn num_hung(&self) -> u32 {
        self.lock().hung
    }

    /// Resolves when a call starts to hang.
    pub async fn hangs(&self) {
        let hanging = self.hanging.notified();
        if self.num_hung() == 0 {
            hanging.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, method: &'static str) -> Option<Failing> {
        let mut state = self.lock();
        *state.calls.entry(method).or_default() += 1;
        for plan in state.plans.iter_mut().filter(|plan| plan.method == method) {
            if plan.skip > 0 {
                plan.skip -= 1;
            } else if plan.count > 0 {
                plan.count -= 1;
                return Some(plan.failing);
            }
        }
        None
    }

    async fn stand_before(&self, method: &'static str) {
        let pause = self.lock().pauses.remove(method);
        if let Some(pause) = pause {
            pause.reached.notify_one();
            pause.go_on.notified().await;
        }
    }

    async fn hang<T>(&self) -> T {
        self.lock().hung += 1;
        self.hanging.notify_waiters();
        std::future::pending().await
    }

    fn unavailable(method: &'static str) -> Error {
        Error::Unavailable { doing: method, source: "scripted fault".into() }
    }
}

macro_rules! with_faults {
    ($($trait:ident { $(fn $method:ident($($arg:ident: $type:ty),*) -> $answer:ty;)* })*) => { $(
        #[async_trait]
        impl $trait for FaultyStore {
            $(async fn $method(&self $(, $arg: $type)*) -> Result<$answer, Error> {
                self.stand_before(stringify!($method)).await;
                let failing = self.enter(stringify!($method));
                match failing {
                    Some(Failing::Before) => return Err(Self::unavailable(stringify!($method))),
                    Some(Failing::HangBefore) => return self.hang().await,
                    Some(Failing::After | Failing::HangAfter) | None => {}
                }
                let answer = self.inner.$method($($arg),*).await;
                match failing {
                    Some(Failing::After) => Err(Self::unavailable(stringify!($method))),
                    Some(Failing::HangAfter) => self.hang().await,
                    _ => answer,
                }
            })*
        }
    )* };
}

with_faults! {
    Files {
        fn insert_file(file: NewFile) -> File;
        fn find_file(id: FileId) -> Option<File>;
        fn list_files(query: FileQuery) -> Page<File>;
        fn delete_file_if_present(id: FileId) -> Guarded<(), ()>;
        fn list_removable_files(limit: u32) -> Vec<FileId>;
        fn forget_file(id: FileId) -> ();
        fn known_files(ids: &[FileId]) -> Vec<FileId>;
    }
    Jobs {
        fn insert_job(job: NewJob, key: Option<IdempotencyKey>) -> InsertJob;
        fn find_job(id: JobId) -> Option<Job>;
        fn list_jobs(query: JobQuery) -> Page<Job>;
        fn find_progress(id: JobId) -> Progress;
        fn pause_job_if_active(id: JobId) -> Guarded<JobState, Job>;
        fn unpause_job_if_active(id: JobId) -> Guarded<JobState, Job>;
        fn cancel_job_if_active(id: JobId, mode: CancelMode, drain: Duration) -> Guarded<JobState, Job>;
        fn reopen_job_if_ended(id: JobId, reopen: Reopen) -> Guarded<JobState, Reopened>;
        fn release_lost_leases(id: JobId) -> u32;
        fn expire_due_jobs(limit: u32) -> Vec<JobId>;
        fn delete_job_if_terminal(id: JobId) -> Guarded<JobState, ()>;
        fn delete_jobs_ended_for(kept: Duration, limit: u32) -> u32;
        fn purge_deleted_jobs(limit: u32) -> Purged;
        fn known_jobs(ids: &[JobId]) -> Vec<JobId>;
        fn find_progress_of(ids: &[JobId], ahead: JobsAhead) -> Vec<(JobId, Progress)>;
    }
    Steps {
        fn claim_step(worker: WorkerId, ttl: Duration) -> Option<StepLease>;
        fn extend_step_if_leased(lease: &StepLease, ttl: Duration) -> Guarded<JobState, ()>;
        fn release_step_if_leased(lease: &StepLease, delay: Duration) -> Guarded<JobState, ()>;
        fn record_intake_if_leased(lease: &StepLease, progress: IntakeProgress, shards: Vec<NewShard>)
            -> Guarded<JobState, ()>;
        fn restart_intake_if_leased(lease: &StepLease) -> Guarded<JobState, Job>;
        fn finish_intake_if_leased(lease: &StepLease, end: IntakeEnd) -> Guarded<JobState, Job>;
        fn fence_shards_if_leased(lease: &StepLease) -> Guarded<JobState, ()>;
        fn finish_job_if_leased(lease: &StepLease, published: Published) -> Guarded<JobState, Job>;
    }
    Shards {
        fn claim_shard(claim: &ClaimShard) -> Option<ShardLease>;
        fn extend_shards(worker: WorkerId, keys: &[ShardKey], ttl: Duration) -> Vec<ShardKey>;
        fn commit_segment_if_leased(key: ShardKey, segment: &NewSegment) -> Guarded<ShardState, Committed>;
        fn record_faults_if_leased(key: ShardKey, faults: &[NewFault]) -> Guarded<ShardState, u64>;
        fn release_shard_if_leased(key: ShardKey, delay: Duration, why: AttemptEnd) -> Guarded<ShardState, ()>;
        fn set_probe_if_leased(key: ShardKey, item: Option<ItemIndex>) -> Guarded<ShardState, ()>;
        fn release_leases_of_dead(workers: &[WorkerId]) -> u32;
        fn release_expired_leases(limit: u32) -> u32;
        fn find_job_signals(jobs: &[JobId]) -> Vec<JobSignal>;
        fn find_shard(job: JobId, shard: ShardIndex) -> Option<Shard>;
        fn find_shard_of_item(job: JobId, item: ItemIndex) -> Option<Shard>;
        fn list_shards(job: JobId, from: ShardIndex, limit: u32) -> Vec<Shard>;
        fn list_faults(job: JobId, from: ItemIndex, to: ItemIndex, limit: u32) -> Vec<Fault>;
    }
    Segments {
        fn list_segments(job: JobId, from: ShardIndex, limit: u32) -> Vec<Segment>;
        fn list_segments_of_shard(job: JobId, shard: ShardIndex) -> Vec<Segment>;
        fn list_segments_committed(selection: SegmentSelection) -> Vec<Segment>;
    }
    Attempts {
        fn list_attempts(job: JobId, shard: ShardIndex, limit: u32) -> Vec<Attempt>;
        fn prune_attempts(limit: u32) -> u32;
    }
    Workers {
        fn report_worker(worker: &NewWorker) -> ();
        fn remove_worker(id: WorkerId) -> ();
        fn list_live_workers() -> Vec<LiveWorker>;
        fn list_workers_on_host(host: &str) -> Vec<NewWorker>;
    }
    Outbox {
        fn claim_event(hold: Duration) -> Option<OutboxEvent>;
        fn deliver_event_if_undelivered(event: EventId) -> Guarded<OutboxState>;
        fn retry_event_if_claimed(event: &OutboxEvent, delay: Duration) -> Guarded<OutboxState>;
        fn give_up_event_if_claimed(event: &OutboxEvent, reason: &str) -> Guarded<OutboxState>;
    }
    Events {
        fn list_events(job: JobId, after: u64, limit: u32) -> Vec<Event>;
    }
}

impl Wake for FaultyStore {
    fn woken(&self) -> Woken {
        self.inner.woken()
    }
}

#[async_trait]
impl Store for FaultyStore {
    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    async fn now(&self) -> Result<Timestamp, Error> {
        let behind = self.lock().clock_behind;
        Ok(Timestamp::from_micros(self.inner.now().await?.micros() - behind.as_micros() as i64))
    }

    async fn keep_objects_id(&self, mine: uuid::Uuid) -> Result<uuid::Uuid, Error> {
        self.inner.keep_objects_id(mine).await
    }

    async fn forget_objects_id(&self) -> Result<bool, Error> {
        self.inner.forget_objects_id().await
    }

    async fn check(&self) -> Result<Vec<String>, Error> {
        self.inner.check().await
    }

    async fn size_bytes(&self) -> Result<u64, Error> {
        self.inner.size_bytes().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
