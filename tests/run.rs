//! `batch run`: one process, no server; killed and typed again it goes on.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use overnight_store::JobQuery;
use serde_json::{Value, json};

use crate::backend::{self, Backend, Opened};
use crate::harness::{Service, batch_binary, is_terminal};
use crate::kill::{FAST, essence, input, tiny_model};
use crate::peer::Peer;

/// A run has its database to itself.
fn is_elsewhere() -> bool {
    backend::is_without("`batch run`, which takes no shared database", |backend| backend == Backend::Sqlite)
}

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
    if is_elsewhere() {
        return;
    }
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
    if is_elsewhere() {
        return;
    }
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

/// Outcomes that a run has recorded so far, failed ones too; 0 while there is no database.
async fn num_recorded(data_dir: &Path) -> u64 {
    let Some(beside) = Opened::if_there(data_dir).await else { return 0 };
    let store = &beside.store;
    let jobs = store.list_jobs(JobQuery { limit: 10, ..JobQuery::default() }).await.expect("it can be read").rows;
    let mut num = 0;
    for job in jobs {
        let counts = store.find_progress(job.id).await.expect("it can be read").counts;
        num += counts.total - counts.unfinished();
    }
    beside.close().await;
    num
}

/// What was recorded before a kill is not asked for again, be it an answer or a refusal
/// of the engine; all runs together cost one pass and what was under way at the kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_run_asks_only_for_what_has_no_outcome() {
    if is_elsewhere() {
        return;
    }
    const ITEMS: usize = 400;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    let lines = (0..ITEMS).map(|index| {
        let body = json!({"model": "m", "prompt": format!("review {index}"), "max_tokens": 2});
        json!({"custom_id": format!("item-{index}"), "method": "POST", "url": "/v1/completions", "body": body})
    });
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    std::fs::write(folder.join("input.jsonl"), text).expect("input is written");
    // Answers that the engine may have given: it waits there, so that every kill meets work.
    let (allowed, given) = (Arc::new(AtomicUsize::new(0)), AtomicUsize::new(0));
    let limit = allowed.clone();
    let remote = Peer::start(move |body, _| {
        let number = given.fetch_add(1, Ordering::SeqCst);
        tokio::task::block_in_place(|| {
            while number >= limit.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        if body.contains("7\"") {
            return (400, r#"{"error":{"message":"not this one","code":"no"}}"#.to_owned());
        }
        let choice = json!({"index": 0, "text": "fine", "finish_reason": "stop", "logprobs": null});
        let usage = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5});
        (
            200,
            json!({"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice],
            "usage": usage})
            .to_string(),
        )
    })
    .await;
    let command = || {
        let mut command = tokio::process::Command::new(batch_binary());
        command
            .current_dir(folder)
            .args(["--data-dir", "data", "--set", "engine.kind=openai", "--set"])
            .arg(format!("engine.base_urls=[\"{}\"]", remote.url))
            .args(["--set", "engine.max_num_seqs=4", "run", "input.jsonl", "-o", "out.jsonl"])
            .envs(FAST.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        command
    };
    let mut recorded = 0;
    for share in [1, 2, 3] {
        // A quarter of the work more each time.
        let target = remote.bodies().len().max(share * ITEMS / 4) + 8;
        allowed.store(target, Ordering::SeqCst);
        let mut child = command().spawn().expect("batch starts");
        let end = Instant::now() + Duration::from_secs(60);
        let mut now = recorded;
        while remote.bodies().len() <= target || now <= recorded {
            let asked = remote.bodies().len();
            assert!(Instant::now() < end, "{asked} of {target} requests came, {now} outcomes are recorded");
            assert!(child.try_wait().expect("a child can be asked").is_none(), "the kill comes too late");
            tokio::time::sleep(Duration::from_millis(10)).await;
            now = num_recorded(&folder.join("data")).await;
        }
        child.kill().await.expect("a child can be killed");
        let now = num_recorded(&folder.join("data")).await;
        assert!(now > recorded, "{now} outcomes, after {recorded}");
        recorded = now;
    }
    allowed.store(usize::MAX, Ordering::SeqCst);
    let before = remote.bodies().len();
    let output = tokio::time::timeout(Duration::from_secs(60), command().output()).await;
    let output = output.expect("the last run ends").expect("batch starts");
    assert_eq!(output.status.code(), Some(3), "some lines fail: {}", String::from_utf8_lossy(&output.stderr));
    let asked = remote.bodies().split_off(before);
    assert_eq!(asked.len() as u64, ITEMS as u64 - recorded, "{recorded} outcomes were recorded");
    let (answers, errors) = (lines_of(&folder.join("out.jsonl")), lines_of(&folder.join("out.errors.jsonl")));
    assert_eq!((answers, errors), (ITEMS - 40, 40));
}

fn lines_of(path: &Path) -> usize {
    std::fs::read_to_string(path).expect("the run wrote its file").lines().count()
}

/// Weights of a folder that has none are drawn from the seed: the same ones at every start, by `run` and by `serve`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dummy_weights_answer_the_same_at_every_start_of_run_and_serve() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    let model = tiny_model(folder);
    std::fs::remove_file(model.join("model.safetensors")).expect("a tiny model has one file of weights");
    std::fs::write(folder.join("input.jsonl"), input(20, 8)).expect("input is written");
    let run = |name: &str, args: &[&str]| {
        let out = format!("{name}.jsonl");
        let mut command = command(folder, name, &out);
        let status = command.args(args).status().expect("batch starts");
        (status.code(), if status.success() { lines(&folder.join(out)) } else { Vec::new() })
    };
    let dummy = ["--load-format", "dummy"];
    let (code, first) = run("first", &dummy);
    assert_eq!((code, first.len()), (Some(0), 20));
    assert_eq!(run("second", &dummy).1, first, "the same seed gives the same weights");
    assert_ne!(run("other", &["--load-format", "dummy", "--seed", "5"]).1, first, "another seed gives others");
    assert_ne!(run("plain", &[]).0, Some(0), "without the flag the missing weights are an error");

    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny", "--load-format", "dummy"];
    let mut service = Service::start(&folder.join("served"), &args, FAST);
    service.wait_ready(Duration::from_secs(60)).await;
    let file = service.upload("input.jsonl", input(20, 8)).await;
    let id = service.create(&file, "/v1/completions").await;
    let batch = service.wait_batch(&id, Duration::from_secs(60), is_terminal).await;
    let served: Vec<Value> = service.file_lines(&batch["output_file_id"]).await.iter().map(essence).collect();
    assert_eq!(served, first);
}
