//! The planner at work: shards enter prepared items at their [`Seat`], one task hands them
//! to the engine and brings the outputs back.
//!
//! Invariants: the planner's lock is never held across an await; a panic of the engine
//! while it takes requests reaches the shards whose requests they were, and nobody else;
//! an engine that hangs holds up neither outputs nor seats.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use overnight_types::Timestamp;
use tokio::sync::futures::OwnedNotified;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::{Counts, Deliveries, Delivery, Offer, Planner, PlannerLimits, Sitter, Ticket};
use crate::WorkerConfig;
use crate::generate::{EngineStatus, Failure, Generate, NotAccepting, Output, OutputSender, Request, RequestId};

/// Items in the window, per sequence that the engine runs at once.
const WINDOW_PER_SEQ: u32 = 4;
/// Requests at the engine, per sequence that it runs at once: the next one is there when
/// one ends, and the rest can still be put in order.
const AHEAD_PER_SEQ: u32 = 2;
/// Messages of the engine that are taken in one go.
const MESSAGES_MAX: usize = 64;
/// How often time limits are looked at.
const TICK: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct State {
    planner: Planner,
    /// A submission is under way, and the engine may not know its requests yet.
    is_submitting: bool,
    /// Cancelled since it began: the engine is told again when it knows them all.
    cancelled_meanwhile: Vec<RequestId>,
    seats: HashMap<Ticket, mpsc::UnboundedSender<Vec<Delivery>>>,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Something may be handed over.
    work: Notify,
    /// Something left the window or the engine, or a seat that ran alone is gone.
    changed: Arc<Notify>,
    generate: Arc<dyn Generate>,
    window_items_max: Option<u32>,
    bytes_max: u64,
    request_timeout: Duration,
}

/// Where shards and engine meet. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Desk {
    inner: Arc<Inner>,
}

/// A shard's place at the desk; gives everything up when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    desk: Desk,
    ticket: Ticket,
    /// What comes for its items. Unbounded, and bounded by what the window holds.
    pub(crate) deliveries: mpsc::UnboundedReceiver<Vec<Delivery>>,
}

/// How a submission ended: its requests, and what the engine said. `Err`: it panicked.
type Submitted = (Vec<RequestId>, std::thread::Result<Result<(), NotAccepting>>);

impl Desk {
    pub(crate) fn new(generate: Arc<dyn Generate>, config: &WorkerConfig) -> Self {
        let limits = PlannerLimits { items_max: 1, bytes_max: config.window_bytes_max, requests_max: 1 };
        let inner = Inner {
            state: Mutex::new(State {
                planner: Planner::new(limits),
                is_submitting: false,
                cancelled_meanwhile: Vec::new(),
                seats: HashMap::new(),
            }),
            work: Notify::new(),
            changed: Arc::default(),
            generate,
            window_items_max: config.window_items_max,
            bytes_max: config.window_bytes_max,
            request_timeout: config.request_timeout,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Takes over the engine's limits as they are now; returns how many items the window holds.
    pub(crate) fn refresh(&self, status: &EngineStatus) -> u32 {
        let inner = &self.inner;
        let running_max = status.max_num_seqs.max(1);
        let items_max = inner.window_items_max.unwrap_or(running_max.saturating_mul(WINDOW_PER_SEQ)).max(1);
        let requests_max = items_max.min(running_max.saturating_mul(AHEAD_PER_SEQ));
        let limits = PlannerLimits { items_max, bytes_max: inner.bytes_max, requests_max };
        let mut state = inner.lock();
        let before = state.planner.limits();
        state.planner.set_limits(limits);
        drop(state);
        if items_max > before.items_max || requests_max > before.requests_max {
            inner.notify();
        }
        items_max
    }

    /// A seat for a shard.
    pub(crate) fn seat(&self, sitter: Sitter) -> Seat {
        let (sender, deliveries) = mpsc::unbounded_channel();
        let mut state = self.inner.lock();
        let ticket = state.planner.join(sitter);
        state.seats.insert(ticket, sender);
        Seat { desk: self.clone(), ticket, deliveries }
    }

    /// What is in the window.
    pub(crate) fn counts(&self) -> Counts {
        self.inner.lock().planner.counts()
    }

    /// Whether a shard runs alone or waits to.
    pub(crate) fn has_alone(&self) -> bool {
        self.inner.lock().planner.has_alone()
    }

    /// Hands over and brings back until `stop`. A panic on the way takes the open shards
    /// along, whose leases run out, and nothing else: those to come find a fresh planner.
    pub(crate) async fn run(self, stop: CancellationToken) {
        while AssertUnwindSafe(self.serve(&stop)).catch_unwind().await.is_err() {
            tracing::error!("the planner broke down; shards that are open run again under their next lease");
            let mut state = self.inner.lock();
            state.seats.clear();
            state.is_submitting = false;
            let at_engine = state.planner.restart();
            drop(state);
            self.inner.left(&at_engine);
        }
    }

    async fn serve(&self, stop: &CancellationToken) {
        let (sender, mut outputs) = mpsc::unbounded_channel();
        let mut submitting: Option<BoxFuture<'static, Submitted>> = None;
        let mut tick = tokio::time::interval(TICK);
        loop {
            if submitting.is_none() {
                submitting = self.submit_next(&sender);
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                submitted = ended(&mut submitting) => {
                    submitting = None;
                    self.note(submitted);
                }
                Some(first) = outputs.recv() => self.receive(first, &mut outputs),
                () = self.inner.work.notified() => {}
                _ = tick.tick() => self.end_overdue(),
            }
        }
    }

    /// Starts to submit what the engine can be given now.
    fn submit_next(&self, outputs: &OutputSender) -> Option<BoxFuture<'static, Submitted>> {
        let generate = self.inner.generate.clone();
        self.refresh(&generate.status());
        let mut state = self.inner.lock();
        let requests = state.planner.take(Timestamp::now());
        state.is_submitting = !requests.is_empty();
        drop(state);
        if requests.is_empty() {
            return None;
        }
        let ids = requests.iter().map(|request| request.id).collect();
        let submission = submit(generate, requests, outputs.clone());
        Some(AssertUnwindSafe(submission).catch_unwind().map(|end| (ids, end)).boxed())
    }

    fn note(&self, (ids, end): Submitted) {
        let now = Instant::now();
        let mut deliveries = Deliveries::new();
        let mut state = self.inner.lock();
        state.is_submitting = false;
        let cancelled = match end {
            Ok(Ok(())) => std::mem::take(&mut state.cancelled_meanwhile),
            Ok(Err(not_accepting)) => {
                let failure = Failure::EngineTrouble { message: not_accepting.to_string() };
                for id in ids {
                    state.planner.receive(Output::Failed { id, failure: failure.clone() }, now, &mut deliveries);
                }
                Vec::new()
            }
            Err(_) => state.planner.break_off(&ids, &mut deliveries),
        };
        state.cancelled_meanwhile.clear();
        state.deliver(deliveries);
        drop(state);
        self.inner.left(&cancelled);
    }

    fn receive(&self, first: Vec<Output>, more: &mut mpsc::UnboundedReceiver<Vec<Output>>) {
        let now = Instant::now();
        let mut deliveries = Deliveries::new();
        let mut state = self.inner.lock();
        let more = std::iter::from_fn(|| more.try_recv().ok()).take(MESSAGES_MAX);
        for output in std::iter::once(first).chain(more).flatten() {
            state.planner.receive(output, now, &mut deliveries);
        }
        // What only begins makes no room.
        let is_change = !deliveries.is_empty();
        state.deliver(deliveries);
        drop(state);
        if is_change {
            self.inner.left(&[]);
        }
    }

    fn end_overdue(&self) {
        let mut deliveries = Deliveries::new();
        let mut state = self.inner.lock();
        let cancelled = state.planner.end_overdue(Instant::now(), self.inner.request_timeout, &mut deliveries);
        state.deliver(deliveries);
        drop(state);
        if !cancelled.is_empty() {
            self.inner.left(&cancelled);
        }
    }
}

async fn submit(
    generate: Arc<dyn Generate>,
    requests: Vec<Request>,
    outputs: OutputSender,
) -> Result<(), NotAccepting> {
    generate.submit(requests, outputs).await?;
    fail::fail_point!("worker::requests_submitted");
    Ok(())
}

/// The end of the submission under way; never without one.
async fn ended(submitting: &mut Option<BoxFuture<'static, Submitted>>) -> Submitted {
    match submitting {
        Some(submission) => submission.await,
        None => std::future::pending().await,
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // After a panic inside, `run` begins anew.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self) {
        self.work.notify_one();
        self.changed.notify_waiters();
    }

    /// Something left the window: cancels these at the engine, and lets others move up.
    fn left(&self, cancelled: &[RequestId]) {
        if !cancelled.is_empty() {
            let mut state = self.lock();
            if state.is_submitting {
                state.cancelled_meanwhile.extend_from_slice(cancelled);
            }
            drop(state);
            self.generate.cancel(cancelled);
        }
        self.notify();
    }
}

impl State {
    fn deliver(&mut self, deliveries: Deliveries) {
        for (ticket, deliveries) in deliveries {
            if let Some(seat) = self.seats.get(&ticket) {
                // A seat that is just being dropped needs nothing more.
                let _ = seat.send(deliveries);
            }
        }
    }
}

impl Seat {
    /// Enters offers, the last one first, as far as the window has room.
    pub(crate) fn enter(&self, offers: &mut Vec<Offer>) {
        if offers.is_empty() {
            return;
        }
        let now = Timestamp::now();
        let num_before = offers.len();
        let mut state = self.desk.inner.lock();
        while let Some(offer) = offers.pop() {
            if let Err(offer) = state.planner.enter(self.ticket, offer, now) {
                offers.push(offer);
                break;
            }
        }
        drop(state);
        if offers.len() < num_before {
            self.desk.inner.work.notify_one();
        }
    }

    /// Takes back what has not begun; returns its bits.
    pub(crate) fn withdraw(&self) -> Vec<u32> {
        let (bits, cancelled) = self.desk.inner.lock().planner.withdraw(self.ticket);
        if !bits.is_empty() {
            self.desk.inner.left(&cancelled);
        }
        bits
    }

    /// An item needs no more answers.
    pub(crate) fn settle(&self, bit: u32) {
        let cancelled = self.desk.inner.lock().planner.settle(self.ticket, bit);
        if !cancelled.is_empty() {
            self.desk.inner.left(&cancelled);
        }
    }

    /// Asks for the engine alone; `true` once it is. Call again after [`Seat::changed`] until
    /// then. Ends with the seat.
    pub(crate) fn try_alone(&self) -> bool {
        let mut state = self.desk.inner.lock();
        state.planner.try_alone(self.ticket) && !state.is_submitting
    }

    /// Resolves at the next change of the window; create it before looking.
    pub(crate) fn changed(&self) -> OwnedNotified {
        self.desk.inner.changed.clone().notified_owned()
    }

    /// Gives everything up; what it had at the engine alone is cancelled there.
    pub(crate) fn leave(&self) {
        let mut state = self.desk.inner.lock();
        if state.seats.remove(&self.ticket).is_none() {
            return;
        }
        let cancelled = state.planner.leave(self.ticket);
        drop(state);
        self.desk.inner.left(&cancelled);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
    }
}
