//! The thread that owns the engine and steps it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::output_thread::Mail;
use super::panic_text;
use super::shared::{Shared, lock};
use super::status::EngineState;
use crate::metrics::{Arrival, StepMark};
use crate::output::{EndedHere, Event, Registration, Sink};
use crate::request::{Request, RequestId};
use crate::step::{SequenceOutput, StepOutput};
use crate::{Engine, Error};

/// Steps whose outputs nobody watches are handed over together, at most this many outputs.
const UNWATCHED_MAX: usize = 4096;
/// The same in steps, which may have no outputs.
const STEPS_MAX: usize = 256;

pub(super) struct EngineThread {
    engine: Engine,
    shared: Arc<Shared>,
    to_outputs: SyncSender<Mail>,
    /// Begun, and not handed over yet.
    begun: Vec<RequestId>,
    /// Outputs not handed over yet.
    outputs: Vec<SequenceOutput>,
    /// The steps that brought them, and those since the last handing over.
    steps: Vec<StepMark>,
    must_hand_over: bool,
}

impl EngineThread {
    pub(super) fn new(engine: Engine, shared: Arc<Shared>, to_outputs: SyncSender<Mail>) -> Self {
        Self {
            engine,
            shared,
            to_outputs,
            begun: Vec::new(),
            outputs: Vec::new(),
            steps: Vec::new(),
            must_hand_over: false,
        }
    }

    /// Steps until closed or broken, then fails what is left.
    pub(super) fn run(mut self) {
        let end = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let state = match end {
            Ok(Ok(())) => EngineState::Stopped,
            Ok(Err(error)) => EngineState::Poisoned(crate::error::chain(&error)),
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
            let ended_at = self.note(&step, started);
            let num_tokens = step.num_decode_rows + step.num_prefill_tokens;
            self.must_hand_over |= !step.begun.is_empty();
            self.begun.extend(step.begun);
            for output in step.outputs {
                self.keep(output);
            }
            let num_outputs = self.outputs.len();
            self.steps.push(StepMark {
                started_at: started,
                ended_at,
                num_tokens,
                admitted: step.admitted,
                num_outputs,
            });
            if self.must_hand_over || num_outputs >= UNWATCHED_MAX || self.steps.len() >= STEPS_MAX {
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
        let now = Instant::now();
        for (request, sink) in submissions {
            self.add(request, sink, now);
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

    fn add(&mut self, request: Request, sink: Sink, now: Instant) {
        let id = request.id;
        let registration = Registration::new(&request, sink.clone());
        let arrival = Arrival::new(id, &request.stop, now);
        match self.engine.add(request) {
            Ok(()) => self.send(Mail::Register(Box::new((registration, arrival)))),
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
        if !self.begun.is_empty() || !self.outputs.is_empty() || !self.steps.is_empty() {
            let begun = std::mem::take(&mut self.begun);
            let outputs = std::mem::take(&mut self.outputs);
            let steps = std::mem::take(&mut self.steps);
            self.send(Mail::Outputs { begun, outputs, steps });
        }
    }

    /// The output thread outlives this one; should it be gone, the engine breaks too.
    fn send(&self, mail: Mail) {
        if self.to_outputs.send(mail).is_err() {
            self.shared.close();
        }
    }

    /// Adds a step to the counts; the moment of its end.
    fn note(&self, step: &StepOutput, started: Instant) -> Instant {
        let now = Instant::now();
        let mut status = lock(&self.shared.status);
        status.last_progress = now;
        // A step that was only started has nothing to tell yet.
        if step.num_decode_rows + step.num_prefill_tokens == 0 {
            return now;
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
        now
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
