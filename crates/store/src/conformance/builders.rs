//! Short ways to the states that promises start from. All through the contract,
//! so that every backend gets there as it would in life.

use std::time::Duration;

use overnight_types::{
    Bitmap, Ending, Endpoint, FileId, ItemIndex, JobId, JobState, OutcomeCounts, ShardIndex, ShardState, Usage,
    WorkerId,
};

use crate::{
    AttemptEnd, CancelMode, ClaimShard, Committed, FilePurpose, Guarded, InsertJob, IntakeEnd, IntakeProgress, Job,
    NewFault, NewFile, NewJob, NewSegment, NewShard, Published, Shard, ShardLease, StepKind, StepLease, Store,
};

/// The model of every job here.
pub const MODEL: &str = "tiny";

/// Length of every lease here.
pub const TTL: Duration = Duration::from_secs(15);

/// Window of every job here, unless a promise is about it.
pub const WINDOW: Duration = Duration::from_secs(24 * 3600);

/// An uploaded input.
pub async fn input(store: &dyn Store) -> FileId {
    let file = new_file(FilePurpose::Batch);
    store.insert_file(file.clone()).await.unwrap();
    file.id
}

/// A file about to be recorded.
pub fn new_file(purpose: FilePurpose) -> NewFile {
    NewFile {
        id: FileId::new(),
        filename: "input.jsonl".into(),
        purpose,
        bytes: 1_000,
        sha256: [7; 32],
        expires_after_s: None,
    }
}

/// A job about to be recorded.
pub fn new_job(input: FileId) -> NewJob {
    NewJob {
        id: JobId::new(),
        endpoint: Endpoint::ChatCompletions,
        input_file_id: input,
        completion_window: "24h".into(),
        window: WINDOW,
        metadata: None,
        name: None,
        priority: 0,
        output_expires_after: None,
    }
}

/// A job in `validating`.
pub async fn validating_job(store: &dyn Store) -> Job {
    let input = input(store).await;
    insert(store, new_job(input)).await
}

/// Records a job; panics when it is not new.
pub async fn insert(store: &dyn Store, job: NewJob) -> Job {
    match store.insert_job(job, None).await.unwrap() {
        InsertJob::Created(job) => job,
        other => panic!("expected a new job, got {other:?}"),
    }
}

/// A job in `in_progress` with shards of these sizes.
pub async fn running_job(store: &dyn Store, sizes: &[u32]) -> Job {
    let input = input(store).await;
    run_new_job(store, new_job(input), sizes).await
}

/// As [`running_job`], for a job of the promise's own making.
pub async fn run_new_job(store: &dyn Store, job: NewJob, sizes: &[u32]) -> Job {
    let job = insert(store, job).await;
    let lease = claim_step_of(store, job.id).await;
    assert_eq!(lease.kind, StepKind::Intake);
    run_intake(store, &lease, sizes).await
}

/// Cuts shards of these sizes and ends intake.
pub async fn run_intake(store: &dyn Store, lease: &StepLease, sizes: &[u32]) -> Job {
    let shards = cuts(sizes);
    let end = shards.last().map_or(0, |last| last.byte_offset + last.byte_len);
    let num_items = sizes.iter().map(|&size| u64::from(size)).sum();
    let num_shards = u32::try_from(sizes.len()).unwrap();
    let progress = IntakeProgress { offset: end, notes: "{}".into() };
    applied(store.record_intake_if_leased(lease, progress, shards).await.unwrap());
    let end = IntakeEnd::Valid { model: MODEL.into(), num_items, num_shards };
    applied(store.finish_intake_if_leased(lease, end).await.unwrap())
}

/// Shards of these sizes, one after another, ten bytes an item.
pub fn cuts(sizes: &[u32]) -> Vec<NewShard> {
    let mut first = 0;
    let mut cuts = Vec::new();
    for (index, &num_items) in sizes.iter().enumerate() {
        cuts.push(NewShard {
            shard: ShardIndex(u32::try_from(index).unwrap()),
            first_item: ItemIndex(first),
            num_items,
            first_line: first + 1,
            byte_offset: first * 10,
            byte_len: u64::from(num_items) * 10,
            // The largest numbers are no signed integers; every other shard is of a release without hashes.
            lines_hash: index.is_multiple_of(2).then_some(u64::MAX - first),
        });
        first += u64::from(num_items);
    }
    cuts
}

/// Leases steps until that of this job; gives the others back.
pub async fn claim_step_of(store: &dyn Store, job: JobId) -> StepLease {
    let worker = WorkerId::new();
    let mut others = Vec::new();
    let mut found = None;
    while let Some(lease) = store.claim_step(worker, TTL).await.unwrap() {
        if lease.job.id == job {
            found = Some(lease);
            break;
        }
        others.push(lease);
    }
    for other in &others {
        applied(store.release_step_if_leased(other, Duration::ZERO).await.unwrap());
    }
    found.unwrap_or_else(|| panic!("no step of {job} is due"))
}

/// A claim by this worker of any job for [`MODEL`].
pub fn claim(worker: WorkerId) -> ClaimShard {
    ClaimShard { worker, ttl: TTL, models: Some(vec![MODEL.into()]), oldest: false }
}

/// Leases the next shard; panics when there is none.
pub async fn lease(store: &dyn Store, worker: WorkerId) -> ShardLease {
    try_lease(store, worker).await.expect("a shard is ready")
}

/// Leases the next shard, if there is one.
pub async fn try_lease(store: &dyn Store, worker: WorkerId) -> Option<ShardLease> {
    store.claim_shard(&claim(worker)).await.unwrap()
}

/// Outcomes of these items of a shard (bits within it); those of `failed` failed.
pub fn segment_of(shard: &Shard, items: &[u32], failed: &[u32]) -> NewSegment {
    let mut all = Bitmap::new(shard.cut.num_items);
    let mut bad = Bitmap::new(shard.cut.num_items);
    items.iter().for_each(|&bit| all.set(bit));
    failed.iter().for_each(|&bit| bad.set(bit));
    let ok = items.len() - failed.len();
    NewSegment {
        shard: shard.cut.shard,
        seq: shard.next_seq,
        epoch: shard.epoch,
        items: all,
        failed: bad,
        code_counts: format!("{{\"ok\":{ok}}}"),
        usage: Usage { input_tokens: 10 * ok as u64, output_tokens: ok as u64, ..Usage::default() },
        byte_len: 100 * items.len() as u64,
        sha256: [1; 32],
    }
}

/// Commits outcomes of these items under the lease, and moves the lease's view on.
pub async fn commit(
    store: &dyn Store,
    lease: &mut ShardLease,
    items: &[u32],
    failed: &[u32],
) -> Guarded<ShardState, Committed> {
    let segment = segment_of(&lease.shard, items, failed);
    let answer = store.commit_segment_if_leased(lease.key(), &segment).await.unwrap();
    if answer.is_applied() {
        lease.shard.next_seq += 1;
        lease.shard.done.union(&segment.items);
        lease.shard.failed.union(&segment.failed);
    }
    answer
}

/// Commits every undone item of the lease; none failed.
pub async fn commit_rest(store: &dyn Store, lease: &mut ShardLease) -> Committed {
    let rest: Vec<u32> = lease.shard.done.zeros().collect();
    applied(commit(store, lease, &rest, &[]).await)
}

/// Gives the lease back, for shutdown.
pub async fn release(store: &dyn Store, lease: &ShardLease) {
    applied(store.release_shard_if_leased(lease.key(), Duration::ZERO, AttemptEnd::Released).await.unwrap());
}

/// A fault of this item (of the job), for the `attempts`-th time.
pub fn new_fault(item: u64, attempts: u32, delay: Duration) -> NewFault {
    NewFault {
        item: ItemIndex(item),
        attempts,
        delay,
        http_status: Some(503),
        code: "engine_timeout".into(),
        message: "the engine did not answer".into(),
    }
}

/// Runs every shard of every job to its end.
pub async fn run_all(store: &dyn Store) {
    let worker = WorkerId::new();
    while let Some(mut lease) = try_lease(store, worker).await {
        commit_rest(store, &mut lease).await;
    }
}

/// What finalize publishes for the job as its shards stand: the files' ids, the
/// counts of the bits, undone items by the ending.
pub async fn publication(store: &dyn Store, job: &Job) -> Published {
    let progress = store.find_progress(job.id).await.unwrap();
    let mut counts = OutcomeCounts { total: job.num_items, ..progress.counts };
    let undone = counts.unfinished();
    match job.ending.expect("the job is being finalized") {
        Ending::Completed => assert_eq!(undone, 0, "a completed job has no undone item"),
        Ending::Expired => counts.expired += undone,
        Ending::Cancelled => counts.cancelled += undone,
    }
    let file = |id| NewFile { id, ..new_file(FilePurpose::BatchOutput) };
    let has_errors = counts.total > counts.completed;
    Published {
        output: job.output_file_id.filter(|_| counts.completed > 0).map(file),
        error: job.error_file_id.filter(|_| has_errors).map(file),
        counts,
        usage: progress.usage,
    }
}

/// Runs the job's finalize, which must be due, and checks the accounting.
pub async fn finalize(store: &dyn Store, job: JobId) -> Job {
    let lease = claim_step_of(store, job).await;
    assert_eq!(lease.kind, StepKind::Finalize);
    applied(store.fence_shards_if_leased(&lease).await.unwrap());
    let published = publication(store, &lease.job).await;
    let job = applied(store.finish_job_if_leased(&lease, published).await.unwrap());
    assert_closed(store, &job).await;
    job
}

/// A job that has completed, with these shards, whose items `failed` failed.
pub async fn completed_job(store: &dyn Store, sizes: &[u32], failed: &[u64]) -> Job {
    let job = running_job(store, sizes).await;
    let worker = WorkerId::new();
    for _ in sizes {
        let mut lease = lease(store, worker).await;
        let first = lease.shard.cut.first_item.0;
        let all: Vec<u32> = (0..lease.shard.cut.num_items).collect();
        let bad: Vec<u32> = all.iter().copied().filter(|&bit| failed.contains(&(first + u64::from(bit)))).collect();
        applied(commit(store, &mut lease, &all, &bad).await);
    }
    finalize(store, job.id).await
}

/// A job that was cancelled with nothing leased.
pub async fn cancelled_job(store: &dyn Store, job: JobId) -> Job {
    applied(store.cancel_job_if_active(job, CancelMode::Now, Duration::ZERO).await.unwrap());
    finalize(store, job).await
}

/// Every item has one outcome: the final counts sum to the job's items, equal what
/// progress says, and nothing of the job is held or waits.
pub async fn assert_closed(store: &dyn Store, job: &Job) {
    assert!(job.state.is_terminal(), "{} is not an end", job.state);
    let counts = job.final_counts.expect("an ended job has its counts");
    assert_eq!(counts.total, job.num_items);
    assert_eq!(counts.completed + counts.failed + counts.cancelled + counts.expired, counts.total, "{counts:?}");
    let progress = store.find_progress(job.id).await.unwrap();
    assert_eq!(progress.counts, counts);
    assert_eq!((progress.shards_leased, progress.items_waiting), (0, 0));
    if job.state == JobState::Completed {
        assert_eq!(progress.shards_ready, 0);
    }
}

/// The applied value; panics when the guard was lost.
#[track_caller]
pub fn applied<S: std::fmt::Debug, T>(answer: Guarded<S, T>) -> T {
    match answer {
        Guarded::Applied(value) => value,
        Guarded::Lost { now } => panic!("the guard was lost: {now:?}"),
    }
}

/// The state that a lost guard tells; panics when it was applied.
#[track_caller]
pub fn lost<S: std::fmt::Debug, T: std::fmt::Debug>(answer: Guarded<S, T>) -> Option<S> {
    match answer {
        Guarded::Lost { now } => now,
        Guarded::Applied(value) => panic!("applied, but the guard should have been lost: {value:?}"),
    }
}
