//! A commit that comes after its lease, and the negative control of the fence.
//!
//! A worker stops itself between its last look at the local deadline and the commit:
//! no clock of its own can save it there, only the epoch in the transaction. Another
//! worker takes the shard over meanwhile. Without the guard the same checks must fail.

use std::path::Path;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::harness::{Service, is_terminal};
use crate::kill::{FAST, input, published, rounds, tiny_model, undisturbed};

const PATIENCE: Duration = Duration::from_secs(60);
const NO_GUARD: (&str, &str) = ("OVERNIGHT_TEST_WITHOUT_EPOCH_GUARD", "1");
/// What a worker says once its late commit is behind it, whether it was taken or not.
const LATE_COMMIT_IS_OVER: &str = "lost the lease of a shard";

type Lines = (Vec<Value>, Vec<Value>);

/// What is wrong with a job's end: an unsound database, no end, or other files than
/// those of an undisturbed run. `None` when nothing is.
async fn complaint(service: &Service, id: &str, whole: &Lines) -> Option<String> {
    // First, since an end may never come when outcomes are gone.
    if let Some(unsound) = service.unsound() {
        return Some(unsound);
    }
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    let batch = loop {
        let batch = service.batch(id).await.expect("the server answers");
        if is_terminal(&batch) || tokio::time::Instant::now() > until {
            break batch;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    if batch["status"] != "completed" {
        return Some(format!("it did not complete: {batch}"));
    }
    if published(service, &batch).await != *whole {
        return Some("the files differ from those of an undisturbed run".to_owned());
    }
    service.unsound()
}

/// One shard whose items end one after another, each some steps after the one before.
fn staggered_input() -> Vec<u8> {
    let line = |index: usize| {
        json!({
            "custom_id": format!("item-{index:02}"), "method": "POST", "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": format!("review {index} says"), "max_tokens": 1 + 3 * index,
                "temperature": 0, "ignore_eos": true},
        })
    };
    (0..40).map(|index| format!("{}\n", line(index))).collect::<String>().into_bytes()
}

/// The first worker stops before its first commit, of an item or a few. The second one
/// takes the shard over, commits at least sixteen under the same sequence number, and
/// stops before its next commit, so that the job is still open. Then the first goes on.
async fn late_commit(folder: &Path, args: &[&str], env: &[(&str, &str)], whole: &Lines) -> Option<String> {
    let data_dir = folder.join("late");
    let door = [args, &["--no-worker"]].concat();
    let mut front = Service::start(&data_dir, &door, &[FAST, env].concat());
    front.wait_up(PATIENCE).await;
    let file = front.upload("input.jsonl", staggered_input()).await;
    let id = front.create(&file, "/v1/completions").await;
    let with = |more: &[(&'static str, &'static str)]| [FAST, env, more].concat();
    let few = ("OVERNIGHT_WORKER__CHECKPOINT_ITEMS_MAX", "1");
    let at = "worker::segment_before_commit=1";
    let mut first = Service::start_worker_that_stops(&data_dir, args, &with(&[few]), at);
    first.wait_stopped(PATIENCE).await;

    let many = ("OVERNIGHT_WORKER__CHECKPOINT_ITEMS_MAX", "16");
    let seldom = ("OVERNIGHT_WORKER__CHECKPOINT_EVERY_LOCAL", "60s");
    let at = "worker::segment_before_commit=2";
    let mut second = Service::start_worker_that_stops(&data_dir, args, &with(&[many, seldom]), at);
    second.wait_stopped(PATIENCE).await;
    let batch = front.batch(&id).await.expect("the door answers");
    assert_eq!(batch["status"], "in_progress", "the late commit must meet an open job: {batch}");

    first.go_on();
    first.wait_log(LATE_COMMIT_IS_OVER, PATIENCE).await;
    first.kill();
    second.go_on();
    complaint(&front, &id, whole).await
}

async fn setting(folder: &Path) -> (Vec<String>, Lines) {
    let model = tiny_model(folder);
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder, &args, staggered_input(), "/v1/completions").await;
    assert_eq!((whole.0.len(), whole.1.len()), (40, 0));
    (args.map(str::to_owned).to_vec(), whole)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_commit_is_fenced_and_changes_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (args, whole) = setting(folder.path()).await;
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    assert_eq!(late_commit(folder.path(), &args, &[], &whole).await, None);
}

/// The negative control of the test above: the same run and the same checks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_epoch_guard_the_late_commit_is_noticed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (args, whole) = setting(folder.path()).await;
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let complaint = late_commit(folder.path(), &args, &[NO_GUARD], &whole).await;
    let complaint = complaint.expect("the checks must notice a commit that nothing fenced");
    assert!(complaint.contains("no segment holds their outcome"), "{complaint}");
}

/// A random round of the kill test with a late writer beside it: a worker stops itself
/// at a random commit, the server is killed and started again, goes on with the job,
/// and then the worker wakes up.
async fn killed_beside_a_late_writer(
    data_dir: &Path,
    args: &[&str],
    env: &[(&str, &str)],
    seed: u64,
    whole: &Lines,
) -> Option<String> {
    let mut random = StdRng::seed_from_u64(seed);
    let env = [FAST, env].concat();
    let door = [args, &["--no-worker"]].concat();
    let mut service = Service::start(data_dir, &door, &env);
    service.wait_up(PATIENCE).await;
    let file = service.upload("input.jsonl", input(2_000, 3)).await;
    let id = service.create(&file, "/v1/completions").await;
    let stop_at = format!("worker::segment_before_commit={}", random.random_range(1..=12));
    let mut late = Service::start_worker_that_stops(data_dir, args, &env, &stop_at);
    late.wait_stopped(PATIENCE).await;
    service.kill();
    // Slow enough that the late commit meets a job that is still open, however fast the machine.
    let slow = [env, vec![("FAILPOINTS", "worker::segment_after_put=sleep(150)")]].concat();
    service = Service::start(data_dir, args, &slow);
    let committed = |batch: &Value| batch["request_counts"]["completed"].as_u64();
    let before = service.wait_batch(&id, PATIENCE, |batch| committed(batch).is_some()).await;
    let before = committed(&before);
    // Until leases of the late writer have run out and others' outcomes came.
    tokio::time::sleep(Duration::from_millis(random.random_range(1_500..1_900))).await;
    service.wait_batch(&id, PATIENCE, |batch| is_terminal(batch) || committed(batch) > before).await;
    late.go_on();
    late.wait_log(LATE_COMMIT_IS_OVER, PATIENCE).await;
    complaint(&service, &id, whole).await
}

async fn kill_setting(folder: &Path) -> (Vec<String>, Lines) {
    let model = tiny_model(folder);
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder, &args, input(2_000, 3), "/v1/completions").await;
    (args.map(str::to_owned).to_vec(), whole)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_beside_a_late_writer_loses_and_doubles_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (args, whole) = kill_setting(folder.path()).await;
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for seed in rounds(3) {
        let data_dir = folder.path().join(format!("round-{seed}"));
        let complaint = killed_beside_a_late_writer(&data_dir, &args, &[], seed, &whole).await;
        assert_eq!(complaint, None, "seed {seed}");
    }
}

/// The negative control of the kill test: without the guard some round must fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_without_the_epoch_guard_is_noticed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (args, whole) = kill_setting(folder.path()).await;
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for seed in 0..10 {
        let data_dir = folder.path().join(format!("round-{seed}"));
        if let Some(complaint) = killed_beside_a_late_writer(&data_dir, &args, &[NO_GUARD], seed, &whole).await {
            eprintln!("noticed in round {seed}: {complaint}");
            return;
        }
    }
    panic!("ten rounds without the epoch guard passed every check: the kill test proves nothing about it");
}
