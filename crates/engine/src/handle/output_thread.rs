//! The thread that turns tokens into events.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::panic_text;
use super::shared::{Shared, lock};
use super::status::EngineState;
use crate::metrics::{Arrival, Recorder, StepMark};
use crate::output::{Outputs, Registration};
use crate::request::{RequestError, RequestId};
use crate::step::SequenceOutput;

/// To the output thread.
pub(super) enum Mail {
    Register(Box<(Registration, Arrival)>),
    Outputs {
        /// Requests that began before.
        begun: Vec<RequestId>,
        outputs: Vec<SequenceOutput>,
        /// The steps that brought them.
        steps: Vec<StepMark>,
    },
    FailAll(RequestError),
}

/// Turns tokens into events until the engine thread is gone.
pub(super) fn run_outputs(mut outputs: Outputs, shared: &Shared, mail: &Receiver<Mail>) {
    let mut recorder = Recorder::new(shared.limits.max_model_len);
    let end = catch_unwind(AssertUnwindSafe(|| {
        while let Ok(first) = mail.recv() {
            for mail in std::iter::once(first).chain(mail.try_iter()) {
                match mail {
                    Mail::Register(both) => {
                        let (registration, arrival) = *both;
                        recorder.arrive(arrival);
                        outputs.register(registration);
                    }
                    Mail::Outputs { begun, outputs: batch, steps } => {
                        let now = Instant::now();
                        recorder.take(&batch, &steps, now);
                        begun.into_iter().for_each(|id| outputs.begin(id));
                        batch.into_iter().for_each(|output| outputs.take(output));
                        recorder.take_ended(outputs.ended(), now);
                        // Before the answers go out: who has one finds it counted.
                        lock(&shared.metrics).clone_from(recorder.metrics());
                        let ended = outputs.deliver();
                        recorder.take_ended(&ended, now);
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
