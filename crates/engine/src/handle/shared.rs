//! What handles and the two threads share: the inbox, the room, the status.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;

use super::status::{EngineState, EngineStatus};
use crate::Error;
use crate::door::Limits;
use crate::metrics::EngineMetrics;
use crate::output::{EndedHere, Event, Sink};
use crate::request::{Request, RequestError, RequestId};
use crate::running::Close;
use crate::waiting::WaitingRequests;

/// What callers and the output thread leave for the engine thread.
#[derive(Default)]
pub(super) struct Inbox {
    /// Announced by a submission that waits for room.
    pub(super) waiting: WaitingRequests,
    pub(super) submissions: Vec<(Request, Sink)>,
    pub(super) cancels: Vec<RequestId>,
    /// Ended by the output thread.
    pub(super) ended: Vec<EndedHere>,
    /// No more is taken.
    pub(super) is_closed: bool,
}

pub(super) struct Shared {
    pub(super) limits: Limits,
    pub(super) inbox: Mutex<Inbox>,
    /// Whether the inbox has anything; spares the lock in a step.
    pub(super) has_mail: AtomicBool,
    pub(super) wake: Condvar,
    pub(super) room: Semaphore,
    pub(super) capacity: u32,
    pub(super) status: Mutex<EngineStatus>,
    pub(super) metrics: Mutex<EngineMetrics>,
}

/// What a submission has not handed over yet.
pub(super) struct Queue<'a> {
    pub(super) shared: &'a Shared,
    pub(super) requests: VecDeque<Request>,
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            self.shared.take_waiting(std::mem::take(&mut self.requests));
        }
    }
}

impl Close for Shared {
    fn close(&self) {
        Self::close(self);
    }
}

impl Shared {
    /// Makes requests that passed the door known to cancels and queues them; events of
    /// the others. Errors with `Stopped` when the engine takes none.
    pub(super) fn announce(
        &self,
        checked: Vec<(Result<(), RequestError>, Request)>,
        sink: &Sink,
        queue: &mut VecDeque<Request>,
    ) -> Result<Vec<Event>, Error> {
        let mut inbox = lock(&self.inbox);
        if inbox.is_closed {
            drop(inbox);
            return Err(Error::Stopped(self.why_closed()));
        }
        let mut refused = Vec::new();
        for (door, request) in checked {
            match door.and_then(|()| inbox.waiting.announce(&request, sink)) {
                Ok(()) => queue.push_back(request),
                Err(error) => refused.push(Event::Failed { id: request.id, error }),
            }
        }
        Ok(refused)
    }

    /// Leaves requests for the engine thread, but for those that were cancelled while
    /// they waited; their places are free again. Gives their ids back when it takes none.
    pub(super) fn hand_over(&self, requests: Vec<Request>, sink: &Sink) -> Result<(), Vec<RequestId>> {
        let num_places = requests.len();
        let mut inbox = lock(&self.inbox);
        let left: Vec<Request> = requests.into_iter().filter(|request| inbox.waiting.take(request.id)).collect();
        if inbox.is_closed {
            return Err(left.into_iter().map(|request| request.id).collect());
        }
        self.room.add_permits(num_places - left.len());
        if !left.is_empty() {
            inbox.submissions.extend(left.into_iter().map(|request| (request, sink.clone())));
            self.notify(inbox);
        }
        Ok(())
    }

    /// Takes requests back that were announced; ids of those that nobody cancelled.
    pub(super) fn take_waiting(&self, requests: VecDeque<Request>) -> Vec<RequestId> {
        let mut inbox = lock(&self.inbox);
        requests.into_iter().map(|request| request.id).filter(|id| inbox.waiting.take(*id)).collect()
    }

    pub(super) fn notify(&self, inbox: MutexGuard<'_, Inbox>) {
        self.has_mail.store(true, Ordering::Release);
        drop(inbox);
        self.wake.notify_one();
    }

    pub(super) fn close(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.is_closed = true;
        self.notify(inbox);
        self.room.close();
    }

    pub(super) fn why_closed(&self) -> String {
        match &lock(&self.status).state {
            EngineState::Poisoned(why) => why.clone(),
            EngineState::Ready | EngineState::Stopped => "it is shutting down".to_owned(),
        }
    }

    pub(super) fn closed_error(&self) -> RequestError {
        let message = format!("the engine stopped: {}", self.why_closed());
        RequestError { transient: true, code: "engine_stopped", param: None, message }
    }
}

/// A panic elsewhere leaves counts behind that are still whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
