//! Token requests, as the local engine takes them: merged, seeded, limited.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use overnight_store::{CancelMode, Jobs};
use overnight_testing::service::{line_saying, line_with};
use overnight_testing::{Ask, Reply, ScriptedGenerate, TestService, wait};
use overnight_types::OutcomeKind;
use overnight_worker::WorkerHandle;

async fn start(service: &TestService, engine: &ScriptedGenerate) -> WorkerHandle {
    service.start_parts(Some((Arc::new(engine.clone()), service.local_mapper()))).await
}

#[tokio::test]
async fn identical_greedy_requests_run_once_and_are_answered_each() {
    let service = TestService::new().await;
    let greedy = |id: usize, text: &str| line_with(&format!("item-{id}"), text, r#","temperature":0,"max_tokens":5"#);
    let mut lines: Vec<String> = (0..40).map(|id| greedy(id, "the same")).collect();
    lines.push(greedy(40, "another"));
    // The same prompt with another limit is another request.
    lines.push(line_with("item-41", "the same", r#","temperature":0,"max_tokens":6"#));
    let job = service.submit_cut(&lines, 42).await;
    let engine = ScriptedGenerate::new(|_| Reply::Text("answer".to_owned()));
    let worker = start(&service, &engine).await;
    service.until_outcomes(job, 42).await;
    assert_eq!(engine.num_asked(), 3);
    let outcomes = service.outcomes(job).await;
    for (item, record) in &outcomes {
        let line = String::from_utf8_lossy(&record.line).into_owned();
        assert_eq!((record.outcome, record.usage.output_tokens), (OutcomeKind::Completed, 1), "{line}");
        assert!(line.contains(&format!(r#""custom_id":"item-{item}""#)) && line.contains("answer"), "{line}");
    }
    let answers: BTreeSet<String> = outcomes.values().map(|record| body_id(&record.line)).collect();
    assert_eq!(answers.len(), 42, "each answer has its own id");
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

fn body_id(line: &[u8]) -> String {
    let line: serde_json::Value = serde_json::from_slice(line).unwrap();
    line["response"]["body"]["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn followers_of_a_failed_request_are_tried_again_too() {
    let service = TestService::new().await;
    let lines: Vec<String> =
        (0..10).map(|id| line_with(&format!("item-{id}"), "the same", r#","temperature":0"#)).collect();
    let job = service.submit_cut(&lines, 10).await;
    let engine = ScriptedGenerate::new(|ask| match ask.tries {
        0 => Reply::Failed(overnight_worker::generate::Failure::Transient {
            code: "lost".to_owned(),
            message: "lost".to_owned(),
        }),
        _ => Reply::Text("answer".to_owned()),
    });
    let worker = start(&service, &engine).await;
    service.until_outcomes(job, 10).await;
    let outcomes = service.outcomes(job).await;
    assert!(outcomes.values().all(|record| (record.outcome, record.attempts) == (OutcomeKind::Completed, 2)));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn drawn_seed_is_recorded_and_the_same_after_a_retry() {
    let service = TestService::new().await;
    let lines: Vec<String> = (0..20).map(|id| line_saying(&format!("item-{id}"), &format!("text {id}"))).collect();
    let job = service.submit_cut(&lines, 20).await;
    let seeds: Arc<Mutex<Vec<(String, u64)>>> = Arc::default();
    let seen = seeds.clone();
    let engine = ScriptedGenerate::new(move |ask: &Ask| {
        seen.lock().unwrap().push((ask.text().to_owned(), ask.seed.unwrap()));
        match ask.tries {
            0 => Reply::Failed(overnight_worker::generate::Failure::Transient {
                code: "lost".to_owned(),
                message: "lost".to_owned(),
            }),
            _ => Reply::Text("answer".to_owned()),
        }
    });
    let worker = start(&service, &engine).await;
    service.until_outcomes(job, 20).await;
    let asked: BTreeSet<(String, u64)> = seeds.lock().unwrap().iter().cloned().collect();
    assert_eq!(asked.len(), 20, "one seed per item over both tries");
    let used: BTreeSet<u64> = asked.iter().map(|(_, seed)| *seed).collect();
    let recorded: BTreeSet<u64> = service.outcomes(job).await.values().map(|record| record.seed.unwrap()).collect();
    assert_eq!((used.len(), recorded), (20, used));
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn local_request_past_its_time_limit_ends_by_name_and_frees_its_place() {
    let mut service = TestService::new().await;
    service.config.request_timeout = Duration::from_millis(500);
    let lines = [line_saying("slow", "slow one"), line_saying("quick", "quick")];
    let job = service.submit_cut(&lines, 2).await;
    let engine = ScriptedGenerate::new(|ask| match ask.order {
        0 => Reply::Silence,
        _ => Reply::Text("answer".to_owned()),
    });
    let worker = start(&service, &engine).await;
    service.until_outcomes(job, 2).await;
    let codes: BTreeSet<Option<String>> =
        service.outcomes(job).await.into_values().map(|record| record.error_code).collect();
    assert_eq!(codes, BTreeSet::from([None, Some("request_timeout".to_owned())]));
    assert_eq!(engine.num_cancelled(), 1);
    wait::until("the window to be empty", || async {
        let in_flight = worker.status().window.items_in_flight;
        if in_flight == 0 { Ok(()) } else { Err(format!("{in_flight} in flight")) }
    })
    .await;
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn request_that_waits_in_the_engine_is_not_past_its_time_limit() {
    let mut service = TestService::new().await;
    service.config.request_timeout = Duration::from_secs(2);
    let lines: Vec<String> = (0..12).map(|id| line_saying(&format!("item-{id}"), &format!("text {id}"))).collect();
    let job = service.submit_cut(&lines, 12).await;
    // It says that it runs 16 at once, and all 12 reach it; the first one keeps the others waiting.
    let engine = ScriptedGenerate::new(|ask| match ask.order {
        0 => Reply::Silence,
        _ => Reply::Hold("answer".to_owned()),
    });
    let engine = engine.running_at_most(1);
    let worker = start(&service, &engine).await;
    wait::until("the hung request to be ended", || async {
        let num_cancelled = engine.num_cancelled();
        if num_cancelled > 0 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    assert_eq!((engine.num_cancelled(), engine.num_asked()), (1, 12), "the others were there as long");
    engine.release_all();
    service.until_outcomes(job, 12).await;
    let outcomes = service.outcomes(job).await;
    let codes: Vec<String> = outcomes.values().filter_map(|record| record.error_code.clone()).collect();
    assert_eq!(codes, ["request_timeout"]);
    assert_eq!(outcomes.values().filter(|record| record.outcome == OutcomeKind::Completed).count(), 11);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// Ten minutes of drain are for what runs: what waits in the engine's own queue must not start.
#[tokio::test]
async fn cancelled_job_starts_nothing_that_waits_in_the_engine() {
    let service = TestService::new().await;
    let lines: Vec<String> = (0..12).map(|id| line_saying(&format!("item-{id}"), &format!("text {id}"))).collect();
    let job = service.submit_cut(&lines, 12).await;
    let engine = ScriptedGenerate::new(|_| Reply::Hold("answer".to_owned())).running_at_most(3);
    let worker = start(&service, &engine).await;
    wait::until("all at the engine", || async {
        if engine.num_held() == 12 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    let drain = Duration::from_secs(600);
    assert!(service.store.cancel_job_if_active(job, CancelMode::Drain, drain).await.unwrap().is_applied());
    wait::until("the others to be taken back", || async {
        if engine.num_cancelled() == 9 { Ok(()) } else { Err(format!("{} cancelled", engine.num_cancelled())) }
    })
    .await;
    assert_eq!(engine.num_held(), 3, "what runs goes on");
    engine.release_all();
    wait::until("what ran to be committed", || async {
        let done = service.outcomes(job).await.len();
        if done == 3 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    assert_eq!(engine.num_asked(), 12);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// A pause of one job must not hold the others up until its longest request ends.
#[tokio::test]
async fn paused_job_leaves_its_room_to_others_while_it_drains() {
    let mut service = TestService::new().await;
    service.config.window_items_max = Some(4);
    let lines = |name: &str| -> Vec<String> {
        (0..8).map(|id| line_saying(&format!("item-{id}"), &format!("{name} {id}"))).collect()
    };
    let paused = service.submit_cut(&lines("first"), 8).await;
    let engine = ScriptedGenerate::new(|_| Reply::Hold("answer".to_owned())).running_at_most(2);
    let worker = start(&service, &engine).await;
    wait::until("a full window", || async {
        if engine.num_held() == 4 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    assert!(service.store.pause_job_if_active(paused).await.unwrap().is_applied());
    let other = service.submit_cut(&lines("other"), 8).await;
    wait::until("the other job's requests at the engine", || async {
        let num_asked = engine.num_asked();
        if num_asked > 4 { Ok(()) } else { Err(format!("{num_asked} asked, {}", service.seen(other).await)) }
    })
    .await;
    wait::until("the other job's answers", || async {
        engine.release_all();
        let done = service.outcomes(other).await.len();
        if done == 8 { Ok(()) } else { Err(service.seen(other).await) }
    })
    .await;
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(other).await;
}
