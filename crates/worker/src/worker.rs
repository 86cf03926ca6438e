//! A worker from start to stop: its locks, its row, its timers and its pools.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use overnight_blobs::Blobs;
use overnight_store::{JobQuery, NewWorker, Store};
use overnight_types::{JobState, Limits, WorkerId, chain};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::generate::{EngineState, EngineStatus, Generate};
use crate::lifecycle::sweep::{SweepAges, SweptJobs};
use crate::lifecycle::webhook::Webhook;
use crate::lifecycle::{self, StepFailures};
use crate::mapper::Mapper;
use crate::metrics::WorkerMetrics;
use crate::planner::Desk;
use crate::renewal::{self, EngineWatch, Leases, Order};
use crate::window::{Window, WindowStatus};
use crate::{Error, WorkerConfig, lock, pool};

/// How long a worker's row is good for without a new report, divided.
const REPORT_EVERY: Duration = Duration::from_secs(20);
/// How long work that was told to hand back may take to do so.
const HAND_BACK_MAX: Duration = Duration::from_secs(10);

/// What a worker is made of.
#[derive(Debug, Clone)]
pub struct WorkerParts {
    /// The truth.
    pub store: Arc<dyn Store>,
    /// Objects.
    pub blobs: Blobs,
    /// Whatever generates; without it only lifecycle steps run.
    pub generate: Option<Arc<dyn Generate>>,
    /// Maps items to requests; needed with `generate`.
    pub mapper: Option<Mapper>,
    /// The `[worker]` section.
    pub config: WorkerConfig,
    /// Models that are configured here, loaded or not; intake knows them besides
    /// those that live workers report.
    pub known_models: Vec<String>,
    /// Models that this process serves once its engine is loaded; its row tells them, so that
    /// their batches are taken, and wait.
    pub may_load: Vec<String>,
    /// What made the outcomes, in words, for segments and manifests: engine, version, model digest.
    pub producer: String,
    /// What intake accepts and how it cuts shards.
    pub limits: Limits,
    /// Who is told of the ends of jobs.
    pub webhook: Option<Webhook>,
    /// This machine's name.
    pub host: String,
    /// The data folder, for lock files.
    pub data_dir: PathBuf,
}

/// A snapshot of a worker.
#[derive(Debug, Clone)]
pub struct WorkerStatus {
    /// Whose.
    pub id: WorkerId,
    /// Whether it stops and leases nothing new.
    pub is_stopping: bool,
    /// Leases held.
    pub leases: usize,
    /// The window.
    pub window: WindowStatus,
    /// The engine, when there is one.
    pub engine: Option<EngineStatus>,
}

/// What the parts of one worker share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: WorkerId,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) blobs: Blobs,
    pub(crate) generate: Option<Arc<dyn Generate>>,
    pub(crate) mapper: Option<Mapper>,
    pub(crate) config: WorkerConfig,
    pub(crate) known_models: Vec<String>,
    pub(crate) producer: String,
    pub(crate) limits: Limits,
    pub(crate) webhook: Option<Webhook>,
    pub(crate) window: Window,
    /// Where shards meet the engine, when there is one.
    pub(crate) desk: Option<Desk>,
    pub(crate) leases: Leases,
    pub(crate) engine_watch: Arc<EngineWatch>,
    pub(crate) retries: crate::outcome::RetryBudgets,
    pub(crate) troubles: crate::claim::Troubles,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) sweep_ages: SweepAges,
    pub(crate) swept_jobs: SweptJobs,
    pub(crate) step_failures: StepFailures,
    /// Claims end.
    pub(crate) stop_claiming: CancellationToken,
    /// Steps end at their next await.
    pub(crate) stop_steps: CancellationToken,
}

impl Shared {
    /// Models to claim shards for; `None` for any.
    pub(crate) fn models(&self) -> Option<Vec<String>> {
        let models = self.generate.as_ref().map(|generate| generate.status().models).unwrap_or_default();
        (!models.iter().any(|model| model == "*")).then_some(models)
    }

    /// How often the engine has broken down since the start.
    pub(crate) fn num_breakdowns(&self) -> u32 {
        self.generate.as_ref().map_or(0, |generate| generate.num_breakdowns())
    }

    /// Longest wait of a finished outcome.
    pub(crate) fn checkpoint_every(&self) -> Duration {
        match self.blobs.is_local() {
            true => self.config.checkpoint_every_local,
            false => self.config.checkpoint_every_remote,
        }
    }
}

/// A running worker. Dropping it stops it without grace: leases run out, or the
/// next start on this host releases them.
#[derive(Debug)]
pub struct WorkerHandle {
    shared: Arc<Shared>,
    pools: Mutex<Option<JoinHandle<()>>>,
    timers: Vec<JoinHandle<()>>,
    stop_timers: CancellationToken,
    lock: Mutex<Option<lock::WorkerLock>>,
}

/// Starts a worker: checks the settings, takes its lock file, releases the leases
/// of workers that died on this host, records itself, and starts its pools.
///
/// Errors with [`Error::Config`] on a setting out of range, [`Error::DataDir`] when
/// the lock file cannot be made, and [`Error::Store`] when the database does not
/// answer.
pub async fn start(parts: WorkerParts) -> Result<WorkerHandle, Error> {
    parts.config.validate()?;
    if parts.generate.is_some() != parts.mapper.is_some() {
        let what = "an engine and a mapper go together".to_owned();
        return Err(Error::Config { key: "engine", what });
    }
    let id = WorkerId::new();
    let lock = lock::WorkerLock::take(&parts.data_dir, id)?;
    lock::release_dead(parts.store.as_ref(), &parts.data_dir, &parts.host).await?;
    let config = parts.config;
    let window = Window::new(1, config.window_bytes_max, config.open_shards_max);
    let desk = parts.generate.as_ref().map(|generate| Desk::new(generate.clone(), &config));
    let shared = Arc::new(Shared {
        id,
        store: parts.store,
        blobs: parts.blobs,
        generate: parts.generate,
        mapper: parts.mapper,
        known_models: parts.known_models,
        producer: parts.producer,
        limits: parts.limits,
        webhook: parts.webhook,
        window,
        desk,
        leases: Leases::default(),
        engine_watch: Arc::new(EngineWatch::new(config.engine_stall_max)),
        retries: crate::outcome::RetryBudgets::default(),
        troubles: crate::claim::Troubles::default(),
        metrics: Arc::default(),
        swept_jobs: SweptJobs::default(),
        sweep_ages: SweepAges {
            orphans: config.orphans_kept_for,
            unclaimed: config.unclaimed_kept_for,
            jobs: (!config.jobs_kept_for.is_zero()).then_some(config.jobs_kept_for),
        },
        step_failures: StepFailures::default(),
        stop_claiming: CancellationToken::new(),
        stop_steps: CancellationToken::new(),
        config,
    });
    let models = row_models(&shared);
    let row = NewWorker { id, host: parts.host, pid: std::process::id(), models, may_load: parts.may_load };
    shared.store.report_worker(&row).await.map_err(Error::store("record this worker"))?;
    // A process with an engine starts two of these; who runs the items says what goes on.
    if shared.generate.is_some() {
        log_resumed(&shared).await;
    }
    let stop_timers = CancellationToken::new();
    let timers = start_timers(&shared, row, &stop_timers);
    let pools = Mutex::new(Some(tokio::spawn(pool::run(shared.clone()))));
    Ok(WorkerHandle { shared, pools, timers, stop_timers, lock: Mutex::new(Some(lock)) })
}

fn start_timers(shared: &Arc<Shared>, row: NewWorker, stop: &CancellationToken) -> Vec<JoinHandle<()>> {
    let (store, leases, config) = (&shared.store, &shared.leases, &shared.config);
    let mut timers = vec![tokio::spawn(report(shared.clone(), row, stop.clone()))];
    timers.push(tokio::spawn(lifecycle::expire_on_time(shared.clone())));
    if let Some(generate) = &shared.generate {
        let (generate, engine_watch) = (generate.clone(), shared.engine_watch.clone());
        let renewal = renewal::renew(
            store.clone(),
            shared.id,
            leases.clone(),
            generate,
            engine_watch,
            config.clone(),
            stop.clone(),
        );
        timers.push(tokio::spawn(renewal));
        let watch = renewal::watch_jobs(store.clone(), leases.clone(), config.clone(), stop.clone());
        timers.push(tokio::spawn(watch));
    }
    timers.extend(shared.desk.iter().map(|desk| tokio::spawn(desk.clone().run(stop.clone()))));
    timers
}

/// Models whose items this worker can run now: none without an engine, and none while
/// its engine loads or cannot answer.
fn row_models(shared: &Shared) -> Vec<String> {
    let status = shared.generate.as_ref().map(|generate| generate.status());
    let can_answer = |status: &EngineStatus| matches!(status.state, EngineState::Ready);
    let mut models = status.filter(can_answer).map(|status| status.models).unwrap_or_default();
    models.sort();
    models.dedup();
    models
}

/// Keeps this worker's row alive, with the models that it has by now.
async fn report(shared: Arc<Shared>, mut row: NewWorker, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(REPORT_EVERY)).await.is_some() {
        row.models = row_models(&shared);
        match tokio::time::timeout(REPORT_EVERY, shared.store.report_worker(&row)).await {
            Ok(Ok(())) => {}
            Ok(Err(err)) => tracing::warn!(error = %chain(&err), "could not report this worker"),
            Err(_) => tracing::warn!("the database did not answer this worker's report in time"),
        }
    }
}

/// Says of each interrupted job what was kept and what runs again.
async fn log_resumed(shared: &Shared) {
    let query = JobQuery { limit: 100, states: vec![JobState::InProgress], ..JobQuery::default() };
    let jobs = match shared.store.list_jobs(query).await {
        Ok(page) => page.rows,
        Err(err) => return tracing::warn!(error = %chain(&err), "could not list interrupted jobs"),
    };
    for job in jobs {
        let Ok(progress) = shared.store.find_progress(job.id).await else { continue };
        let to_go = progress.counts.unfinished();
        let done = progress.counts.total - to_go;
        if done == 0 {
            continue;
        }
        shared.metrics.resumed();
        let in_flight = match shared.store.list_shards(job.id, overnight_types::ShardIndex(0), job.num_shards).await {
            Ok(shards) => shards.iter().filter(|shard| was_in_flight(shard)).map(num_undone).sum::<u64>(),
            Err(_) => 0,
        };
        tracing::info!(
            job.id = %job.id,
            "resumed: {done} done, {to_go} to go, {in_flight} were in flight and run again"
        );
    }
}

/// Leased, or taken back from a worker that died.
fn was_in_flight(shard: &overnight_store::Shard) -> bool {
    shard.state == overnight_types::ShardState::Leased || shard.crashes > 0
}

fn num_undone(shard: &overnight_store::Shard) -> u64 {
    u64::from(shard.done.num_bits() - shard.done.count_ones())
}

impl WorkerHandle {
    /// This start's id.
    pub fn id(&self) -> WorkerId {
        self.shared.id
    }

    /// Where it stands.
    pub fn status(&self) -> WorkerStatus {
        WorkerStatus {
            id: self.shared.id,
            is_stopping: self.shared.stop_claiming.is_cancelled(),
            leases: self.shared.leases.len(),
            window: self.shared.window.status(self.shared.desk.as_ref().map(Desk::counts).unwrap_or_default()),
            engine: self.shared.generate.as_ref().map(|generate| generate.status()),
        }
    }

    /// What it did since its start.
    pub fn metrics(&self) -> Arc<WorkerMetrics> {
        self.shared.metrics.clone()
    }

    /// Stops in order: leases nothing more, lets running items finish for up to
    /// `grace`, then hands the rest back, commits what is finished, and takes its
    /// row and lock file away. Returns at most about ten seconds after `grace`.
    /// A second call returns at once.
    pub async fn shutdown(&self, grace: Duration) {
        let Some(mut pools) = self.pools.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let started_at = Instant::now();
        self.shared.stop_claiming.cancel();
        self.shared.leases.order_all(Order::Drain);
        let mut ended = tokio::time::timeout(grace, &mut pools).await.is_ok();
        if !ended {
            self.shared.leases.order_all(Order::HandBack);
            self.shared.stop_steps.cancel();
            ended = tokio::time::timeout(HAND_BACK_MAX, &mut pools).await.is_ok();
        }
        if !ended {
            tracing::error!(leases = self.shared.leases.len(), "work did not hand back in time; its leases run out");
            pools.abort();
        }
        self.stop_timers.cancel();
        match tokio::time::timeout(HAND_BACK_MAX, self.shared.store.remove_worker(self.shared.id)).await {
            Ok(Ok(())) => {}
            Ok(Err(err)) => tracing::warn!(error = %chain(&err), "could not take this worker's row away"),
            Err(_) => tracing::warn!("the database did not answer in time; this worker's row goes stale by itself"),
        }
        if ended {
            // Without its file nobody takes this worker for one that died.
            self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
        tracing::info!(worker.id = %self.shared.id, took_s = crate::seconds(started_at.elapsed()), "worker stopped");
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.stop_timers.cancel();
        self.shared.stop_claiming.cancel();
        self.timers.iter().for_each(JoinHandle::abort);
        if let Some(pools) = self.pools.get_mut().unwrap_or_else(PoisonError::into_inner) {
            pools.abort();
        }
    }
}
