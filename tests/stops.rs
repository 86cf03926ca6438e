//! Two worker processes on one data folder; one is stopped for longer than its
//! lease and wakes up late. The late writer must change nothing.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use crate::harness::{Service, is_terminal};
use crate::kill::{input, published, rounds, tiny_model, undisturbed};

const SHORT_LEASE: &[(&str, &str)] = &[
    ("OVERNIGHT_WORKER__LEASE_TTL", "1200ms"),
    ("OVERNIGHT_WORKER__CHECKPOINT_INTERVAL", "30ms"),
    ("OVERNIGHT_WORKER__CHECKPOINT_ITEMS", "48"),
    ("OVERNIGHT_WORKER__POLL_INTERVAL", "50ms"),
];

async fn stopped_run(
    folder: &std::path::Path,
    args: &[&str],
    env: &[(&str, &str)],
    seed: u64,
    num_items: usize,
) -> (Vec<Value>, Vec<Value>) {
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
        tokio::time::sleep(Duration::from_millis(random.random_range(1_500..2_500))).await;
        stopped.signal("CONT");
    }
    let batch = first.wait_batch(&id, Duration::from_secs(300), is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    published(&first, &batch).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_longer_than_the_lease_kills_no_item_and_doubles_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(2_000, 3), "/v1/completions").await;
    for seed in rounds(5) {
        let got = stopped_run(folder.path(), &args, SHORT_LEASE, seed, 2_000).await;
        assert!(got == whole, "files of seed {seed} differ from those of an undisturbed run");
    }
}
