//! Gauges of the durable path: what the database says of the batches that have not ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_store::{Error, JobQuery, JobsAhead};
use overnight_types::{JobState, chain};
use tokio::sync::Mutex;

use super::MetricsPage;
use crate::state::{Inner, num_ready};

/// What was read is good for this long: sums over many shards are not free.
const KEPT: Duration = Duration::from_secs(5);
/// Longest that the database may take.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Batches read at once, and at most.
const PAGE: u32 = 500;
const PAGES_MAX: u32 = 20;

/// The states that end by themselves.
const STATES: [JobState; 4] = [JobState::Validating, JobState::InProgress, JobState::Finalizing, JobState::Cancelling];

/// The last look at the database.
#[derive(Debug, Default)]
pub(super) struct Service {
    kept: Mutex<Option<(Instant, Arc<Counts>)>>,
}

#[derive(Debug, Clone, Default)]
struct Counts {
    batches: [u64; STATES.len()],
    requests_done: [u64; 4],
    requests_pending: u64,
    requests_waiting: u64,
    shards: [u64; 3],
    oldest_seconds: f64,
    live_workers: u64,
    ready_workers: u64,
    database_bytes: u64,
}

impl Service {
    /// Adds the gauges. A database that does not answer costs its gauges alone.
    pub(super) async fn show(&self, state: &Inner, page: &mut MetricsPage) {
        let read = tokio::time::timeout(DATABASE_TIMEOUT, self.counts(state)).await;
        let counts = match read {
            Ok(Ok(counts)) => Some(counts),
            Ok(Err(error)) => {
                tracing::warn!(error = %chain(&error), "metrics go without the database");
                None
            }
            Err(_) => {
                tracing::warn!("metrics go without the database: no answer within {DATABASE_TIMEOUT:?}");
                None
            }
        };
        let up = if counts.is_some() { 1.0 } else { 0.0 };
        page.gauge("batch_database_up", "Whether the database answered this scrape", &[], up);
        if let Some(counts) = counts {
            counts.show(page);
        }
        if let Some(Ok(free)) = state.parts.free_disk.as_ref().map(|free_disk| free_disk()) {
            page.gauge("batch_disk_free_bytes", "Bytes free where database and objects lie", &[], free as f64);
        }
    }

    async fn counts(&self, state: &Inner) -> Result<Arc<Counts>, Error> {
        let mut kept = self.kept.lock().await;
        if let Some((_, counts)) = kept.as_ref().filter(|(at, _)| at.elapsed() < KEPT) {
            return Ok(Arc::clone(counts));
        }
        let counts = Arc::new(read(state).await?);
        *kept = Some((Instant::now(), Arc::clone(&counts)));
        Ok(counts)
    }
}

async fn read(state: &Inner) -> Result<Counts, Error> {
    let store = &state.parts.store;
    let now = store.now().await?;
    let workers = store.list_live_workers().await?;
    let mut counts = Counts {
        live_workers: workers.len() as u64,
        ready_workers: num_ready(&workers) as u64,
        database_bytes: store.size_bytes().await?,
        ..Counts::default()
    };
    let mut query = JobQuery { limit: PAGE, states: STATES.to_vec(), ..JobQuery::default() };
    for _ in 0..PAGES_MAX {
        let jobs = store.list_jobs(query.clone()).await?;
        for job in &jobs.rows {
            if let Some(at) = STATES.iter().position(|&state| state == job.state) {
                counts.batches[at] += 1;
            }
            counts.oldest_seconds = counts.oldest_seconds.max(now.since(job.created_at).as_secs_f64());
        }
        let ids: Vec<_> = jobs.rows.iter().map(|job| job.id).collect();
        for (_, progress) in store.find_progress_of(&ids, JobsAhead::Skip).await? {
            let done = progress.counts;
            for (sum, num) in
                counts.requests_done.iter_mut().zip([done.completed, done.failed, done.cancelled, done.expired])
            {
                *sum += num;
            }
            counts.requests_pending += done.unfinished().saturating_sub(progress.items_waiting);
            counts.requests_waiting += progress.items_waiting;
            for (sum, num) in
                counts.shards.iter_mut().zip([progress.shards_ready, progress.shards_leased, progress.shards_done])
            {
                *sum += u64::from(num);
            }
        }
        if !jobs.has_more {
            break;
        }
        query.after = ids.last().copied();
    }
    Ok(counts)
}

impl Counts {
    fn show(&self, page: &mut MetricsPage) {
        for (state, &num) in STATES.iter().zip(&self.batches) {
            let labels = [("status", state.as_str())];
            page.gauge("batch_batches", "Batches that have not ended", &labels, num as f64);
        }
        let states = ["completed", "failed", "cancelled", "expired"].into_iter().zip(self.requests_done);
        let open = [("pending", self.requests_pending), ("waiting_for_retry", self.requests_waiting)];
        for (state, num) in open.into_iter().chain(states) {
            let help = "Requests of the batches that have not ended";
            page.gauge("batch_requests", help, &[("state", state)], num as f64);
        }
        for (state, num) in ["ready", "leased", "done"].into_iter().zip(self.shards) {
            let help = "Shards of the batches that have not ended";
            page.gauge("batch_shards", help, &[("state", state)], num as f64);
        }
        let help = "Age of the oldest batch that has not ended; 0 without one";
        page.gauge("batch_queue_oldest_seconds", help, &[], self.oldest_seconds);
        let help = "Workers that reported within the last minute";
        page.gauge("batch_workers_live", help, &[], self.live_workers as f64);
        let help = "Of these, those with an engine that can answer";
        page.gauge("batch_workers_ready", help, &[], self.ready_workers as f64);
        page.gauge("batch_database_bytes", "Bytes of the database, its log included", &[], self.database_bytes as f64);
    }
}
