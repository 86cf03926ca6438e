//! Orders that reach running shards: shutdown, cancel, pause, expiry, a new round.

use std::time::{Duration, Instant};

use overnight_store::{AttemptEnd, Attempts, CancelMode, Jobs, Reopen, ReopenItems};
use overnight_testing::scripted::echo_of;
use overnight_testing::service::{body_saying, numbered_lines};
use overnight_testing::{Reply, ScriptedGenerate, TestService, wait};
use overnight_types::{JobId, JobState, ShardIndex, ShardState};

/// Answers the first `count` requests, holds the others.
fn answering_first(count: usize) -> ScriptedGenerate {
    ScriptedGenerate::new(move |ask| match ask.order < count {
        true => Reply::Text(echo_of(ask.text())),
        false => Reply::Hold(echo_of(ask.text())),
    })
}

async fn no_lease_left(service: &TestService, job: JobId) {
    wait::until("no lease", || async {
        let leased = service.shards(job).await.iter().any(|shard| shard.state == ShardState::Leased);
        if leased { Err(service.seen(job).await) } else { Ok(()) }
    })
    .await;
}

async fn last_end(service: &TestService, job: JobId) -> Option<AttemptEnd> {
    service.store.list_attempts(job, ShardIndex(0), 1).await.unwrap().first().and_then(|attempt| attempt.end)
}

#[tokio::test]
async fn shutdown_lets_running_items_finish_and_starts_no_others() {
    let mut service = TestService::new().await;
    service.config.window_items_max = Some(4);
    let job = service.submit_cut(&numbered_lines(10), 10).await;
    let engine = answering_first(0);
    let worker = std::sync::Arc::new(service.start(&engine).await);
    wait::until("a full window", || async {
        if engine.num_held() == 4 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    let stopping = tokio::spawn({
        let worker = worker.clone();
        async move { worker.shutdown(Duration::from_secs(20)).await }
    });
    wait::until("the worker to stop", || async {
        if worker.status().is_stopping { Ok(()) } else { Err("running".to_owned()) }
    })
    .await;
    engine.release_all();
    stopping.await.unwrap();
    assert_eq!((service.outcomes(job).await.len(), engine.num_asked()), (4, 4));
    assert_eq!(last_end(&service, job).await, Some(AttemptEnd::Released));
    assert_eq!(service.shards(job).await[0].crashes, 0);
    service.drop_checks(job).await;
}

#[tokio::test]
async fn shutdown_hands_back_what_does_not_finish_in_its_grace() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(10), 10).await;
    let engine = answering_first(6);
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 6).await;
    let started_at = Instant::now();
    worker.shutdown(Duration::from_millis(200)).await;
    assert!(started_at.elapsed() < Duration::from_secs(10), "{:?}", started_at.elapsed());
    assert_eq!(engine.num_cancelled(), 4);
    assert_eq!(last_end(&service, job).await, Some(AttemptEnd::Released));
    service.drop_checks(job).await;
    // The next worker runs exactly the rest.
    let next_engine = ScriptedGenerate::echo();
    let next = service.start(&next_engine).await;
    service.until_outcomes(job, 10).await;
    assert_eq!(next_engine.num_asked(), 4);
    next.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn unfinished_outcomes_are_committed_at_shutdown() {
    let mut service = TestService::new().await;
    service.config.checkpoint_every_local = Duration::from_secs(600);
    let job = service.submit_cut(&numbered_lines(10), 10).await;
    let engine = answering_first(6);
    let worker = service.start(&engine).await;
    wait::until("the requests", || async {
        if engine.num_asked() == 10 { Ok(()) } else { Err(format!("{} asked", engine.num_asked())) }
    })
    .await;
    worker.shutdown(Duration::from_secs(1)).await;
    assert_eq!(service.outcomes(job).await.len(), 6);
    service.drop_checks(job).await;
}

// doublewordai/fusillade#353 (service 21), llm-d-batch-gateway#504 (service 42), river discussion#1603.
#[tokio::test]
async fn cancel_now_stops_running_items_and_keeps_finished_ones() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(10), 10).await;
    let engine = answering_first(6);
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 6).await;
    let cancelled = service.store.cancel_job_if_active(job, CancelMode::Now, Duration::ZERO).await.unwrap();
    assert!(cancelled.is_applied());
    no_lease_left(&service, job).await;
    wait::until("the cancel to reach the engine", || async {
        if engine.num_cancelled() == 4 { Ok(()) } else { Err(format!("{} cancelled", engine.num_cancelled())) }
    })
    .await;
    assert_eq!(service.outcomes(job).await.len(), 6);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn cancel_with_drain_lets_running_items_finish() {
    let mut service = TestService::new().await;
    service.config.window_items_max = Some(4);
    let job = service.submit_cut(&numbered_lines(10), 10).await;
    let engine = answering_first(0);
    let worker = service.start(&engine).await;
    wait::until("a full window", || async {
        if engine.num_held() == 4 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    let drain = Duration::from_secs(600);
    assert!(service.store.cancel_job_if_active(job, CancelMode::Drain, drain).await.unwrap().is_applied());
    let signals = service.store.calls("find_job_signals");
    wait::until("the signal to be read", || async {
        let calls = service.store.calls("find_job_signals");
        if calls >= signals + 3 { Ok(()) } else { Err(format!("{calls} reads")) }
    })
    .await;
    engine.release_all();
    no_lease_left(&service, job).await;
    assert_eq!((service.outcomes(job).await.len(), engine.num_asked(), engine.num_cancelled()), (4, 4, 0));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn paused_job_starts_nothing_new_and_goes_on_after_resume() {
    let mut service = TestService::new().await;
    service.config.window_items_max = Some(4);
    let job = service.submit_cut(&numbered_lines(12), 12).await;
    let engine = ScriptedGenerate::new(|ask| match ask.order < 4 {
        true => Reply::Hold(echo_of(ask.text())),
        false => Reply::Text(echo_of(ask.text())),
    });
    let worker = service.start(&engine).await;
    wait::until("a full window", || async {
        if engine.num_held() == 4 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    assert!(service.store.pause_job_if_active(job).await.unwrap().is_applied());
    let signals = service.store.calls("find_job_signals");
    wait::until("the signal to be read", || async {
        let calls = service.store.calls("find_job_signals");
        if calls >= signals + 3 { Ok(()) } else { Err(format!("{calls} reads")) }
    })
    .await;
    engine.release_all();
    no_lease_left(&service, job).await;
    assert_eq!((service.outcomes(job).await.len(), engine.num_asked()), (4, 4));
    assert!(service.store.unpause_job_if_active(job).await.unwrap().is_applied());
    service.until_outcomes(job, 12).await;
    assert_eq!(engine.num_asked(), 12);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// doublewordai/fusillade#295 (service 20), llm-d-batch-gateway#298 (service 43): the window closes on
// running items; what finished stays, what comes late is refused.
#[tokio::test]
async fn running_items_of_an_expired_job_are_dropped() {
    let service = TestService::new().await;
    let lines = numbered_lines(10);
    let job = service.submit_with(&lines, |job| job.window = Duration::from_millis(1_500)).await;
    service.cut(job, &lines, 10).await;
    let engine = answering_first(6);
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 6).await;
    wait::until("the window to close", || async {
        match service.job(job).await.state {
            JobState::Finalizing | JobState::Expired => Ok(()),
            _ => Err(service.seen(job).await),
        }
    })
    .await;
    wait::until("the items to be dropped", || async {
        if engine.num_cancelled() == 4 { Ok(()) } else { Err(format!("{} cancelled", engine.num_cancelled())) }
    })
    .await;
    engine.release_all();
    no_lease_left(&service, job).await;
    assert_eq!(service.outcomes(job).await.len(), 6);
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn resumed_round_runs_only_what_has_no_success() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(8), 4).await;
    let refusing = ScriptedGenerate::new(|ask| match ask.text() == body_saying("item-5") {
        true => Reply::Response(400, r#"{"error":{"message":"no"}}"#.to_owned(), None),
        false => Reply::Text("ok".to_owned()),
    });
    let worker = service.start(&refusing).await;
    service.until_state(job, JobState::Completed).await;
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
    let reopen = Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: Vec::new() };
    assert!(service.store.reopen_job_if_ended(job, reopen).await.unwrap().is_applied());
    let engine = ScriptedGenerate::echo();
    let worker = service.start(&engine).await;
    let ended = service.until_state(job, JobState::Completed).await;
    assert_eq!(engine.asked(), [body_saying("item-5")]);
    assert_eq!((ended.round, ended.final_counts.unwrap().completed), (2, 8));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}
