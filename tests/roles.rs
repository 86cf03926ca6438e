//! An API on its own, and workers that come and go: what each of them says and runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use overnight_types::{JobId, ShardIndex, WorkerId};
use serde_json::{Value, json};

use crate::backend::{self, Opened};
use crate::harness::{Service, batch_binary, free_port, is_terminal};
use crate::kill::{FAST, input, published, tiny_model, undisturbed};

const PATIENCE: Duration = Duration::from_secs(120);
const API_ALONE: &[&str] = &["--no-worker"];

async fn health(service: &Service) -> (u16, Value) {
    service.call("GET", "/health", None).await.expect("the door answers")
}

/// Waits until `/health` of an API counts so many workers whose engine can answer.
async fn wait_ready_workers(service: &Service, wanted: u64) {
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        let (status, told) = health(service).await;
        assert_eq!(status, 200, "an API without an engine is up: {told}");
        if told["workers_ready"].as_u64() == Some(wanted) {
            return;
        }
        assert!(std::time::Instant::now() < end, "not {wanted} ready workers: {told}\n{}", service.log_tail());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What a person sees of a batch.
fn status_of(service: &Service, id: &str) -> String {
    let output = Command::new(batch_binary()).args(["--server", &service.url, "status", id]).output();
    let output = output.expect("batch starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat()
}

async fn terminate(mut process: Service) {
    process.signal("TERM");
    let status = process.wait_exit(Duration::from_secs(60)).await;
    assert_eq!(status.code(), Some(0), "{}", process.log_tail());
}

/// Without a worker the API takes files and batches, is healthy, and says what is missing;
/// a worker that joins runs them, and its row goes when it leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_without_a_worker_answers_and_says_what_is_missing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let data_dir = folder.path().join("data");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let mut api = Service::start(&data_dir, API_ALONE, FAST);
    api.wait_up(PATIENCE).await;
    let (status, told) = health(&api).await;
    assert_eq!((status, &told["engine"], &told["workers_ready"]), (200, &json!("none"), &json!(0)), "{told}");
    assert_eq!(told["workers_live"], 1, "its own, for intake and finalizing: {told}");
    let file = api.upload("input.jsonl", input(100, 2)).await;
    let id = api.create(&file, "/v1/completions").await;
    let waiting = |batch: &Value| batch["waiting_for"].is_string() && batch["status"] == "in_progress";
    let batch = api.wait_batch(&id, PATIENCE, waiting).await;
    let told = "no live worker has an engine that can answer";
    assert!(batch["waiting_for"].as_str().is_some_and(|text| text.contains(told)), "{batch}");
    assert!(status_of(&api, &id).contains(told), "{}", status_of(&api, &id));

    let worker = Service::start_worker(&data_dir, &args, FAST);
    let batch = api.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    published(&api, &batch).await;
    wait_ready_workers(&api, 1).await;
    terminate(worker).await;
    wait_ready_workers(&api, 0).await;
    let opened = Opened::beside(&data_dir).await;
    let live = opened.store.list_live_workers().await.expect("the database answers");
    assert_eq!(live.len(), 1, "only the API's own row is left: {live:?}");
    opened.close().await;
}

/// The names of the models that the holders of this job's leases served.
async fn models_of_holders(opened: &Opened, job: &str) -> BTreeSet<String> {
    let job: JobId = job.parse().expect("a batch id");
    let live = opened.store.list_live_workers().await.expect("the database answers");
    let models: BTreeMap<WorkerId, Vec<String>> =
        live.into_iter().map(|live| (live.worker.id, live.worker.models)).collect();
    let shards = opened.store.list_shards(job, ShardIndex(0), 1_000).await.expect("the database answers");
    let mut names = BTreeSet::new();
    for shard in shards {
        let attempts = opened.store.list_attempts(job, shard.cut.shard, 100).await.expect("the database answers");
        assert!(!attempts.is_empty(), "a done shard was leased");
        for attempt in attempts {
            names.extend(models.get(&attempt.worker).expect("the worker lives still").iter().cloned());
        }
    }
    names
}

fn input_for(model: &str, num_items: usize) -> Vec<u8> {
    let text = String::from_utf8(input(num_items, 2)).expect("UTF-8");
    text.replace(r#""model":"tiny""#, &format!(r#""model":"{model}""#)).into_bytes()
}

/// Two workers with different models: each runs its own. A model that is known and that
/// nobody has waits and says so; one that nobody knows is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_batch_runs_where_its_model_is_and_an_absent_model_waits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let data_dir = folder.path().join("data");
    let config = folder.path().join("api.toml");
    std::fs::write(&config, "[[models]]\nname = \"green\"\n").expect("a file can be written");
    let config = config.to_str().expect("UTF-8");
    let mut api = Service::start(&data_dir, &["--no-worker", "--config", config], FAST);
    api.wait_up(PATIENCE).await;
    let worker = |name| {
        // Whoever takes a batch in must know the names that may be asked for.
        let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", name, "--config", config];
        Service::start_worker(&data_dir, &args, FAST)
    };
    let _workers = [worker("red"), worker("blue")];
    wait_ready_workers(&api, 2).await;
    let mut batches = BTreeMap::new();
    for name in ["green", "red", "blue", "mauve"] {
        let file = api.upload("input.jsonl", input_for(name, 200)).await;
        batches.insert(name, api.create(&file, "/v1/completions").await);
    }
    let opened = Opened::beside(&data_dir).await;
    for name in ["red", "blue"] {
        let batch = api.wait_batch(&batches[name], PATIENCE, is_terminal).await;
        assert_eq!(batch["status"], "completed", "{batch}");
        published(&api, &batch).await;
        assert_eq!(models_of_holders(&opened, &batches[name]).await, BTreeSet::from([name.to_owned()]));
    }
    let refused = api.wait_batch(&batches["mauve"], PATIENCE, is_terminal).await;
    assert_eq!(refused["status"], "failed", "{refused}");
    assert!(refused["errors"].to_string().contains("model_not_found"), "{refused}");

    // A worker that misses a heartbeat on a busy machine is left out for that long.
    let is_told = |batch: &Value| {
        let told = batch["waiting_for"].as_str().unwrap_or_default();
        told.contains("no live worker has the model green") && told.contains("blue, red")
    };
    let waiting = api.wait_batch(&batches["green"], PATIENCE, is_told).await;
    assert_eq!(waiting["status"], "in_progress", "{waiting}");
    let green: JobId = batches["green"].parse().expect("a batch id");
    let attempts = opened.store.list_attempts(green, ShardIndex(0), 9).await.expect("the database answers");
    assert_eq!(attempts, [], "nobody leased it");
    let _worker = worker("green");
    let batch = api.wait_batch(&batches["green"], PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert_eq!(models_of_holders(&opened, &batches["green"]).await, BTreeSet::from(["green".to_owned()]));
    opened.close().await;
}

fn completed(batch: &Value) -> u64 {
    batch["request_counts"]["completed"].as_u64().unwrap_or(0)
}

/// Workers join, drain, are killed and join again in the middle of a batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_join_and_leave_at_any_time_lose_and_double_nothing() {
    const ITEMS: usize = 2_000;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let data_dir = folder.path().join("data");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(ITEMS, 3), "/v1/completions").await;
    // Slow enough that every change meets an open batch, however fast the machine.
    let slow = [FAST, &[("FAILPOINTS", "worker::segment_after_commit=sleep(150)")]].concat();
    let mut api = Service::start(&data_dir, API_ALONE, FAST);
    api.wait_up(PATIENCE).await;
    let file = api.upload("input.jsonl", input(ITEMS, 3)).await;
    let id = api.create(&file, "/v1/completions").await;
    let more_than = async |api: &Service, share: u64| {
        let batch = api.wait_batch(&id, PATIENCE, |batch| is_terminal(batch) || completed(batch) >= share).await;
        assert!(!is_terminal(&batch), "the batch ended before the change: {batch}");
    };
    let first = Service::start_worker(&data_dir, &args, &slow);
    more_than(&api, 100).await;
    let mut second = Service::start_worker(&data_dir, &args, &slow);
    second.wait_log("ready:", PATIENCE).await;
    more_than(&api, 300).await;
    terminate(first).await;
    more_than(&api, 500).await;
    second.kill();
    let third = Service::start_worker(&data_dir, &args, &slow);
    more_than(&api, 900).await;
    let fourth = Service::start_worker(&data_dir, &args, FAST);
    fourth.wait_log("ready:", PATIENCE).await;
    terminate(third).await;
    let batch = api.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert!(published(&api, &batch).await == whole, "files differ from those of an undisturbed run");
    assert_eq!(api.unsound(), None);
}

/// What does not end within the grace is handed back at once: another worker has it
/// before the lease would have run out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drained_worker_hands_back_what_it_cannot_finish() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let data_dir = folder.path().join("data");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny", "--max-num-seqs", "2"];
    // A lease that outlives the test by far.
    let env = [FAST, &[("OVERNIGHT_WORKER__LEASE_TTL", "1h"), ("OVERNIGHT_WORKER__SHUTDOWN_GRACE", "300ms")]].concat();
    let mut api = Service::start(&data_dir, API_ALONE, &env);
    api.wait_up(PATIENCE).await;
    // Two at a time and 400 tokens each: much more than a grace.
    let file = api.upload("input.jsonl", input(64, 400)).await;
    let id = api.create(&file, "/v1/completions").await;
    let worker = Service::start_worker(&data_dir, &args, &env);
    let opened = Opened::beside(&data_dir).await;
    let job: JobId = id.parse().expect("a batch id");
    api.wait_batch(&id, PATIENCE, |batch| batch["status"] == "in_progress").await;
    let end = std::time::Instant::now() + PATIENCE;
    while opened.store.find_progress(job).await.expect("the database answers").shards_leased == 0 {
        assert!(std::time::Instant::now() < end, "nothing was leased\n{}", worker.log_tail());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    terminate(worker).await;
    let progress = opened.store.find_progress(job).await.expect("the database answers");
    assert_eq!(progress.shards_leased, 0, "a drained worker holds nothing: {progress:?}");
    assert!(progress.shards_ready > 0, "the batch is open still: {progress:?}");
    let shards = opened.store.list_shards(job, ShardIndex(0), 100).await.expect("the database answers");
    assert!(shards.iter().all(|shard| shard.crashes == 0), "handing back is no crash");
    opened.close().await;
}

fn door_of(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// The answer of a worker's door; waits until it is there.
async fn ask(url: &str, key: Option<&str>) -> (u16, String) {
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        let mut request = reqwest::Client::new().get(url).timeout(Duration::from_secs(20));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        if let Ok(response) = request.send().await {
            return (response.status().as_u16(), response.text().await.expect("a text"));
        }
        assert!(std::time::Instant::now() < end, "nobody answers at {url}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The door of a worker is red while its model loads, green after it, tells what the process
/// counts and nothing of the database, and has no other route.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn door_of_a_worker_answers_probes_and_scrapers_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let (data_dir, keys) = (folder.path().join("data"), folder.path().join("keys"));
    std::fs::write(&keys, "the-key\nread-only the-scraper\n").expect("a file can be written");
    let port = free_port();
    let (text, keys) = (port.to_string(), keys.to_str().expect("UTF-8"));
    let model = model.to_str().expect("UTF-8");
    let args = ["--model", model, "--served-model-name", "tiny", "--port", &text, "--api-key-file", keys];
    let loading = [FAST, &[("FAILPOINTS", "service::model_loading=sleep(2000)")]].concat();
    let worker = Service::start_worker(&data_dir, &args, &loading);
    let (status, told) = ask(&format!("{}/health", door_of(port)), None).await;
    assert_eq!(status, 503, "its model loads: {told}");
    worker.wait_log("ready:", PATIENCE).await;
    let (status, told) = ask(&format!("{}/health", door_of(port)), None).await;
    assert_eq!(status, 200, "{told}");
    assert!(told.contains(r#""engine":"ready""#), "{told}");
    assert_eq!(ask(&format!("{}/metrics", door_of(port)), None).await.0, 401, "metrics want a key");
    let (status, page) = ask(&format!("{}/metrics", door_of(port)), Some("the-scraper")).await;
    assert_eq!(status, 200, "{page}");
    for name in ["vllm:num_requests_running", "batch_engine_ready", "batch_leases_total", "http_requests_total"] {
        assert!(page.contains(&format!("\n# TYPE {name} ")), "{name} is there: {page}");
    }
    for name in ["batch_requests{", "batch_database_up", "batch_workers_live", "batch_upload_bytes_total"] {
        assert!(!page.contains(&format!("\n{name}")), "{name} is a server's: {page}");
    }
    for path in ["/v1/models", "/v1/batches", "/ui/", "/openapi.json"] {
        let (status, told) = ask(&format!("{}{path}", door_of(port)), Some("the-key")).await;
        assert_eq!(status, 404, "{path}: {told}");
    }
    terminate(worker).await;
}

fn start_refused(data_dir: &Path, words: &[&str]) -> String {
    let output = Command::new(batch_binary())
        .arg("--data-dir")
        .arg(data_dir)
        .args(words)
        .envs(backend::environment(data_dir))
        .output()
        .expect("batch starts");
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn worker_opens_no_door_to_others_without_a_key() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let model = model.to_str().expect("UTF-8");
    let data_dir = folder.path().join("data");
    let told = start_refused(&data_dir, &["worker", "--model", model, "--host", "0.0.0.0", "--port", "0"]);
    assert!(told.contains("no API key is set") && told.contains("--insecure"), "{told}");
}
