//! `batch serve` itself is killed at random moments until a job is done; the
//! published files must be those of a run that nobody disturbed.
//!
//! Goal: every item exactly once, in input order, with the same texts. Method: a
//! seeded generator draws when to kill; each failure prints its seed, and
//! `OVERNIGHT_TEST_SEED` runs that one again. `OVERNIGHT_TEST_ROUNDS` sets how many.
//! What a kill met is told by what it left behind; a moment that no random kill met is
//! aimed at with the job held there, so that none is passed over.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use overnight_testing::tiny_model::{TinyArch, TinyModel};
use overnight_types::{JobId, JobState, ShardIndex};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::backend::{self, Backend, Opened};
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Intake,
    Running,
    /// A segment object is there, or half of it, and no row names it.
    Checkpoint,
    Finalizing,
    Any,
}

/// Which moments kills really met, told by what they left, and how often.
type Met = BTreeMap<Moment, u32>;

/// The moments that the kills of a test must meet, each with what holds the job there
/// for long enough that a round which aims at it meets it, however fast the machine.
const HELD: &[(Moment, &str)] = &[
    (Moment::Intake, "intake::before_finish=sleep(1000)"),
    (Moment::Running, "worker::requests_submitted=sleep(20)"),
    (Moment::Checkpoint, "worker::segment_after_put=sleep(100)"),
    (Moment::Finalizing, "finalize::after_fence=sleep(1000)"),
];
/// Rounds that aim at a moment which the random ones did not meet.
const AIMED_ROUNDS_MAX: u32 = 5;

async fn wait_for(service: &mut Service, id: &str, moment: Moment, random: &mut StdRng) {
    let delay = match moment {
        Moment::Intake => Duration::from_millis(random.random_range(0..40)),
        Moment::Any => Duration::from_millis(random.random_range(0..1500)),
        Moment::Running | Moment::Checkpoint | Moment::Finalizing => {
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

/// What a killed server left: the state of its job, and how many segment objects no row names.
#[derive(Debug, Clone, Copy)]
struct Left {
    state: JobState,
    num_orphans: usize,
}

async fn left_by_kill(data_dir: &Path, id: &str) -> Left {
    let job: JobId = id.parse().expect("a batch id");
    let left = Opened::after_kill(data_dir).await;
    let state = left.store.find_job(job).await.expect("it can be read").expect("the job is there").state;
    let segments = left.store.list_segments(job, ShardIndex(0), 100_000).await.expect("it can be read");
    left.close().await;
    let num_objects = backend::num_segment_objects(data_dir, job).await;
    Left { state, num_orphans: num_objects - segments.len() }
}

fn count(met: &mut Met, left: Left, num_orphans_before: usize) {
    let moments = match left.state {
        JobState::Validating => vec![Moment::Intake],
        JobState::InProgress if left.num_orphans > num_orphans_before => vec![Moment::Running, Moment::Checkpoint],
        JobState::InProgress => vec![Moment::Running],
        JobState::Finalizing => vec![Moment::Finalizing],
        state => {
            assert!(state.is_terminal(), "nobody expires or cancels this job: {state}");
            Vec::new()
        }
    };
    for moment in moments {
        *met.entry(moment).or_default() += 1;
    }
}

/// A job, and the server that is killed while it runs.
#[derive(Debug, Clone, Copy)]
struct Round<'a> {
    data_dir: &'a Path,
    model: &'a [&'a str],
    env: &'a [(&'a str, &'a str)],
    file: &'a [u8],
}

impl Round<'_> {
    /// Runs the job with a kill at each of `moments`; returns its lines, and adds to `met`
    /// which moments the kills met.
    async fn run(&self, moments: &[Moment], random: &mut StdRng, met: &mut Met) -> (Vec<Value>, Vec<Value>) {
        let Self { data_dir, model, env, file } = *self;
        let mut service = Service::start(data_dir, model, env);
        service.wait_up(Duration::from_secs(60)).await;
        let file = service.upload("input.jsonl", file.to_vec()).await;
        let id = service.create(&file, "/v1/completions").await;
        let mut num_orphans = 0;
        for &moment in moments {
            wait_for(&mut service, &id, moment, random).await;
            service.kill();
            let left = left_by_kill(data_dir, &id).await;
            count(met, left, num_orphans);
            num_orphans = left.num_orphans;
            service = Service::start(data_dir, model, env);
            service.wait_up(Duration::from_secs(60)).await;
        }
        let batch = service.wait_batch(&id, Duration::from_secs(300), is_terminal).await;
        assert_eq!(batch["status"], "completed", "{batch}");
        published(&service, &batch).await
    }
}

fn random_moments(num_kills: u32, random: &mut StdRng) -> Vec<Moment> {
    let mut moment = |kill| match (kill, random.random_range(0..4)) {
        (0, _) => Moment::Intake,
        (_, 0) => Moment::Finalizing,
        (_, 1) => Moment::Any,
        _ => Moment::Running,
    };
    (0..num_kills).map(&mut moment).collect()
}

pub(crate) fn rounds(default: u64) -> std::ops::Range<u64> {
    if let Some(seed) = setting("OVERNIGHT_TEST_SEED") {
        let seed = seed.parse().expect("OVERNIGHT_TEST_SEED is a number");
        return seed..seed + 1;
    }
    let rounds = setting("OVERNIGHT_TEST_ROUNDS").map(|text| text.parse().expect("a number of rounds"));
    // Most of what a round meets does not depend on the back end; the first has them all.
    let fewer = if backend::backend() == Backend::Sqlite { default } else { default.div_ceil(3) };
    0..rounds.unwrap_or(fewer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_at_any_moment_loses_and_doubles_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let file = input(2_000, 3);
    let (output, errors) = undisturbed(folder.path(), &args, file.clone(), "/v1/completions").await;
    assert_eq!((output.len(), errors.len()), (1_980, 20));
    let mut met = Met::new();
    for seed in rounds(30) {
        let mut random = StdRng::seed_from_u64(seed);
        let data_dir = folder.path().join(format!("round-{seed}"));
        let num_kills = random.random_range(1..=4);
        let moments = random_moments(num_kills, &mut random);
        let round = Round { data_dir: &data_dir, model: &args, env: FAST, file: &file };
        let (got, failed) = round.run(&moments, &mut random, &mut met).await;
        assert_eq!(got, output, "output lines of seed {seed}");
        assert_eq!(failed, errors, "error lines of seed {seed}");
        backend::forget(&data_dir);
    }
    eprintln!("random kills met {met:?}");
    for &(moment, held) in HELD {
        for number in 0..AIMED_ROUNDS_MAX {
            if met.contains_key(&moment) {
                break;
            }
            let mut random = StdRng::seed_from_u64(u64::from(number));
            let data_dir = folder.path().join(format!("{moment:?}-{number}"));
            let env = [FAST, &[("FAILPOINTS", held)]].concat();
            let round = Round { data_dir: &data_dir, model: &args, env: &env, file: &file };
            let (got, failed) = round.run(&[moment], &mut random, &mut met).await;
            assert_eq!(got, output, "output lines after a kill at {moment:?}");
            assert_eq!(failed, errors, "error lines after a kill at {moment:?}");
        }
        assert!(met.contains_key(&moment), "no kill met {moment:?}, only {met:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_loses_nothing_on_a_real_model() {
    let Some(model) = crate::harness::real_model("gemma-3-270m.gguf") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let file = input(100, 6);
    let (output, errors) = undisturbed(folder.path(), &args, file.clone(), "/v1/completions").await;
    let mut met = Met::new();
    for seed in rounds(3) {
        let mut random = StdRng::seed_from_u64(seed);
        let data_dir = folder.path().join(format!("round-{seed}"));
        let round = Round { data_dir: &data_dir, model: &args, env: FAST, file: &file };
        // The second one aims at half-done work, which on this model takes seconds.
        let (got, failed) = round.run(&[Moment::Any, Moment::Running], &mut random, &mut met).await;
        assert_eq!(got, output, "output lines of seed {seed}");
        assert_eq!(failed, errors, "error lines of seed {seed}");
    }
    assert!(met.contains_key(&Moment::Running), "no kill met a running job, only {met:?}");
}
