//! Serving the router on a socket until told to stop.
//!
//! Invariant: no peer holds a connection for ever. One that sends no head, or takes
//! nothing of its answer, is cut after `api.connection_timeout`; connections beyond
//! `api.connections_max` wait in the system's queue. Bodies that arrive have limits of
//! their own in their handlers. HTTP/1.1 only, as before.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::ApiConfig;

/// Pause after a failed accept that is not the peer's fault, such as no free descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Serves `router` on `listener` within the limits of `config` until `stop` is
/// cancelled; then takes no new connection and lets open requests end for up to `grace`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    config: &ApiConfig,
    stop: CancellationToken,
    grace: Duration,
) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(config.connections_max as usize));
    let (connections, cut) = (TaskTracker::new(), CancellationToken::new());
    let limit = config.connection_timeout;
    let accepting = async {
        loop {
            let place = Arc::clone(&places).acquire_owned().await.expect("nobody closes the semaphore");
            let Some(stream) = accept(&listener).await else { continue };
            let connection = connection(stream, router.clone(), limit, stop.clone());
            let cut = cut.clone();
            connections.spawn(async move {
                let _place = place;
                cut.run_until_cancelled(connection).await;
            });
        }
    };
    tokio::select! {
        () = accepting => {}
        () = stop.cancelled() => {}
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(grace, connections.wait()).await.is_err() {
        cut.cancel();
    }
    Ok(())
}

/// `None` after an error: one bad peer, or a lack of descriptors, must not end the server.
async fn accept(listener: &TcpListener) -> Option<TcpStream> {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    match listener.accept().await {
        Ok((stream, _)) => Some(stream),
        Err(err) if matches!(err.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) => None,
        Err(err) => {
            tracing::error!(error = %err, "could not accept a connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

async fn connection(stream: TcpStream, router: Router, limit: Duration, stop: CancellationToken) {
    let stream = TokioIo::new(Timed { stream, limit, stalled: None });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limit);
    let mut serving = pin!(builder.serve_connection(stream, TowerToHyperService::new(router)));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(err) = ended {
        tracing::debug!(error = %overnight_types::chain(&err), "connection cut");
    }
}

/// A stream on which a write that goes nowhere for `limit` is an error.
struct Timed {
    stream: TcpStream,
    limit: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Timed {
    fn judge<T>(&mut self, tried: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            self.stalled = None;
            return tried;
        }
        let limit = self.limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes nothing of its answer")))
    }
}

impl AsyncRead for Timed {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(tried, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.judge(tried, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(tried, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(tried, context)
    }
}
