//! Two worker processes on one data folder; one is stopped for longer than its
//! lease and wakes up late. The late writer must change nothing.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use crate::harness::{Service, is_terminal};
use crate::kill::{FAST, input, published, rounds, tiny_model, undisturbed};

/// What a worker says when it finds, awake again, that its lease went to somebody else.
const LOST: &str = "lost the lease of a shard";
/// Rounds beside the random ones in which a stop is to meet a lease.
const AIMED_ROUNDS_MAX: u64 = 5;
/// Commits are slow enough that a stop meets an open job, however fast the machine.
const SLOW_COMMIT: (&str, &str) = ("FAILPOINTS", "worker::segment_after_put=sleep(100)");

/// A job on two processes, one of which is stopped past its lease, three times. Also
/// tells how many leases were lost by it.
async fn stopped_run(
    folder: &std::path::Path,
    args: &[&str],
    env: &[(&str, &str)],
    seed: u64,
    num_items: usize,
) -> ((Vec<Value>, Vec<Value>), usize) {
    let mut random = StdRng::seed_from_u64(seed);
    let data_dir = folder.join(format!("round-{seed}"));
    let mut first = Service::start(&data_dir, args, env);
    first.wait_up(Duration::from_secs(60)).await;
    let second = Service::start_worker(&data_dir, args, env);
    let file = first.upload("input.jsonl", input(num_items, 3)).await;
    let id = first.create(&file, "/v1/completions").await;
    for _ in 0..3 {
        let running = |batch: &Value| is_terminal(batch) || batch["status"] != "validating";
        first.wait_batch(&id, Duration::from_secs(120), running).await;
        tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
        let stopped = if random.random_bool(0.5) { &first } else { &second };
        stopped.signal("STOP");
        tokio::time::sleep(Duration::from_millis(random.random_range(1_800..2_800))).await;
        stopped.signal("CONT");
    }
    let batch = first.wait_batch(&id, Duration::from_secs(300), is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let num_lost = [&first, &second].iter().map(|process| process.log().matches(LOST).count()).sum();
    (published(&first, &batch).await, num_lost)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_longer_than_the_lease_kills_no_item_and_doubles_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(2_000, 3), "/v1/completions").await;
    let mut lost = 0;
    for seed in rounds(5) {
        let (got, num_lost) = stopped_run(folder.path(), &args, FAST, seed, 2_000).await;
        assert!(got == whole, "files of seed {seed} differ from those of an undisturbed run");
        lost += num_lost;
    }
    eprintln!("random stops lost {lost} leases");
    let slow = [FAST, &[SLOW_COMMIT]].concat();
    for number in 0..AIMED_ROUNDS_MAX {
        if lost > 0 {
            break;
        }
        let folder = folder.path().join("aimed");
        std::fs::create_dir_all(&folder).expect("a folder can be made");
        let (got, num_lost) = stopped_run(&folder, &args, &slow, number, 2_000).await;
        assert!(got == whole, "files of aimed round {number} differ from those of an undisturbed run");
        lost += num_lost;
    }
    assert!(lost > 0, "no stop cost a lease: the test proves nothing");
}

/// SIGTERM: nothing new starts, what is finished is kept, the exit is 0, and the next start goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_service_exits_with_zero_and_kills_no_item() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(2_000, 3), "/v1/completions").await;
    let data_dir = folder.path().join("terminated");
    let mut service = Service::start(&data_dir, &args, FAST);
    service.wait_up(Duration::from_secs(60)).await;
    let file = service.upload("input.jsonl", input(2_000, 3)).await;
    let id = service.create(&file, "/v1/completions").await;
    let begun = |batch: &Value| is_terminal(batch) || batch["request_counts"]["completed"].as_u64() > Some(0);
    service.wait_batch(&id, Duration::from_secs(120), begun).await;
    service.signal("TERM");
    let status = service.wait_exit(Duration::from_secs(60)).await;
    assert_eq!(status.code(), Some(0), "{}", service.log_tail());
    let mut service = Service::start(&data_dir, &args, FAST);
    service.wait_up(Duration::from_secs(60)).await;
    let batch = service.wait_batch(&id, Duration::from_secs(300), is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert!(published(&service, &batch).await == whole, "files differ from those of an undisturbed run");
}
