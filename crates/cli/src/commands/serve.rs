//! `batch serve`: API, worker and engine in one process.
//!
//! The socket answers at once; `/health` is red until the model is loaded. A first
//! SIGTERM or SIGINT drains, checkpoints and exits 0; a second one ends at once.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Args;
use overnight_api::{ApiState, FreeDisk};
use overnight_types::Limits;
use overnight_worker::WorkerHandle;
use overnight_worker::generate::Generate;
use overnight_worker::lock::DataDirUse;
use overnight_worker::mapper::Mapper;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::App;
use crate::config::{Config, EngineKind, Loaded, Setting};
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::service::door::{self, CONNECTIONS_GRACE};
use crate::service::engine::{self, Started};
use crate::service::flags::EngineFlags;
use crate::service::late::{self, LateEngine};
use crate::service::metrics::Sources;
use crate::service::{Place, Stops, clean_up, stats};
use crate::{host, logging};

/// Arguments of `batch serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 takes a free one [default: 8000]
    #[arg(long)]
    port: Option<u16>,
    /// Serve the API alone; workers are other processes
    #[arg(long)]
    no_worker: bool,
    /// Listen beyond this machine without an API key
    #[arg(long)]
    insecure: bool,
    /// Seconds between engine log lines; 0 turns them off
    #[arg(long, value_name = "SECONDS")]
    stats_interval: Option<u64>,
    #[command(flatten)]
    engine: EngineFlags,
}

impl ServeArgs {
    fn settings(&self, app: &App) -> Result<Vec<Setting>> {
        let mut settings = self.engine.settings()?;
        settings.extend(self.host.as_deref().map(|host| Setting::flag("--host", "api.host", host)));
        settings.extend(self.port.map(|port| Setting::flag("--port", "api.port", port)));
        settings
            .extend(self.stats_interval.map(|every| Setting::flag("--stats-interval", "log.stats_interval_s", every)));
        if let Some(path) = &app.globals.api_key_file {
            settings.push(Setting::flag("--api-key-file", "api.api_keys_file", crate::config::path_text(path)?));
        }
        Ok(settings)
    }
}

pub(crate) async fn run(args: ServeArgs, app: &App) -> Result {
    let mut stops = Stops::listen()?;
    let loaded = Loaded::read(&app.globals, args.settings(app)?)?;
    let config = loaded.config;
    door::refuse_open(&config, args.insecure)?;
    if !args.no_worker {
        engine::check(&config)?;
    }
    logging::start_service(&config, "serve")?;
    let place = tokio::select! {
        place = Place::open(&config, DataDirUse::Shared) => place?,
        // A database or an object store that does not answer is waited for.
        name = stops.next() => {
            tracing::info!("{name} before the start; nothing was begun");
            return Ok(());
        }
    };
    let listener = door::bind(&config, config.api.port).await?;
    let server = Server::start(&config, &place, listener, args.no_worker).await?;
    server.run(&config, &place, &mut stops).await
}

/// A server whose socket answers.
struct Server {
    late: Option<Arc<LateEngine>>,
    metrics: Arc<Sources>,
    mapper: Arc<OnceLock<Mapper>>,
    draining: CancellationToken,
    stop_api: CancellationToken,
    api: JoinHandle<std::io::Result<()>>,
    lifecycle: WorkerHandle,
    _card: host::ServerCardGuard,
}

impl Server {
    async fn start(config: &Config, place: &Place, listener: TcpListener, no_worker: bool) -> Result<Self> {
        let late = (!no_worker).then(|| LateEngine::new(engine::served_names(config), config.worker.engine_stall_max));
        let mapper = Arc::new(OnceLock::new());
        let (draining, stop_api) = (CancellationToken::new(), CancellationToken::new());
        let generate = late.clone().map(|late| late as Arc<dyn Generate>);
        let metrics = Sources::new(late.clone(), &engine::served_names(config), &config.engine.local);
        let router = overnight_api::router(ApiState {
            store: place.shared_store(),
            blobs: place.blobs.clone(),
            generate,
            mapper: mapper.clone(),
            checks_bodies: config.engine.source.kind == EngineKind::Local,
            config: config.api.clone(),
            limits: Limits::default(),
            cancel_drain: config.worker.cancel_drain,
            models: engine::known_models(config),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            draining: draining.clone(),
            free_disk: Some(free_disk(&place.data_dir)),
            measure: Some(metrics.clone().measure()),
            extra: Default::default(),
        })
        .map_err(|err| Failure::from_error("start the API", &err))?;
        let address = listener.local_addr()?;
        let url = format!("http://{address}");
        let card = host::announce(&place.data_dir, &url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]"))?;
        let (api_config, stop) = (config.api.clone(), stop_api.clone());
        let api =
            tokio::spawn(
                async move { overnight_api::serve(listener, router, &api_config, stop, CONNECTIONS_GRACE).await },
            );
        tracing::info!(
            "overnight {} listening on {url}, data in {}",
            env!("CARGO_PKG_VERSION"),
            place.data_dir.display()
        );
        // Intake, finalizing, expiry and sweep do not wait for the model.
        let may_load = if no_worker { Vec::new() } else { engine::served_names(config) };
        let lifecycle = place.start_worker(config, None, may_load).await?;
        Ok(Self { late, metrics, mapper, draining, stop_api, api, lifecycle, _card: card })
    }

    /// Loads the model beside serving, then runs until a signal.
    async fn run(mut self, config: &Config, place: &Place, stops: &mut Stops) -> Result {
        let mut worker = None;
        let mut ended = Ok(());
        let stop_stats = CancellationToken::new();
        if let Some(late) = self.late.clone() {
            let (to_load, for_load) = (config.clone(), late.clone());
            let mut loading = tokio::task::spawn_blocking(move || engine::start(&to_load, |text| for_load.stage(text)));
            tokio::select! {
                started = &mut loading => {
                    match started.unwrap_or_else(|err| Err(Failure::from_error("load the model", &err))) {
                        Ok(started) => worker = Some(self.open_engine(config, place, &late, started, &stop_stats).await?),
                        Err(failure) => ended = Err(failure),
                    }
                }
                name = stops.next() => {
                    tracing::info!("{name} while loading");
                    clean_up(stops, self.stop(None, config)).await;
                    place.store.close().await;
                    // The loading thread cannot be interrupted and holds nothing durable. It may be inside
                    // the driver, which must not be unloaded under it.
                    overnight_engine::exit_at_once(Exit::Success as u8);
                }
            }
        }
        if ended.is_ok() {
            let late = self.late.clone();
            tokio::select! {
                failure = given_up(config, late.as_ref()) => ended = Err(failure),
                name = stops.next() => tracing::info!("{name}: draining for up to {}", human::duration(config.worker.shutdown_grace)),
                stopped = &mut self.api => {
                    let reason = match stopped { Ok(Ok(())) => "it ended".to_owned(), Ok(Err(err)) => err.to_string(), Err(err) => err.to_string() };
                    ended = Err(Failure::new(Exit::Failure, format!("the API stopped: {reason}")));
                }
            }
        }
        stop_stats.cancel();
        clean_up(stops, self.stop(worker.as_ref(), config)).await;
        place.store.close().await;
        ended
    }

    async fn open_engine(
        &self,
        config: &Config,
        place: &Place,
        late: &Arc<LateEngine>,
        started: Started,
        stop_stats: &CancellationToken,
    ) -> Result<WorkerHandle> {
        // The mapper first: whoever sees a ready engine finds it.
        let _ = self.mapper.set(started.mapper.clone());
        late.set(&started);
        let generate: Arc<dyn Generate> = late.clone();
        let engine = (generate, started.mapper, started.producer.clone());
        let worker = place.start_worker(config, Some(engine), Vec::new()).await?;
        self.metrics.set_worker(&worker);
        tracing::info!("ready: {}, models {}", started.producer, engine::served_names(config).join(", "));
        if config.log.stats_interval_s > 0 {
            let every = Duration::from_secs(config.log.stats_interval_s);
            tokio::spawn(stats::log(late.clone(), place.shared_store(), every, stop_stats.clone()));
        }
        Ok(worker)
    }

    /// Stops taking work, lets running work finish, commits it, closes the socket.
    async fn stop(&mut self, worker: Option<&WorkerHandle>, config: &Config) {
        self.draining.cancel();
        let grace = config.worker.shutdown_grace;
        match worker {
            Some(worker) => {
                tokio::join!(worker.shutdown(grace), self.lifecycle.shutdown(grace));
            }
            None => self.lifecycle.shutdown(grace).await,
        }
        self.stop_api.cancel();
        if !self.api.is_finished() {
            let _ = (&mut self.api).await;
        }
        tracing::info!("stopped; nothing that was finished is lost");
    }
}

/// Keeps the engine going, where there is one; ends when that is given up.
async fn given_up(config: &Config, late: Option<&Arc<LateEngine>>) -> Failure {
    match late {
        Some(late) => late::keep(config, late).await,
        None => std::future::pending().await,
    }
}

fn free_disk(data_dir: &Path) -> FreeDisk {
    let data_dir = data_dir.to_owned();
    Arc::new(move || host::free_disk(&data_dir))
}
