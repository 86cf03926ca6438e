//! The engine's and the worker's part of `/metrics`.
//!
//! The engine's metrics have the names, types and labels of vLLM's; docs/operations.md says
//! which of those are left out and why. They begin again with an engine that is built anew.

use std::sync::{Arc, OnceLock};

use overnight_api::{Measure, MetricsPage};
use overnight_engine::{EngineConfig, EngineHandle};
use overnight_worker::WorkerHandle;
use overnight_worker::generate::{EngineState, Generate};
use overnight_worker::metrics::{Histogram, WorkerCounts, WorkerMetrics};

use super::late::LateEngine;

/// What a page is made of.
#[derive(Debug)]
pub(crate) struct Sources {
    late: Option<Arc<LateEngine>>,
    /// As vLLM's label `model_name`.
    model: String,
    config: EngineConfig,
    /// The one that runs shards; the other one of a server has nothing to tell.
    worker: OnceLock<Arc<WorkerMetrics>>,
}

impl Sources {
    /// Of this engine, when the process has one; the settings are shown with it.
    pub(crate) fn new(late: Option<Arc<LateEngine>>, models: &[String], config: &EngineConfig) -> Arc<Self> {
        let model = models.first().cloned().unwrap_or_default();
        Arc::new(Self { late, model, config: config.clone(), worker: OnceLock::new() })
    }

    /// This worker runs the shards. The first one stays.
    pub(crate) fn set_worker(&self, worker: &WorkerHandle) {
        let _ = self.worker.set(worker.metrics());
    }

    /// Fills pages from here on.
    pub(crate) fn measure(self: Arc<Self>) -> Measure {
        Arc::new(move |page| self.show(page))
    }

    fn show(&self, page: &mut MetricsPage) {
        let Some(late) = &self.late else { return };
        let ready = if late.status().state == EngineState::Ready { 1.0 } else { 0.0 };
        page.gauge("batch_engine_ready", "Whether the engine can answer", &[], ready);
        let breakdowns = f64::from(late.num_breakdowns());
        page.counter("batch_engine_breakdowns_total", "Breakdowns of the engine", &[], breakdowns);
        if let Some(handle) = late.handle() {
            engine(page, &handle, &self.model, &self.config);
        }
        worker(page, &self.worker.get().cloned().unwrap_or_default().counts());
    }
}

/// What vLLM tells of an engine.
fn engine(page: &mut MetricsPage, handle: &EngineHandle, model: &str, config: &EngineConfig) {
    let (status, metrics, limits) = (handle.status(), handle.metrics(), handle.limits());
    let base = [("model_name", model), ("engine", "0")];
    let with = |name: &'static str, value: &'static str| [base[0], base[1], (name, value)];
    let mut gauge = |name, help, value: f64| page.gauge(name, help, &base, value);
    gauge("vllm:num_requests_running", "Sequences in the running step", status.num_running.into());
    gauge("vllm:num_requests_waiting", "Sequences that wait", status.num_waiting.into());
    gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", status.kv_cache_usage.into());
    let mut counter = |name, help, value: u64| page.counter(name, help, &base, value as f64);
    let looked_up = "Prompt tokens looked up in the prefix cache";
    counter("vllm:prefix_cache_queries_total", looked_up, status.prefix_cache_queries);
    counter("vllm:prefix_cache_hits_total", "Of these, found", status.prefix_cache_hits);
    let preempted = "Sequences whose KV blocks were taken";
    counter("vllm:num_preemptions_total", preempted, status.num_preemptions);
    counter("vllm:prompt_tokens_total", "Prompt tokens, cached ones included", metrics.prompt_tokens);
    counter("vllm:prompt_tokens_cached_total", "Of these, found in the prefix cache", metrics.cached_tokens);
    counter("vllm:generation_tokens_total", "Tokens generated", status.generation_tokens);
    let computed = metrics.prompt_tokens - metrics.cached_tokens;
    for (source, tokens) in [("local_compute", computed), ("local_cache_hit", metrics.cached_tokens)] {
        let labels = with("source", source);
        page.counter("vllm:prompt_tokens_by_source_total", "Prompt tokens by source", &labels, tokens as f64);
    }
    let ends = status.num_finished;
    for (reason, num) in [("stop", ends.stop), ("length", ends.length), ("abort", ends.abort), ("error", ends.error)] {
        let labels = with("finished_reason", reason);
        page.counter("vllm:request_success_total", "Requests by how they ended", &labels, num as f64);
    }
    let mut histogram = |name, help, of: &Histogram| {
        page.histogram(name, help, &base, of.cumulative(), (of.sum(), of.count()));
    };
    let m = &metrics;
    histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", &m.request_prompt_tokens);
    histogram("vllm:request_generation_tokens", "Tokens generated for a request", &m.request_generation_tokens);
    histogram("vllm:iteration_tokens_total", "Tokens of a step", &m.iteration_tokens);
    histogram(
        "vllm:request_max_num_generation_tokens",
        "Most tokens of a choice of a request; each choice is a request here",
        &m.request_generation_tokens,
    );
    histogram("vllm:request_params_max_tokens", "max_tokens of a request", &m.request_max_tokens);
    histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", &m.time_to_first_token);
    histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request", &m.inter_token_latency);
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "The mean of that over a request, without its first token",
        &m.time_per_output_token,
    );
    histogram("vllm:e2e_request_latency_seconds", "From arrival to the end", &m.e2e_latency);
    histogram("vllm:request_queue_time_seconds", "From arrival to the first step", &m.queue_time);
    histogram("vllm:request_inference_time_seconds", "From the first step to the end", &m.inference_time);
    histogram("vllm:request_prefill_time_seconds", "From the first step to the first token", &m.prefill_time);
    histogram("vllm:request_decode_time_seconds", "From the first token to the last", &m.decode_time);
    histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were computed",
        &m.request_computed_tokens,
    );
    let num = m.request_prompt_tokens.count();
    let help = "Choices asked for by a request; each choice is a request here";
    let bounds = [1.0, 2.0, 5.0, 10.0, 20.0];
    page.histogram("vllm:request_params_n", help, &base, bounds.map(|bound| (bound, num)), (num as f64, num));
    let word = |is_on: bool| if is_on { "True" } else { "False" };
    let numbers = [limits.block_size.to_string(), limits.num_blocks.to_string(), limits.max_model_len.to_string()];
    let share = config.gpu_memory_utilization.to_string();
    let labels = [
        base[0],
        base[1],
        ("block_size", &numbers[0]),
        ("num_gpu_blocks", &numbers[1]),
        ("max_model_len", &numbers[2]),
        ("enable_prefix_caching", word(config.enable_prefix_caching)),
        ("gpu_memory_utilization", &share),
        ("cache_dtype", "auto"),
    ];
    page.gauge("vllm:cache_config_info", "Always 1; the KV cache's settings", &labels, 1.0);
}

/// What the worker did.
fn worker(page: &mut MetricsPage, counts: &WorkerCounts) {
    for (code, num) in &counts.outcomes {
        let outcome = if code == "ok" { "completed" } else { "failed" };
        let labels = [("outcome", outcome), ("code", code.as_str())];
        page.counter("batch_request_outcomes_total", "Final outcomes committed here", &labels, *num as f64);
    }
    let mut counter = |name, help, value: u64| page.counter(name, help, &[], value as f64);
    counter("batch_retries_total", "Failed tries that are followed by another one", counts.retries);
    counter("batch_segments_total", "Segments committed", counts.segments);
    counter("batch_segment_bytes_total", "Bytes of these", counts.segment_bytes);
    counter("batch_leases_total", "Shards leased", counts.leases);
    counter("batch_lease_expired_total", "Of these, after a lease that ran out", counts.leases_expired);
    let again = "Requests of such shards without an outcome: they may have run before";
    counter("batch_requests_reexecuted_total", again, counts.requests_reexecuted);
    counter("batch_lease_lost_total", "Late writes that the database refused", counts.leases_lost);
    let resumed = "Batches with outcomes already that this start went on with";
    counter("batch_resume_total", resumed, counts.resumed);
    let mut histogram = |name, help, of: &Histogram| {
        page.histogram(name, help, &[], of.cumulative(), (of.sum(), of.count()));
    };
    histogram("batch_checkpoint_seconds", "Of a checkpoint: object, then transaction", &counts.checkpoint);
    histogram("batch_db_write_seconds", "Of its transaction", &counts.commit);
}
