//! How long requests waited and ran, and how large they were, as histograms over fixed buckets.
//!
//! Owns the bookkeeping per request; runs beside the output thread, so that the engine's thread
//! only notes a moment per step. Invariant: a request is counted once, at its end. Names,
//! labels and text of the metrics belong to whoever shows them.
//! Buckets and meanings are those of vLLM's metrics of the same names.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::output::EndedHere;
use crate::request::{RequestId, StopRules};
use crate::step::SequenceOutput;

/// Bounds for seconds until a first token.
const FIRST_TOKEN_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Bounds for seconds between tokens.
const BETWEEN_TOKENS_SECONDS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Bounds for seconds of a whole request or a phase of it.
const REQUEST_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Bounds for the tokens of a step.
const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0];

/// Counts of values by upper bound, and their sum.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    bounds: Arc<[f64]>,
    /// By bound, and at the end what is above all of them.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    /// An empty one; `bounds` rise.
    pub fn new(bounds: impl Into<Arc<[f64]>>) -> Self {
        let bounds = bounds.into();
        debug_assert!(bounds.is_sorted(), "bounds rise: {bounds:?}");
        Self { counts: vec![0; bounds.len() + 1], bounds, sum: 0.0 }
    }

    /// Counts a value.
    pub fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
    }

    /// Values so far.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// Each bound with the number of values up to it.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let mut so_far = 0;
        self.bounds.iter().zip(&self.counts).map(move |(&bound, count)| {
            so_far += count;
            (bound, so_far)
        })
    }
}

/// What requests and steps were like since the start. Times are seconds by the monotonic clock.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineMetrics {
    /// Prompt tokens of requests whose prefill is done, cached ones included.
    pub prompt_tokens: u64,
    /// Of these, found in the prefix cache.
    pub cached_tokens: u64,
    /// Prompt and output tokens of each step.
    pub iteration_tokens: Histogram,
    /// From arrival to the first token.
    pub time_to_first_token: Histogram,
    /// Between two tokens of a request.
    pub inter_token_latency: Histogram,
    /// The mean of that over a request, without its first token.
    pub time_per_output_token: Histogram,
    /// From arrival to the end.
    pub e2e_latency: Histogram,
    /// From arrival to the first step with the request in it.
    pub queue_time: Histogram,
    /// From there to the end.
    pub inference_time: Histogram,
    /// From there to the first token.
    pub prefill_time: Histogram,
    /// From the first token to the end.
    pub decode_time: Histogram,
    /// Prompt tokens of a request.
    pub request_prompt_tokens: Histogram,
    /// Of them, those computed.
    pub request_computed_tokens: Histogram,
    /// Tokens generated for a request.
    pub request_generation_tokens: Histogram,
    /// Tokens that a request allowed.
    pub request_max_tokens: Histogram,
}

impl EngineMetrics {
    /// Empty, for an engine whose sequences have at most `max_model_len` tokens.
    pub fn new(max_model_len: u32) -> Self {
        let tokens: Arc<[f64]> = one_two_five(max_model_len).into();
        let tokens = || Histogram::new(tokens.clone());
        let seconds = |bounds: &[f64]| Histogram::new(bounds.to_vec());
        Self {
            prompt_tokens: 0,
            cached_tokens: 0,
            iteration_tokens: seconds(STEP_TOKENS),
            time_to_first_token: seconds(FIRST_TOKEN_SECONDS),
            inter_token_latency: seconds(BETWEEN_TOKENS_SECONDS),
            time_per_output_token: seconds(BETWEEN_TOKENS_SECONDS),
            e2e_latency: seconds(REQUEST_SECONDS),
            queue_time: seconds(REQUEST_SECONDS),
            inference_time: seconds(REQUEST_SECONDS),
            prefill_time: seconds(REQUEST_SECONDS),
            decode_time: seconds(REQUEST_SECONDS),
            request_prompt_tokens: tokens(),
            request_computed_tokens: tokens(),
            request_generation_tokens: tokens(),
            request_max_tokens: tokens(),
        }
    }
}

/// 1, 2, 5, 10, 20, 50, … up to `max`.
fn one_two_five(max: u32) -> Vec<f64> {
    let decades = std::iter::successors(Some(1.0f64), |decade| Some(decade * 10.0));
    let bounds = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|digit| digit * decade));
    bounds.take_while(|&bound| bound <= f64::from(max.max(1))).collect()
}

/// A request that the engine took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// Which.
    pub id: RequestId,
    /// When.
    pub at: Instant,
    /// Tokens that it allows.
    pub max_tokens: u32,
}

impl Arrival {
    /// Of a request taken now.
    pub fn new(id: RequestId, stop: &StopRules, at: Instant) -> Self {
        Self { id, at, max_tokens: stop.max_tokens }
    }
}

/// What is noted of a step while the engine goes on.
#[derive(Debug, Clone, PartialEq)]
pub struct StepMark {
    /// When it was planned.
    pub started_at: Instant,
    /// When its outputs were there.
    pub ended_at: Instant,
    /// Tokens computed, and rows that decode.
    pub num_tokens: u32,
    /// Requests that it computed as the first one.
    pub admitted: Vec<RequestId>,
    /// Outputs up to and including its own, of those handed over together.
    pub num_outputs: usize,
}

#[derive(Debug)]
struct Live {
    arrival: Arrival,
    scheduled_at: Option<Instant>,
    first_token_at: Option<Instant>,
    last_at: Instant,
    num_tokens: u32,
    /// Prompt tokens and those found in the cache, from its first output on.
    prompt: Option<(u32, u32)>,
}

/// Follows requests from their arrival to their end.
#[derive(Debug)]
pub struct Recorder {
    live: HashMap<RequestId, Live>,
    metrics: EngineMetrics,
}

impl Recorder {
    /// Nothing seen yet.
    pub fn new(max_model_len: u32) -> Self {
        Self { live: HashMap::new(), metrics: EngineMetrics::new(max_model_len) }
    }

    /// What was seen.
    pub fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }

    /// Follows a request from here on.
    pub fn arrive(&mut self, arrival: Arrival) {
        let live = Live {
            arrival,
            scheduled_at: None,
            first_token_at: None,
            last_at: arrival.at,
            num_tokens: 0,
            prompt: None,
        };
        self.live.insert(arrival.id, live);
    }

    /// Takes the outputs of these steps; those behind the last step ended now, at `now`.
    pub fn take(&mut self, outputs: &[SequenceOutput], steps: &[StepMark], now: Instant) {
        let mut start = 0;
        for step in steps {
            if step.num_tokens > 0 {
                self.metrics.iteration_tokens.observe(f64::from(step.num_tokens));
            }
            for id in &step.admitted {
                if let Some(live) = self.live.get_mut(id) {
                    live.scheduled_at.get_or_insert(step.started_at);
                }
            }
            for output in &outputs[start..step.num_outputs] {
                self.take_output(output, step.ended_at);
            }
            start = step.num_outputs;
        }
        for output in &outputs[start..] {
            self.take_output(output, now);
        }
    }

    fn take_output(&mut self, output: &SequenceOutput, at: Instant) {
        let Some(live) = self.live.get_mut(&output.id) else { return };
        if live.prompt.is_none() && live.scheduled_at.is_some() {
            live.prompt = Some((output.num_prompt_tokens, output.num_cached_tokens));
            self.metrics.prompt_tokens += u64::from(output.num_prompt_tokens);
            self.metrics.cached_tokens += u64::from(output.num_cached_tokens);
        }
        if output.token.is_some() {
            let since_last = seconds(live.last_at, at);
            match live.first_token_at {
                None => {
                    live.first_token_at = Some(at);
                    self.metrics.time_to_first_token.observe(since_last);
                }
                Some(_) => self.metrics.inter_token_latency.observe(since_last),
            }
            live.last_at = at;
            live.num_tokens += 1;
        }
        match &output.end {
            Some(Ok(_)) => self.end(output.id, at),
            Some(Err(_)) => self.forget(output.id),
            None => {}
        }
    }

    /// Takes requests that ended on the way out; those that are known to have ended are not counted again.
    pub fn take_ended(&mut self, ended: &[EndedHere], now: Instant) {
        for EndedHere { id, reason } in ended {
            match reason {
                Some(_) => self.end(*id, now),
                None => self.forget(*id),
            }
        }
    }

    /// Counts a request by whatever finish reason. One that never ran has no times to tell.
    fn end(&mut self, id: RequestId, at: Instant) {
        let Some(live) = self.live.remove(&id) else { return };
        let (Some(scheduled_at), Some((num_prompt, num_cached))) = (live.scheduled_at, live.prompt) else { return };
        let metrics = &mut self.metrics;
        metrics.queue_time.observe(seconds(live.arrival.at, scheduled_at));
        metrics.e2e_latency.observe(seconds(live.arrival.at, at));
        metrics.inference_time.observe(seconds(scheduled_at, at));
        metrics.prefill_time.observe(seconds(scheduled_at, live.first_token_at.unwrap_or(at)));
        if let Some(first) = live.first_token_at {
            let decode = seconds(first, live.last_at);
            metrics.decode_time.observe(decode);
            if live.num_tokens > 1 {
                metrics.time_per_output_token.observe(decode / f64::from(live.num_tokens - 1));
            }
        }
        metrics.request_prompt_tokens.observe(f64::from(num_prompt));
        metrics.request_computed_tokens.observe(f64::from(num_prompt - num_cached.min(num_prompt)));
        metrics.request_generation_tokens.observe(f64::from(live.num_tokens));
        metrics.request_max_tokens.observe(f64::from(live.arrival.max_tokens));
    }

    /// Follows a request no more: it failed.
    fn forget(&mut self, id: RequestId) {
        self.live.remove(&id);
    }
}

/// Marks of two threads may lie a little crosswise.
fn seconds(from: Instant, to: Instant) -> f64 {
    to.checked_duration_since(from).unwrap_or(Duration::ZERO).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Finish, FinishReason};

    fn output(id: RequestId, token: Option<u32>, ends: bool) -> SequenceOutput {
        let finish = Finish {
            reason: FinishReason::Length,
            stop_reason: None,
            num_prompt_tokens: 100,
            num_cached_tokens: 64,
            num_output_tokens: 3,
        };
        SequenceOutput {
            id,
            token,
            logprobs: None,
            prompt_logprobs: None,
            num_prompt_tokens: 100,
            num_cached_tokens: 64,
            end: ends.then_some(Ok(finish)),
            is_watched: false,
        }
    }

    fn mark(at: Instant, ms: u64, num_tokens: u32, num_outputs: usize) -> StepMark {
        let ended_at = at + Duration::from_millis(ms);
        StepMark {
            started_at: ended_at - Duration::from_millis(10),
            ended_at,
            num_tokens,
            admitted: Vec::new(),
            num_outputs,
        }
    }

    #[test]
    fn values_fall_under_the_first_bound_that_is_not_below_them() {
        let mut histogram = Histogram::new([1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 9.0] {
            histogram.observe(value);
        }
        assert_eq!(histogram.cumulative().collect::<Vec<_>>(), [(1.0, 2), (2.0, 4)]);
        assert_eq!((histogram.count(), histogram.sum()), (5, 14.0));
    }

    #[test]
    fn bounds_of_tokens_are_one_two_five_up_to_the_context() {
        assert_eq!(one_two_five(4096).last(), Some(&2000.0));
        assert_eq!(one_two_five(20), [1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(one_two_five(0), [1.0]);
    }

    /// Four steps handed over in two rounds: queue 20 ms, first token at 130 ms, then 100 and 200 ms.
    #[test]
    fn each_phase_of_a_request_is_timed_by_the_steps_that_it_was_in() {
        let (id, at) = (RequestId::next(), Instant::now());
        let mut recorder = Recorder::new(4096);
        recorder.arrive(Arrival { id, at, max_tokens: 3 });
        let prefill = StepMark { admitted: vec![id], ..mark(at, 30, 36, 0) };
        let tokens = [output(id, Some(1), false), output(id, Some(2), false)];
        recorder.take(&tokens, &[prefill, mark(at, 130, 1, 1), mark(at, 230, 1, 2)], at);
        recorder.take(&[output(id, Some(3), true)], &[mark(at, 430, 1, 1)], at);
        let metrics = recorder.metrics();
        let sum = |histogram: &Histogram| (histogram.count(), (histogram.sum() * 1e6).round() / 1e6);
        assert_eq!(sum(&metrics.queue_time), (1, 0.020));
        assert_eq!(sum(&metrics.time_to_first_token), (1, 0.130));
        assert_eq!(sum(&metrics.inter_token_latency), (2, 0.300));
        assert_eq!(sum(&metrics.time_per_output_token), (1, 0.150));
        assert_eq!(sum(&metrics.prefill_time), (1, 0.110));
        assert_eq!(sum(&metrics.decode_time), (1, 0.300));
        assert_eq!(sum(&metrics.inference_time), (1, 0.410));
        assert_eq!(sum(&metrics.e2e_latency), (1, 0.430));
        assert_eq!(sum(&metrics.iteration_tokens), (4, 39.0));
        assert_eq!((metrics.prompt_tokens, metrics.cached_tokens), (100, 64));
        assert_eq!(sum(&metrics.request_computed_tokens), (1, 36.0));
        assert_eq!(sum(&metrics.request_generation_tokens), (1, 3.0));
        assert!(recorder.live.is_empty(), "an ended request is followed no more");
    }

    #[test]
    fn cancelled_and_failed_requests_that_never_ran_leave_no_times() {
        let (id, at) = (RequestId::next(), Instant::now());
        let mut recorder = Recorder::new(64);
        recorder.arrive(Arrival { id, at, max_tokens: 3 });
        recorder.take(&[output(id, None, true)], &[], at);
        assert!(recorder.live.is_empty());
        assert_eq!(recorder.metrics(), &EngineMetrics::new(64));
    }
}
