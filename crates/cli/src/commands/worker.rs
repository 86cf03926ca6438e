//! `batch worker`: a worker and its engine, no API.

use std::time::Duration;

use clap::Args;
use overnight_worker::lock::DataDirUse;
use tokio_util::sync::CancellationToken;

use crate::App;
use crate::config::{Loaded, Setting};
use crate::error::{Failure, Result};
use crate::logging;
use crate::output::human;
use crate::service::flags::EngineFlags;
use crate::service::late::{self, LateEngine};
use crate::service::{Place, Stops, clean_up, engine, stats};

/// Arguments of `batch worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Seconds between engine log lines; 0 turns them off
    #[arg(long, value_name = "SECONDS")]
    stats_interval: Option<u64>,
    #[command(flatten)]
    engine: EngineFlags,
}

pub(crate) async fn run(args: WorkerArgs, app: &App) -> Result {
    let mut stops = Stops::listen()?;
    let mut settings = args.engine.settings()?;
    settings.extend(args.stats_interval.map(|every| Setting::flag("--stats-interval", "log.stats_interval_s", every)));
    let config = Loaded::read(&app.globals, settings)?.config;
    engine::check(&config)?;
    logging::start_service(&config, "worker")?;
    let place = Place::open(&config, DataDirUse::Shared).await?;
    // Whoever asks what is served hears of it from now on, and batches for it are taken; intake,
    // finalizing and expiry do not wait for the model either.
    let lifecycle = place.start_worker(&config, None, engine::served_names(&config)).await?;
    let to_load = config.clone();
    let mut loading = tokio::task::spawn_blocking(move || engine::start(&to_load, |text| tracing::info!("{text}")));
    let started = tokio::select! {
        started = &mut loading => started.unwrap_or_else(|err| Err(Failure::from_error("load the model", &err))),
        name = stops.next() => {
            tracing::info!("{name} while loading");
            clean_up(&mut stops, lifecycle.shutdown(config.worker.shutdown_grace)).await;
            place.store.close().await;
            // The loading thread cannot be interrupted and holds nothing durable.
            std::process::exit(0);
        }
    };
    let started = match started {
        Ok(started) => started,
        Err(failure) => {
            clean_up(&mut stops, lifecycle.shutdown(config.worker.shutdown_grace)).await;
            place.store.close().await;
            return Err(failure);
        }
    };
    let late = LateEngine::new(engine::served_names(&config));
    late.set(&started);
    let with_engine = Some((late.clone() as _, started.mapper, started.producer.clone()));
    let worker = place.start_worker(&config, with_engine, Vec::new()).await?;
    tracing::info!("ready: {} as {}", started.producer, worker.id());
    let stop_stats = CancellationToken::new();
    if config.log.stats_interval_s > 0 {
        let every = Duration::from_secs(config.log.stats_interval_s);
        tokio::spawn(stats::log(late.clone(), place.shared_store(), every, stop_stats.clone()));
    }
    let grace = config.worker.shutdown_grace;
    // From here on only the stand-in holds the engine, so that a broken one frees its memory.
    drop((started.generate, started.handle));
    let ended = tokio::select! {
        failure = late::keep(&config, &late) => Err(failure),
        name = stops.next() => {
            tracing::info!("{name}: draining for up to {}", human::duration(grace));
            Ok(())
        }
    };
    stop_stats.cancel();
    clean_up(&mut stops, async { _ = tokio::join!(worker.shutdown(grace), lifecycle.shutdown(grace)) }).await;
    place.store.close().await;
    tracing::info!("stopped; nothing that was finished is lost");
    ended
}
