//! How long the API takes to answer while a job runs: status, a page of items, the list.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::client::Client;
use crate::error::Result;

/// Pause between looks, so that looking does not become the load.
const EVERY: Duration = Duration::from_millis(50);
/// Looks kept per kind; a run of hours keeps the latest.
const KEPT_MAX: usize = 100_000;

/// Latencies by what was asked.
#[derive(Debug, Default)]
pub(super) struct Looks {
    kinds: [(&'static str, Vec<Duration>); 3],
}

impl Looks {
    /// Asks in turns until told to stop. Items are asked for all over the job.
    pub(super) async fn take(client: Client, batch: String, items: u64, stop: CancellationToken) -> Result<Self> {
        let mut looks = Self { kinds: ["status", "items", "list"].map(|name| (name, Vec::new())) };
        let (status, page) = (format!("/v1/batches/{batch}"), format!("/v1/batches/{batch}/items"));
        let mut turn: u64 = 0;
        while !stop.is_cancelled() {
            let which = (turn % 3) as usize;
            // A step that is prime to what jobs have in items: pages from everywhere.
            let after = turn.wrapping_mul(7_368_787) % items.max(1);
            turn += 1;
            let start = Instant::now();
            match which {
                0 => client.get(&status, &[]).await?,
                1 => client.get(&page, &[("after", after.to_string()), ("limit", "20".to_owned())]).await?,
                _ => client.get("/v1/batches", &[("limit", "20".to_owned())]).await?,
            };
            let kept = &mut looks.kinds[which].1;
            if kept.len() < KEPT_MAX {
                kept.push(start.elapsed());
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(EVERY) => {}
            }
        }
        Ok(looks)
    }

    /// Median, 99th percentile and most, milliseconds, with how many were taken.
    pub(super) fn figures(mut self) -> Value {
        let mut figures = json!({});
        for (name, times) in &mut self.kinds {
            times.sort_unstable();
            let at = |share: f64| {
                let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len().max(1)) - 1;
                times.get(index).map(|time| (time.as_secs_f64() * 1e5).round() / 100.0)
            };
            figures[*name] = json!({"num": times.len(), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)});
        }
        figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_times() {
        let mut looks = Looks::default();
        looks.kinds[0] = ("status", (1..=200).rev().map(Duration::from_millis).collect());
        let figures = looks.figures();
        assert_eq!(figures["status"], json!({"num": 200, "p50_ms": 100.0, "p99_ms": 198.0, "max_ms": 200.0}));
    }
}
