//! States that a batch passes quickly, held open and seen over HTTP; a stop while the
//! model is loading; and what can be read after a kill.

use std::time::Duration;

use overnight_store::{InsertJob, NewJob};
use overnight_types::{Endpoint, JobId};
use serde_json::{Value, json};

use crate::backend::Opened;
use crate::harness::{Service, is_terminal};
use crate::kill::{FAST, essence, input, published, tiny_model};

const PATIENCE: Duration = Duration::from_secs(120);
/// Finalize waits before it publishes anything, long enough to be seen.
const SLOW_FINALIZE: (&str, &str) = ("FAILPOINTS", "finalize::after_fence=1*sleep(1500)");
/// Longer than any test waits.
const SLOW_MODEL: (&str, &str) = ("FAILPOINTS", "service::model_loading=sleep(600000)");

/// `finalizing` is seen, has the published files' ids not yet, and counts every item.
async fn wait_finalizing(service: &Service, id: &str, num_items: u64) {
    let batch = service.wait_batch(id, PATIENCE, |batch| batch["status"] == "finalizing" || is_terminal(batch)).await;
    assert_eq!(batch["status"], "finalizing", "{batch}");
    assert!(batch["finalizing_at"].is_u64() && batch["completed_at"].is_null(), "{batch}");
    assert!(batch["output_file_id"].is_null() && batch["error_file_id"].is_null(), "not published yet: {batch}");
    assert_eq!(batch["request_counts"]["total"], num_items);
    let (status, refusal) = service.call("POST", &format!("/v1/batches/{id}/cancel"), None).await.expect("an answer");
    assert_eq!(status, 409, "what is being published cannot be cancelled: {refusal}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finalizing_is_seen_before_completed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let mut service = Service::start(&folder.path().join("data"), &args, &[FAST, &[SLOW_FINALIZE]].concat());
    service.wait_up(PATIENCE).await;
    let file = service.upload("input.jsonl", input(100, 2)).await;
    let id = service.create(&file, "/v1/completions").await;
    wait_finalizing(&service, &id, 100).await;
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert!(batch["completed_at"].as_u64() >= batch["finalizing_at"].as_u64(), "{batch}");
    let (output, errors) = published(&service, &batch).await;
    assert_eq!((output.len(), errors.len()), (99, 1));
}

/// The wire's shortest window is five minutes, so the store records one of two seconds;
/// everything else goes through the door.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_batch_passes_finalizing_and_gives_each_item_its_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let data_dir = folder.path().join("data");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny", "--max-num-seqs", "1"];
    let mut service = Service::start(&data_dir, &args, &[FAST, &[SLOW_FINALIZE]].concat());
    service.wait_ready(PATIENCE).await;
    // One after another and 400 tokens each: hours of work for this machine or any other.
    let file = service.upload("input.jsonl", input(3_000, 400)).await;
    let beside = Opened::beside(&data_dir).await;
    let job = NewJob {
        id: JobId::new(),
        endpoint: Endpoint::Completions,
        input_file_id: file.parse().expect("a file id"),
        completion_window: "2s".to_owned(),
        window: Duration::from_secs(2),
        metadata: None,
        name: None,
        priority: 0,
        output_expires_after: None,
    };
    let InsertJob::Created(job) = beside.store.insert_job(job, None).await.expect("it is recorded") else {
        panic!("the job is new")
    };
    beside.close().await;
    let id = job.id.to_string();
    let running = |batch: &Value| batch["status"] == "in_progress" || is_terminal(batch);
    let batch = service.wait_batch(&id, PATIENCE, running).await;
    assert_eq!(batch["status"], "in_progress", "{batch}");
    wait_finalizing(&service, &id, 3_000).await;
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "expired", "{batch}");
    assert!(batch["expired_at"].as_u64() >= batch["expires_at"].as_u64(), "{batch}");
    assert!(batch["completed_at"].is_null() && batch["cancelled_at"].is_null(), "{batch}");
    let output = service.file_lines(&batch["output_file_id"]).await;
    let errors = service.file_lines(&batch["error_file_id"]).await;
    assert_eq!(output.len() + errors.len(), 3_000, "closed accounting");
    assert_eq!(batch["request_counts"]["completed"], json!(output.len()));
    let num_expired = errors.iter().filter(|line| line["error"]["code"] == "batch_expired").count();
    assert!(num_expired > 2_000, "{num_expired} lines say that their request was too late");
    assert_eq!(batch["outcome_counts"]["expired"], json!(num_expired));
    assert_eq!(service.unsound(), None);
}

/// SIGTERM while the model loads: the process ends in order within its grace, says 0,
/// and what was submitted runs at the next start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_terminated_while_loading_exits_with_zero_and_keeps_its_jobs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let data_dir = folder.path().join("data");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let env = [FAST, &[SLOW_MODEL, ("OVERNIGHT_WORKER__SHUTDOWN_GRACE", "5s")]].concat();
    let mut service = Service::start(&data_dir, &args, &env);
    service.wait_up(PATIENCE).await;
    let (status, health) = service.call("GET", "/health", None).await.expect("the door answers");
    assert_eq!(status, 503, "a model that loads cannot answer: {health}");
    let file = service.upload("input.jsonl", input(100, 2)).await;
    let id = service.create(&file, "/v1/completions").await;
    service.wait_batch(&id, PATIENCE, |batch| batch["status"] == "in_progress").await;
    let mut worker = Service::start_worker(&data_dir, &args, &env);
    worker.wait_log("loading", PATIENCE).await;
    for process in [&mut service, &mut worker] {
        process.signal("TERM");
        let status = process.wait_exit(Duration::from_secs(15)).await;
        assert_eq!(status.code(), Some(0), "{}", process.log_tail());
    }
    let mut service = Service::start(&data_dir, &args, FAST);
    service.wait_up(PATIENCE).await;
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
}

/// vllm#52505: what was finished when the server died can be read, before anybody goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_half_of_a_killed_batch_can_be_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let data_dir = folder.path().join("data");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = crate::kill::undisturbed(folder.path(), &args, input(600, 3), "/v1/completions").await.0;
    // Slow enough that the kill meets the second half.
    let slow = [FAST, &[("FAILPOINTS", "worker::segment_after_commit=sleep(50)")]].concat();
    let mut service = Service::start(&data_dir, &args, &slow);
    service.wait_up(PATIENCE).await;
    let file = service.upload("input.jsonl", input(600, 3)).await;
    let id = service.create(&file, "/v1/completions").await;
    let completed = |batch: &Value| batch["request_counts"]["completed"].as_u64().unwrap_or(0);
    service.wait_batch(&id, PATIENCE, |batch| completed(batch) >= 300).await;
    service.kill();

    let mut service = Service::start(&data_dir, &[&args[..], &["--no-worker"]].concat(), FAST);
    service.wait_up(PATIENCE).await;
    let batch = service.batch(&id).await.expect("the door answers");
    assert_eq!(batch["status"], "in_progress", "the kill came too late: {batch}");
    let path = format!("/v1/batches/{id}/results?limit=10000&order=completion");
    let (status, text) = service.call("GET", &path, None).await.expect("an answer");
    assert_eq!(status, 200, "{text}");
    let text = text.as_str().expect("JSON lines").to_owned();
    let read: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
    let answers: Vec<Value> = read.iter().filter(|line| line["response"]["status_code"] == 200).map(essence).collect();
    assert_eq!(answers.len() as u64, completed(&batch));
    assert!(
        answers.len() >= 300 && answers.iter().all(|answer| whole.contains(answer)),
        "each as it will be published"
    );
}
