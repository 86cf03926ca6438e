//! The parts that `serve`, `worker` and `run` are built of: the data folder with its
//! lock, database and objects; the engine, loaded in the background; signals.
//!
//! Invariant: nothing is opened before the folder's lock is held, and the lock is
//! given back last.

#[cfg(feature = "failpoints")]
pub(crate) mod crash;
pub(crate) mod database;
pub(crate) mod door;
pub(crate) mod engine;
pub(crate) mod flags;
pub(crate) mod late;
pub(crate) mod metrics;
pub(crate) mod objects;
pub(crate) mod stats;

use std::path::PathBuf;
use std::sync::Arc;

use overnight_blobs::Blobs;
use overnight_store::Store;
use overnight_types::Limits;
use overnight_worker::generate::Generate;
use overnight_worker::lifecycle::webhook::{Webhook, WebhookConfig};
use overnight_worker::lock::{DataDirLock, DataDirUse};
use overnight_worker::mapper::Mapper;
use overnight_worker::{WorkerHandle, WorkerParts};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Config;
use crate::error::{Exit, Failure, Result};
use crate::host;
use crate::service::database::{Database, Opening};

/// The data folder, opened.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) data_dir: PathBuf,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) blobs: Blobs,
    webhook: Option<Webhook>,
    _lock: DataDirLock,
}

impl Place {
    /// Takes the folder's lock and opens database and objects.
    pub(crate) async fn open(config: &Config, usage: DataDirUse) -> Result<Self> {
        let data_dir = std::path::absolute(config.data_dir())?;
        let lock = DataDirLock::take(&data_dir, usage).map_err(|err| {
            let code = if matches!(err, overnight_worker::Error::DataDirInUse { .. }) {
                "data_dir_in_use"
            } else {
                "data_dir"
            };
            Failure::new(Exit::Failure, overnight_types::chain(&err)).code(code)
        })?;
        let store = Database::of(config)?.open(Opening::Serve).await?;
        let blobs = objects::open(config, &data_dir, &*store).await?;
        let webhook = webhook(config)?;
        Ok(Self { data_dir, store, blobs, webhook, _lock: lock })
    }

    /// The store as everybody takes it.
    pub(crate) fn shared_store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// What a worker on this place is made of.
    pub(crate) fn worker_parts(
        &self,
        config: &Config,
        engine: Option<(Arc<dyn Generate>, Mapper, String)>,
        may_load: Vec<String>,
    ) -> WorkerParts {
        let (generate, mapper, producer) = match engine {
            Some((generate, mapper, producer)) => (Some(generate), Some(mapper), producer),
            None => (None, None, producer("no engine")),
        };
        WorkerParts {
            store: self.shared_store(),
            blobs: self.blobs.clone(),
            generate,
            mapper,
            config: config.worker.clone(),
            known_models: engine::known_models(config),
            may_load,
            producer,
            limits: Limits::default(),
            webhook: self.webhook.clone(),
            host: host::name(),
            data_dir: self.data_dir.clone(),
        }
    }

    /// Starts a worker here, which serves `may_load` once its process has loaded its engine.
    pub(crate) async fn start_worker(
        &self,
        config: &Config,
        engine: Option<(Arc<dyn Generate>, Mapper, String)>,
        may_load: Vec<String>,
    ) -> Result<WorkerHandle> {
        overnight_worker::start(self.worker_parts(config, engine, may_load))
            .await
            .map_err(|err| Failure::from_error("start the worker", &err))
    }
}

/// Who is told of the ends of jobs, with the secrets of `[webhook]` and its file.
fn webhook(config: &Config) -> Result<Option<Webhook>> {
    let section = &config.webhook;
    let Some(url) = &section.url else { return Ok(None) };
    let mut secrets: Vec<String> = section.secrets.iter().map(|secret| secret.expose().to_owned()).collect();
    if let Some(path) = &section.secrets_file {
        let text = std::fs::read_to_string(path).map_err(|err| {
            Failure::new(Exit::Usage, format!("could not read webhook.secrets_file {}: {err}", path.display()))
        })?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        secrets.extend(lines.map(str::to_owned));
    }
    let (retry_min, retry_max) = (section.retry_min, section.retry_max);
    let config = WebhookConfig { url: url.expose().to_owned(), secrets, retry_min, retry_max };
    let webhook = Webhook::new(&config).map_err(|err| match err {
        overnight_worker::Error::Config { key, what } => {
            Failure::usage(format!("invalid setting webhook.{key}: {what}")).code("invalid_config")
        }
        other => Failure::from_error("set up the webhook", &other),
    });
    webhook.map(Some)
}

/// Who makes outcomes, in words, for segments and manifests.
pub(crate) fn producer(engine: &str) -> String {
    format!("overnight {} · {engine}", env!("CARGO_PKG_VERSION"))
}

/// Resolves at SIGTERM or SIGINT, again at the next one.
#[derive(Debug)]
pub(crate) struct Stops {
    terminate: Signal,
    interrupt: Signal,
}

impl Stops {
    pub(crate) fn listen() -> Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next one's name.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Runs the clean-up; another signal ends the process at once.
pub(crate) async fn clean_up(stops: &mut Stops, cleaning: impl Future<Output = ()>) {
    tokio::select! {
        () = cleaning => {}
        name = stops.next() => {
            tracing::warn!("{name} again: stopping at once; leases are released at the next start");
            // Not by the handlers of libraries: a GPU that hangs would keep them.
            overnight_engine::exit_at_once(Exit::Interrupted as u8);
        }
    }
}
