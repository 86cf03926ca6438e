//! `batch serve` itself is killed at random moments until a job is done; the
//! published files must be those of a run that nobody disturbed.
//!
//! Goal: every item exactly once, in input order, with the same texts. Method: a
//! seeded generator draws when to kill; each failure prints its seed, and
//! `OVERNIGHT_TEST_SEED` runs that one again. `OVERNIGHT_TEST_ROUNDS` sets how many.

use std::path::{Path, PathBuf};
use std::time::Duration;

use overnight_testing::tiny_model::{TinyArch, TinyModel};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::harness::{Service, is_terminal, setting};

/// Short leases, so that a round does not wait for them; many small checkpoints.
pub(crate) const FAST: &[(&str, &str)] = &[
    ("OVERNIGHT_WORKER__LEASE_TTL", "1500ms"),
    ("OVERNIGHT_WORKER__RENEW_EVERY", "300ms"),
    ("OVERNIGHT_WORKER__CHECKPOINT_EVERY_LOCAL", "30ms"),
    ("OVERNIGHT_WORKER__CHECKPOINT_ITEMS_MAX", "48"),
    ("OVERNIGHT_WORKER__POLL_EVERY", "50ms"),
];

/// A folder with a tiny model of random weights, made once per test.
pub(crate) fn tiny_model(folder: &Path) -> PathBuf {
    let path = folder.join("tiny");
    TinyModel::new(TinyArch::Qwen3).write(&path).expect("a tiny checkpoint can be written");
    path
}

/// `num_items` completions of a few tokens; every 97th is refused by the engine.
pub(crate) fn input(num_items: usize, max_tokens: u32) -> Vec<u8> {
    let mut text = String::new();
    for index in 0..num_items {
        let prompt = if index % 97 == 96 { String::new() } else { format!("review {} says", index % 700) };
        let line = json!({
            "custom_id": format!("item-{index:05}"), "method": "POST", "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true},
        });
        text.push_str(&line.to_string());
        text.push('\n');
    }
    text.into_bytes()
}

/// What must be equal between two runs: everything but ids, times and cache hits.
pub(crate) fn essence(line: &Value) -> Value {
    let response = &line["response"];
    json!([
        line["custom_id"],
        line["error"],
        response["status_code"],
        response["body"]["choices"],
        response["body"]["usage"]["completion_tokens"],
        response["body"]["error"]["code"],
    ])
}

pub(crate) async fn published(service: &Service, batch: &Value) -> (Vec<Value>, Vec<Value>) {
    let output = service.file_lines(&batch["output_file_id"]).await;
    let errors = service.file_lines(&batch["error_file_id"]).await;
    let counts = &batch["request_counts"];
    assert_eq!(output.len() + errors.len(), counts["total"].as_u64().expect("total") as usize, "closed accounting");
    assert_eq!(output.len(), counts["completed"].as_u64().expect("completed") as usize, "{batch}");
    assert_eq!(errors.len(), counts["failed"].as_u64().expect("failed") as usize, "{batch}");
    let essences = |lines: &[Value]| lines.iter().map(essence).collect();
    (essences(&output), essences(&errors))
}

/// One job on a server that nobody disturbs.
pub(crate) async fn undisturbed(
    folder: &Path,
    model: &[&str],
    file: Vec<u8>,
    endpoint: &str,
) -> (Vec<Value>, Vec<Value>) {
    let mut service = Service::start(&folder.join("undisturbed"), model, FAST);
    service.wait_up(Duration::from_secs(60)).await;
    let file = service.upload("input.jsonl", file).await;
    let id = service.create(&file, endpoint).await;
    let batch = service.wait_batch(&id, Duration::from_secs(300), is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    published(&service, &batch).await
}

/// Which moment of the job a kill aims at.
#[derive(Debug, Clone, Copy)]
enum Moment {
    Intake,
    Running,
    Finalizing,
    Any,
}

async fn wait_for(service: &mut Service, id: &str, moment: Moment, random: &mut StdRng) {
    let delay = match moment {
        Moment::Intake => Duration::from_millis(random.random_range(0..40)),
        Moment::Any => Duration::from_millis(random.random_range(0..1500)),
        Moment::Running | Moment::Finalizing => {
            let share = random.random_range(0.0..0.95);
            let wanted = |batch: &Value| match moment {
                Moment::Finalizing => is_terminal(batch) || batch["status"] == "finalizing",
                _ => {
                    let counts = &batch["outcome_counts"];
                    let total = batch["request_counts"]["total"].as_f64().unwrap_or(0.0);
                    let open = counts["processing"].as_f64().unwrap_or(0.0);
                    is_terminal(batch) || (total > 0.0 && total - open >= share * total)
                }
            };
            service.wait_batch(id, Duration::from_secs(240), wanted).await;
            Duration::from_micros(random.random_range(0..15_000))
        }
    };
    tokio::time::sleep(delay).await;
}

/// Runs one job with `num_kills` kills; returns its lines and how many kills met it unfinished.
async fn disturbed(
    data_dir: &Path,
    model: &[&str],
    env: &[(&str, &str)],
    file: Vec<u8>,
    num_kills: u32,
    random: &mut StdRng,
) -> (Vec<Value>, Vec<Value>, u32) {
    let mut service = Service::start(data_dir, model, env);
    service.wait_up(Duration::from_secs(60)).await;
    let file = service.upload("input.jsonl", file).await;
    let id = service.create(&file, "/v1/completions").await;
    let mut num_met = 0;
    for kill in 0..num_kills {
        let moment = match (kill, random.random_range(0..4)) {
            (0, _) => Moment::Intake,
            (_, 0) => Moment::Finalizing,
            (_, 1) => Moment::Any,
            _ => Moment::Running,
        };
        wait_for(&mut service, &id, moment, random).await;
        num_met += u32::from(!service.batch(&id).await.is_some_and(|batch| is_terminal(&batch)));
        service.kill();
        service = Service::start(data_dir, model, env);
        service.wait_up(Duration::from_secs(60)).await;
    }
    let batch = service.wait_batch(&id, Duration::from_secs(300), is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let (output, errors) = published(&service, &batch).await;
    (output, errors, num_met)
}

pub(crate) fn rounds(default: u64) -> std::ops::Range<u64> {
    if let Some(seed) = setting("OVERNIGHT_TEST_SEED") {
        let seed = seed.parse().expect("OVERNIGHT_TEST_SEED is a number");
        return seed..seed + 1;
    }
    let rounds = setting("OVERNIGHT_TEST_ROUNDS").map(|text| text.parse().expect("a number of rounds"));
    0..rounds.unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_at_any_moment_loses_and_doubles_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let (output, errors) = undisturbed(folder.path(), &args, input(2_000, 3), "/v1/completions").await;
    assert_eq!((output.len(), errors.len()), (1_980, 20));
    let mut num_met = 0;
    for seed in rounds(30) {
        let mut random = StdRng::seed_from_u64(seed);
        let data_dir = folder.path().join(format!("round-{seed}"));
        let num_kills = random.random_range(1..=4);
        let (got, failed, met) = disturbed(&data_dir, &args, FAST, input(2_000, 3), num_kills, &mut random).await;
        assert_eq!(got, output, "output lines of seed {seed}");
        assert_eq!(failed, errors, "error lines of seed {seed}");
        num_met += met;
        std::fs::remove_dir_all(&data_dir).expect("the round's folder can go");
    }
    eprintln!("{num_met} kills met an unfinished job");
    assert!(num_met > 0, "no kill met an unfinished job: the test proves nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_loses_nothing_on_a_real_model() {
    let Some(model) = crate::harness::real_model("gemma-3-270m.gguf") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let (output, errors) = undisturbed(folder.path(), &args, input(100, 6), "/v1/completions").await;
    for seed in rounds(3) {
        let mut random = StdRng::seed_from_u64(seed);
        let data_dir = folder.path().join(format!("round-{seed}"));
        let (got, failed, _) = disturbed(&data_dir, &args, FAST, input(100, 6), 2, &mut random).await;
        assert_eq!(got, output, "output lines of seed {seed}");
        assert_eq!(failed, errors, "error lines of seed {seed}");
    }
}
