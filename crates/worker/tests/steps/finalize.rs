//! The finalize step: what is published at each end, and that it can be killed
//! anywhere and run again.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use overnight_blobs::manifest::Manifest;
use overnight_blobs::{ObjectName, Prefix};
use overnight_store::{CancelMode, Jobs, Reopen, ReopenItems, Segments, StepKind};
use overnight_testing::TestService;
use overnight_testing::service::numbered_lines;
use overnight_types::OutcomeKind::{Completed, Failed};
use overnight_types::{Class, ItemIndex, JobId, JobState, OutcomeCounts, OutcomeKind, ShardIndex};
use overnight_worker::failpoints;
use overnight_worker::items::{RetryFilter, RetryPlan, discard_leftovers, plan_retry};
use overnight_worker::lifecycle::finalize;
use overnight_worker::lifecycle::sweep::{SweepAges, sweep_job};

use crate::support::*;

/// A job of numbered lines that runs.
async fn running(service: &TestService, num_items: usize) -> JobId {
    let id = service.submit(&numbered_lines(num_items)).await;
    run_intake(service).await.unwrap();
    id
}

fn not_completed() -> Reopen {
    Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: Vec::new() }
}

// Field reports 46, 47, 51 and 56.
#[tokio::test]
async fn completed_job_has_the_files_that_have_lines() {
    // One in so many fails.
    for (failing, num_failed) in [(u64::MAX, 0), (1, 10), (3, 4)] {
        let outcome = |item: u64| if item.is_multiple_of(failing) && failing < 100 { Failed } else { Completed };
        let service = TestService::new().await;
        let id = running(&service, 10).await;
        run_items(&service, id, |item| Some(outcome(item))).await;
        run_finalize(&service).await.unwrap();
        let (output, error) = ended(&service, id, JobState::Completed).await;
        assert_eq!((output.len() as u64, error.len() as u64), (10 - num_failed, num_failed));
        let job = service.job(id).await;
        let counts =
            OutcomeCounts { total: 10, completed: 10 - num_failed, failed: num_failed, cancelled: 0, expired: 0 };
        assert_eq!(job.final_counts, Some(counts));
        assert_eq!(job.final_usage.unwrap().input_tokens, 10 * (10 - num_failed), "of what completed");
        // Never an empty file: neither a row nor an object.
        assert_eq!(object(&service, job.output_file_id).await.is_some(), num_failed < 10);
        assert_eq!(object(&service, job.error_file_id).await.is_some(), num_failed > 0);
        let manifest = service.blobs.read(&ObjectName::manifest(id, 1)).await.unwrap();
        let manifest: Manifest = serde_json::from_slice(&manifest).unwrap();
        assert_eq!((manifest.counts, manifest.producers), (counts, vec!["test engine".to_owned()]));
        assert_eq!(manifest.output.map(|file| file.lines), (num_failed < 10).then_some(Some(10 - num_failed)));
    }
}

// Field reports 43, 45 and 54: whatever finished is published; the rest has its line.
#[tokio::test]
async fn expired_job_keeps_what_finished() {
    for num_done in [0u64, 4, 10] {
        let (service, clock) = service_with_clock().await;
        let id = running(&service, 10).await;
        run_items(&service, id, |item| (item < num_done).then_some(Completed)).await;
        clock.advance(Duration::from_secs(3_700));
        let due = service.store.expire_due_jobs(10).await.unwrap();
        assert_eq!(due.len(), usize::from(num_done < 10), "a job with all outcomes does not expire");
        run_finalize(&service).await.unwrap();
        let state = if num_done < 10 { JobState::Expired } else { JobState::Completed };
        let (output, error) = ended(&service, id, state).await;
        assert_eq!((output.len() as u64, error.len() as u64), (num_done, 10 - num_done));
        assert!(error.iter().all(|line| line.contains("\"batch_expired\"")));
        let counts = service.job(id).await.final_counts.unwrap();
        assert_eq!((counts.completed, counts.failed, counts.expired), (num_done, 0, 10 - num_done));
    }
}

// Field reports 42, 44 and 55.
#[tokio::test]
async fn cancelled_job_keeps_what_finished_and_stays_cancelled() {
    for num_done in [0u64, 7, 10] {
        let service = TestService::new().await;
        let id = running(&service, 10).await;
        let lease = claim_shard(&service).await.unwrap();
        let cancelled = service.store.cancel_job_if_active(id, CancelMode::Drain, Duration::ZERO).await.unwrap();
        assert!(cancelled.is_applied());
        // What ran may finish and counts.
        let first = num_done.min(4);
        commit(&service, &lease, &|item| (item < first).then_some(Completed)).await;
        run_finalize(&service).await.unwrap();
        let (output, error) = ended(&service, id, JobState::Cancelled).await;
        assert_eq!((output.len() as u64, error.len() as u64), (first, 10 - first));
        assert!(error.iter().all(|line| line.contains("\"batch_cancelled\"")));
    }
    let service = TestService::new().await;
    let id = running(&service, 3).await;
    let lease = claim_shard(&service).await.unwrap();
    let cancelled = service.store.cancel_job_if_active(id, CancelMode::Drain, Duration::ZERO).await.unwrap();
    assert!(cancelled.is_applied());
    commit(&service, &lease, &|_| Some(Completed)).await;
    run_finalize(&service).await.unwrap();
    let (output, _) = ended(&service, id, JobState::Cancelled).await;
    assert_eq!(output.len(), 3, "also when every item happened to finish");
}

#[tokio::test]
async fn later_round_supersedes_and_earlier_files_stay() {
    let service = TestService::new().await;
    let id = running(&service, 10).await;
    run_items(&service, id, |item| Some(if item % 2 == 0 { Completed } else { Failed })).await;
    run_finalize(&service).await.unwrap();
    let first = service.job(id).await;
    let before = (object(&service, first.output_file_id).await, object(&service, first.error_file_id).await);
    reopen(&service, id, not_completed()).await;
    // In the second round 9 fails again.
    run_items(&service, id, |item| Some(if item == 9 { Failed } else { Completed })).await;
    let progress = service.store.find_progress(id).await.unwrap();
    assert_eq!(progress.usage.input_tokens, 90, "each completed item once, also before the files are published");
    run_finalize(&service).await.unwrap();
    let (output, error) = ended(&service, id, JobState::Completed).await;
    assert_eq!((output.len(), error.len()), (9, 1));
    let rounds: Vec<bool> = output.iter().map(|line| line.contains("\"round\":2")).collect();
    assert_eq!(rounds, [false, true, false, true, false, true, false, true, false], "what succeeded is kept, not run");
    let second = service.job(id).await;
    assert_ne!(second.output_file_id, first.output_file_id);
    assert_eq!((object(&service, first.output_file_id).await, object(&service, first.error_file_id).await), before);
    assert_eq!(second.final_usage.unwrap(), progress.usage);
}

#[tokio::test]
async fn selective_retry_runs_what_was_named_and_gives_the_rest_its_line() {
    let (service, clock) = service_with_clock().await;
    let id = running(&service, 10).await;
    // 0…3 done (1 and 3 failed), the rest undone at the window's end.
    run_items(&service, id, |item| (item < 4).then_some(if item % 2 == 0 { Completed } else { Failed })).await;
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    run_finalize(&service).await.unwrap();
    ended(&service, id, JobState::Expired).await;
    let job = service.job(id).await;
    let filter = RetryFilter {
        custom_ids: ["item-3", "item-5", "item-0", "nobody"].map(str::to_owned).to_vec(),
        ..RetryFilter::default()
    };
    let plan = plan_retry(&service.store, &service.blobs, &job, &filter).await.unwrap();
    assert_eq!(plan.items, [3, 5].map(ItemIndex), "a completed item never runs again");
    assert_eq!(plan.unknown_custom_ids, ["nobody"]);
    assert!(plan.leftover_segments.is_empty(), "a filter that names an unknown item is refused, so nothing is written");
    let filter = RetryFilter { custom_ids: filter.custom_ids[..3].to_vec(), ..filter };
    let plan = plan_retry(&service.store, &service.blobs, &job, &filter).await.unwrap();
    assert_eq!((plan.items.as_slice(), plan.leftover_segments.len()), (&[3, 5].map(ItemIndex)[..], 2));
    let (items, leftover_segments) = (plan.reopen_items(), plan.leftover_segments);
    reopen(&service, id, Reopen { items, window: None, leftover_segments }).await;
    run_items(&service, id, |_| Some(Completed)).await;
    run_finalize(&service).await.unwrap();
    let (output, error) = ended(&service, id, JobState::Completed).await;
    assert_eq!(output.iter().map(|line| item_of(line)).collect::<Vec<_>>(), [0, 2, 3, 5]);
    assert_eq!(error.iter().map(|line| item_of(line)).collect::<Vec<_>>(), [1, 4, 6, 7, 8, 9]);
    assert_eq!(error.iter().filter(|line| line.contains("batch_expired")).count(), 5);
}

/// Two retries of one job meet: the one that is refused takes its objects along, and
/// those of the other stay.
#[tokio::test]
async fn refused_retry_leaves_no_object() {
    let (service, clock) = service_with_clock().await;
    let id = running(&service, 10).await;
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    run_finalize(&service).await.unwrap();
    let job = service.job(id).await;
    let filter = RetryFilter { custom_ids: vec!["item-3".to_owned()], ..RetryFilter::default() };
    let (first, second) = (
        plan_retry(&service.store, &service.blobs, &job, &filter).await.unwrap(),
        plan_retry(&service.store, &service.blobs, &job, &filter).await.unwrap(),
    );
    let again = |plan: &RetryPlan| Reopen {
        items: plan.reopen_items(),
        window: None,
        leftover_segments: plan.leftover_segments.clone(),
    };
    reopen(&service, id, again(&first)).await;
    assert!(!service.store.reopen_job_if_ended(id, again(&second)).await.unwrap().is_applied());
    discard_leftovers(&service.store, &service.blobs, id, &second.leftover_segments).await.unwrap();
    // Whoever mistakes its answer for a refusal destroys nothing.
    discard_leftovers(&service.store, &service.blobs, id, &first.leftover_segments).await.unwrap();
    let mut names = HashSet::new();
    let mut listed = service.blobs.list(Prefix::Segments(id));
    while let Some(object) = futures::TryStreamExt::try_next(&mut listed).await.unwrap() {
        names.insert(object.name);
    }
    let named =
        first.leftover_segments.iter().map(|new| ObjectName::segment(id, new.shard, new.epoch, new.seq, &new.sha256));
    assert_eq!(names, named.collect::<HashSet<_>>());
    run_items(&service, id, |_| Some(Completed)).await;
    run_finalize(&service).await.unwrap();
    let (output, error) = ended(&service, id, JobState::Completed).await;
    assert_eq!((output.len(), error.len()), (1, 9));
}

/// A retry that died between its objects and the re-opening leaves what the sweep takes.
#[tokio::test]
async fn objects_of_a_retry_that_died_are_swept() {
    let (service, clock) = service_with_clock().await;
    let id = running(&service, 10).await;
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    run_finalize(&service).await.unwrap();
    let job = service.job(id).await;
    let filter = RetryFilter { custom_ids: vec!["item-3".to_owned()], ..RetryFilter::default() };
    let plan = plan_retry(&service.store, &service.blobs, &job, &filter).await.unwrap();
    assert_eq!(plan.leftover_segments.len(), 3);
    let swept = sweep_job(&service.store, &service.blobs, id, &SweepAges::default()).await.unwrap();
    assert_eq!(swept, 0, "too young: the re-opening may be about to name them");
    let now = SweepAges { orphans: Duration::ZERO, unclaimed: Duration::ZERO, jobs: None };
    assert_eq!(sweep_job(&service.store, &service.blobs, id, &now).await.unwrap(), 3);
    ended(&service, id, JobState::Expired).await;
}

#[tokio::test]
async fn retry_selects_by_outcome_and_code() {
    let (service, clock) = service_with_clock().await;
    let id = running(&service, 10).await;
    run_items(&service, id, |item| (item < 8).then_some(if item < 4 { Failed } else { Completed })).await;
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    run_finalize(&service).await.unwrap();
    let job = service.job(id).await;
    let select = async |outcomes: &[OutcomeKind], codes: &[&str]| {
        let error_codes = codes.iter().map(|code| (*code).to_owned()).collect();
        let filter = RetryFilter { outcomes: outcomes.to_vec(), error_codes, custom_ids: Vec::new() };
        let plan = plan_retry(&service.store, &service.blobs, &job, &filter).await.unwrap();
        plan.items.iter().map(|item| item.0).collect::<Vec<_>>()
    };
    assert_eq!(select(&[], &[]).await, [0, 1, 2, 3, 8, 9]);
    assert_eq!(select(&[Failed], &[]).await, [0, 1, 2, 3]);
    assert_eq!(select(&[OutcomeKind::Expired], &[]).await, [8, 9]);
    assert_eq!(select(&[], &["bad"]).await, [0, 2]);
    assert_eq!(select(&[Failed], &["request_timeout", "batch_expired"]).await, [1, 3]);
    assert!(select(&[Completed], &[]).await.is_empty());
}

#[tokio::test]
async fn two_finalizers_write_the_same_bytes_and_one_ends_the_job() {
    let service = TestService::new().await;
    let id = running(&service, 10).await;
    run_items(&service, id, |item| Some(if item % 3 == 0 { Failed } else { Completed })).await;
    let stale = claim(&service, StepKind::Finalize).await;
    let fresh = claim(&service, StepKind::Finalize).await;
    let context = context(&service);
    let err = finalize::run(&context, &stale).await.unwrap_err();
    assert_eq!(err.class(), Class::Cancelled, "{err}");
    finalize::run(&context, &fresh).await.unwrap();
    ended(&service, id, JobState::Completed).await;
    let job = service.job(id).await;
    let read = async || {
        let manifest = service.blobs.read(&ObjectName::manifest(id, 1)).await.unwrap();
        [
            object(&service, job.output_file_id).await.unwrap(),
            object(&service, job.error_file_id).await.unwrap(),
            manifest,
        ]
    };
    let before = read().await;
    // A late finalizer that got past the fence before its lease was lost.
    let err = finalize::publish(&context, &stale).await.unwrap_err();
    assert_eq!(err.class(), Class::Cancelled, "{err}");
    assert_eq!(read().await, before);
}

// A finalizer that dies before the job's end has written what the next one writes.
#[tokio::test]
async fn finalizer_that_takes_over_writes_the_same_bytes() {
    let service = TestService::new().await;
    let id = running(&service, 10).await;
    run_items(&service, id, |item| Some(if item % 3 == 0 { Failed } else { Completed })).await;
    let lease = claim(&service, StepKind::Finalize).await;
    let first = finalize::publish(&context(&service), &lease).await.unwrap();
    let before = object(&service, lease.job.output_file_id).await.unwrap();
    let lease = claim(&service, StepKind::Finalize).await;
    assert_eq!(finalize::publish(&context(&service), &lease).await.unwrap(), first);
    assert_eq!(object(&service, lease.job.output_file_id).await.unwrap(), before);
}

// SIGSTOP in a finalizer of the first round; it goes on when the second has outcomes.
#[tokio::test]
async fn finalizer_that_wakes_up_in_a_later_round_changes_no_published_byte() {
    for paused_at in ["list_shards", "list_segments"] {
        let service = TestService::new().await;
        let id = running(&service, 4).await;
        run_items(&service, id, |item| (item < 2).then_some(if item == 0 { Completed } else { Failed })).await;
        let cancelled = service.store.cancel_job_if_active(id, CancelMode::Now, Duration::ZERO).await.unwrap();
        assert!(cancelled.is_applied());
        let stopped = claim(&service, StepKind::Finalize).await;
        let pause = service.store.pause(paused_at);
        let finalizer = {
            let (context, stopped) = (context(&service), stopped.clone());
            tokio::spawn(async move { finalize::run(&context, &stopped).await })
        };
        pause.reached().await;
        run_finalize(&service).await.unwrap();
        let first = ended(&service, id, JobState::Cancelled).await;
        let job = service.job(id).await;
        let files = async || {
            let manifest = service.blobs.read(&ObjectName::manifest(id, 1)).await.unwrap();
            (object(&service, job.output_file_id).await, object(&service, job.error_file_id).await, manifest)
        };
        let before = files().await;
        reopen(&service, id, not_completed()).await;
        run_items(&service, id, |_| Some(Completed)).await;
        pause.go_on();
        let err = finalizer.await.unwrap().unwrap_err();
        assert_eq!(err.class(), Class::Cancelled, "{err}");
        assert_eq!(files().await, before, "stopped at {paused_at}");
        run_finalize(&service).await.unwrap();
        let second = ended(&service, id, JobState::Completed).await;
        assert_eq!((first.0.len(), second.0.len()), (1, 4));
    }
}

// Field report 26: killed at each place and run again; published once, whole.
#[tokio::test]
async fn finalize_killed_at_each_crash_point_ends_the_same() {
    let points = failpoints::FINALIZE.iter();
    let mut wanted: Option<(Vec<String>, Vec<String>)> = None;
    for point in points {
        let service = TestService::new().await;
        let id = running(&service, 10).await;
        run_items(&service, id, |item| Some(if item % 3 == 0 { Failed } else { Completed })).await;
        fail::cfg(*point, "1*panic->off").unwrap();
        let mut deaths = 0;
        while !service.job(id).await.state.is_terminal() {
            let (context, lease) = (context(&service), claim(&service, StepKind::Finalize).await);
            match tokio::spawn(async move { finalize::run(&context, &lease).await }).await {
                Ok(done) => done.unwrap(),
                Err(died) => deaths += u32::from(died.is_panic()),
            }
            let job = service.job(id).await;
            if !job.state.is_terminal() {
                assert_eq!(job.state, JobState::Finalizing, "{point}");
                assert!(service.lines(job.output_file_id).await.is_empty(), "{point}: not a file before its job's end");
            }
        }
        fail::remove(*point);
        assert_eq!(deaths, 1, "{point} was passed");
        let files = ended(&service, id, JobState::Completed).await;
        // Ids differ from job to job, the rest does not.
        let same = |lines: &[String]| lines.iter().map(|line| line[50..].to_owned()).collect::<Vec<_>>();
        let files = (same(&files.0), same(&files.1));
        assert_eq!(&files, wanted.get_or_insert_with(|| files.clone()), "{point}");
    }
}

// Never published from what is not all there; nothing is thrown away (field report 36).
#[tokio::test]
async fn missing_or_damaged_segment_is_never_published_over() {
    let service = TestService::new().await;
    let id = running(&service, 10).await;
    run_items(&service, id, |_| Some(Completed)).await;
    let segment = service.store.list_segments(id, ShardIndex(1), 10).await.unwrap().remove(0);
    let name = ObjectName::segment(id, segment.new.shard, segment.new.epoch, segment.new.seq, &segment.new.sha256);
    let bytes = service.blobs.read(&name).await.unwrap();
    let mut damaged = bytes.to_vec();
    damaged[100] ^= 1;
    for broken in [None, Some(Bytes::from(damaged)), Some(bytes.slice(..bytes.len() - 1))] {
        match broken {
            None => service.blobs.delete(&name).await.unwrap(),
            Some(broken) => service.blobs.put(&name, broken).await.unwrap(),
        }
        let err = run_finalize(&service).await.unwrap_err();
        let text = overnight_types::chain(&err);
        assert!(text.contains(&name.to_string()), "the object is named: {text}");
        let job = service.job(id).await;
        assert_eq!(job.state, JobState::Finalizing);
        assert_eq!(object(&service, job.output_file_id).await, None);
    }
    service.blobs.put(&name, bytes).await.unwrap();
    run_finalize(&service).await.unwrap();
    let (output, _) = ended(&service, id, JobState::Completed).await;
    assert_eq!(output.len(), 10);
}

// Field report 60: a shard larger than the memory allowed is read line by line.
#[tokio::test]
async fn shard_of_large_outputs_is_published_all_the_same() {
    let service = TestService::new().await;
    let id = running(&service, 3).await;
    let lease = claim_shard(&service).await.unwrap();
    let large = "x".repeat(9 << 20);
    let head = overnight_blobs::SegmentHead {
        job: id,
        shard: ShardIndex(0),
        epoch: lease.shard.epoch,
        seq: 0,
        producer: "large".to_owned(),
    };
    let mut writer = overnight_blobs::SegmentWriter::new(head, ItemIndex(0), 3);
    for item in [2, 0, 1] {
        let mut record = record(&lease.job, item, Completed);
        let request = overnight_types::BatchRequestId { job: id, item: ItemIndex(item) };
        let body = format!("{{\"x\":\"{large}{item}\"}}");
        record.line =
            overnight_blobs::response_line(request, custom_id(item).as_bytes(), 200, "req_1", body.as_bytes());
        writer.push(&record);
    }
    let (bytes, parts) = writer.finish();
    service.blobs.put(&parts.name, bytes).await.unwrap();
    commit_parts(&service, &lease, parts).await;
    run_finalize(&service).await.unwrap();
    let (output, _) = ended(&service, id, JobState::Completed).await;
    for (item, line) in output.iter().enumerate() {
        assert!(line.contains(&format!("x{item}\"")) && line.len() > 9 << 20, "{item}");
    }
    let manifest = service.blobs.read(&ObjectName::manifest(id, 1)).await.unwrap();
    assert!(String::from_utf8_lossy(&manifest).contains("\"large\""));
}

/// A job of five items in two shards whose window closed with one outcome.
async fn expired_with_one_outcome() -> (TestService, JobId, ObjectName) {
    let (service, clock) = service_with_clock().await;
    let id = running(&service, 5).await;
    run_items(&service, id, |item| (item == 1).then_some(Completed)).await;
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    let name = ObjectName::file(service.job(id).await.input_file_id);
    (service, id, name)
}

#[tokio::test]
async fn storage_that_is_away_delays_the_lines_of_undone_items() {
    let (service, id, _) = expired_with_one_outcome().await;
    let [objects, elsewhere] = ["objects", "elsewhere"].map(|name| service.data_dir().join(name));
    std::fs::rename(&objects, &elsewhere).unwrap();
    std::fs::create_dir(&objects).unwrap();
    let err = run_finalize(&service).await.unwrap_err();
    assert_eq!(err.class(), Class::Transient, "{err}");
    assert_eq!(service.job(id).await.state, JobState::Finalizing);
    std::fs::remove_dir(&objects).unwrap();
    std::fs::rename(&elsewhere, &objects).unwrap();
    run_finalize(&service).await.unwrap();
    ended(&service, id, JobState::Expired).await;
    let mut published = service.blobs.list(Prefix::Files);
    let mut num_files = 0;
    while futures::TryStreamExt::try_next(&mut published).await.unwrap().is_some() {
        num_files += 1;
    }
    assert_eq!(num_files, 3, "the input, the output and the error file");
}

// A job of which nothing can be read any more still ends, and every item has its line.
#[tokio::test]
async fn input_that_is_gone_for_good_does_not_keep_a_job_from_its_end() {
    for what in ["deleted", "cut short", "changed"] {
        let (service, id, name) = expired_with_one_outcome().await;
        let bytes = service.blobs.read(&name).await.unwrap();
        match what {
            "deleted" => service.blobs.delete(&name).await.unwrap(),
            "cut short" => service.blobs.put(&name, bytes.slice(..10)).await.unwrap(),
            _ => service.blobs.put(&name, Bytes::from(vec![b'{'; bytes.len()])).await.unwrap(),
        }
        run_finalize(&service).await.unwrap();
        service.drop_checks(id).await;
        let job = service.job(id).await;
        assert_eq!(job.state, JobState::Expired, "{what}");
        let counts = job.final_counts.unwrap();
        assert_eq!((counts.completed, counts.expired), (1, 4), "{what}");
        for line in service.lines(job.error_file_id).await {
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(
                (&line["custom_id"], &line["error"]["code"]),
                (&serde_json::Value::Null, &"batch_expired".into())
            );
            assert!(line["error"]["message"].as_str().unwrap().contains("cannot be read any more"), "{line}");
        }
    }
}

// Field reports 4, 14, 15 and 16: a custom id comes back as the token that came in.
#[tokio::test]
async fn odd_custom_ids_come_back_as_they_were_written() {
    let (service, clock) = service_with_clock().await;
    let long = format!("\"{}\"", "x".repeat(10_000));
    let tokens = [
        "\"\u{1f600}\"",
        "\"\\ud83d\\ude01\"",
        "\"a\\nb\"",
        "\"\\u0000\"",
        "\"\\ud800\"",
        "\"\u{2028}\u{2029}\u{85}\"",
        "\" \"",
        "\"\\/..\\/etc\"",
        &long,
    ];
    let template = overnight_testing::service::line("ID");
    let lines: Vec<String> = tokens
        .iter()
        .map(|token| template.replace("\"custom_id\":\"ID\"", &format!("\"custom_id\":{token}")))
        .collect();
    let id = service.submit(&lines).await;
    run_intake(&service).await.unwrap();
    assert_eq!(service.job(id).await.num_items, tokens.len() as u64, "{:?}", service.job(id).await.errors);
    let job = service.job(id).await;
    for (text, index) in [("\u{1f600}", 0), ("\u{1f601}", 1), ("a\nb", 2), ("\0", 3), ("/../etc", 7)] {
        let item = overnight_worker::items::ItemRef::CustomId(text.to_owned());
        let found = overnight_worker::items::find(&service.store, &service.blobs, &job, &item).await.unwrap();
        assert_eq!(found.map(|found| found.view.index), Some(index), "{text:?}");
    }
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    run_finalize(&service).await.unwrap();
    let job = service.job(id).await;
    let error = service.lines(job.error_file_id).await;
    let bytes = object(&service, job.error_file_id).await.unwrap();
    assert_eq!(memchr::memchr_iter(b'\n', &bytes).count(), tokens.len());
    for (line, token) in bytes.split(|byte| *byte == b'\n').zip(tokens) {
        let wanted = format!(",\"custom_id\":{token},\"response\":null,");
        assert!(memchr::memmem::find(line, wanted.as_bytes()).is_some(), "{token} in {error:?}");
    }
}

// More shards and segments than one read of rows holds, some shards with two segments.
#[tokio::test]
async fn job_of_many_shards_is_published_whole() {
    let service = TestService::new().await;
    let id = service.submit(&numbered_lines(150)).await;
    let mut context = context(&service);
    (context.limits.shard_items_max, context.limits.small_shard_items_max) = (1, 1);
    overnight_worker::lifecycle::intake::run(&context, &claim(&service, StepKind::Intake).await).await.unwrap();
    assert_eq!(service.job(id).await.num_shards, 150);
    run_items(&service, id, |item| Some(if item % 7 == 0 { Failed } else { Completed })).await;
    run_finalize(&service).await.unwrap();
    ended(&service, id, JobState::Completed).await;
    reopen(&service, id, not_completed()).await;
    run_items(&service, id, |_| Some(Completed)).await;
    run_finalize(&service).await.unwrap();
    let (output, error) = ended(&service, id, JobState::Completed).await;
    assert_eq!((output.len(), error.len()), (150, 0));
    assert_eq!(output.iter().filter(|line| line.contains("\"round\":2")).count(), 22);
}
