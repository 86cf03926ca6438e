//! Retries: backoff, `Retry-After`, the cap on tries, the job's budget.

use std::time::{Duration, Instant};

use overnight_store::{Attempts, Jobs, Shards};
use overnight_testing::service::{body_saying, numbered_lines};
use overnight_testing::{Reply, ScriptedGenerate, TestService, wait};
use overnight_types::{ItemIndex, OutcomeKind};
use overnight_worker::generate::{EngineState, Failure};

const OVERLOADED: &str = r#"{"error":{"message":"overloaded","type":"server_error","param":null,"code":"overloaded"}}"#;

#[tokio::test]
async fn transient_failure_is_tried_again_and_its_tries_are_counted() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(10), 10).await;
    let engine = ScriptedGenerate::new(|ask| match (ask.text() == body_saying("item-4"), ask.tries) {
        (true, 0) => Reply::Response(503, OVERLOADED.to_owned(), None),
        (true, 1) => {
            Reply::Failed(Failure::Transient { code: "connection_lost".to_owned(), message: "cut".to_owned() })
        }
        _ => Reply::Text("ok".to_owned()),
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 10).await;
    let outcomes = service.outcomes(job).await;
    assert!(outcomes.values().all(|record| record.outcome == OutcomeKind::Completed));
    assert_eq!((outcomes[&4].attempts, outcomes[&5].attempts), (3, 1));
    let faults = service.store.list_faults(job, ItemIndex(0), ItemIndex(10), 100).await.unwrap();
    assert_eq!(faults, [], "the fault goes with the outcome");
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// doublewordai/control-layer#110 (service 49): failed means final; docetl#50 (service 39).
#[tokio::test]
async fn last_failure_stands_after_the_tries_are_used_up() {
    let mut service = TestService::new().await;
    service.config.attempts_max = 3;
    let job = service.submit_cut(&numbered_lines(3), 3).await;
    let engine = ScriptedGenerate::new(|ask| match ask.text() == body_saying("item-1") {
        true => Reply::Response(500, OVERLOADED.to_owned(), None),
        false => Reply::Text("ok".to_owned()),
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 3).await;
    let record = service.outcomes(job).await.remove(&1).unwrap();
    assert_eq!((record.outcome, record.attempts, record.http_status), (OutcomeKind::Failed, 3, Some(500)));
    assert!(String::from_utf8_lossy(&record.line).contains(OVERLOADED), "{record:?}");
    assert_eq!(engine.asked().iter().filter(|body| *body == &body_saying("item-1")).count(), 3);
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn timeouts_end_as_request_timeout() {
    let mut service = TestService::new().await;
    service.config.attempts_max = 2;
    let job = service.submit_cut(&numbered_lines(1), 1).await;
    let engine = ScriptedGenerate::new(|_| Reply::Failed(Failure::Timeout));
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 1).await;
    let record = service.outcomes(job).await.remove(&0).unwrap();
    assert_eq!(record.error_code.as_deref(), Some("request_timeout"));
    let line = String::from_utf8_lossy(&record.line).into_owned();
    assert!(line.contains(r#""response":null"#) && line.contains("request_timeout"), "{line}");
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn retry_after_is_waited_for() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(1), 1).await;
    let engine = ScriptedGenerate::new(|ask| match ask.tries {
        0 => Reply::Response(429, OVERLOADED.to_owned(), Some(Duration::from_secs(1))),
        _ => Reply::Text("ok".to_owned()),
    });
    let started_at = Instant::now();
    let worker = service.start(&engine).await;
    wait::until("the fault", || async {
        let faults = service.store.list_faults(job, ItemIndex(0), ItemIndex(1), 1).await.unwrap();
        match faults.first() {
            Some(fault) if fault.http_status == Some(429) && fault.attempts == 1 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    service.until_outcomes(job, 1).await;
    assert!(started_at.elapsed() >= Duration::from_secs(1), "{:?}", started_at.elapsed());
    assert_eq!(service.outcomes(job).await[&0].attempts, 2);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// vllm-project/aibrix#2547, #2452 (service 63): a burst of errors makes no storm.
#[tokio::test]
async fn retry_budget_of_a_job_ends_a_storm() {
    let mut service = TestService::new().await;
    (service.config.retry_budget_min, service.config.retry_budget_percent) = (7, 10);
    let job = service.submit_cut(&numbered_lines(50), 10).await;
    let engine = ScriptedGenerate::new(|_| Reply::Response(503, OVERLOADED.to_owned(), None));
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 50).await;
    assert_eq!(engine.num_asked(), 50 + 7);
    let outcomes = service.outcomes(job).await;
    assert!(outcomes.values().all(|record| record.outcome == OutcomeKind::Failed));
    worker.shutdown(Duration::from_secs(5)).await;
}

// However many workers run a job, its budget is one.
#[tokio::test]
async fn workers_share_the_retry_budget_of_a_job() {
    let mut service = TestService::new().await;
    (service.config.retry_budget_min, service.config.retry_budget_percent) = (12, 0);
    (service.config.window_items_max, service.config.attempts_max) = (Some(10), 100);
    service.config.checkpoint_every_local = Duration::from_millis(1);
    // A lease that is lost and taken again would tell the budget too.
    service.config.lease_ttl = Duration::from_secs(60);
    let job = service.submit_cut(&numbered_lines(20), 10).await;
    // Each holds one shard before any item fails.
    let failing = || {
        ScriptedGenerate::new(|ask| match ask.tries {
            0 => Reply::Hold("first".to_owned()),
            _ => Reply::Response(503, OVERLOADED.to_owned(), None),
        })
    };
    let (a, b) = (failing(), failing());
    let workers = [service.start(&a).await, service.start(&b).await];
    wait::until("a shard at each", || async {
        let held = (a.num_held(), b.num_held());
        if held == (10, 10) { Ok(()) } else { Err(format!("{held:?} held")) }
    })
    .await;
    let used = async || service.store.find_progress(job).await.unwrap().retries_used;
    let used_at_least = async |at_least: u64| {
        wait::until("retries", || async {
            let used = service.store.find_progress(job).await.unwrap().retries_used;
            if used >= at_least { Ok(()) } else { Err(format!("{used} used")) }
        })
        .await;
    };
    let cut = Failure::Transient { code: "connection_lost".to_owned(), message: "cut".to_owned() };
    // The first worker uses the budget up. The second learns so from the first fault that it records.
    a.fail_held(5, &cut);
    used_at_least(12).await;
    b.fail_held(1, &cut);
    used_at_least(13).await;
    b.fail_held(9, &cut);
    service.until_outcomes(job, 15).await;
    let used = used().await;
    assert!(used <= 16, "{used} retries of a budget of 12; alone the second worker would take 12 more");
    a.release_all();
    service.until_outcomes(job, 20).await;
    for worker in workers {
        worker.shutdown(Duration::from_secs(5)).await;
    }
}

// vllm-project/aibrix#2430 and others (service 26); ray#59212 (service 33).
#[tokio::test]
async fn trouble_of_the_engine_costs_no_item_a_try() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(8), 4).await;
    let engine = ScriptedGenerate::new(|ask| match ask.tries {
        0 => Reply::Hold("lost".to_owned()),
        _ => Reply::Text("ok".to_owned()),
    });
    let worker = service.start(&engine).await;
    wait::until("requests at the engine", || async {
        if engine.num_held() == 8 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    engine.set_state(EngineState::Poisoned("device lost".to_owned()));
    wait::until("the leases given back", || async {
        let leases = worker.status().leases;
        if leases == 0 { Ok(()) } else { Err(format!("{leases} leases")) }
    })
    .await;
    engine.set_state(EngineState::Ready);
    service.until_outcomes(job, 8).await;
    for record in service.outcomes(job).await.values() {
        assert_eq!((record.outcome, record.attempts), (OutcomeKind::Completed, 1));
    }
    assert!(service.shards(job).await.iter().all(|shard| shard.crashes == 0));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// elizaOS/eliza#30878 and others (service 41): no room for a segment loses nothing.
#[tokio::test]
async fn segment_that_cannot_be_written_gives_the_shard_back() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(4), 4).await;
    // A file where the folder must be: every write of a segment fails.
    let folder = service.objects_dir().join("jobs").join(job.to_string());
    std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
    std::fs::write(&folder, b"in the way").unwrap();
    let engine = ScriptedGenerate::echo();
    let worker = service.start(&engine).await;
    wait::until("the shard given back", || async {
        let attempts = service.store.list_attempts(job, overnight_types::ShardIndex(0), 10).await.unwrap();
        match attempts.first().and_then(|attempt| attempt.end) {
            Some(overnight_store::AttemptEnd::Trouble) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    std::fs::remove_file(&folder).unwrap();
    service.until_outcomes(job, 4).await;
    assert!(service.outcomes(job).await.values().all(|record| record.attempts == 1));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}
