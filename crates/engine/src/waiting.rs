//! Requests whose submission waits for room: the engine does not know them yet, so a
//! cancel ends them here.
//!
//! Invariant: a request leaves exactly once, either to be handed over (or failed) by
//! its submission or to be ended by a cancel; whoever takes it out gives its last event.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::output::{Event, Sink};
use crate::request::{Finish, FinishReason, Request, RequestError, RequestId, TokenOutput};

/// What must be known to end a request before the engine has it.
struct Waiting {
    sink: Sink,
    num_prompt_tokens: u32,
}

/// All of them, by id.
#[derive(Default)]
pub(crate) struct WaitingRequests {
    by_id: HashMap<RequestId, Waiting>,
}

impl WaitingRequests {
    /// Takes a request in, so that a cancel finds it. Errors when its id waits already.
    pub(crate) fn announce(&mut self, request: &Request, sink: &Sink) -> Result<(), RequestError> {
        let num_prompt_tokens = u32::try_from(request.prompt.len()).expect("the door bounds a prompt's length");
        match self.by_id.entry(request.id) {
            Entry::Occupied(_) => Err(RequestError::duplicate_id(request.id)),
            Entry::Vacant(free) => {
                free.insert(Waiting { sink: sink.clone(), num_prompt_tokens });
                Ok(())
            }
        }
    }

    /// Takes a request out for its submission; false when a cancel took it before.
    pub(crate) fn take(&mut self, id: RequestId) -> bool {
        self.by_id.remove(&id).is_some()
    }

    /// Takes a request out for a cancel: where its last event goes, and that event.
    pub(crate) fn cancel(&mut self, id: RequestId) -> Option<(Sink, Event)> {
        let Waiting { sink, num_prompt_tokens } = self.by_id.remove(&id)?;
        let finish = Finish {
            reason: FinishReason::Abort,
            stop_reason: None,
            num_prompt_tokens,
            num_cached_tokens: 0,
            num_output_tokens: 0,
        };
        let output = TokenOutput {
            id,
            token_ids: Vec::new(),
            text: String::new(),
            logprobs: Vec::new(),
            prompt_logprobs: None,
            finish: Some(finish),
        };
        Some((sink, Event::Output(output)))
    }
}
