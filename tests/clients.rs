//! The official client against the real `batch serve`, with nothing set but URL and key.

use std::time::Duration;

use crate::harness::{Service, missing, setting};
use crate::kill::tiny_model;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn official_python_client_runs_the_whole_cycle() {
    let Some(python) = setting("OVERNIGHT_TEST_PYTHON") else {
        return missing("clients", "a Python with the openai package, named by OVERNIGHT_TEST_PYTHON");
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let mut service = Service::start(&folder.path().join("data"), &args, &[]);
    service.wait_ready(Duration::from_secs(60)).await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/openai_client.py");
    let run = tokio::process::Command::new(python)
        .args([script, &format!("{}/v1", service.url), "tiny"])
        .kill_on_drop(true)
        .output();
    let output =
        tokio::time::timeout(Duration::from_secs(240), run).await.expect("the client ends").expect("it starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}\n{}", service.log_tail());
}
