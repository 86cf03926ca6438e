//! `batch run`: one process, no server; killed and typed again it goes on.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::batch_binary;
use crate::kill::{FAST, essence, input, tiny_model};

fn command(folder: &Path, data_dir: &str, out: &str) -> Command {
    let mut command = Command::new(batch_binary());
    command
        .current_dir(folder)
        .args(["--data-dir", data_dir, "run", "input.jsonl", "-o", out, "--model"])
        .arg(folder.join("tiny"))
        .args(["--served-model-name", "tiny"])
        .envs(FAST.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the run wrote its file");
    text.lines().map(|line| essence(&serde_json::from_str(line).expect("a line is JSON"))).collect()
}

#[test]
fn killed_run_goes_on_and_ends_with_the_file_of_an_undisturbed_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    tiny_model(folder);
    std::fs::write(folder.join("input.jsonl"), input(600, 3)).expect("input is written");

    let status = command(folder, "whole", "whole.jsonl").status().expect("batch starts");
    assert_eq!(status.code(), Some(3), "some lines fail, so the run says 3");
    let (output, errors) = (lines(&folder.join("whole.jsonl")), lines(&folder.join("whole.errors.jsonl")));
    assert_eq!((output.len(), errors.len()), (594, 6));

    let mut num_killed = 0;
    for wait_ms in [150, 400, 700, 1_000] {
        let mut child = command(folder, "killed", "killed.jsonl").spawn().expect("batch starts");
        let end = Instant::now() + Duration::from_millis(wait_ms);
        while Instant::now() < end && child.try_wait().expect("a child can be asked").is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        num_killed += u32::from(child.try_wait().expect("a child can be asked").is_none());
        child.kill().expect("a child can be killed");
        child.wait().expect("a killed child can be waited for");
    }
    assert!(num_killed > 0, "no kill met a running process: the test proves nothing");
    let status = command(folder, "killed", "killed.jsonl").status().expect("batch starts");
    assert_eq!(status.code(), Some(3));
    assert_eq!(lines(&folder.join("killed.jsonl")), output);
    assert_eq!(lines(&folder.join("killed.errors.jsonl")), errors);
}

/// A run is known by its input's content: what was answered before the change is no answer now.
#[test]
fn run_of_changed_input_is_a_job_of_its_own() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    tiny_model(folder);
    let first = input(40, 3);
    let changed = String::from_utf8(first.clone()).expect("UTF-8").replacen("review", "rewiev", 1).into_bytes();
    assert_ne!(changed, first, "a prompt changes, its length does not");
    std::fs::write(folder.join("input.jsonl"), &first).expect("input is written");
    command(folder, "data", "out.jsonl").status().expect("batch starts");
    let before = lines(&folder.join("out.jsonl"));

    std::fs::write(folder.join("input.jsonl"), &changed).expect("input is written");
    command(folder, "data", "out.jsonl").status().expect("batch starts");
    command(folder, "fresh", "fresh.jsonl").status().expect("batch starts");
    let fresh = lines(&folder.join("fresh.jsonl"));
    assert_ne!(fresh, before, "the change shows in an answer");
    assert_eq!(lines(&folder.join("out.jsonl")), fresh);
}
