//! From tokens to what callers see: text, stop texts, streams or one output at the end.
//!
//! Owns the sinks. Invariants: every registered request gets exactly one last event;
//! text and token ids are cut at the same place; a sink gets at most one message per
//! round. A plain state machine without threads: [`crate::handle`] runs it beside the
//! engine's thread, so that detokenization never holds up a step.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::request::{Finish, FinishReason, Request, RequestError, RequestId, StopReason, TokenLogprobs, TokenOutput};
use crate::step::SequenceOutput;
use crate::text::{OutputRules, OutputText, Text};

/// What comes back for a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A step computes the request for the first time. Comes once, before anything else of it,
    /// to requests of class [`Class::Job`](crate::request::Class::Job) only: nobody waits for an answer there, so the time
    /// before it says nothing.
    Begun {
        /// Whose.
        id: RequestId,
    },
    /// Something generated; the last one has `finish` set.
    Output(TokenOutput),
    /// The last event of a request that got no answer.
    Failed {
        /// Whose.
        id: RequestId,
        /// Why.
        error: RequestError,
    },
}

/// Where a submission's events go: one call per engine step at most, from a thread of
/// the engine. It must not block. `false` says that nobody listens any more, and its
/// requests are cancelled.
pub type Sink = Arc<dyn Fn(Vec<Event>) -> bool + Send + Sync>;

/// Prompt tokens kept for a character that the prompt left unfinished.
const PROMPT_TAIL: usize = 16;

/// What must be known of a request to make its outputs.
pub struct Registration {
    id: RequestId,
    sink: Sink,
    prompt_tail: Vec<u32>,
    stop: Vec<String>,
    include_stop: bool,
    min_tokens: u32,
    skip_special_tokens: bool,
    stream: bool,
}

impl Registration {
    /// Of a request that the engine is about to take.
    pub fn new(request: &Request, sink: Sink) -> Self {
        let tail = request.prompt.len().saturating_sub(PROMPT_TAIL);
        Self {
            id: request.id,
            sink,
            prompt_tail: request.prompt[tail..].to_vec(),
            stop: request.stop.stop.clone(),
            include_stop: request.stop.include_stop_str_in_output,
            min_tokens: request.stop.min_tokens,
            skip_special_tokens: request.skip_special_tokens,
            stream: request.stream,
        }
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("id", &self.id).field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// One request's output so far.
struct Live {
    registration: Registration,
    text: Option<OutputText>,
    /// Tokens not given out yet, with their logprobs when asked for.
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Text not given out yet.
    pending: String,
    num_given: usize,
    /// Tokens that may be given out, from the start of the output.
    num_ready: usize,
    num_tokens: u32,
}

/// All outputs that have not ended.
pub struct Outputs {
    text: Option<Arc<Text>>,
    live: HashMap<RequestId, Live>,
    round: Round,
}

/// A request that the engine need not go on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndedHere {
    /// Which.
    pub id: RequestId,
    /// `None` when it failed here.
    pub reason: Option<FinishReason>,
}

/// What one round gives out, per sink.
#[derive(Default)]
struct Round {
    messages: Vec<(Sink, Vec<Event>)>,
    by_sink: HashMap<usize, usize>,
    ended: Vec<EndedHere>,
}

impl Round {
    fn push(&mut self, sink: &Sink, event: Event) {
        let address = Arc::as_ptr(sink).cast::<()>() as usize;
        let index = *self.by_sink.entry(address).or_insert_with(|| {
            self.messages.push((sink.clone(), Vec::new()));
            self.messages.len() - 1
        });
        self.messages[index].1.push(event);
    }
}

impl std::fmt::Debug for Outputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outputs").field("num_live", &self.live.len()).finish_non_exhaustive()
    }
}

impl Outputs {
    /// No outputs yet. Without `text`, outputs have token ids only.
    pub fn new(text: Option<Arc<Text>>) -> Self {
        Self { text, live: HashMap::new(), round: Round::default() }
    }

    /// Expects outputs of this request.
    pub fn register(&mut self, registration: Registration) {
        let text = self.text.as_ref().map(|text| {
            let rules = OutputRules {
                stop: &registration.stop,
                include_stop: registration.include_stop,
                min_tokens: registration.min_tokens,
                skip_special_tokens: registration.skip_special_tokens,
            };
            OutputText::new(text, &registration.prompt_tail, rules)
        });
        let live = Live {
            text,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: None,
            pending: String::new(),
            num_given: 0,
            num_ready: 0,
            num_tokens: 0,
            registration,
        };
        self.live.insert(live.registration.id, live);
    }

    /// Notes that a step computes this request for the first time.
    pub fn begin(&mut self, id: RequestId) {
        if let Some(live) = self.live.get(&id) {
            self.round.push(&live.registration.sink, Event::Begun { id });
        }
    }

    /// Takes what a step brought for a request. What comes after its end here, because
    /// the engine had not heard of a stop text yet, is dropped.
    pub fn take(&mut self, output: SequenceOutput) {
        let id = output.id;
        let Some(live) = self.live.get_mut(&id) else { return };
        let has_engine_ended = output.end.is_some();
        let event = catch_unwind(AssertUnwindSafe(|| live.advance(output))).unwrap_or_else(|_| {
            Some(failed(id, RequestError::DETOKENIZATION_FAILED, "the tokenizer broke down on this output".to_owned()))
        });
        let Some(event) = event else { return };
        let reason = match &event {
            Event::Output(output) => output.finish.as_ref().map(|finish| finish.reason),
            Event::Begun { .. } | Event::Failed { .. } => None,
        };
        let is_last = reason.is_some() || matches!(event, Event::Failed { .. });
        self.round.push(&live.registration.sink, event);
        if is_last {
            self.live.remove(&id);
            if !has_engine_ended {
                self.round.ended.push(EndedHere { id, reason });
            }
        }
    }

    /// Ends every request that is still open with this error.
    pub fn fail_all(&mut self, error: &RequestError) {
        for (id, live) in self.live.drain() {
            self.round.push(&live.registration.sink, Event::Failed { id, error: error.clone() });
        }
    }

    /// Requests that ended here since the last delivery, before the engine ended them.
    pub fn ended(&self) -> &[EndedHere] {
        &self.round.ended
    }

    /// Gives out the events since the last call, one message per sink. Returns the
    /// requests that ended here before the engine ended them, or that nobody listens to.
    pub fn deliver(&mut self) -> Vec<EndedHere> {
        let round = std::mem::take(&mut self.round);
        let mut ended = round.ended;
        for (sink, events) in round.messages {
            let ids: Vec<RequestId> = events
                .iter()
                .filter_map(|event| match event {
                    Event::Begun { id } => Some(*id),
                    Event::Output(output) if output.finish.is_none() => Some(output.id),
                    _ => None,
                })
                .collect();
            if !sink(events) {
                for id in ids {
                    if self.live.remove(&id).is_some() {
                        ended.push(EndedHere { id, reason: Some(FinishReason::Abort) });
                    }
                }
            }
        }
        ended
    }
}

impl Live {
    /// Moves on by one step; what can be given out now.
    fn advance(&mut self, output: SequenceOutput) -> Option<Event> {
        if output.prompt_logprobs.is_some() {
            self.prompt_logprobs = output.prompt_logprobs;
        }
        let finish = match output.end {
            Some(Err(error)) => return Some(Event::Failed { id: output.id, error }),
            Some(Ok(finish)) => Some(finish),
            None => None,
        };
        if let Some(token) = output.token {
            self.num_tokens += 1;
            // Only end tokens stop a sequence in the engine; they are no part of the answer.
            let is_end_token = finish.as_ref().is_some_and(|finish| finish.reason == FinishReason::Stop);
            if !is_end_token || self.registration.include_stop {
                match self.push(token, output.logprobs) {
                    Ok(None) => {}
                    Ok(Some(index)) => {
                        let stop = self.registration.stop[index].clone();
                        return Some(self.give_out(
                            output.id,
                            Some(Finish {
                                reason: FinishReason::Stop,
                                stop_reason: Some(StopReason::Text(stop)),
                                num_prompt_tokens: output.num_prompt_tokens,
                                num_cached_tokens: output.num_cached_tokens,
                                num_output_tokens: self.num_tokens,
                            }),
                        ));
                    }
                    Err(message) => return Some(failed(output.id, RequestError::DETOKENIZATION_FAILED, message)),
                }
            }
        }
        if finish.is_some() {
            if let Some(text) = &mut self.text {
                self.pending += &text.finish();
            }
            self.num_ready = self.num_given + self.tokens.len();
            return Some(self.give_out(output.id, finish));
        }
        let is_new = !self.pending.is_empty() || self.num_ready > self.num_given;
        (self.registration.stream && is_new).then(|| self.give_out(output.id, None))
    }

    /// Appends a token and its text. The index of the stop text that was found, if one
    /// was; tokens beyond it are cut off.
    fn push(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> Result<Option<usize>, String> {
        self.tokens.push(token);
        self.logprobs.extend(logprobs);
        let Some(text) = &mut self.text else {
            self.num_ready = self.num_given + self.tokens.len();
            return Ok(None);
        };
        let step = text.push(token).map_err(|error| error.to_string())?;
        self.pending += &step.text;
        self.num_ready = step.num_ready;
        let Some(hit) = step.stop else { return Ok(None) };
        self.num_ready = hit.num_tokens;
        let num_kept = hit.num_tokens - self.num_given;
        self.tokens.truncate(num_kept);
        self.logprobs.truncate(num_kept);
        Ok(Some(hit.index))
    }

    fn give_out(&mut self, id: RequestId, finish: Option<Finish>) -> Event {
        let num_new = self.num_ready - self.num_given;
        self.num_given = self.num_ready;
        let num_logprobs = num_new.min(self.logprobs.len());
        Event::Output(TokenOutput {
            id,
            token_ids: self.tokens.drain(..num_new).collect(),
            text: std::mem::take(&mut self.pending),
            logprobs: self.logprobs.drain(..num_logprobs).collect(),
            prompt_logprobs: self.prompt_logprobs.take(),
            finish,
        })
    }
}

fn failed(id: RequestId, code: &'static str, message: String) -> Event {
    Event::Failed { id, error: RequestError { transient: false, code, param: None, message } }
}
