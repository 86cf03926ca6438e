//! What handlers share: the parts that `cli` hands in, and this server's own gates.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use overnight_blobs::Blobs;
use overnight_store::{LiveWorker, Store};
use overnight_types::{Limits, Timestamp};
use overnight_worker::generate::Generate;
use overnight_worker::mapper::Mapper;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::auth::Keys;
use crate::config::ApiConfig;
use crate::error::{ApiError, Error, Result};
use crate::metrics::{Measure, Metrics};

/// Bytes free where objects and database live; an error text when it cannot be told.
pub type FreeDisk = Arc<dyn Fn() -> Result<u64, String> + Send + Sync>;

/// The parts of the server, given by whoever starts it.
#[derive(Clone)]
pub struct ApiState {
    /// Durable state.
    pub store: Arc<dyn Store>,
    /// Bytes of files and segments.
    pub blobs: Blobs,
    /// What answers online requests; `None` on a front without an engine.
    pub generate: Option<Arc<dyn Generate>>,
    /// Makes requests of bodies for `generate`; empty until the model is loaded.
    pub mapper: Arc<OnceLock<Mapper>>,
    /// Whether bodies are judged by the local engine's rules while `mapper` is empty; a
    /// remote engine judges them itself.
    pub checks_bodies: bool,
    /// The `[api]` section.
    pub config: ApiConfig,
    /// Limits of intake.
    pub limits: Limits,
    /// How long a cancelled job's running items may finish (`worker.cancel_drain`).
    pub cancel_drain: Duration,
    /// Names of configured models; live workers' and the engine's come on top.
    pub models: Vec<String>,
    /// Shown by `/version` and in `system_fingerprint`.
    pub version: String,
    /// Cancelled when the server starts to drain: writing routes then answer 503 and streams end.
    pub draining: CancellationToken,
    /// The free-disk guard's look at the disk; `None` turns the guard off.
    pub free_disk: Option<FreeDisk>,
    /// Metrics of other parts (engine, worker) for `/metrics`.
    pub measure: Option<Measure>,
    /// Routes of others (the dashboard) that the same keys guard.
    pub extra: axum::Router,
}

impl fmt::Debug for ApiState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiState")
            .field("store", &self.store)
            .field("config", &self.config)
            .field("models", &self.models)
            .finish_non_exhaustive()
    }
}

/// What handlers hold.
pub(crate) type Shared = Arc<Inner>;

/// [`ApiState`] with the gates of this server.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) parts: ApiState,
    pub(crate) keys: Keys,
    pub(crate) started_at: Timestamp,
    pub(crate) online: Gate,
    pub(crate) uploads: Gate,
    pub(crate) event_streams: Gate,
    pub(crate) metrics: Metrics,
    /// Asked for by every page of batches, so kept for a moment.
    workers: Mutex<Option<(Instant, Arc<[LiveWorker]>)>>,
}

/// How long the list of live workers is kept.
const WORKERS_KEPT: Duration = Duration::from_secs(1);

impl Inner {
    pub(crate) fn new(parts: ApiState) -> Result<Self, Error> {
        parts.config.validate()?;
        let config = &parts.config;
        let gate = |what, max, setting| Gate::new(what, max, setting, config.retry_after);
        Ok(Self {
            keys: Keys::load(config)?,
            started_at: Timestamp::now(),
            online: gate("online requests", config.online_requests_max, "api.online_requests_max"),
            uploads: gate("uploads", config.uploads_max, "api.uploads_max"),
            event_streams: gate("event streams", config.event_streams_max, "api.event_streams_max"),
            metrics: Metrics::new(),
            workers: Mutex::new(None),
            parts,
        })
    }

    /// Live workers, at most a second old.
    pub(crate) async fn live_workers(&self) -> Result<Arc<[LiveWorker]>> {
        let mut kept = self.workers.lock().await;
        if let Some((_, workers)) = kept.as_ref().filter(|(at, _)| at.elapsed() < WORKERS_KEPT) {
            return Ok(Arc::clone(workers));
        }
        let workers: Arc<[LiveWorker]> = self.parts.store.list_live_workers().await?.into();
        *kept = Some((Instant::now(), Arc::clone(&workers)));
        Ok(workers)
    }

    /// Names of the configuration, of this process's engine and of live workers; `*`
    /// among them when something takes any name.
    pub(crate) async fn known_models(&self) -> Result<BTreeSet<String>> {
        let mut names: BTreeSet<String> = self.parts.models.iter().cloned().collect();
        names.extend(self.parts.generate.iter().flat_map(|generate| generate.status().models));
        names.extend(self.live_workers().await?.iter().flat_map(|live| live.worker.models.clone()));
        Ok(names)
    }

    pub(crate) fn retry_after(&self) -> Duration {
        self.parts.config.retry_after
    }

    /// 503 while the disk is too full to take more; a remote store has no disk of ours.
    pub(crate) fn check_free_disk(&self) -> Result<()> {
        self.check_free_disk_for(0)
    }

    /// The same when `more_bytes` are about to come.
    pub(crate) fn check_free_disk_for(&self, more_bytes: u64) -> Result<()> {
        let min = self.parts.config.free_disk_bytes_min;
        let Some(free_disk) = self.parts.free_disk.as_ref().filter(|_| min > 0 && self.parts.blobs.is_local()) else {
            return Ok(());
        };
        let unavailable = |cause| ApiError::unavailable("disk_full", self.retry_after()).cause(cause);
        match free_disk() {
            Ok(free) if free >= min.saturating_add(more_bytes) => Ok(()),
            Ok(free) => {
                Err(unavailable(format!("{free} bytes free, {more_bytes} to come, api.free_disk_bytes_min is {min}")))
            }
            Err(reason) => Err(unavailable(reason)),
        }
    }
}

/// Workers that can run items now: a row names the models of an engine that can answer.
pub(crate) fn num_ready(workers: &[LiveWorker]) -> usize {
    workers.iter().filter(|live| !live.worker.models.is_empty()).count()
}

/// Lets a bounded number in at once and turns the others away.
#[derive(Debug)]
pub(crate) struct Gate {
    semaphore: Arc<Semaphore>,
    what: &'static str,
    max: u32,
    setting: &'static str,
    retry_after: Duration,
}

impl Gate {
    fn new(what: &'static str, max: u32, setting: &'static str, retry_after: Duration) -> Self {
        Self { semaphore: Arc::new(Semaphore::new(max as usize)), what, max, setting, retry_after }
    }

    /// A place until the permit is dropped, or 429.
    pub(crate) fn enter(&self) -> Result<OwnedSemaphorePermit> {
        Arc::clone(&self.semaphore).try_acquire_owned().map_err(|_| {
            let Self { what, max, setting, .. } = self;
            ApiError::slow_down(format!("already {max} {what} at once, the limit set by {setting}"), self.retry_after)
        })
    }
}
