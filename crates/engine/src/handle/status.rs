//! What the engine shows of itself.

use std::time::Instant;

use crate::request::FinishReason;

/// Where the engine stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineState {
    /// Takes requests.
    Ready,
    /// Broke down, for this reason; it must be built anew.
    Poisoned(String),
    /// Was shut down.
    Stopped,
}

/// A snapshot of the engine, from the end of its last step. Counters run from the start.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineStatus {
    /// Where it stands.
    pub state: EngineState,
    /// Sequences that run.
    pub num_running: u32,
    /// Sequences that wait.
    pub num_waiting: u32,
    /// Share of the KV blocks that sequences hold, 0…1.
    pub kv_cache_usage: f32,
    /// When a step ended, or work came to an idle engine.
    pub last_progress: Instant,
    /// Steps computed.
    pub num_steps: u64,
    /// Tokens computed in prefill.
    pub prompt_tokens: u64,
    /// Tokens chosen.
    pub generation_tokens: u64,
    /// Of these, in steps without prefill.
    pub decode_only_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Of these, found.
    pub prefix_cache_hits: u64,
    /// Sequences whose blocks were taken.
    pub num_preemptions: u64,
    /// Requests ended by `stop`, `length`, `abort`, and failed ones.
    pub num_finished: FinishCounts,
    /// Seconds inside steps that had prefill tokens, and inside the others.
    pub prefill_seconds: f64,
    /// See above.
    pub decode_seconds: f64,
}

impl EngineStatus {
    /// Of an engine that has done nothing yet.
    pub(super) fn new() -> Self {
        Self {
            state: EngineState::Ready,
            num_running: 0,
            num_waiting: 0,
            kv_cache_usage: 0.0,
            last_progress: Instant::now(),
            num_steps: 0,
            prompt_tokens: 0,
            generation_tokens: 0,
            decode_only_tokens: 0,
            prefix_cache_queries: 0,
            prefix_cache_hits: 0,
            num_preemptions: 0,
            num_finished: FinishCounts::default(),
            prefill_seconds: 0.0,
            decode_seconds: 0.0,
        }
    }
}

/// Ends of requests, by kind. A stop text found counts as `stop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FinishCounts {
    /// End of sequence, stop token or stop text.
    pub stop: u64,
    /// `max_tokens` or the context's end.
    pub length: u64,
    /// Cancelled.
    pub abort: u64,
    /// Failed by an error.
    pub error: u64,
}

impl FinishCounts {
    /// Counts an end; `None` is a failure.
    pub(super) fn count(&mut self, reason: Option<FinishReason>) {
        match reason {
            Some(FinishReason::Stop) => self.stop += 1,
            Some(FinishReason::Length) => self.length += 1,
            Some(FinishReason::Abort) => self.abort += 1,
            None => self.error += 1,
        }
    }
}
