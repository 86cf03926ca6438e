//! The engine's threads and the handle to them.
//!
//! One thread owns the [`Engine`] and steps it while anything is there; a second one
//! turns tokens into text and feeds the sinks. The handle is cheap to clone and works
//! from any thread. Invariants: every submitted request gets exactly one last event;
//! no more than [`EngineHandle::capacity`] requests are inside; a failure or panic of
//! the engine thread fails all of them as transient and shows as [`EngineState::Poisoned`].
//!
//! Start with [`Engine::start`], then `EngineThread::run`.

mod engine_thread;
mod output_thread;
mod shared;
mod status;

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use tokio::sync::Semaphore;

use crate::config::EngineConfig;
use crate::door::Limits;
use crate::metrics::EngineMetrics;
use crate::model::Forward;
use crate::output::{Event, Outputs, Sink};
use crate::request::{FinishReason, Request, RequestId};
use crate::running::{Alive, Close};
use crate::text::Text;
use crate::{Engine, Error};
use engine_thread::EngineThread;
use output_thread::run_outputs;
use shared::{Queue, Shared, lock};

pub use status::{EngineState, EngineStatus, FinishCounts};

/// Requests inside at once, per sequence of a step, and at least.
const CAPACITY_PER_SEQ: u32 = 16;
const CAPACITY_MIN: u32 = 256;
/// Requests that a submission hands over at a time.
const SUBMIT_CHUNK: usize = 64;
/// Rounds of output on the way to the output thread.
const OUTPUT_QUEUE: usize = 256;

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
        metrics: Mutex::new(EngineMetrics::new(limits.max_model_len)),
        limits,
        inbox: Mutex::default(),
        has_mail: AtomicBool::new(false),
        wake: Condvar::new(),
        room: Semaphore::new(capacity as usize),
        capacity,
        status: Mutex::new(EngineStatus::new()),
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

    /// How long requests took and how large they were, up to the last outputs given out.
    pub fn metrics(&self) -> EngineMetrics {
        lock(&self.owner.shared.metrics).clone()
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

/// Memory that the system can give without swapping, where it says so.
fn free_memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
