//! The intake step: what it records, and that it can be killed anywhere.

use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use overnight_blobs::{ObjectName, Prefix, index};
use overnight_store::{IntakeProgress, Jobs, NewShard, NewWorker, StepKind, Steps, Workers};
use overnight_testing::TestService;
use overnight_testing::service::{line, numbered_lines};
use overnight_types::{Class, Endpoint, ItemIndex, JobState, ShardIndex, WorkerId};
use overnight_worker::failpoints;
use overnight_worker::intake::{IntakeOptions, KnownModels};
use overnight_worker::lifecycle::{StepContext, intake};

use crate::support::{claim, context, run_intake};

fn small_pieces() -> IntakeOptions {
    let options = IntakeOptions::new(Endpoint::ChatCompletions, KnownModels::Any);
    IntakeOptions { run_items_max: 5, ..options }
}

#[tokio::test]
async fn sound_input_is_cut_indexed_and_set_running() {
    let service = TestService::new().await;
    let mut lines = numbered_lines(9);
    lines.insert(2, String::new());
    let id = service.submit(&lines).await;
    run_intake(&service).await.unwrap();
    let job = service.job(id).await;
    assert_eq!((job.state, job.num_items, job.num_shards), (JobState::InProgress, 9, 3));
    assert_eq!(job.model.as_deref(), Some("m"));
    let cuts: Vec<_> =
        service.shards(id).await.iter().map(|shard| (shard.cut.num_items, shard.cut.first_line)).collect();
    assert_eq!(cuts, [(4, 1), (4, 6), (1, 10)]);
    for item in 0..9 {
        let found = index::find(&service.blobs, id, format!("item-{item}").as_bytes()).await.unwrap();
        assert_eq!(found, [ItemIndex(item)]);
    }
}

// Field report 19: the create was accepted; later the job is failed, with all four keys.
#[tokio::test]
async fn faulty_input_fails_the_job_with_every_error() {
    let service = TestService::new().await;
    let id = service.submit(&[line("a"), "bad".into(), line("a"), line("b").replace("\"m\"", "\"n\"")]).await;
    run_intake(&service).await.unwrap();
    let job = service.job(id).await;
    assert_eq!((job.state, job.num_items), (JobState::Failed, 0));
    let errors: serde_json::Value = serde_json::from_str(&job.errors.unwrap()).unwrap();
    let codes: Vec<_> = errors["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry["line"].as_u64(), entry["code"].as_str().unwrap()))
        .collect();
    assert_eq!(codes, [(Some(2), "invalid_json_line"), (Some(3), "duplicate_custom_id"), (Some(4), "model_mismatch")]);
    for entry in errors["data"].as_array().unwrap() {
        let keys: Vec<_> = entry.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["code", "line", "message", "param"]);
    }
    assert!(service.shards(id).await.is_empty());
    assert_eq!(service.blobs.size(&ObjectName::index(id)).await.unwrap(), None);
}

// An API whose workers are all away, or still load their models, cannot know what is served.
#[tokio::test]
async fn name_is_taken_while_nobody_says_what_is_served() {
    let service = TestService::new().await;
    let nobody = StepContext { known_models: Vec::new(), ..context(&service) };
    let loading =
        NewWorker { id: WorkerId::new(), host: "h".to_owned(), pid: 1, models: Vec::new(), may_load: Vec::new() };
    service.store.report_worker(&loading).await.unwrap();
    let job = service.submit(&[line("a")]).await;
    intake::run(&nobody, &claim(&service, StepKind::Intake).await).await.unwrap();
    assert_eq!(service.job(job).await.state, JobState::InProgress);
    // As soon as one does, its word counts.
    let ready = NewWorker { models: vec!["another".to_owned()], ..loading };
    service.store.report_worker(&ready).await.unwrap();
    let job = service.submit(&[line("a")]).await;
    intake::run(&nobody, &claim(&service, StepKind::Intake).await).await.unwrap();
    assert_eq!(service.job(job).await.state, JobState::Failed);
    // Also the word of one that still loads.
    let second = NewWorker { id: WorkerId::new(), models: vec![], may_load: vec!["m".to_owned()], ..ready };
    service.store.report_worker(&second).await.unwrap();
    let job = service.submit(&[line("a")]).await;
    intake::run(&nobody, &claim(&service, StepKind::Intake).await).await.unwrap();
    assert_eq!(service.job(job).await.state, JobState::InProgress);
}

#[tokio::test]
async fn model_that_nobody_serves_is_named_with_those_that_are() {
    let service = TestService::new().await;
    let id = service.submit(&[line("a").replace("\"m\"", "\"other\"")]).await;
    run_intake(&service).await.unwrap();
    let errors = service.job(id).await.errors.unwrap();
    assert!(errors.contains("model_not_found") && errors.contains("served are: m"), "{errors}");
    // A worker that is alive makes its models known.
    let worker =
        NewWorker { id: WorkerId::new(), host: "h".into(), pid: 1, models: vec!["other".into()], may_load: vec![] };
    service.store.report_worker(&worker).await.unwrap();
    let id = service.submit(&[line("a").replace("\"m\"", "\"other\"")]).await;
    run_intake(&service).await.unwrap();
    assert_eq!(service.job(id).await.state, JobState::InProgress);
}

// An upgrade in the middle of an intake that takes an hour.
#[tokio::test]
async fn intake_of_another_version_starts_over() {
    let service = TestService::new().await;
    let id = service.submit(&numbered_lines(10)).await;
    let lease = claim(&service, StepKind::Intake).await;
    // As much as an older version had recorded: a shard, and notes in its own form.
    let cut = NewShard {
        shard: ShardIndex(0),
        first_item: ItemIndex(0),
        num_items: 3,
        first_line: 1,
        byte_offset: 0,
        byte_len: 90,
        lines_hash: None,
    };
    let progress = IntakeProgress { offset: 90, notes: r#"{"version":0,"offset":90}"#.to_owned() };
    assert!(service.store.record_intake_if_leased(&lease, progress, vec![cut]).await.unwrap().is_applied());
    run_intake(&service).await.unwrap();
    let job = service.job(id).await;
    assert_eq!((job.state, job.num_items), (JobState::InProgress, 10));
    let items: Vec<u32> = service.shards(id).await.iter().map(|shard| shard.cut.num_items).collect();
    assert_eq!(items, [4, 4, 2]);
}

#[tokio::test]
async fn input_bytes_that_changed_are_found_out() {
    let service = TestService::new().await;
    let lines = numbered_lines(3);
    let id = service.submit(&lines).await;
    let name = ObjectName::file(service.job(id).await.input_file_id);
    let changed = service.blobs.read(&name).await.unwrap().to_vec();
    let changed = String::from_utf8(changed).unwrap().replace("item-1", "item-7");
    service.blobs.put(&name, Bytes::from(changed)).await.unwrap();
    run_intake(&service).await.unwrap();
    let job = service.job(id).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.errors.unwrap().contains("\"input_modified\""));
}

// Field reports 25 and 30: killed at each place, also between pieces; whoever takes
// over ends with the same shards, index and errors.
#[tokio::test]
async fn intake_killed_at_each_crash_point_goes_on_to_the_same_end() {
    let mut lines = numbered_lines(23);
    lines.insert(7, String::new());
    let mut wanted = None;
    let points = failpoints::INTAKE.iter();
    for (point, nth) in std::iter::once((&"none", 0)).chain(points.flat_map(|point| [(point, 1), (point, 3)])) {
        let service = TestService::new().await;
        let id = service.submit(&lines).await;
        if nth > 0 {
            fail::cfg(*point, &format!("{}*off->1*panic->off", nth - 1)).unwrap();
        }
        let mut deaths = 0;
        while service.job(id).await.state == JobState::Validating {
            let (context, lease) = (context(&service), claim(&service, StepKind::Intake).await);
            let step = tokio::spawn(async move { intake::run_with(&context, &lease, small_pieces()).await });
            match step.await {
                Ok(done) => done.unwrap(),
                Err(died) => deaths += u32::from(died.is_panic()),
            }
        }
        if nth > 0 {
            fail::remove(*point);
            let passed_often = !point.ends_with("finish") && !point.ends_with("index_object");
            assert_eq!(deaths, u32::from(nth == 1 || passed_often), "{point} {nth}");
        }
        let job = service.job(id).await;
        assert_eq!((job.state, job.num_items), (JobState::InProgress, 23), "{point} {nth}");
        let cuts: Vec<_> = service.shards(id).await.into_iter().map(|shard| shard.cut).collect();
        for item in 0..23 {
            let found = index::find(&service.blobs, id, format!("item-{item}").as_bytes()).await.unwrap();
            assert_eq!(found, [ItemIndex(item)], "{point} {nth}");
        }
        assert_eq!(&cuts, wanted.get_or_insert_with(|| cuts.clone()), "{point} {nth}");
        if !point.ends_with("finish") {
            let runs: Vec<_> = service.blobs.list(Prefix::IntakeRuns(id)).try_collect().await.unwrap();
            assert!(runs.is_empty(), "{point}: runs are of no use after the merge");
        }
    }
}

#[tokio::test]
async fn intake_that_lost_its_lease_gives_way() {
    let service = TestService::new().await;
    let id = service.submit(&numbered_lines(5)).await;
    let stale = claim(&service, StepKind::Intake).await;
    run_intake(&service).await.unwrap();
    let shards = service.shards(id).await;
    let err = intake::run(&context(&service), &stale).await.unwrap_err();
    assert_eq!(err.class(), Class::Cancelled, "{err}");
    assert_eq!(service.shards(id).await, shards);
}

#[tokio::test]
async fn job_that_is_cancelled_while_validating_ends_without_a_file() {
    let service = TestService::new().await;
    let id = service.submit(&numbered_lines(23)).await;
    // One piece is recorded, then the step dies.
    fail::cfg("intake::after_record", "1*panic->off").unwrap();
    let (context, lease) = (context(&service), claim(&service, StepKind::Intake).await);
    let died = tokio::spawn(async move { intake::run_with(&context, &lease, small_pieces()).await }).await;
    assert!(died.unwrap_err().is_panic());
    fail::remove("intake::after_record");
    let cancelled = service.store.cancel_job_if_active(id, Default::default(), Duration::ZERO).await.unwrap();
    assert!(cancelled.is_applied());
    assert!(
        service
            .store
            .claim_step(WorkerId::new(), Duration::ZERO)
            .await
            .unwrap()
            .is_some_and(|lease| lease.kind == StepKind::Finalize)
    );
    crate::support::run_finalize(&service).await.unwrap();
    let (output, error) = crate::support::ended(&service, id, JobState::Cancelled).await;
    assert!(output.is_empty() && error.is_empty());
    // Resumed, it validates to its end.
    let items = overnight_store::ReopenItems::NotCompleted;
    let reopen = overnight_store::Reopen { items, window: None, leftover_segments: Vec::new() };
    let job = crate::support::reopen(&service, id, reopen).await;
    assert_eq!(job.state, JobState::Validating);
    run_intake(&service).await.unwrap();
    let job = service.job(id).await;
    assert_eq!((job.state, job.num_items), (JobState::InProgress, 23));
}

// Field report 11: no internal id derives from a custom id.
#[tokio::test]
async fn same_custom_ids_in_two_jobs_are_independent() {
    let service = TestService::new().await;
    let ids = [service.submit(&numbered_lines(6)).await, service.submit(&numbered_lines(6)).await];
    // Both under way at once.
    let leases = [claim(&service, StepKind::Intake).await, claim(&service, StepKind::Intake).await];
    assert_ne!(leases[0].job.id, leases[1].job.id);
    let context = context(&service);
    let (first, second) = tokio::join!(intake::run(&context, &leases[0]), intake::run(&context, &leases[1]));
    first.and(second).unwrap();
    for id in ids {
        let job = service.job(id).await;
        assert_eq!((job.state, job.num_items), (JobState::InProgress, 6));
        assert_eq!(index::find(&service.blobs, id, b"item-5").await.unwrap(), [ItemIndex(5)]);
    }
}
