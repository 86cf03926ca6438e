//! An apalis `Backend` whose `poll_next` asks our store for one due piece of work.
//!
//! Invariants: at most one claim is under way per backend; a claim that was made
//! and cannot be handed over any more (shutdown) is handed back; a database error
//! delays the next claim and never ends the pool.

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
use futures::future::BoxFuture;
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
    claiming: Option<BoxSyncFuture<Option<S::Work>>>,
    handing_back: Option<BoxSyncFuture<()>>,
    /// The tracing layer asks each task for an id.
    next_id: u64,
}

impl<S: Source> Claims<S> {
    pub(super) fn new(source: Arc<S>) -> Self {
        Self { source, claiming: None, handing_back: None, next_id: 1 }
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
        let claiming = self.claiming.get_or_insert_with(|| BoxSyncFuture::new(source.clone().next()));
        let Poll::Ready(work) = claiming.poll_unpin(cx) else { return Poll::Pending };
        self.claiming = None;
        let id = TaskId::from_int(self.next_id);
        self.next_id += 1;
        Poll::Ready(work.map(|work| Ok(TaskBuilder::new(work).task_id(id).build())))
    }

    /// Ends the claim under way: the source gives up by itself once the worker
    /// stops, and what it had claimed by then goes back.
    fn poll_close(&mut self, cx: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Infallible>> {
        if let Some(claiming) = &mut self.claiming {
            let Poll::Ready(work) = claiming.poll_unpin(cx) else { return Poll::Pending };
            self.claiming = None;
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
