//! Drives a job by hand: its steps, and outcomes committed without an engine.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use overnight_blobs::{ItemRecord, ObjectName, SegmentHead, SegmentParts, SegmentWriter, error_line, response_line};
use overnight_store::{ClaimShard, Guarded, Job, NewSegment, ShardLease, Shards, StepKind, StepLease, Steps};
use overnight_store_sqlite::{ClockOffset, Options};
use overnight_testing::TestService;
use overnight_types::{
    BatchRequestId, ErrorCode, FileId, ItemIndex, JobId, JobState, Limits, OutcomeKind, Timestamp, Usage, WorkerId,
};
use overnight_worker::Error;
use overnight_worker::lifecycle::{StepContext, finalize, intake};

/// A service whose database's clock the test moves.
pub(crate) async fn service_with_clock() -> (TestService, ClockOffset) {
    let clock = ClockOffset::default();
    let options = Options { clock_offset: clock.clone(), ..Options::default() };
    (TestService::with_options(options).await, clock)
}

pub(crate) fn context(service: &TestService) -> StepContext {
    StepContext {
        store: Arc::new(service.store.clone()),
        blobs: service.blobs.clone(),
        known_models: vec!["m".to_owned()],
        producer: "test engine".to_owned(),
        limits: Limits { shard_items_max: 4, small_shard_items_max: 4, ..Limits::default() },
        // As `claim` leases: whoever claims next finds the step free at once.
        lease_ttl: Duration::ZERO,
    }
}

/// Claims the step that is due, as a worker that takes over would: at once, even
/// when another holds it.
pub(crate) async fn claim(service: &TestService, kind: StepKind) -> StepLease {
    // The lease is over as soon as it is taken, so that the next claim finds it free.
    let lease = service.store.claim_step(WorkerId::new(), Duration::ZERO).await.unwrap();
    let lease = lease.expect("a step is due");
    assert_eq!(lease.kind, kind);
    lease
}

pub(crate) async fn run_intake(service: &TestService) -> Result<(), Error> {
    let lease = claim(service, StepKind::Intake).await;
    intake::run(&context(service), &lease).await
}

pub(crate) async fn run_finalize(service: &TestService) -> Result<(), Error> {
    let lease = claim(service, StepKind::Finalize).await;
    finalize::run(&context(service), &lease).await
}

/// An ended job of these lines, all outcomes as told: `None` leaves an item undone.
pub(crate) async fn run_items(service: &TestService, job: JobId, outcome: impl Fn(u64) -> Option<OutcomeKind>) {
    while let Some(lease) = claim_shard(service).await {
        assert_eq!(lease.job.id, job);
        commit(service, &lease, &outcome).await;
        if lease.shard.done.num_bits() > 0 && has_undone(service, &lease).await {
            // Far away, so that the next claim takes another shard.
            let delay = Duration::from_secs(7 * 86_400);
            let why = overnight_store::AttemptEnd::Waiting;
            let _ = service.store.release_shard_if_leased(lease.key(), delay, why).await.unwrap();
        }
    }
}

pub(crate) async fn claim_shard(service: &TestService) -> Option<ShardLease> {
    let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_secs(60), models: None, oldest: false };
    service.store.claim_shard(&claim).await.unwrap()
}

async fn has_undone(service: &TestService, lease: &ShardLease) -> bool {
    let shard = service.store.find_shard(lease.job.id, lease.shard.cut.shard).await.unwrap().unwrap();
    !shard.done.is_full()
}

/// Commits outcomes of a lease's undone items, the last item first.
pub(crate) async fn commit(service: &TestService, lease: &ShardLease, outcome: &impl Fn(u64) -> Option<OutcomeKind>) {
    let cut = lease.shard.cut;
    let head = SegmentHead {
        job: lease.job.id,
        shard: cut.shard,
        epoch: lease.shard.epoch,
        seq: lease.shard.next_seq,
        producer: "test engine".to_owned(),
    };
    let mut writer = SegmentWriter::new(head, cut.first_item, cut.num_items);
    let bits: Vec<u32> = lease.shard.done.zeros().collect();
    for bit in bits.into_iter().rev() {
        let item = cut.first_item.0 + u64::from(bit);
        if let Some(outcome) = outcome(item) {
            writer.push(&record(&lease.job, item, outcome));
        }
    }
    if writer.num_records() == 0 {
        return;
    }
    let (bytes, parts) = writer.finish();
    service.blobs.put(&parts.name, bytes).await.unwrap();
    commit_parts(service, lease, parts).await;
}

/// Commits a segment whose object is written.
pub(crate) async fn commit_parts(service: &TestService, lease: &ShardLease, parts: SegmentParts) {
    let segment = NewSegment {
        shard: lease.shard.cut.shard,
        seq: lease.shard.next_seq,
        epoch: lease.shard.epoch,
        items: parts.items,
        failed: parts.failed,
        code_counts: parts.code_counts,
        usage: parts.usage,
        byte_len: parts.byte_len,
        sha256: parts.sha256,
    };
    let committed = service.store.commit_segment_if_leased(lease.key(), &segment).await.unwrap();
    assert!(committed.is_applied(), "{committed:?}");
}

/// The custom id of an item of [`overnight_testing::service::numbered_lines`].
pub(crate) fn custom_id(item: u64) -> String {
    format!("\"item-{item}\"")
}

/// An outcome whose line says the job's round.
pub(crate) fn record(job: &Job, item: u64, outcome: OutcomeKind) -> ItemRecord {
    let id = BatchRequestId { job: job.id, item: ItemIndex(item) };
    let custom_id = custom_id(item);
    let body = format!(r#"{{"round":{},"error":{{"message":"no good"}}}}"#, job.round);
    let (http_status, error_code, line) = match outcome {
        OutcomeKind::Completed => {
            (Some(200), None, response_line(id, custom_id.as_bytes(), 200, "req_1", body.as_bytes()))
        }
        // Two kinds of failure: with an HTTP answer and without.
        _ if item.is_multiple_of(2) => {
            (Some(400), Some("bad"), response_line(id, custom_id.as_bytes(), 400, "req_1", body.as_bytes()))
        }
        _ => {
            (None, Some("request_timeout"), error_line(id, custom_id.as_bytes(), ErrorCode::RequestTimeout, "too long"))
        }
    };
    let at = Timestamp::from_micros(1_000_000);
    ItemRecord {
        item: ItemIndex(item),
        outcome,
        http_status,
        error_code: error_code.map(str::to_owned),
        attempts: 1,
        failed_tries: Vec::new(),
        seed: Some(item),
        usage: Usage { input_tokens: 10, cached_tokens: 1, output_tokens: 2, reasoning_tokens: 0 },
        started_at: at,
        finished_at: at,
        finish_reason: Some("stop".to_owned()),
        line,
    }
}

/// Bytes of a file's object, published or not.
pub(crate) async fn object(service: &TestService, file: Option<FileId>) -> Option<Bytes> {
    service.blobs.read(&ObjectName::file(file?)).await.ok()
}

/// Asserts closed accounting of an ended job; returns its output and error lines.
pub(crate) async fn ended(service: &TestService, job: JobId, state: JobState) -> (Vec<String>, Vec<String>) {
    let job = service.job(job).await;
    assert_eq!(job.state, state);
    service.drop_checks(job.id).await;
    let files = (service.lines(job.output_file_id).await, service.lines(job.error_file_id).await);
    let mut items: Vec<u64> = Vec::new();
    for lines in [&files.0, &files.1] {
        let in_file: Vec<u64> = lines.iter().map(|line| item_of(line)).collect();
        assert!(in_file.is_sorted(), "input order: {in_file:?}");
        items.extend(in_file);
    }
    items.sort_unstable();
    assert_eq!(items, (0..job.num_items).collect::<Vec<_>>(), "each custom id once");
    files
}

/// The item that a published line is of; checks the line's form.
pub(crate) fn item_of(line: &str) -> u64 {
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!(line.as_object().unwrap().len(), 4);
    assert_ne!(line["response"].is_null(), line["error"].is_null());
    line["custom_id"].as_str().unwrap().strip_prefix("item-").unwrap().parse().unwrap()
}

/// Re-opens an ended job.
pub(crate) async fn reopen(service: &TestService, job: JobId, reopen: overnight_store::Reopen) -> Job {
    use overnight_store::Jobs;
    match service.store.reopen_job_if_ended(job, reopen).await.unwrap() {
        Guarded::Applied(reopened) => reopened.job,
        Guarded::Lost { now } => panic!("not re-opened: {now:?}"),
    }
}
