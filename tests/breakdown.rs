//! The engine of `batch` breaks down in the middle of a job: it is built anew and the
//! job goes on, or the process ends with a code of its own and the next one goes on.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;

use crate::backend::{self, Backend};
use crate::harness::{Service, batch_binary, is_terminal};
use crate::kill::{FAST, essence, input, published, tiny_model, undisturbed};

const BREAK: &str = "OVERNIGHT_TEST_BREAK_ENGINE_AT";

// Field report 33 (service): the engine is started again, and every item has its one answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_engine_is_built_anew_and_the_job_is_that_of_an_undisturbed_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(400, 3), "/v1/completions").await;
    let mut env = FAST.to_vec();
    env.push((BREAK, "1,9,30"));
    let mut service = Service::start(&folder.path().join("broken"), &args, &env);
    service.wait_ready(Duration::from_secs(60)).await;
    let file = service.upload("input.jsonl", input(400, 3)).await;
    let id = service.create(&file, "/v1/completions").await;
    let mut was_red = false;
    let batch = loop {
        was_red |= service.call("GET", "/health", None).await.is_some_and(|(status, _)| status == 503);
        let batch = service.wait_batch(&id, Duration::from_secs(60), |_| true).await;
        if is_terminal(&batch) {
            break batch;
        }
        assert!(!service.has_exited(), "{}", service.log_tail());
    };
    assert!(was_red, "/health is red while there is no engine");
    assert_eq!(batch["status"], "completed", "{batch}");
    assert!(published(&service, &batch).await == whole, "files differ from those of an undisturbed run");
    let log = service.log();
    for number in 1..=3 {
        assert!(log.contains(&format!("{number} of 10 in an hour")), "{log}");
    }
    assert!(!log.contains("4 of 10 in an hour"), "{log}");
    let (_, items) = service.call("GET", &format!("/v1/batches/{id}/items?limit=100"), None).await.expect("answered");
    let items = items["data"].as_array().expect("a page");
    assert!(items.iter().all(|item| item["attempts"] == 1), "a breakdown counts no attempt");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_whose_engine_is_given_up_ends_by_name_and_the_next_one_goes_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let data_dir = folder.path().join("given-up");
    let mut env = FAST.to_vec();
    env.extend([(BREAK, "4"), ("OVERNIGHT_ENGINE__REBUILDS_MAX", "0")]);
    let mut service = Service::start(&data_dir, &args, &env);
    service.wait_ready(Duration::from_secs(60)).await;
    let file = service.upload("input.jsonl", input(200, 3)).await;
    let id = service.create(&file, "/v1/completions").await;
    let status = service.wait_exit(Duration::from_secs(60)).await;
    assert_eq!(status.code(), Some(9), "{}", service.log_tail());
    assert!(service.log().contains("error: the engine broke down"), "{}", service.log_tail());
    let mut service = Service::start(&data_dir, &args, FAST);
    service.wait_up(Duration::from_secs(60)).await;
    let batch = service.wait_batch(&id, Duration::from_secs(120), is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    published(&service, &batch).await;
}

fn run(folder: &Path, data_dir: &str, env: &[(&str, &str)]) -> Output {
    Command::new(batch_binary())
        .current_dir(folder)
        .args(["--data-dir", data_dir, "run", "input.jsonl", "-o"])
        .arg(format!("{data_dir}.jsonl"))
        .arg("--model")
        .arg(folder.join("tiny"))
        .args(["--served-model-name", "tiny"])
        .envs(FAST.iter().copied())
        .envs(env.iter().copied())
        .output()
        .expect("batch starts")
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the run wrote its file");
    text.lines().map(|line| essence(&serde_json::from_str(line).expect("a line is JSON"))).collect()
}

#[test]
fn run_whose_engine_is_given_up_ends_by_name_and_the_same_command_goes_on() {
    if backend::is_without("`batch run`, which takes no shared database", |backend| backend == Backend::Sqlite) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    tiny_model(folder);
    std::fs::write(folder.join("input.jsonl"), input(90, 3)).expect("input is written");
    assert_eq!(run(folder, "whole", &[]).status.code(), Some(0));
    let broken = run(folder, "broken", &[(BREAK, "1,2"), ("OVERNIGHT_ENGINE__REBUILDS_MAX", "1")]);
    let said = String::from_utf8_lossy(&broken.stderr);
    assert_eq!(broken.status.code(), Some(9), "{said}");
    assert!(said.contains("the engine broke down, after 1 rebuilds within an hour"), "{said}");
    assert!(said.contains("the same command goes on"), "{said}");
    assert!(!folder.join("broken.jsonl").exists(), "nothing half is published");
    let again = run(folder, "broken", &[]);
    assert_eq!(again.status.code(), Some(0), "{}", String::from_utf8_lossy(&again.stderr));
    assert_eq!(lines(&folder.join("broken.jsonl")), lines(&folder.join("whole.jsonl")));
}

/// The engine stays in a step for ever.
const HANG: &[(&str, &str)] =
    &[("FAILPOINTS", "engine::step=5*off->pause"), ("OVERNIGHT_WORKER__ENGINE_STALL_MAX", "1s")];

// A kernel that never ends, a driver that answers no more: nothing fails, and nothing comes back either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_whose_engine_hangs_turns_red_and_ends_by_name_and_the_next_one_goes_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let data_dir = folder.path().join("hung");
    let mut service = Service::start(&data_dir, &args, &[FAST, HANG].concat());
    service.wait_ready(Duration::from_secs(60)).await;
    let file = service.upload("input.jsonl", input(200, 3)).await;
    let id = service.create(&file, "/v1/completions").await;
    let mut words = Vec::new();
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !service.has_exited() {
        if let Some((503, said)) = service.call("GET", "/health", None).await {
            words.push(said["code"].as_str().unwrap_or_default().to_owned());
        }
        assert!(std::time::Instant::now() < end, "it hangs on: {words:?}\n{}", service.log_tail());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(words.iter().any(|word| word == "engine_stalled"), "{words:?}");
    assert_eq!(service.wait_exit(Duration::from_secs(60)).await.code(), Some(9), "{}", service.log_tail());
    assert!(service.log().contains("error: the engine hangs"), "{}", service.log_tail());
    let mut service = Service::start(&data_dir, &args, FAST);
    service.wait_up(Duration::from_secs(60)).await;
    let batch = service.wait_batch(&id, Duration::from_secs(120), is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    published(&service, &batch).await;
}

#[test]
fn run_whose_engine_hangs_ends_by_name_and_the_same_command_goes_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    tiny_model(folder);
    std::fs::write(folder.join("input.jsonl"), input(90, 3)).expect("input is written");
    let hung = run(folder, "hung", HANG);
    let said = String::from_utf8_lossy(&hung.stderr);
    assert_eq!(hung.status.code(), Some(9), "{said}");
    assert!(said.contains("the engine hangs") && said.contains("the same command goes on"), "{said}");
    let again = run(folder, "hung", &[]);
    assert_eq!(again.status.code(), Some(0), "{}", String::from_utf8_lossy(&again.stderr));
    assert_eq!(lines(&folder.join("hung.jsonl")).len(), 90);
}
