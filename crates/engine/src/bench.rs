//! Throughput of an engine on token-id prompts, as vLLM's `bench throughput` reports it.
//!
//! Prompts are random ids from a seed, all of one length, with a shared beginning when
//! asked for; every request generates exactly `output_len` tokens. The engine's start is
//! not in the figures. Reads the clock; belongs to no request's path.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use tokio::sync::mpsc;

use crate::Error;
use crate::handle::EngineHandle;
use crate::output::{Event, Sink};
use crate::request::{Class, Request, RequestError, RequestId, SamplingParams, StopRules};
use crate::sampler::philox;

/// What to run.
#[derive(Debug, Clone, PartialEq)]
pub struct ThroughputOptions {
    /// Prompt tokens of each request, the shared ones included; at least 1.
    pub input_len: u32,
    /// Tokens that each request generates; at least 1.
    pub output_len: u32,
    /// Requests.
    pub num_prompts: u32,
    /// Of each prompt, tokens that all have in common; at most `input_len`.
    pub shared_prefix_len: u32,
    /// How tokens are chosen; the seed is replaced per request.
    pub sampling: SamplingParams,
    /// Of prompts and sampling.
    pub seed: u64,
}

/// What came of it. The first five fields are those of vLLM's `--output-json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ThroughputReport {
    /// Seconds from the first submission to the last answer.
    pub elapsed_time: f64,
    /// Requests answered.
    pub num_requests: u32,
    /// Prompt and output tokens.
    pub total_num_tokens: u64,
    /// Requests a second.
    pub requests_per_second: f64,
    /// Prompt and output tokens a second.
    pub tokens_per_second: f64,
    /// Output tokens.
    pub output_num_tokens: u64,
    /// Output tokens a second.
    pub output_tokens_per_second: f64,
    /// Prompt tokens found in the prefix cache.
    pub cached_num_tokens: u64,
    /// Steps computed.
    pub num_steps: u64,
    /// Sequences preempted.
    pub num_preemptions: u64,
    /// Seconds in steps that had prefill tokens, decode rows beside them included.
    pub prefill_time: f64,
    /// Prompt tokens computed, per second of `prefill_time`.
    pub prefill_tokens_per_second: f64,
    /// Seconds in steps of decode rows only.
    pub decode_time: f64,
    /// Output tokens of such steps, per second of `decode_time`.
    pub decode_tokens_per_second: f64,
}

/// A throughput run that could not be finished.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The engine takes no requests.
    #[error("the engine does not serve the run")]
    Engine(#[source] Error),
    /// A request was refused or failed; the options ask for too much.
    #[error("a request of the run failed")]
    Request(#[source] RequestError),
    /// An option is out of range.
    #[error("invalid option {option}: {what}")]
    Option {
        /// Which.
        option: &'static str,
        /// Value and range.
        what: String,
    },
    /// The engine went away in the middle.
    #[error("the engine went away before the last answer")]
    Lost,
}

/// Submits all prompts at once and waits for the last answer. The figures are those of
/// this run alone when nothing else uses the engine meanwhile.
pub async fn run_throughput(
    handle: &EngineHandle,
    options: &ThroughputOptions,
) -> Result<ThroughputReport, BenchError> {
    let requests = requests(options, handle.limits().vocab_size)?;
    let num_requests = options.num_prompts;
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let sink: Sink = Arc::new(move |events| sender.send(events).is_ok());
    let before = handle.status();
    let started = Instant::now();
    let collect = async move {
        let (mut num_ended, mut num_output, mut num_cached) = (0, 0, 0);
        while num_ended < num_requests {
            for event in receiver.recv().await.ok_or(BenchError::Lost)? {
                match event {
                    Event::Begun { .. } => {}
                    Event::Failed { error, .. } => return Err(BenchError::Request(error)),
                    Event::Output(output) => {
                        if let Some(finish) = output.finish {
                            num_ended += 1;
                            num_output += u64::from(finish.num_output_tokens);
                            num_cached += u64::from(finish.num_cached_tokens);
                        }
                    }
                }
            }
        }
        Ok((num_output, num_cached))
    };
    let submit = async { handle.submit(requests, sink).await.map_err(BenchError::Engine) };
    let ((), (num_output, num_cached)) = tokio::try_join!(submit, collect)?;
    let elapsed = started.elapsed().as_secs_f64();
    let after = handle.status();
    let prefill_time = after.prefill_seconds - before.prefill_seconds;
    let decode_time = after.decode_seconds - before.decode_seconds;
    let total = u64::from(options.input_len) * u64::from(num_requests) + num_output;
    Ok(ThroughputReport {
        elapsed_time: elapsed,
        num_requests,
        total_num_tokens: total,
        requests_per_second: f64::from(num_requests) / elapsed,
        tokens_per_second: total as f64 / elapsed,
        output_num_tokens: num_output,
        output_tokens_per_second: num_output as f64 / elapsed,
        cached_num_tokens: num_cached,
        num_steps: after.num_steps - before.num_steps,
        num_preemptions: after.num_preemptions - before.num_preemptions,
        prefill_time,
        prefill_tokens_per_second: rate(after.prompt_tokens - before.prompt_tokens, prefill_time),
        decode_time,
        decode_tokens_per_second: rate(after.decode_only_tokens - before.decode_only_tokens, decode_time),
    })
}

fn rate(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// Random prompts below `vocab_size`, never all alike.
fn requests(options: &ThroughputOptions, vocab_size: u32) -> Result<Vec<Request>, BenchError> {
    let ThroughputOptions { input_len, output_len, num_prompts, shared_prefix_len, seed, .. } = *options;
    for (option, value) in [("input_len", input_len), ("output_len", output_len), ("num_prompts", num_prompts)] {
        if value == 0 {
            return Err(BenchError::Option { option, what: "0; at least 1 is needed".to_owned() });
        }
    }
    if shared_prefix_len > input_len {
        let what = format!("{shared_prefix_len} is above input_len = {input_len}");
        return Err(BenchError::Option { option: "shared_prefix_len", what });
    }
    let token = |stream: u32, position: u32| {
        let words = philox::philox4x32([position, stream, 0, 1], [seed as u32, (seed >> 32) as u32]);
        ((u64::from(words[0]) * u64::from(vocab_size)) >> 32) as u32
    };
    let prompt = |index: u32| {
        let own = (shared_prefix_len..input_len).map(move |position| token(index + 1, position));
        (0..shared_prefix_len).map(|position| token(0, position)).chain(own).collect()
    };
    let requests = (0..num_prompts).map(|index| Request {
        id: RequestId::next(),
        class: Class::Job,
        prompt: prompt(index),
        sampling: SamplingParams { seed: seed.wrapping_add(u64::from(index)), ..options.sampling.clone() },
        stop: StopRules { max_tokens: output_len, ignore_eos: true, ..StopRules::default() },
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        stream: false,
    });
    Ok(requests.collect())
}
