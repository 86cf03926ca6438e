//! The line that operators read every ten seconds: vLLM's wording and order, so that
//! existing parsers read it; `Batch: …` is ours, at the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_store::{JobQuery, Store};
use overnight_types::JobState;
use overnight_worker::generate::Generate;
use tokio_util::sync::CancellationToken;

use super::late::LateEngine;

/// Writes the line until `stop`; nothing on an idle engine.
pub(crate) async fn log(generate: Arc<LateEngine>, store: Arc<dyn Store>, every: Duration, stop: CancellationToken) {
    let mut last = (Instant::now(), generate.status());
    let mut prefix_before = prefix(&generate);
    let mut was_idle = true;
    while stop.run_until_cancelled(tokio::time::sleep(every)).await.is_some() {
        let now = (Instant::now(), generate.status());
        let prefix_now = prefix(&generate);
        let seconds = now.0.duration_since(last.0).as_secs_f64().max(0.001);
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let prompt = rate(now.1.prompt_tokens, last.1.prompt_tokens);
        let generation = rate(now.1.generation_tokens, last.1.generation_tokens);
        let queries = prefix_now.0.saturating_sub(prefix_before.0);
        let hits = prefix_now.1.saturating_sub(prefix_before.1);
        let hit_rate = if queries == 0 { 0.0 } else { 100.0 * hits as f64 / queries as f64 };
        let is_idle = now.1.is_idle() && prompt == 0.0 && generation == 0.0;
        let text = format!(
            "Engine 000: Avg prompt throughput: {prompt:.1} tokens/s, Avg generation throughput: {generation:.1} tokens/s, \
             Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {:.1}%, Prefix cache hit rate: {hit_rate:.1}%{}",
            now.1.num_running,
            now.1.num_waiting,
            100.0 * now.1.kv_cache_usage,
            if is_idle { String::new() } else { batch_part(store.as_ref()).await }
        );
        if is_idle && was_idle {
            tracing::debug!("{text}");
        } else {
            tracing::info!("{text}");
        }
        was_idle = is_idle;
        last = now;
        prefix_before = prefix_now;
    }
}

fn prefix(generate: &LateEngine) -> (u64, u64) {
    let status = generate.handle().map(|handle| handle.status());
    status.map_or((0, 0), |status| (status.prefix_cache_queries, status.prefix_cache_hits))
}

/// Counts over the jobs that run; empty when the database does not answer.
async fn batch_part(store: &dyn Store) -> String {
    let query = JobQuery { limit: 100, states: vec![JobState::InProgress], ..JobQuery::default() };
    let Ok(page) = store.list_jobs(query).await else { return String::new() };
    let ids: Vec<_> = page.rows.iter().map(|job| job.id).collect();
    let Ok(progress) = store.find_progress_of(&ids).await else { return String::new() };
    let (mut total, mut done, mut failed) = (0, 0, 0);
    for (_, progress) in progress {
        total += progress.counts.total;
        done += progress.counts.total - progress.counts.unfinished();
        failed += progress.counts.failed;
    }
    if total == 0 { String::new() } else { format!(", Batch: {done}/{total}, failed {failed}") }
}
