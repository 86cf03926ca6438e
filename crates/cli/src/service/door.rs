//! Sockets of this process: who may listen where, and the door of `batch worker`,
//! which answers probes and scrapers and nothing else.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use overnight_api::ApiState;
use overnight_types::Limits;
use overnight_worker::generate::Generate;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::late::LateEngine;
use super::metrics::Sources;
use super::{Place, engine};
use crate::config::Config;
use crate::error::{Exit, Failure, Result};

/// How long open connections may go on once everything else has stopped.
pub(crate) const CONNECTIONS_GRACE: Duration = Duration::from_secs(3);

/// Refuses to listen beyond this machine without a key, unless that is wanted.
pub(crate) fn refuse_open(config: &Config, insecure: bool) -> Result {
    if config.api.is_loopback() || config.api.has_keys() || insecure {
        return Ok(());
    }
    Err(Failure::usage(format!("{} is reachable from other machines and no API key is set", config.api.host))
        .code("no_api_key")
        .hint("give --api-key-file PATH (one key a line), or --insecure when the network is closed"))
}

/// Listens at `api.host` on this port.
pub(crate) async fn bind(config: &Config, port: u16) -> Result<TcpListener> {
    let host = config.api.host.trim_start_matches('[').trim_end_matches(']');
    TcpListener::bind((host, port)).await.map_err(|err| {
        let failure =
            Failure::new(Exit::Failure, format!("could not listen on {host}:{port}: {err}")).code("not_listening");
        match err.kind() {
            std::io::ErrorKind::AddrInUse => failure.hint("another server runs there; choose one with --port"),
            _ => failure,
        }
    })
}

/// The open door of a worker. Dropping it closes it at once.
#[derive(Debug)]
pub(crate) struct Door {
    draining: CancellationToken,
    stop: CancellationToken,
    serving: AbortOnDropHandle<std::io::Result<()>>,
}

impl Door {
    /// Opens it where `api.worker_port` says; `None` without one.
    pub(crate) async fn open(
        config: &Config,
        place: &Place,
        late: &Arc<LateEngine>,
        metrics: &Arc<Sources>,
    ) -> Result<Option<Self>> {
        let Some(port) = config.api.worker_port else { return Ok(None) };
        let listener = bind(config, port).await?;
        let (draining, stop) = (CancellationToken::new(), CancellationToken::new());
        let generate: Arc<dyn Generate> = late.clone();
        let router = overnight_api::probes_router(ApiState {
            store: place.shared_store(),
            blobs: place.blobs.clone(),
            generate: Some(generate),
            mapper: Arc::new(OnceLock::new()),
            checks_bodies: false,
            config: config.api.clone(),
            limits: Limits::default(),
            cancel_drain: config.worker.cancel_drain,
            models: engine::known_models(config),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            draining: draining.clone(),
            free_disk: None,
            measure: Some(metrics.clone().measure()),
            extra: Default::default(),
        })
        .map_err(|err| Failure::from_error("open the worker's door", &err))?;
        tracing::info!("health and metrics at http://{}", listener.local_addr()?);
        let (config, stopped) = (config.api.clone(), stop.clone());
        let serving =
            tokio::spawn(
                async move { overnight_api::serve(listener, router, &config, stopped, CONNECTIONS_GRACE).await },
            );
        Ok(Some(Self { draining, stop, serving: AbortOnDropHandle::new(serving) }))
    }

    /// From here on it says that this process takes no new work.
    pub(crate) fn drain(&self) {
        self.draining.cancel();
    }

    /// Lets open answers end, then closes.
    pub(crate) async fn close(self) {
        self.stop.cancel();
        // A door that broke has said so in the log; there is nothing left to do about it.
        let _ended = self.serving.await;
    }
}
