//! The real `batch serve` on remote object stores.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use overnight_blobs::{Blobs, Options, Unmarked};
use overnight_testing::objects::{ObjectServer, servers};
use serde_json::Value;

use crate::harness::{Service, batch_binary, is_terminal};
use crate::kill::{FAST, input, published, tiny_model, undisturbed};

const PATIENCE: Duration = Duration::from_secs(120);

fn serve(data_dir: &Path, model: &[&str], server: &ObjectServer) -> Service {
    let url = [("OVERNIGHT_OBJECTS__URL", server.url.as_str()), ("OVERNIGHT_WORKER__CHECKPOINT_EVERY_REMOTE", "100ms")];
    let theirs = server.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let env: Vec<(&str, &str)> = FAST.iter().copied().chain(url).chain(theirs).collect();
    Service::start(data_dir, model, &env)
}

fn moto() -> Option<ObjectServer> {
    servers().into_iter().find(|server| server.name == "moto")
}

/// A job whose server is killed and started again ends as on a folder, on every store.
#[tokio::test]
async fn job_on_a_remote_store_survives_a_kill_and_ends_as_on_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_model(dir.path());
    let model = ["--model", model.to_str().unwrap()];
    let wanted = undisturbed(dir.path(), &model, input(400, 8), "/v1/completions").await;
    for server in servers() {
        let data_dir = dir.path().join(server.name);
        let mut service = serve(&data_dir, &model, &server);
        service.wait_up(PATIENCE).await;
        assert!(service.log().contains("uploaded in parts"), "the probe is told: {}", service.log_tail());
        let file = service.upload("input.jsonl", input(400, 8)).await;
        let id = service.create(&file, "/v1/completions").await;
        service.wait_batch(&id, PATIENCE, |batch| done(batch) > 40).await;
        service.kill();
        let mut service = serve(&data_dir, &model, &server);
        service.wait_up(PATIENCE).await;
        let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
        assert_eq!(batch["status"], "completed", "{}: {batch}", server.name);
        assert_eq!(published(&service, &batch).await, wanted, "{}", server.name);
    }
}

fn done(batch: &Value) -> u64 {
    let count = |name: &str| batch["request_counts"][name].as_u64().unwrap_or(0);
    count("completed") + count("failed")
}

// A mistyped prefix must not look like a store from which everything has gone.
#[tokio::test]
async fn start_on_the_wrong_prefix_is_refused_by_name() {
    let Some(server) = moto() else { return };
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_model(dir.path());
    let model = ["--model", model.to_str().unwrap()];
    let data_dir = dir.path().join("data");
    let mut service = serve(&data_dir, &model, &server);
    service.wait_up(PATIENCE).await;
    service.upload("input.jsonl", input(3, 1)).await;
    service.signal("TERM");
    service.wait_exit(PATIENCE).await;
    let wrong = ObjectServer { url: format!("{}x", server.url), ..server.clone() };
    let mut refused = serve(&data_dir, &model, &wrong);
    assert_eq!(refused.wait_exit(PATIENCE).await.code(), Some(1));
    assert!(refused.log().contains("it has no mark"), "{}", refused.log_tail());
    // Another installation's store has a mark, but none of our files.
    let mut other = serve(&dir.path().join("other"), &model, &wrong);
    other.wait_up(PATIENCE).await;
    other.kill();
    std::fs::remove_file(data_dir.join("objects.id")).unwrap();
    let mut refused = serve(&data_dir, &model, &wrong);
    assert_eq!(refused.wait_exit(PATIENCE).await.code(), Some(1));
    assert!(refused.log().contains("none of the 1 newest files"), "{}", refused.log_tail());
    for secret in server.environment.iter().filter(|(name, _)| name.ends_with("SECRET_ACCESS_KEY")) {
        assert!(!refused.log().contains(&secret.1), "{}", refused.log_tail());
    }
    assert!(!data_dir.join("objects.id").exists(), "a start that is refused remembers nothing");
    let mut right = serve(&data_dir, &model, &server);
    right.wait_up(PATIENCE).await;
}

#[tokio::test]
async fn doctor_says_what_a_store_can_do_and_leaves_nothing_in_it() {
    for server in servers() {
        let dir = tempfile::tempdir().unwrap();
        let told = std::process::Command::new(batch_binary())
            .args(["doctor", "--data-dir", dir.path().to_str().unwrap()])
            .env("OVERNIGHT_OBJECTS__URL", &server.url)
            .envs(server.environment.iter().map(|(name, value)| (name, value)))
            .output()
            .expect("batch runs");
        let told = String::from_utf8_lossy(&told.stdout).into_owned();
        let kept = if server.name == "garage" { "not kept" } else { "kept" };
        assert!(told.contains(&format!("uploaded in parts; conditional writes {kept}")), "{}: {told}", server.name);
        let options =
            Options { environment: server.environment.clone(), unmarked: Unmarked::IsWrong, ..Options::default() };
        let err = Blobs::open(&server.url, &options).await.unwrap_err();
        assert!(matches!(err, overnight_blobs::Error::NotOurs { .. }), "{}: {err}", server.name);
    }
}

/// How often a word stands in moto's answer about the store's prefix.
async fn num_listed(server: &ObjectServer, query: &str, below: &str, word: &str) -> usize {
    let (bucket, prefix) = server.url.strip_prefix("s3://").unwrap().split_once('/').unwrap();
    let url = format!("{}/{bucket}?{query}&prefix={prefix}/{below}", server.environment[0].1);
    let answer = reqwest::get(url).await.unwrap().error_for_status().unwrap();
    answer.text().await.unwrap().matches(word).count()
}

/// Uploads that have not ended.
async fn num_uploads(server: &ObjectServer) -> usize {
    num_listed(server, "uploads", "", "<Upload>").await
}

#[tokio::test]
async fn upload_whose_server_was_killed_is_aborted_by_the_sweep() {
    let Some(server) = moto() else { return };
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_model(dir.path());
    let data_dir = dir.path().join("data");
    let mut service = serve(&data_dir, &["--model", model.to_str().unwrap()], &server);
    service.wait_up(PATIENCE).await;
    // A form that never ends: two parts of its file and some more.
    let host = service.url.strip_prefix("http://").unwrap().to_owned();
    let mut client = std::net::TcpStream::connect(&host).unwrap();
    let head = "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
        --x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\n\r\n";
    let length = 64 << 20;
    write!(
        client,
        "POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: {length}\r\n\r\n{head}"
    )
    .unwrap();
    client.write_all(&vec![b'x'; 11 << 20]).unwrap();
    let started = Instant::now();
    while num_listed(&server, "list-type=2", ".overnight-uploads", "<Key>").await == 0 {
        assert!(started.elapsed() < PATIENCE, "no upload began\n{}", service.log_tail());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    service.kill();
    assert_eq!(num_uploads(&server).await, 1, "nobody aborted it");
    let options =
        Options { environment: server.environment.clone(), unmarked: Unmarked::IsWrong, ..Options::default() };
    let blobs = Blobs::open(&server.url, &options).await.unwrap();
    assert_eq!(
        blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::from_secs(24 * 3_600)).await.unwrap(),
        0,
        "a young one may be in use"
    );
    let swept = blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::ZERO).await.unwrap();
    assert_eq!((swept, num_uploads(&server).await), (1, 0));
}
