//! An apalis `Backend` whose `poll_next` asks our store for one due piece of work.
//!
//! Invariants: at most one claim is under way per backend; a claim that was made
//! and cannot be handed over any more (shutdown) is handed back; a database error
//! delays the next claim and never ends the pool; a claim under way goes on by
//! itself, since apalis polls nothing of a backend while it waits for running work
//! to end, and a claim that stands still in its transaction holds up every other
//! writer of the database.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use apalis_core::backend::finalize::Ephemeral;
use apalis_core::backend::future::BoxSyncFuture;
use apalis_core::backend::{Backend, BackendConfig};
use apalis_core::task::Task;
use apalis_core::task::builder::TaskBuilder;
use apalis_core::task::task_id::TaskId;
use apalis_core::worker::context::WorkerContext;
use futures::future::{BoxFuture, FutureExt};
use tokio_util::task::AbortOnDropHandle;
use tower::layer::util::Identity;

/// Where a pool's work comes from.
pub(crate) trait Source: Send + Sync + 'static {
    /// One piece of work, claimed.
    type Work: Send + Sync + 'static;

    /// Waits until a piece of work is claimed; `None` once the worker stops.
    fn next(self: Arc<Self>) -> BoxFuture<'static, Option<Self::Work>>;

    /// Takes back what was claimed and cannot run any more.
    fn hand_back(self: Arc<Self>, work: Self::Work) -> BoxFuture<'static, ()>;
}

/// The backend of one pool.
pub(super) struct Claims<S: Source> {
    source: Arc<S>,
    claiming: Option<AbortOnDropHandle<Option<S::Work>>>,
    handing_back: Option<BoxSyncFuture<()>>,
    /// The tracing layer asks each task for an id.
    next_id: u64,
}

impl<S: Source> Claims<S> {
    pub(super) fn new(source: Arc<S>) -> Self {
        Self { source, claiming: None, handing_back: None, next_id: 1 }
    }

    /// What the claim under way brings; `None` when the worker stops.
    fn poll_claim(&mut self, cx: &mut Context<'_>) -> Poll<Option<S::Work>> {
        let Some(claiming) = &mut self.claiming else { return Poll::Ready(None) };
        let Poll::Ready(ended) = claiming.poll_unpin(cx) else { return Poll::Pending };
        self.claiming = None;
        match ended {
            Ok(work) => Poll::Ready(work),
            Err(err) if err.is_panic() => std::panic::resume_unwind(err.into_panic()),
            // The runtime shuts down; this task ends with it.
            Err(_) => Poll::Pending,
        }
    }
}

impl<S: Source> Backend for Claims<S> {
    type Task = Task<S::Work>;
    type Error = Infallible;

    fn poll_ready(&mut self, _: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        _: &WorkerContext,
    ) -> Poll<Option<Result<Task<S::Work>, Infallible>>> {
        let source = &self.source;
        self.claiming.get_or_insert_with(|| AbortOnDropHandle::new(tokio::spawn(source.clone().next())));
        let Poll::Ready(work) = self.poll_claim(cx) else { return Poll::Pending };
        let id = TaskId::from_int(self.next_id);
        self.next_id += 1;
        Poll::Ready(work.map(|work| Ok(TaskBuilder::new(work).task_id(id).build())))
    }

    /// Ends the claim under way: the source gives up by itself once the worker
    /// stops, and what it had claimed by then goes back.
    fn poll_close(&mut self, cx: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Infallible>> {
        if self.claiming.is_some() {
            let Poll::Ready(work) = self.poll_claim(cx) else { return Poll::Pending };
            let source = self.source.clone();
            self.handing_back = work.map(|work| BoxSyncFuture::new(source.hand_back(work)));
        }
        if let Some(handing_back) = &mut self.handing_back {
            if handing_back.poll_unpin(cx).is_pending() {
                return Poll::Pending;
            }
            self.handing_back = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: Source> BackendConfig for Claims<S> {
    type Args = S::Work;
    type Id = TaskId;
    type Kind = Ephemeral;
    type Config = ();
    type Layer = Identity;

    fn config(&self) -> &() {
        &()
    }

    fn middleware(&mut self, _: &mut WorkerContext) -> Identity {
        Identity::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::Notify;

    use super::*;

    /// Claims in two steps, as a transaction does; what is claimed is counted.
    #[derive(Debug, Default)]
    struct Steps {
        begun: Notify,
        go_on: Notify,
        claimed: Notify,
        handed_back: AtomicU32,
    }

    impl Source for Steps {
        type Work = u32;

        fn next(self: Arc<Self>) -> BoxFuture<'static, Option<u32>> {
            Box::pin(async move {
                self.begun.notify_one();
                self.go_on.notified().await;
                self.claimed.notify_one();
                Some(7)
            })
        }

        fn hand_back(self: Arc<Self>, work: u32) -> BoxFuture<'static, ()> {
            Box::pin(async move {
                self.handed_back.fetch_add(work, Ordering::Relaxed);
            })
        }
    }

    // While running work ends, apalis polls nothing of the backend; a claim that is
    // in its transaction then must not keep the database's one writer.
    #[tokio::test]
    async fn claim_under_way_ends_though_nobody_polls_it() {
        let source = Arc::new(Steps::default());
        let mut claims = Claims::new(source.clone());
        let worker = WorkerContext::new("shards");
        let first = futures::future::poll_fn(|cx| Poll::Ready(claims.poll_next(cx, &worker).is_pending())).await;
        assert!(first, "the claim waits");
        source.begun.notified().await;
        source.go_on.notify_one();
        let claimed = tokio::time::timeout(std::time::Duration::from_secs(10), source.claimed.notified()).await;
        assert!(claimed.is_ok(), "the claim stands still");
        futures::future::poll_fn(|cx| claims.poll_close(cx, &worker)).await.unwrap();
        assert_eq!(source.handed_back.load(Ordering::Relaxed), 7, "what it claimed goes back");
    }
}
