//! The thread that turns tokens into events.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;

use super::panic_text;
use super::shared::{Shared, lock};
use super::status::EngineState;
use crate::output::{Outputs, Registration};
use crate::request::{RequestError, RequestId};
use crate::step::SequenceOutput;

/// To the output thread.
pub(super) enum Mail {
    Register(Box<Registration>),
    /// Requests that began, then outputs.
    Outputs(Vec<RequestId>, Vec<SequenceOutput>),
    FailAll(RequestError),
}

/// Turns tokens into events until the engine thread is gone.
pub(super) fn run_outputs(mut outputs: Outputs, shared: &Shared, mail: &Receiver<Mail>) {
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
