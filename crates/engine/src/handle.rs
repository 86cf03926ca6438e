//! The engine's threads and the handle to them.
//!
//! One thread owns the [`Engine`] and steps it while anything is there; a second one
//! turns tokens into text and feeds the sinks. The handle is cheap to clone and works
//! from any thread. Invariants: every submitted request gets exactly one last event;
//! no more than [`EngineHandle::capacity`] requests are inside; a failure or panic of
//! the engine thread fails all of them as transient and shows as [`EngineState::Poisoned`].
//!
//! Start with [`Engine::start`], then `run_engine`.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::Semaphore;

use crate::config::EngineConfig;
use crate::door::Limits;
use crate::model::Forward;
use crate::output::{EndedHere, Event, Outputs, Registration, Sink};
use crate::request::{FinishReason, Request, RequestError, RequestId};
use crate::running::{Alive, Close};
use crate::step::{SequenceOutput, StepOutput};
use crate::text::Text;
use crate::waiting::WaitingRequests;
use crate::{Engine, Error};

/// Requests inside at once, per sequence of a step, and at least.
const CAPACITY_PER_SEQ: u32 = 16;
const CAPACITY_MIN: u32 = 256;
/// Requests that a submission hands over at a time.
const SUBMIT_CHUNK: usize = 64;
/// Rounds of output on the way to the output thread.
const OUTPUT_QUEUE: usize = 256;
/// Steps whose outputs nobody watches are handed over together, at most this many outputs.
const UNWATCHED_MAX: usize = 4096;

/// Where the engine stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineState {
    /// Takes requests.
    Ready,
    /// Broke down, for this reason; it must be built anew.
    Poisoned(String),
    /// Was shut down.
    Stopped,
}

/// A snapshot of the engine, from the end of its last step. Counters run from the start.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineStatus {
    /// Where it stands.
    pub state: EngineState,
    /// Sequences that run.
    pub num_running: u32,
    /// Sequences that wait.
    pub num_waiting: u32,
    /// Share of the KV blocks that sequences hold, 0…1.
    pub kv_cache_usage: f32,
    /// When a step ended, or work came to an idle engine.
    pub last_progress: Instant,
    /// Steps computed.
    pub num_steps: u64,
    /// Tokens computed in prefill.
    pub prompt_tokens: u64,
    /// Tokens chosen.
    pub generation_tokens: u64,
    /// Of these, in steps without prefill.
    pub decode_only_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Of these, found.
    pub prefix_cache_hits: u64,
    /// Sequences whose blocks were taken.
    pub num_preemptions: u64,
    /// Requests ended by `stop`, `length`, `abort`, and failed ones.
    pub num_finished: FinishCounts,
    /// Seconds inside steps that had prefill tokens, and inside the others.
    pub prefill_seconds: f64,
    /// See above.
    pub decode_seconds: f64,
}

/// Ends of requests, by kind. A stop text found counts as `stop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FinishCounts {
    /// End of sequence, stop token or stop text.
    pub stop: u64,
    /// `max_tokens` or the context's end.
    pub length: u64,
    /// Cancelled.
    pub abort: u64,
    /// Failed by an error.
    pub error: u64,
}

impl FinishCounts {
    /// Counts an end; `None` is a failure.
    fn count(&mut self, reason: Option<FinishReason>) {
        match reason {
            Some(FinishReason::Stop) => self.stop += 1,
            Some(FinishReason::Length) => self.length += 1,
            Some(FinishReason::Abort) => self.abort += 1,
            None => self.error += 1,
        }
    }
}

/// What callers and the output thread leave for the engine thread.
#[derive(Default)]
struct Inbox {
    /// Announced by a submission that waits for room.
    waiting: WaitingRequests,
    submissions: Vec<(Request, Sink)>,
    cancels: Vec<RequestId>,
    /// Ended by the output thread.
    ended: Vec<EndedHere>,
    /// No more is taken.
    is_closed: bool,
}

struct Shared {
    limits: Limits,
    inbox: Mutex<Inbox>,
    /// Whether the inbox has anything; spares the lock in a step.
    has_mail: AtomicBool,
    wake: Condvar,
    room: Semaphore,
    capacity: u32,
    status: Mutex<EngineStatus>,
}

/// To the output thread.
enum Mail {
    Register(Box<Registration>),
    /// Requests that began, then outputs.
    Outputs(Vec<RequestId>, Vec<SequenceOutput>),
    FailAll(RequestError),
}

/// Shuts the threads down when the last handle goes.
struct Owner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// The way to a running engine. Cheap to clone; the engine stops when the last one is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("limits", self.limits()).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts the threads of an engine over `model`. Without `text` it serves token ids
    /// only, and refuses stop texts. Errors with `Config` when the settings do not fit
    /// the model or the memory.
    pub fn start(
        model: Box<dyn Forward>,
        text: Option<Arc<Text>>,
        config: &EngineConfig,
    ) -> Result<EngineHandle, Error> {
        let text_vocab_size = text.as_ref().map(|text| text.vocab_size());
        let config = &config.with_defaults(model.defaults());
        let mut limits = Limits::resolve(model.shape(), config, text_vocab_size, free_memory_bytes())?;
        for id in text.iter().flat_map(|text| text.eos_token_ids()) {
            if !limits.eos_token_ids.contains(id) {
                limits.eos_token_ids.push(*id);
            }
        }
        let engine = Engine::new(model, limits.clone(), config.enable_prefix_caching)?;
        tracing::info!(
            kv.num_blocks = limits.num_blocks,
            kv.num_tokens = limits.pool_tokens(),
            max_model_len = limits.max_model_len,
            "kv cache holds {:.1} sequences of full length",
            limits.max_concurrency()
        );
        Ok(spawn(engine, Outputs::new(text), limits))
    }
}

fn spawn(engine: Engine, outputs: Outputs, limits: Limits) -> EngineHandle {
    let capacity = (limits.max_num_seqs * CAPACITY_PER_SEQ).max(CAPACITY_MIN);
    let shared = Arc::new(Shared {
        limits,
        inbox: Mutex::default(),
        has_mail: AtomicBool::new(false),
        wake: Condvar::new(),
        room: Semaphore::new(capacity as usize),
        capacity,
        status: Mutex::new(EngineStatus {
            state: EngineState::Ready,
            num_running: 0,
            num_waiting: 0,
            kv_cache_usage: 0.0,
            last_progress: Instant::now(),
            num_steps: 0,
            prompt_tokens: 0,
            generation_tokens: 0,
            decode_only_tokens: 0,
            prefix_cache_queries: 0,
            prefix_cache_hits: 0,
            num_preemptions: 0,
            num_finished: FinishCounts::default(),
            prefill_seconds: 0.0,
            decode_seconds: 0.0,
        }),
    });
    let (to_outputs, mail) = sync_channel(OUTPUT_QUEUE);
    let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name(name.to_owned()).spawn(body).expect("the system gives two more threads")
    };
    let (for_engine, for_outputs) = (shared.clone(), shared.clone());
    let closable: Arc<dyn Close> = shared.clone();
    let alive = Alive::of(Arc::downgrade(&closable));
    let threads = vec![
        spawn(
            "engine",
            Box::new(move || {
                EngineThread::new(engine, for_engine, to_outputs).run();
                drop(alive);
            }),
        ),
        spawn("engine-output", Box::new(move || run_outputs(outputs, &for_outputs, &mail))),
    ];
    EngineHandle { owner: Arc::new(Owner { shared, threads: Mutex::new(threads) }) }
}

impl EngineHandle {
    /// Takes requests; each gets exactly one last event on `sink`, also when it is refused
    /// at the door, or cancelled while it waits for room. Waits for room, keeping their
    /// order. Errors with `Stopped` when the engine takes none; then nothing was taken.
    /// Dropped before it ends, it forgets what was not handed over, without an event.
    pub async fn submit(&self, requests: Vec<Request>, sink: Sink) -> Result<(), Error> {
        let shared = &self.owner.shared;
        let checked: Vec<_> = requests.into_iter().map(|request| (shared.limits.check(&request), request)).collect();
        let mut queue = Queue { shared, requests: VecDeque::with_capacity(checked.len()) };
        let refused = shared.announce(checked, &sink, &mut queue.requests)?;
        if !refused.is_empty() {
            sink(refused);
        }
        while !queue.requests.is_empty() {
            let num = queue.requests.len().min(SUBMIT_CHUNK);
            let num_places = u32::try_from(num).expect("at most SUBMIT_CHUNK");
            // An error means closed; `hand_over` then fails what is left.
            if let Ok(permits) = shared.room.acquire_many(num_places).await {
                permits.forget();
            }
            let chunk = queue.requests.drain(..num).collect();
            if let Err(mut left) = shared.hand_over(chunk, &sink) {
                left.extend(shared.take_waiting(std::mem::take(&mut queue.requests)));
                let error = shared.closed_error();
                sink(left.into_iter().map(|id| Event::Failed { id, error: error.clone() }).collect());
            }
        }
        Ok(())
    }

    /// Asks to stop requests; unknown and finished ids do nothing. The last event still
    /// comes: at once for a request that waits for room.
    pub fn cancel(&self, ids: &[RequestId]) {
        let shared = &self.owner.shared;
        let mut inbox = lock(&shared.inbox);
        if inbox.is_closed {
            return;
        }
        let mut ended = Vec::new();
        for &id in ids {
            match inbox.waiting.cancel(id) {
                Some(end) => ended.push(end),
                None => inbox.cancels.push(id),
            }
        }
        shared.notify(inbox);
        for (sink, event) in ended {
            lock(&shared.status).num_finished.count(Some(FinishReason::Abort));
            // Nobody needs to be told that nobody listens.
            let _ = sink(vec![event]);
        }
    }

    /// Where it stands.
    pub fn status(&self) -> EngineStatus {
        lock(&self.owner.shared.status).clone()
    }

    /// What requests are held to; `max_model_len` is the context to fill.
    pub fn limits(&self) -> &Limits {
        &self.owner.shared.limits
    }

    /// Most requests inside at once; a submission beyond it waits.
    pub fn capacity(&self) -> u32 {
        self.owner.shared.capacity
    }

    /// Stops the engine after the step it is in and waits for that. Requests still inside
    /// fail as transient. Blocks: not for an async task.
    pub fn shutdown(&self) {
        self.owner.shared.close();
        for thread in std::mem::take(&mut *lock(&self.owner.threads)) {
            // A panic was caught inside; a thread that still panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

/// What a submission has not handed over yet.
struct Queue<'a> {
    shared: &'a Shared,
    requests: VecDeque<Request>,
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
    fn announce(
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
    fn hand_over(&self, requests: Vec<Request>, sink: &Sink) -> Result<(), Vec<RequestId>> {
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
    fn take_waiting(&self, requests: VecDeque<Request>) -> Vec<RequestId> {
        let mut inbox = lock(&self.inbox);
        requests.into_iter().map(|request| request.id).filter(|id| inbox.waiting.take(*id)).collect()
    }

    fn notify(&self, inbox: MutexGuard<'_, Inbox>) {
        self.has_mail.store(true, Ordering::Release);
        drop(inbox);
        self.wake.notify_one();
    }

    fn close(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.is_closed = true;
        self.notify(inbox);
        self.room.close();
    }

    fn why_closed(&self) -> String {
        match &lock(&self.status).state {
            EngineState::Poisoned(why) => why.clone(),
            EngineState::Ready | EngineState::Stopped => "it is shutting down".to_owned(),
        }
    }

    fn closed_error(&self) -> RequestError {
        let message = format!("the engine stopped: {}", self.why_closed());
        RequestError { transient: true, code: "engine_stopped", param: None, message }
    }
}

struct EngineThread {
    engine: Engine,
    shared: Arc<Shared>,
    to_outputs: SyncSender<Mail>,
    /// Begun, and not handed over yet.
    begun: Vec<RequestId>,
    /// Outputs not handed over yet.
    outputs: Vec<SequenceOutput>,
    must_hand_over: bool,
}

impl EngineThread {
    fn new(engine: Engine, shared: Arc<Shared>, to_outputs: SyncSender<Mail>) -> Self {
        Self { engine, shared, to_outputs, begun: Vec::new(), outputs: Vec::new(), must_hand_over: false }
    }

    /// Steps until closed or broken, then fails what is left.
    fn run(mut self) {
        let end = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let state = match end {
            Ok(Ok(())) => EngineState::Stopped,
            Ok(Err(error)) => EngineState::Poisoned(chain(&error)),
            Err(panic) => EngineState::Poisoned(format!("a step panicked: {}", panic_text(panic.as_ref()))),
        };
        if let EngineState::Poisoned(why) = &state {
            tracing::error!("engine is poisoned: {why}");
        }
        {
            let mut status = lock(&self.shared.status);
            // The output thread may have said why before.
            if status.state == EngineState::Ready {
                status.state = state;
            }
            (status.num_running, status.num_waiting) = (0, 0);
        }
        self.shared.close();
        let error = self.shared.closed_error();
        let left = std::mem::take(&mut lock(&self.shared.inbox).submissions);
        for (request, sink) in left {
            sink(vec![Event::Failed { id: request.id, error: error.clone() }]);
        }
        self.hand_over();
        self.send(Mail::FailAll(error));
    }

    fn serve(&mut self) -> Result<(), Error> {
        while self.take_mail() {
            if self.engine.is_idle() {
                continue;
            }
            let started = Instant::now();
            // Where tests break it down.
            fail::fail_point!("engine::step");
            let step = self.engine.step()?;
            self.note(&step, started);
            self.must_hand_over |= !step.begun.is_empty();
            self.begun.extend(step.begun);
            for output in step.outputs {
                self.keep(output);
            }
            if self.must_hand_over || self.outputs.len() >= UNWATCHED_MAX {
                self.hand_over();
            }
        }
        Ok(())
    }

    /// Takes what callers left; waits for it while the engine is idle. False when closed.
    fn take_mail(&mut self) -> bool {
        let is_idle = self.engine.is_idle();
        if !is_idle && !self.shared.has_mail.load(Ordering::Acquire) {
            return true;
        }
        let mut inbox = lock(&self.shared.inbox);
        while is_idle && !inbox.is_closed && !self.shared.has_mail.load(Ordering::Acquire) {
            inbox = self.shared.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        if inbox.is_closed {
            return false;
        }
        self.shared.has_mail.store(false, Ordering::Release);
        let submissions = std::mem::take(&mut inbox.submissions);
        let cancels = std::mem::take(&mut inbox.cancels);
        let ended = std::mem::take(&mut inbox.ended);
        drop(inbox);
        if is_idle {
            lock(&self.shared.status).last_progress = Instant::now();
        }
        for (request, sink) in submissions {
            self.add(request, sink);
        }
        for id in cancels {
            if let Some(output) = self.engine.cancel(id) {
                self.keep(output);
            }
        }
        for EndedHere { id, reason } in ended {
            if self.engine.cancel(id).is_some() {
                self.shared.room.add_permits(1);
                lock(&self.shared.status).num_finished.count(reason);
            }
        }
        if self.must_hand_over {
            self.hand_over();
        }
        self.note_queues();
        true
    }

    fn add(&mut self, request: Request, sink: Sink) {
        let id = request.id;
        let registration = Registration::new(&request, sink.clone());
        match self.engine.add(request) {
            Ok(()) => self.send(Mail::Register(Box::new(registration))),
            Err(error) => {
                self.shared.room.add_permits(1);
                sink(vec![Event::Failed { id, error }]);
            }
        }
    }

    fn keep(&mut self, output: SequenceOutput) {
        self.must_hand_over |= output.is_watched || output.end.is_some();
        if let Some(end) = &output.end {
            self.shared.room.add_permits(1);
            lock(&self.shared.status).num_finished.count(end.as_ref().ok().map(|finish| finish.reason));
        }
        self.outputs.push(output);
    }

    fn hand_over(&mut self) {
        self.must_hand_over = false;
        if !self.begun.is_empty() || !self.outputs.is_empty() {
            let begun = std::mem::take(&mut self.begun);
            let outputs = std::mem::take(&mut self.outputs);
            self.send(Mail::Outputs(begun, outputs));
        }
    }

    /// The output thread outlives this one; should it be gone, the engine breaks too.
    fn send(&self, mail: Mail) {
        if self.to_outputs.send(mail).is_err() {
            self.shared.close();
        }
    }

    fn note(&self, step: &StepOutput, started: Instant) {
        let now = Instant::now();
        let mut status = lock(&self.shared.status);
        status.last_progress = now;
        // A step that was only started has nothing to tell yet.
        if step.num_decode_rows + step.num_prefill_tokens == 0 {
            return;
        }
        status.num_steps += 1;
        status.prompt_tokens += u64::from(step.num_prefill_tokens);
        let num_chosen = step.outputs.iter().filter(|output| output.token.is_some()).count() as u64;
        status.generation_tokens += num_chosen;
        let seconds = (now - started).as_secs_f64();
        if step.num_prefill_tokens > 0 {
            status.prefill_seconds += seconds;
        } else {
            status.decode_only_tokens += num_chosen;
            status.decode_seconds += seconds;
        }
        drop(status);
        self.note_queues();
    }

    fn note_queues(&self) {
        let scheduler = self.engine.scheduler();
        let mut status = lock(&self.shared.status);
        status.num_running = scheduler.num_running();
        status.num_waiting = scheduler.num_waiting();
        status.kv_cache_usage = 1.0 - scheduler.num_free_blocks() as f32 / self.shared.limits.num_blocks as f32;
        (status.prefix_cache_queries, status.prefix_cache_hits) = scheduler.prefix_cache_counts();
        status.num_preemptions = scheduler.num_preemptions();
    }
}

/// Turns tokens into events until the engine thread is gone.
fn run_outputs(mut outputs: Outputs, shared: &Shared, mail: &Receiver<Mail>) {
    let end = catch_unwind(AssertUnwindSafe(|| {
        while let Ok(first) = mail.recv() {
            for mail in std::iter::once(first).chain(mail.try_iter()) {
                match mail {
                    Mail::Register(registration) => outputs.register(*registration),
                    Mail::Outputs(begun, batch) => {
                        begun.into_iter().for_each(|id| outputs.begin(id));
                        batch.into_iter().for_each(|output| outputs.take(output));
                        let ended = outputs.deliver();
                        if !ended.is_empty() {
                            let mut inbox = lock(&shared.inbox);
                            inbox.ended.extend(ended);
                            shared.notify(inbox);
                        }
                    }
                    Mail::FailAll(error) => {
                        outputs.fail_all(&error);
                        outputs.deliver();
                    }
                }
            }
        }
    }));
    if let Err(panic) = end {
        let why = format!("the output thread panicked: {}", panic_text(panic.as_ref()));
        lock(&shared.status).state = EngineState::Poisoned(why);
        shared.close();
        outputs.fail_all(&shared.closed_error());
        outputs.deliver();
    }
}

/// Memory that the system can give without swapping, where it says so.
fn free_memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// A panic elsewhere leaves counts behind that are still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
