//! `batch worker`: a worker and its engine, no API; a door for probes and scrapers on request.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use overnight_worker::WorkerHandle;
use overnight_worker::lock::DataDirUse;
use tokio_util::sync::CancellationToken;

use crate::App;
use crate::config::{Config, Loaded, Setting};
use crate::error::{Exit, Failure, Result};
use crate::logging;
use crate::output::human;
use crate::service::door::{self, Door};
use crate::service::flags::EngineFlags;
use crate::service::late::{self, LateEngine};
use crate::service::metrics::Sources;
use crate::service::{Place, Stops, clean_up, engine, stats};

/// Arguments of `batch worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Answer /health, /ping, /version and /metrics on this port; 0 takes a free one [default: none]
    #[arg(long)]
    port: Option<u16>,
    /// Address of that port [default: 127.0.0.1]
    #[arg(long)]
    host: Option<String>,
    /// Listen beyond this machine without an API key
    #[arg(long)]
    insecure: bool,
    /// Seconds between engine log lines; 0 turns them off
    #[arg(long, value_name = "SECONDS")]
    stats_interval: Option<u64>,
    #[command(flatten)]
    engine: EngineFlags,
}

impl WorkerArgs {
    fn settings(&self, app: &App) -> Result<Vec<Setting>> {
        let mut settings = self.engine.settings()?;
        settings.extend(self.port.map(|port| Setting::flag("--port", "api.worker_port", port)));
        settings.extend(self.host.as_deref().map(|host| Setting::flag("--host", "api.host", host)));
        settings
            .extend(self.stats_interval.map(|every| Setting::flag("--stats-interval", "log.stats_interval_s", every)));
        if let Some(path) = &app.globals.api_key_file {
            settings.push(Setting::flag("--api-key-file", "api.api_keys_file", crate::config::path_text(path)?));
        }
        Ok(settings)
    }
}

pub(crate) async fn run(args: WorkerArgs, app: &App) -> Result {
    let mut stops = Stops::listen()?;
    let config = Loaded::read(&app.globals, args.settings(app)?)?.config;
    if config.api.worker_port.is_some() {
        door::refuse_open(&config, args.insecure)?;
    }
    engine::check(&config)?;
    logging::start_service(&config, "worker")?;
    let place = tokio::select! {
        place = Place::open(&config, DataDirUse::Shared) => place?,
        // A database or an object store that does not answer is waited for.
        name = stops.next() => {
            tracing::info!("{name} before the start; nothing was begun");
            return Ok(());
        }
    };
    let late = LateEngine::new(engine::served_names(&config), config.worker.engine_stall_max);
    let metrics = Sources::new(Some(late.clone()), &engine::served_names(&config), &config.engine.local);
    let door = Door::open(&config, &place, &late, &metrics).await?;
    let ended = work(&config, &place, &late, &metrics, door.as_ref(), &mut stops).await;
    if let Some(door) = door {
        door.close().await;
    }
    place.store.close().await;
    ended
}

/// Loads the model, then runs until a signal.
async fn work(
    config: &Config,
    place: &Place,
    late: &Arc<LateEngine>,
    metrics: &Arc<Sources>,
    door: Option<&Door>,
    stops: &mut Stops,
) -> Result {
    let grace = config.worker.shutdown_grace;
    let drain = || door.into_iter().for_each(Door::drain);
    // Whoever asks what is served hears of it from now on, and batches for it are taken; intake,
    // finalizing and expiry do not wait for the model either.
    let lifecycle = place.start_worker(config, None, engine::served_names(config)).await?;
    let (to_load, for_load) = (config.clone(), late.clone());
    let mut loading = tokio::task::spawn_blocking(move || engine::start(&to_load, |text| for_load.stage(text)));
    let started = tokio::select! {
        started = &mut loading => started.unwrap_or_else(|err| Err(Failure::from_error("load the model", &err))),
        name = stops.next() => {
            tracing::info!("{name} while loading");
            drain();
            clean_up(stops, lifecycle.shutdown(grace)).await;
            place.store.close().await;
            // The loading thread cannot be interrupted and holds nothing durable. It may be inside
            // the driver, which must not be unloaded under it.
            overnight_engine::exit_at_once(Exit::Success as u8);
        }
    };
    let started = match started {
        Ok(started) => started,
        Err(failure) => {
            clean_up(stops, lifecycle.shutdown(grace)).await;
            return Err(failure);
        }
    };
    late.set(&started);
    let with_engine = Some((late.clone() as _, started.mapper, started.producer.clone()));
    let worker = place.start_worker(config, with_engine, Vec::new()).await?;
    metrics.set_worker(&worker);
    tracing::info!("ready: {} as {}", started.producer, worker.id());
    let stop_stats = CancellationToken::new();
    if config.log.stats_interval_s > 0 {
        let every = Duration::from_secs(config.log.stats_interval_s);
        tokio::spawn(stats::log(late.clone(), place.shared_store(), every, stop_stats.clone()));
    }
    // From here on only the stand-in holds the engine, so that a broken one frees its memory.
    drop((started.generate, started.handle));
    let ended = tokio::select! {
        failure = late::keep(config, late) => Err(failure),
        name = stops.next() => {
            tracing::info!("{name}: draining for up to {}", human::duration(grace));
            Ok(())
        }
    };
    drain();
    stop_stats.cancel();
    clean_up(stops, stop_both(&worker, &lifecycle, grace)).await;
    tracing::info!("stopped; nothing that was finished is lost");
    ended
}

async fn stop_both(worker: &WorkerHandle, lifecycle: &WorkerHandle, grace: Duration) {
    tokio::join!(worker.shutdown(grace), lifecycle.shutdown(grace));
}
