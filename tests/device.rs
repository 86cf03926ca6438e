//! A GPU that fails in the middle of a job, on a machine that has one.

use std::time::Duration;

use overnight_engine::cuda::{DeviceOptions, open};
use overnight_testing::tiny_model::{TinyArch, TinyModel};
use serde_json::json;

use crate::harness::{Service, is_terminal, missing};
use crate::kill::{FAST, input};

const PATIENCE: Duration = Duration::from_secs(110);

/// Goal: a kernel that reads what is not there fails its requests as transient, `/health` is red
/// until there is an engine again, and the job goes on from its checkpoints: in this process when
/// the driver gives a new context, else the process ends with its named code and the next start
/// takes over. Field reports 64 and 66.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_that_fails_costs_no_item() {
    if let Err(error) = open(&DeviceOptions::default()) {
        let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        return missing("gpu", &format!("a GPU: {why}"));
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = folder.path().join("tiny");
    let tiny = TinyModel { head_dim: 64, ..TinyModel::new(TinyArch::Qwen3) };
    tiny.write(&model).expect("a tiny checkpoint can be written");
    let data_dir = folder.path().join("data");
    let model = model.to_str().expect("UTF-8");
    let args = ["--model", model, "--served-model-name", "tiny", "--device", "cuda", "--gpu-memory-utilization", "0.1"];
    // Once, after some steps. A process whose driver gives no new context tries twice.
    let few = ("OVERNIGHT_ENGINE__REBUILDS_MAX", "2");
    let fault = [FAST, &[few, ("FAILPOINTS", "cuda::fault=30*off->1*return")]].concat();
    let mut service = Service::start(&data_dir, &args, &fault);
    service.wait_ready(PATIENCE).await;
    let file = service.upload("input.jsonl", input(2_000, 40)).await;
    let id = service.create(&file, "/v1/completions").await;
    let (mut was_red, mut has_ended) = (false, false);
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        has_ended |= service.has_exited();
        if has_ended {
            break;
        }
        was_red |= service.call("GET", "/health", None).await.is_some_and(|(status, _)| status == 503);
        if service.batch(&id).await.is_some_and(|batch| is_terminal(&batch)) {
            break;
        }
        assert!(std::time::Instant::now() < end, "the job neither ended nor the process\n{}", service.log_tail());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let log = service.log();
    assert!(log.contains("engine is poisoned"), "the device failed: {}", service.log_tail());
    assert!(was_red, "health is red while there is no engine that can answer: {}", service.log_tail());
    if has_ended {
        assert_eq!(service.wait_exit(PATIENCE).await.code(), Some(9), "{}", service.log_tail());
        eprintln!("the driver gave no new context; the next process went on");
        service = Service::start(&data_dir, &args, FAST);
        service.wait_ready(PATIENCE).await;
    }
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert_eq!(batch["request_counts"], json!({"total": 2_000, "completed": 1_980, "failed": 20}), "{batch}");
    let output = service.file_lines(&batch["output_file_id"]).await;
    assert_eq!(output.len(), 1_980, "each item once");
    let whole = |line: &serde_json::Value| line["response"]["body"]["usage"]["completion_tokens"] == 40;
    assert!(output.iter().all(whole), "answers are whole");
    assert_eq!(service.unsound(), None);
}
