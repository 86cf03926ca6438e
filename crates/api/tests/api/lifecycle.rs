//! Batches through their statuses, with a worker in this process.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use overnight_testing::service::{line, numbered_lines};
use overnight_testing::{Reply, ScriptedGenerate};
use overnight_worker::generate::{EngineState, EngineStatus, Generate, NotAccepting, OutputSender, Request, RequestId};
use serde_json::{Value, json};

use crate::server::{Server, json_request};

const GRACE: Duration = Duration::from_secs(5);

fn held() -> ScriptedGenerate {
    ScriptedGenerate::new(|ask| Reply::Hold(ask.text().to_owned()))
}

/// Answers with HTTP 400 for the lines that ask for it.
fn refusing() -> ScriptedGenerate {
    ScriptedGenerate::new(|ask| match ask.text().contains("bad") {
        true => Reply::Response(
            400,
            r#"{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}"#.to_owned(),
            None,
        ),
        false => Reply::Text("fine".to_owned()),
    })
}

// Field report 19: a batch with faulty lines is created, and fails later with every error.
#[tokio::test]
async fn faulty_input_fails_the_batch_and_not_the_create() {
    let server = Server::new().await;
    let lines = ["[1,2]".to_owned(), String::new(), line("a"), line("a"), line("b").replace("POST", "GET")];
    let input = server.upload(lines.join("\n")).await;
    let path = format!("/v1/files/{input}/validate");
    let early = server.post(&path, json!({"endpoint": "/v1/chat/completions"})).await.ok();
    let id = server.create(&input).await.ok()["id"].as_str().unwrap().to_owned();
    let worker = server.service.start(&server.engine).await;
    let failed = server.until(&id, "failed").await;
    let errors = failed["errors"]["data"].as_array().unwrap();
    let found: Vec<(&str, u64, &Value)> = errors
        .iter()
        .map(|error| (error["code"].as_str().unwrap(), error["line"].as_u64().unwrap(), &error["param"]))
        .collect();
    let wanted = [
        ("invalid_json_line", 1, Value::Null),
        ("duplicate_custom_id", 4, json!("custom_id")),
        ("invalid_request", 5, json!("method")),
    ];
    // Field report 17: blank lines count.
    assert_eq!(found, wanted.iter().map(|(code, line, param)| (*code, *line, param)).collect::<Vec<_>>());
    assert!(errors.iter().all(|error| error.as_object().unwrap().keys().eq(["code", "line", "message", "param"])));
    assert_eq!((&failed["errors"]["object"], &failed["errors"]["total"]), (&json!("list"), &json!(3)));
    assert!(failed["failed_at"].is_i64() && failed["in_progress_at"].is_null());
    assert_eq!(failed["request_counts"], json!({"total": 0, "completed": 0, "failed": 0}));
    // The validate route says the same before anything is created.
    assert_eq!((&early["valid"], &early["object"]), (&json!(false), &json!("batch_validation")));
    assert_eq!(early["errors"], failed["errors"]);
    // It stays failed: resume explains, cancel refuses.
    server.poke(&format!("/v1/batches/{id}/resume")).await.refused(409, Value::Null, "batch_invalid");
    server.poke(&format!("/v1/batches/{id}/cancel")).await.refused(409, Value::Null, "batch_not_cancellable");
    worker.shutdown(GRACE).await;
}

// Field reports 46, 47: all failed is completed, with null output, and every line has its status.
#[tokio::test]
async fn batch_whose_requests_all_failed_is_completed() {
    let server = Server::with(refusing(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&[line("bad 1"), line("bad 2")]).await;
    let done = server.until(&id, "completed").await;
    assert_eq!(done["request_counts"], json!({"total": 2, "completed": 0, "failed": 2}));
    assert_eq!(done["output_file_id"], Value::Null);
    let errors = server.get(&format!("/v1/files/{}/content", done["error_file_id"].as_str().unwrap())).await.text();
    assert_eq!(errors.lines().count(), 2);
    for (text, custom_id) in errors.lines().zip(["bad 1", "bad 2"]) {
        let error: Value = serde_json::from_str(text).unwrap();
        assert_eq!(
            (&error["custom_id"], &error["response"]["status_code"], &error["error"]),
            (&json!(custom_id), &json!(400), &Value::Null)
        );
    }
    // Field report 52: the published file is listed with its purpose and name.
    let files = server.get("/v1/files?purpose=batch_output").await.ok();
    assert_eq!(files["data"][0]["id"], done["error_file_id"]);
    assert_eq!(files["data"][0]["filename"], format!("{id}_error.jsonl"));
    worker.shutdown(GRACE).await;
}

// Field report 16: any non-empty string is a custom id.
#[tokio::test]
async fn any_custom_id_comes_back_as_it_was() {
    let server = Server::new().await;
    let worker = server.service.start(&server.engine).await;
    let odd = ["😀 ü", "line\nbreak", "\u{0}\u{1b}[31m", "\u{2028}", &"x".repeat(10_000)];
    let id = server.submit(&odd.map(line)).await;
    let done = server.until(&id, "completed").await;
    let output = server.get(&format!("/v1/files/{}/content", done["output_file_id"].as_str().unwrap())).await.text();
    let ids: Vec<String> = output
        .split('\n')
        .filter(|text| !text.is_empty())
        .map(|text| serde_json::from_str::<Value>(text).unwrap()["custom_id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(ids, odd);
    worker.shutdown(GRACE).await;
}

// Field report 55: the content of a cancelled batch's file can be downloaded.
#[tokio::test]
async fn cancelled_batch_keeps_what_finished_and_can_be_resumed() {
    let server = Server::with(held(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&numbered_lines(4)).await;
    overnight_testing::wait::until("all to be at the engine", || async {
        let held = server.engine.num_held();
        if held == 4 { Ok(()) } else { Err(held.to_string()) }
    })
    .await;
    server.engine.release(1);
    let path = format!("/v1/batches/{id}");
    overnight_testing::wait::until("one outcome", || async {
        let batch = server.get(&path).await.ok();
        if batch["request_counts"]["completed"] == 1 { Ok(()) } else { Err(batch.to_string()) }
    })
    .await;
    let cancelling = server.send(json_request(&format!("{path}/cancel"), r#"{"mode":"now"}"#)).await.ok();
    assert!(["cancelling", "cancelled"].contains(&cancelling["status"].as_str().unwrap()), "{cancelling}");
    let ended = server.until(&id, "cancelled").await;
    assert_eq!(ended["request_counts"], json!({"total": 4, "completed": 1, "failed": 0}));
    assert_eq!(
        ended["outcome_counts"],
        json!({"processing": 0, "succeeded": 1, "errored": 0, "canceled": 3, "expired": 0})
    );
    assert!(ended["cancelling_at"].is_i64() && ended["cancelled_at"].is_i64() && ended["completed_at"].is_null());
    let lines = |file: &Value| format!("/v1/files/{}/content", file.as_str().unwrap());
    assert_eq!(server.get(&lines(&ended["output_file_id"])).await.text().lines().count(), 1);
    let errors = server.get(&lines(&ended["error_file_id"])).await.text();
    assert_eq!(errors.lines().count(), 3);
    assert!(errors.lines().all(|text| text.contains(r#""code":"batch_cancelled""#)), "{errors}");
    assert_eq!(server.poke(&format!("{path}/cancel")).await.ok()["status"], "cancelled", "cancel is idempotent");

    let resumed = server.send(json_request(&format!("{path}/resume"), r#"{"completion_window":"2h"}"#)).await.ok();
    assert_eq!((&resumed["round"], &resumed["status"]), (&json!(2), &json!("in_progress")));
    for key in ["cancelling_at", "cancelled_at", "finalizing_at", "output_file_id", "error_file_id"] {
        assert_eq!(resumed[key], Value::Null, "{key}");
    }
    assert_eq!(resumed["completion_window"], "2h");
    assert_eq!(resumed["request_counts"], json!({"total": 4, "completed": 1, "failed": 0}));
    overnight_testing::wait::until("the rest to be at the engine", || async {
        let held = server.engine.num_held();
        if held >= 3 { Ok(()) } else { Err(held.to_string()) }
    })
    .await;
    server.engine.release_all();
    let done = server.until(&id, "completed").await;
    assert_eq!(done["request_counts"], json!({"total": 4, "completed": 4, "failed": 0}));
    assert_ne!(done["output_file_id"], ended["output_file_id"], "a new round publishes new files");
    assert_eq!(server.get(&lines(&ended["output_file_id"])).await.text().lines().count(), 1, "the earlier file stays");
    server.poke(&format!("{path}/resume")).await.refused(409, Value::Null, "nothing_to_resume");
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn paused_batch_says_so_and_goes_on_when_resumed() {
    let server = Server::new().await;
    let id = server.submit(&numbered_lines(2)).await;
    let path = format!("/v1/batches/{id}");
    let paused = server.poke(&format!("{path}/pause")).await.ok();
    assert!(paused["paused_at"].is_i64());
    assert_eq!(paused["status"], "validating", "pausing is not a status");
    assert!(paused["waiting_for"].as_str().unwrap().contains("paused"));
    assert_eq!(
        server.poke(&format!("{path}/pause")).await.ok()["paused_at"],
        paused["paused_at"],
        "pause is idempotent"
    );
    let worker = server.service.start(&server.engine).await;
    let resumed = server.poke(&format!("{path}/resume")).await.ok();
    assert_eq!((&resumed["paused_at"], &resumed["round"]), (&Value::Null, &json!(1)));
    server.until(&id, "completed").await;
    server.poke(&format!("{path}/pause")).await.refused(409, Value::Null, "batch_not_active");
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn resume_of_a_batch_with_failures_runs_those_again() {
    let server = Server::with(
        ScriptedGenerate::new(|ask| match ask.text().contains("bad") && ask.tries == 0 {
            true => Reply::Response(
                422,
                r#"{"error":{"message":"no","type":"x","param":null,"code":null}}"#.to_owned(),
                None,
            ),
            false => Reply::Text("fine".to_owned()),
        }),
        |_| {},
    )
    .await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&[line("good"), line("bad")]).await;
    assert_eq!(server.until(&id, "completed").await["request_counts"]["failed"], 1);
    server.poke(&format!("/v1/batches/{id}/resume")).await.ok();
    overnight_testing::wait::until("the second round to end", || async {
        let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
        if batch["status"] == "completed" { Ok(batch) } else { Err(batch.to_string()) }
    })
    .await;
    let done = server.get(&format!("/v1/batches/{id}")).await.ok();
    assert_eq!((&done["request_counts"]["completed"], &done["round"]), (&json!(2), &json!(2)));
    assert_eq!(server.engine.num_asked(), 3, "the good one ran once");
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn resume_without_its_input_is_409() {
    let server = Server::with(refusing(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&[line("bad")]).await;
    let done = server.until(&id, "completed").await;
    server.delete(&format!("/v1/files/{}", done["input_file_id"].as_str().unwrap())).await.ok();
    server.poke(&format!("/v1/batches/{id}/resume")).await.refused(409, Value::Null, "input_file_deleted");
    worker.shutdown(GRACE).await;
}

// Its bytes are still there for another batch; a new round may not begin all the same.
#[tokio::test]
async fn resume_without_its_input_is_409_while_another_batch_reads_it() {
    let server = Server::with(refusing(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&[line("bad")]).await;
    let done = server.until(&id, "completed").await;
    worker.shutdown(GRACE).await;
    let input = done["input_file_id"].as_str().unwrap();
    let again = json!({"input_file_id": input, "endpoint": "/v1/chat/completions", "completion_window": "24h"});
    server.post("/v1/batches", again).await.ok();
    server.delete(&format!("/v1/files/{input}")).await.ok();
    server.poke(&format!("/v1/batches/{id}/resume")).await.refused(409, Value::Null, "input_file_deleted");
}

#[tokio::test]
async fn deleting_the_input_does_not_disturb_an_accepted_batch() {
    let server = Server::new().await;
    let id = server.submit(&numbered_lines(2)).await;
    let input = server.get(&format!("/v1/batches/{id}")).await.ok()["input_file_id"].as_str().unwrap().to_owned();
    server.delete(&format!("/v1/files/{input}")).await.ok();
    let worker = server.service.start(&server.engine).await;
    let done = server.until(&id, "completed").await;
    assert_eq!(done["request_counts"]["completed"], 2);
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn ended_batch_can_be_deleted() {
    let server = Server::new().await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&numbered_lines(1)).await;
    server.until(&id, "completed").await;
    let path = format!("/v1/batches/{id}");
    assert_eq!(server.delete(&path).await.ok(), json!({"id": id, "object": "batch", "deleted": true}));
    server.get(&path).await.refused(404, "id", "not_found");
    server.delete(&path).await.refused(404, "id", "not_found");
    assert_eq!(server.get("/v1/batches").await.ok()["data"], json!([]));
    worker.shutdown(GRACE).await;
}

// Field report 59: nobody can tell why nothing runs.
#[tokio::test]
async fn batch_that_waits_for_its_model_says_for_what() {
    let server = Server::with(held(), |_| {}).await;
    let first = server.service.start(&held().serving(&["rare"], 4)).await;
    let id = server.submit(&[line("a").replace(r#""model":"m""#, r#""model":"rare""#)]).await;
    server.until(&id, "in_progress").await;
    first.shutdown(Duration::ZERO).await;
    let second = server.service.start(&ScriptedGenerate::echo().serving(&["other"], 4)).await;
    let reason = overnight_testing::wait::until("the reason", || async {
        let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
        let reason = batch["waiting_for"].as_str().unwrap_or("").to_owned();
        if reason.contains("no live worker has the model rare") { Ok(reason) } else { Err(batch.to_string()) }
    })
    .await;
    assert!(reason.contains("live workers have: other"), "{reason}");
    second.shutdown(GRACE).await;
}

// Field report 59 again: the place in the queue, in one batch and in the list.
#[tokio::test]
async fn batch_that_waits_for_its_turn_says_its_place() {
    let server = Server::with(held(), |_| {}).await;
    // Room for a shard or two of the first batch, and for nothing else.
    let worker = server.service.start(&held().serving(&["m"], 1)).await;
    let first = server.submit(&numbered_lines(1_000)).await;
    let leased = overnight_testing::wait::until("the first batch runs", || async {
        let batch = server.get(&format!("/v1/batches/{first}")).await.ok();
        let runs = batch["status"] == "in_progress" && batch["queue_position"].is_null();
        if runs { Ok(batch) } else { Err(batch.to_string()) }
    });
    assert!(leased.await["waiting_for"].is_null());
    let second = server.submit(&numbered_lines(2)).await;
    let third = server.submit(&numbered_lines(2)).await;
    for (id, place, reason) in [
        (&second, 2, "its turn; 1 batch goes before it, by priority, deadline and age"),
        (&third, 3, "its turn; 2 batches go before it, by priority, deadline and age"),
    ] {
        let batch = server.until(id, "in_progress").await;
        assert_eq!((&batch["queue_position"], &batch["waiting_for"]), (&json!(place), &json!(reason)), "{batch}");
    }
    let list = server.get("/v1/batches").await.ok();
    let places: Vec<_> = list["data"].as_array().unwrap().iter().map(|batch| batch["queue_position"].clone()).collect();
    assert_eq!(places, [json!(3), json!(2), json!(null)]);
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test]
async fn batch_without_an_engine_anywhere_says_so() {
    // What `batch serve` runs beside its API: intake and finalizing, and no engine.
    let server = Server::with(held(), |state| state.generate = None).await;
    let lifecycle = server.service.start_parts(None).await;
    let id = server.submit(&[line("a")]).await;
    let batch = server.until(&id, "in_progress").await;
    let reason = batch["waiting_for"].as_str().unwrap_or_default();
    assert!(reason.contains("no live worker has an engine that can answer"), "{batch}");
    lifecycle.shutdown(GRACE).await;
}

#[tokio::test]
async fn batch_whose_model_still_loads_waits_for_that() {
    let loading = EngineStatus { state: EngineState::Starting("reading weights".to_owned()), ..held().status() };
    let engine = Arc::new(Standing(Mutex::new(loading)));
    let given: Arc<dyn Generate> = engine.clone();
    let server = Server::with(held(), |state| state.generate = Some(given)).await;
    let lifecycle = server.service.start_parts(None).await;
    let id = server.submit(&[line("a")]).await;
    let batch = server.until(&id, "in_progress").await;
    assert_eq!(batch["waiting_for"], "the model is still loading");
    engine.0.lock().unwrap().state = EngineState::Poisoned("a step panicked".to_owned());
    let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
    assert_eq!(batch["waiting_for"], "the engine of this server cannot answer; its log says why");
    lifecycle.shutdown(GRACE).await;
}

#[tokio::test]
async fn health_tells_how_full_the_kv_cache_is() {
    let status = EngineStatus { kv_cache_usage: 0.25, ..held().status() };
    let engine = Arc::new(Standing(Mutex::new(status)));
    let given: Arc<dyn Generate> = engine.clone();
    let server = Server::with(held(), |state| state.generate = Some(given)).await;
    assert_eq!(server.get("/health").await.ok()["kv_cache_usage"], 0.25);
    engine.0.lock().unwrap().kv_cache_usage = 0.0;
    let health = server.get("/health").await.ok();
    assert!(health["kv_cache_usage"].is_null() && health["engine"] == "ready", "{health}");
}

/// An engine that only says where it stands.
#[derive(Debug)]
struct Standing(Mutex<EngineStatus>);

#[async_trait]
impl Generate for Standing {
    async fn submit(&self, _: Vec<Request>, _: OutputSender) -> Result<(), NotAccepting> {
        Err(NotAccepting("it never answers".to_owned()))
    }

    fn cancel(&self, _: &[RequestId]) {}

    fn status(&self) -> EngineStatus {
        self.0.lock().unwrap().clone()
    }
}
