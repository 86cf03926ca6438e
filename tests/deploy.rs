//! The files below deploy/: linters and schemas say nothing, and every name in them exists.
//!
//! The work is two programs in tests/deploy, in Python because the linters are.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::harness::{Service, batch_binary, missing, setting};
use crate::kill::tiny_model;

/// What a program says that lacks a tool.
const LACKS_A_TOOL: i32 = 77;

/// Runs one of the programs; `None` where no Python with its tools is at hand.
fn run(program: &str, more: &[&str]) -> Option<Output> {
    let Some(python) = setting("OVERNIGHT_TEST_PYTHON") else {
        missing("lint", "a Python with the linters of tests/setup.sh, named by OVERNIGHT_TEST_PYTHON");
        return None;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the repository");
    let script = root.join("tests/deploy").join(program);
    let output = Command::new(python).arg(script).arg(root).arg(batch_binary()).args(more).output();
    let output = output.expect("Python starts");
    if output.status.code() == Some(LACKS_A_TOOL) {
        missing("lint", String::from_utf8_lossy(&output.stdout).trim());
        return None;
    }
    Some(output)
}

#[track_caller]
fn assert_silent(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
}

#[test]
fn linters_and_schemas_find_nothing_in_the_deployment_files() {
    let Some(output) = run("lint.py", &[]) else { return };
    assert_silent(&output);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_name_in_the_deployment_files_exists() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let mut service = Service::start(&folder.path().join("data"), &args, &[]);
    service.wait_ready(Duration::from_secs(60)).await;
    let port = service.url.rsplit_once(':').expect("a URL with a port").1.to_owned();
    let output = tokio::task::spawn_blocking(move || run("names.py", &[&port])).await.expect("it ends");
    let Some(output) = output else { return };
    assert_silent(&output);
}
