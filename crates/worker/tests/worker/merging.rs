//! The window over several shards and jobs: equal work runs once, the rest in order.

use std::sync::Arc;
use std::time::Duration;

use overnight_store::{CancelMode, Jobs};
use overnight_testing::service::{line_saying, line_with};
use overnight_testing::{Reply, ScriptedGenerate, TestService, wait};
use overnight_types::{JobId, OutcomeKind};
use overnight_worker::WorkerHandle;
use overnight_worker::generate::Failure;

async fn start(service: &TestService, engine: &ScriptedGenerate) -> WorkerHandle {
    service.start_parts(Some((Arc::new(engine.clone()), service.local_mapper()))).await
}

/// `count` lines, each asking the same greedily.
fn greedy_lines(prefix: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|id| line_with(&format!("{prefix}-{id}"), "the same", r#","temperature":0,"max_tokens":5"#))
        .collect()
}

/// Waits until so many items are in the window, merged ones included.
async fn until_in_window(worker: &WorkerHandle, items: u32) {
    wait::until(&format!("{items} items in the window"), || async {
        let window = worker.status().window;
        let now = window.items_waiting + window.items_in_flight + window.items_merged;
        if now == items { Ok(()) } else { Err(format!("{window:?}")) }
    })
    .await;
}

async fn assert_answered(service: &TestService, job: JobId, prefix: &str, count: usize, attempts: u32) {
    let outcomes = service.outcomes(job).await;
    assert_eq!(outcomes.len(), count);
    for (item, record) in outcomes {
        let line = String::from_utf8_lossy(&record.line).into_owned();
        assert_eq!((record.outcome, record.attempts), (OutcomeKind::Completed, attempts), "{line}");
        assert!(line.contains(&format!(r#""custom_id":"{prefix}-{item}""#)) && line.contains("answer"), "{line}");
    }
}

#[tokio::test]
async fn equal_requests_of_several_shards_and_jobs_run_once() {
    let service = TestService::new().await;
    // Two jobs of two shards each, in all of which the same is asked, and one thing besides.
    let a = service.submit_cut(&greedy_lines("a", 10), 5).await;
    let mut lines = greedy_lines("b", 9);
    lines.push(line_with("b-9", "another", r#","temperature":0,"max_tokens":5"#));
    let b = service.submit_cut(&lines, 5).await;
    let engine = ScriptedGenerate::new(|_| Reply::Hold("answer".to_owned()));
    let worker = start(&service, &engine).await;
    until_in_window(&worker, 20).await;
    wait::until("both requests", || async {
        if engine.num_held() == 2 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    engine.release_all();
    service.until_outcomes(a, 10).await;
    service.until_outcomes(b, 10).await;
    assert_eq!(engine.num_asked(), 2, "of 20 items");
    assert_answered(&service, a, "a", 10, 1).await;
    assert_answered(&service, b, "b", 10, 1).await;
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(a).await;
    service.drop_checks(b).await;
}

#[tokio::test]
async fn cancelled_job_takes_no_answer_from_another_one() {
    let service = TestService::new().await;
    let gone = service.submit_cut(&greedy_lines("gone", 4), 4).await;
    let kept = service.submit_cut(&greedy_lines("kept", 4), 4).await;
    let engine = ScriptedGenerate::new(|_| Reply::Hold("answer".to_owned()));
    let worker = start(&service, &engine).await;
    until_in_window(&worker, 8).await;
    let cancelled = service.store.cancel_job_if_active(gone, CancelMode::Now, Duration::ZERO).await.unwrap();
    assert!(cancelled.is_applied());
    until_in_window(&worker, 4).await;
    assert_eq!(engine.num_cancelled(), 0, "the other job still waits for it");
    engine.release_all();
    service.until_outcomes(kept, 4).await;
    assert_eq!(engine.num_asked(), 1);
    assert_answered(&service, kept, "kept", 4, 1).await;
    worker.shutdown(Duration::from_secs(5)).await;
    assert!(service.outcomes(gone).await.is_empty());
    service.drop_checks(kept).await;
}

#[tokio::test]
async fn failed_try_counts_for_every_item_that_shared_it() {
    let service = TestService::new().await;
    let a = service.submit_cut(&greedy_lines("a", 4), 2).await;
    let b = service.submit_cut(&greedy_lines("b", 4), 2).await;
    let engine = ScriptedGenerate::new(|ask| match ask.tries {
        0 => Reply::Hold("lost".to_owned()),
        _ => Reply::Text("answer".to_owned()),
    });
    let worker = start(&service, &engine).await;
    until_in_window(&worker, 8).await;
    let failure = Failure::Transient { code: "lost".to_owned(), message: "lost".to_owned() };
    engine.fail_all(&failure);
    service.until_outcomes(a, 4).await;
    service.until_outcomes(b, 4).await;
    assert_answered(&service, a, "a", 4, 2).await;
    assert_answered(&service, b, "b", 4, 2).await;
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(a).await;
    service.drop_checks(b).await;
}

#[tokio::test]
async fn window_is_fed_by_shared_prefix_and_the_longest_first() {
    let mut service = TestService::new().await;
    service.config.window_items_max = Some(64);
    let texts = ["a", "b", "c"].map(|letter| letter.repeat(40));
    // Each line longer than the one before, so that the order of the input is the wrong one.
    let text = |id: usize| format!("{}{}", texts[id % 3], "x".repeat(id));
    let lines: Vec<String> = (0..30).map(|id| line_saying(&format!("item-{id}"), &text(id))).collect();
    let job = service.submit_cut(&lines, 10).await;
    // One place at a time, so that all shards are in the window before the second item goes.
    let engine = ScriptedGenerate::new(|_| Reply::Hold("answer".to_owned())).serving(&["*"], 1);
    let worker = start(&service, &engine).await;
    until_in_window(&worker, 30).await;
    wait::until("the end", || async {
        engine.release(1);
        let done = service.outcomes(job).await.len();
        if done == 30 { Ok(()) } else { Err(format!("{done} outcomes")) }
    })
    .await;
    let prompts: Vec<Vec<u32>> = engine.asked().iter().map(|prompt| serde_json::from_slice(prompt).unwrap()).collect();
    let later = &prompts[2..];
    // A token well inside the repeated letter tells the three beginnings apart.
    let runs: Vec<Vec<usize>> =
        later.chunk_by(|a, b| a[40] == b[40]).map(|run| run.iter().map(Vec::len).collect()).collect();
    assert_eq!(runs.len(), 3, "{runs:?}");
    assert!(runs.iter().all(|run| run.is_sorted_by(|a, b| a >= b)), "{runs:?}");
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}
