//! The line that operators read every ten seconds: vLLM's wording and order, so that
//! existing parsers read it; `Batch: …` is ours, at the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_store::{JobQuery, JobsAhead, Store};
use overnight_types::JobState;
use overnight_worker::generate::Generate;
use tokio_util::sync::CancellationToken;

use super::late::LateEngine;
use crate::output::human;

/// Writes the line until `stop`; nothing on an idle engine, and no more than a debug line.
pub(crate) async fn log(generate: Arc<LateEngine>, store: Arc<dyn Store>, every: Duration, stop: CancellationToken) {
    let mut last = Reading::of(&generate);
    let mut last_batch = None;
    let mut was_idle = true;
    while stop.run_until_cancelled(tokio::time::sleep(every)).await.is_some() {
        let now = Reading::of(&generate);
        let is_idle = now.is_idle_since(&last);
        let batch = if is_idle { None } else { Batch::read(store.as_ref()).await };
        let text = line(&last, &now, batch.as_ref().map(|batch| batch.part(last_batch.as_ref(), every)));
        if is_idle && was_idle {
            tracing::debug!("{text}");
        } else {
            tracing::info!("{text}");
        }
        (last, last_batch, was_idle) = (now, batch, is_idle);
    }
}

/// What the engine has counted at a moment.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    prompt_tokens: u64,
    generation_tokens: u64,
    num_running: u32,
    num_waiting: u32,
    kv_cache_usage: f32,
    /// Prompt tokens looked up in the prefix cache, and those found.
    prefix: (u64, u64),
}

impl Reading {
    fn of(generate: &LateEngine) -> Self {
        let status = generate.status();
        let local = generate.handle().map(|handle| handle.status());
        Self {
            at: Instant::now(),
            prompt_tokens: status.prompt_tokens,
            generation_tokens: status.generation_tokens,
            num_running: status.num_running,
            num_waiting: status.num_waiting,
            kv_cache_usage: status.kv_cache_usage,
            prefix: local.map_or((0, 0), |status| (status.prefix_cache_queries, status.prefix_cache_hits)),
        }
    }

    /// Nothing is there now, and nothing was computed since then.
    fn is_idle_since(&self, before: &Self) -> bool {
        let is_empty = self.num_running == 0 && self.num_waiting == 0;
        is_empty && self.prompt_tokens <= before.prompt_tokens && self.generation_tokens <= before.generation_tokens
    }
}

/// The line for the time between two readings. An engine that was built anew counts from zero.
fn line(before: &Reading, now: &Reading, batch: Option<String>) -> String {
    let seconds = now.at.duration_since(before.at).as_secs_f64().max(0.001);
    let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    let queries = now.prefix.0.saturating_sub(before.prefix.0);
    let hits = now.prefix.1.saturating_sub(before.prefix.1);
    let hit_rate = if queries == 0 { 0.0 } else { 100.0 * hits as f64 / queries as f64 };
    format!(
        "Engine 000: Avg prompt throughput: {:.1} tokens/s, Avg generation throughput: {:.1} tokens/s, \
         Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {:.1}%, Prefix cache hit rate: {hit_rate:.1}%{}",
        rate(now.prompt_tokens, before.prompt_tokens),
        rate(now.generation_tokens, before.generation_tokens),
        now.num_running,
        now.num_waiting,
        100.0 * now.kv_cache_usage,
        batch.unwrap_or_default(),
    )
}

/// Sums over the jobs that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Batch {
    total: u64,
    done: u64,
    failed: u64,
}

impl Batch {
    /// `None` without one, and when the database does not answer.
    async fn read(store: &dyn Store) -> Option<Self> {
        let query = JobQuery { limit: 100, states: vec![JobState::InProgress], ..JobQuery::default() };
        let ids: Vec<_> = store.list_jobs(query).await.ok()?.rows.iter().map(|job| job.id).collect();
        let mut sums = Self { total: 0, done: 0, failed: 0 };
        for (_, progress) in store.find_progress_of(&ids, JobsAhead::Skip).await.ok()? {
            sums.total += progress.counts.total;
            sums.done += progress.counts.total - progress.counts.unfinished();
            sums.failed += progress.counts.failed;
        }
        (sums.total > 0).then_some(sums)
    }

    /// Our end of the line; how long it will take by the pace since `before`.
    fn part(&self, before: Option<&Self>, elapsed: Duration) -> String {
        let Self { total, done, failed } = self;
        let num_new =
            before.filter(|before| before.total == *total).map_or(0, |before| done.saturating_sub(before.done));
        let eta = match num_new {
            0 => String::new(),
            _ => {
                let seconds = elapsed.as_secs_f64() * (total - done) as f64 / num_new as f64;
                format!(", ETA {}", human::duration(Duration::from_secs(seconds.ceil() as u64)))
            }
        };
        format!(", Batch: {done}/{total}, failed {failed}{eta}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(at: Instant, prompt_tokens: u64, generation_tokens: u64) -> Reading {
        Reading {
            at,
            prompt_tokens,
            generation_tokens,
            num_running: 212,
            num_waiting: 40,
            kv_cache_usage: 0.718,
            prefix: (prompt_tokens * 2, prompt_tokens),
        }
    }

    #[test]
    fn line_has_the_words_and_the_order_of_vllm() {
        let at = Instant::now();
        let (before, now) = (reading(at, 100, 7), reading(at + Duration::from_secs(10), 51_334, 22_114));
        let batch = Batch { total: 100_000, done: 41_208, failed: 39 };
        let earlier = Batch { done: 37_208, ..batch };
        assert_eq!(
            line(&before, &now, Some(batch.part(Some(&earlier), Duration::from_secs(10)))),
            "Engine 000: Avg prompt throughput: 5123.4 tokens/s, Avg generation throughput: 2210.7 tokens/s, \
             Running: 212 reqs, Waiting: 40 reqs, GPU KV cache usage: 71.8%, Prefix cache hit rate: 50.0%, \
             Batch: 41208/100000, failed 39, ETA 2m27s"
        );
    }

    #[test]
    fn eta_is_told_only_by_a_pace_of_the_same_batches() {
        let batch = Batch { total: 10, done: 5, failed: 0 };
        for before in [None, Some(&batch), Some(&Batch { total: 9, done: 1, failed: 0 })] {
            assert_eq!(batch.part(before, Duration::from_secs(10)), ", Batch: 5/10, failed 0");
        }
    }

    #[test]
    fn engine_is_idle_only_when_it_computed_nothing_since() {
        let at = Instant::now();
        let empty = Reading { num_running: 0, num_waiting: 0, ..reading(at, 100, 7) };
        assert!(empty.is_idle_since(&empty));
        assert!(!Reading { generation_tokens: 8, ..empty }.is_idle_since(&empty), "it ended within the interval");
        assert!(!Reading { num_waiting: 1, ..empty }.is_idle_since(&empty));
        // Built anew meanwhile.
        assert!(Reading { prompt_tokens: 0, generation_tokens: 0, ..empty }.is_idle_since(&empty));
    }
}
