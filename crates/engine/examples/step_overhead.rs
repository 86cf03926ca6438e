//! What a step costs beside the model: plan, sampling and commit at many decode rows, over
//! a model that computes nothing. `cargo run --release -p overnight-engine --example step_overhead`

use std::io::Write;
use std::time::{Duration, Instant};

use overnight_engine::door::Limits;
use overnight_engine::model::{Forward, ModelShape, StepInput};
use overnight_engine::request::Class;
use overnight_engine::scheduler::{Scheduler, SchedulerLimits};
use overnight_engine::sequence::Sequence;
use overnight_engine::step::StepPlan;
use overnight_engine::{Engine, EngineConfig, Error, Request, RequestId, SamplingParams, StopRules};

const NUM_ROWS: u32 = 1_024;
const PROMPT_LEN: u32 = 512;
const NUM_STEPS: usize = 400;
const BLOCK_SIZE: u32 = 64;
const NUM_BLOCKS: u32 = 64 * NUM_ROWS;

/// Likes token 1 at every position.
struct Null(ModelShape, Vec<f32>);

impl Forward for Null {
    fn shape(&self) -> &ModelShape {
        &self.0
    }

    fn allocate_kv_cache(&mut self, _: u32, _: u32) -> Result<(), Error> {
        Ok(())
    }

    fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error> {
        Ok(&self.1[..step.logits_tokens.len() * 4])
    }
}

fn request(salt: u32) -> Request {
    Request {
        id: RequestId::next(),
        class: Class::Job,
        prompt: (0..PROMPT_LEN).map(|at| if at == 0 { salt } else { at } % 4).collect(),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        stop: StopRules { max_tokens: 2_000, ignore_eos: true, ..StopRules::default() },
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        stream: false,
    }
}

/// Median and worst of the calls.
fn report(what: &str, mut times: Vec<Duration>) -> std::io::Result<()> {
    times.sort_unstable();
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    writeln!(std::io::stdout(), "{what}: median {median:?}, worst {worst:?}")
}

fn scheduler_alone(num_waiting: u32) -> std::io::Result<()> {
    let mut scheduler = Scheduler::new(SchedulerLimits {
        max_num_seqs: NUM_ROWS,
        max_num_batched_tokens: 8_192,
        block_size: BLOCK_SIZE,
        num_blocks: NUM_BLOCKS,
        enable_prefix_caching: true,
        expected_output_min: 256,
    });
    for arrival in 0..NUM_ROWS + num_waiting {
        scheduler.add(Sequence::new(request(arrival), u64::from(arrival), 4_096, &[]));
    }
    let mut plan = StepPlan::default();
    let (mut planned, mut committed) = (Vec::new(), Vec::new());
    while planned.len() < NUM_STEPS {
        let started = Instant::now();
        scheduler.plan(&mut plan);
        let took = started.elapsed();
        let is_full = plan.num_decode_rows == NUM_ROWS;
        let started = Instant::now();
        for row in &plan.rows {
            scheduler.note_started(row.sequence, row.samples.then_some(row.logits_start));
            if row.samples {
                scheduler.sequence_mut(row.sequence).push_token(1, &[]);
            }
            scheduler.publish(row.sequence, scheduler.sequence(row.sequence).num_computed);
        }
        if is_full {
            planned.push(took);
            committed.push(started.elapsed());
        }
    }
    report(&format!("plan, {NUM_ROWS} decode rows, {num_waiting} waiting"), planned)?;
    report(&format!("commit, {NUM_ROWS} decode rows, {num_waiting} waiting"), committed)
}

fn whole_step() -> Result<(), Box<dyn std::error::Error>> {
    let shape = ModelShape {
        architecture: "Null".to_owned(),
        vocab_size: 4,
        max_position: 4_096,
        eos_token_ids: Vec::new(),
        kv_bytes_per_token: 1,
        weights_bytes: 0,
    };
    let config = EngineConfig {
        max_num_seqs: Some(NUM_ROWS),
        max_num_batched_tokens: Some(8_192),
        num_gpu_blocks_override: Some(NUM_BLOCKS),
        block_size: BLOCK_SIZE,
        ..EngineConfig::default()
    };
    let limits = Limits::resolve(&shape, &config, None, None)?;
    let logits = [0.0, 1.0, 0.0, 0.0].repeat(8_192);
    let mut engine = Engine::new(Box::new(Null(shape, logits)), limits, true)?;
    for salt in 0..NUM_ROWS {
        engine.add(request(salt))?;
    }
    let mut times = Vec::new();
    while times.len() < NUM_STEPS {
        let started = Instant::now();
        let output = engine.step()?;
        if output.num_decode_rows == NUM_ROWS {
            times.push(started.elapsed());
        }
    }
    Ok(report(&format!("whole step without the model, {NUM_ROWS} decode rows"), times)?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    scheduler_alone(0)?;
    scheduler_alone(3 * NUM_ROWS)?;
    whole_step()
}
