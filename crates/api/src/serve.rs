//! Serving the router on a socket until told to stop.

use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Serves `router` on `listener` until `stop` is cancelled; then takes no new
/// connection and lets open requests end for up to `grace`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    stop: CancellationToken,
    grace: Duration,
) -> std::io::Result<()> {
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    let cut = async {
        stop.cancelled().await;
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        ended = serving.into_future() => ended,
        () = cut => Ok(()),
    }
}
