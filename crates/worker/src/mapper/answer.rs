//! Collects the outputs of a body's requests into one answer.

use bytes::Bytes;
use overnight_engine::request::{FinishReason, RequestId, TokenOutput};
use overnight_types::Usage;

use super::choice::Choices;
use super::refusal::of_failure;
use super::{remote, write};
use crate::generate::{Failure, Output};

/// A finished HTTP answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// HTTP status.
    pub status: u16,
    /// Always a JSON object.
    pub body: Bytes,
    /// Tokens used; zero when unknown.
    pub usage: Usage,
    /// Of all choices when they agree, else `length` when one was cut.
    pub finish_reason: Option<String>,
    /// `error.code` of an answer that is not 2xx.
    pub error_code: Option<String>,
    /// Another try may fare better (429, 5xx, no answer in a 200); after the last one this answer stands.
    pub retryable: bool,
}

/// Where an answer stands after an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerState {
    /// More outputs will come.
    Pending,
    /// Complete.
    Done(Response),
    /// One of its requests got no answer; the caller cancels the others, whose outputs are then ignored.
    Failed(Failure),
}

/// What one output adds to a stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamStep {
    /// Payloads of `data:` lines, in order; the last one of a good end is `[DONE]`.
    pub chunks: Vec<Bytes>,
    /// Set when nothing follows.
    pub end: Option<StreamEnd>,
}

/// How a stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEnd {
    /// All choices are complete.
    Done {
        /// Tokens used.
        usage: Usage,
        /// As in [`Response::finish_reason`].
        finish_reason: Option<String>,
    },
    /// No answer. Before the first chunk the caller can send this as it is, later its body as the last chunk.
    Failed(Response),
}

/// Collects outputs of one body.
#[derive(Debug)]
pub struct Answer {
    ids: Vec<RequestId>,
    /// `None` for a remote engine, whose one output is the answer.
    choices: Option<Choices>,
    over: bool,
}

impl Answer {
    pub(super) fn remote(id: RequestId) -> Self {
        Self { ids: vec![id], choices: None, over: false }
    }

    pub(super) fn local(choices: Choices) -> Self {
        let ids = choices.all.iter().map(|choice| choice.request).collect();
        Self { ids, choices: Some(choices), over: false }
    }

    /// The requests that it waits for, for routing and cancel.
    pub fn request_ids(&self) -> &[RequestId] {
        &self.ids
    }

    /// Takes an output. Outputs of others and outputs after the end change nothing.
    pub fn push(&mut self, output: Output) -> AnswerState {
        if self.over || !self.ids.contains(&output.id()) {
            return AnswerState::Pending;
        }
        let state = match output {
            Output::Begun { .. } => AnswerState::Pending,
            Output::Tokens(tokens) => self.push_tokens(tokens),
            Output::Response { status, body, .. } => AnswerState::Done(remote::judge(status, body)),
            Output::Failed { failure: refused @ Failure::Refused { .. }, .. } => {
                AnswerState::Done(failure_response(&refused))
            }
            Output::Failed { failure, .. } => AnswerState::Failed(failure),
        };
        self.over = state != AnswerState::Pending;
        state
    }

    fn push_tokens(&mut self, tokens: TokenOutput) -> AnswerState {
        let aborted = tokens.finish.as_ref().is_some_and(|finish| finish.reason == FinishReason::Abort);
        let Some(choices) = &mut self.choices else { return AnswerState::Pending };
        if aborted {
            return AnswerState::Failed(Failure::Cancelled);
        }
        match choices.take(tokens) {
            Some(_) if choices.is_complete() => AnswerState::Done(write::whole(choices)),
            _ => AnswerState::Pending,
        }
    }

    /// The same for a body that asked for a stream.
    pub fn push_stream(&mut self, output: Output) -> StreamStep {
        if self.over || !self.ids.contains(&output.id()) {
            return StreamStep::default();
        }
        match output {
            Output::Begun { .. } => StreamStep::default(),
            Output::Tokens(tokens) => self.stream_tokens(tokens),
            Output::Response { status, body, .. } => self.stream_failed(remote::judge(status, body)),
            Output::Failed { failure, .. } => self.stream_failed(failure_response(&failure)),
        }
    }

    fn stream_tokens(&mut self, mut tokens: TokenOutput) -> StreamStep {
        if tokens.finish.as_ref().is_some_and(|finish| finish.reason == FinishReason::Abort) {
            return self.stream_failed(failure_response(&Failure::Cancelled));
        }
        let Some(choices) = &mut self.choices else { return StreamStep::default() };
        // What the chunk shows need not be kept; the end and the prompt's logprobs are.
        let kept = TokenOutput {
            id: tokens.id,
            token_ids: Vec::new(),
            text: String::new(),
            logprobs: Vec::new(),
            prompt_logprobs: tokens.prompt_logprobs.take(),
            finish: tokens.finish.clone(),
        };
        let Some(index) = choices.take(kept) else { return StreamStep::default() };
        let mut chunks = write::chunks(choices, index, &tokens);
        if !choices.is_complete() {
            return StreamStep { chunks, end: None };
        }
        if choices.rules.include_usage {
            chunks.push(write::usage_chunk(choices));
        }
        chunks.push(Bytes::from_static(b"[DONE]"));
        self.over = true;
        let end = StreamEnd::Done { usage: choices.usage(), finish_reason: choices.finish_reason() };
        StreamStep { chunks, end: Some(end) }
    }

    fn stream_failed(&mut self, response: Response) -> StreamStep {
        self.over = true;
        StreamStep { chunks: Vec::new(), end: Some(StreamEnd::Failed(response)) }
    }
}

/// The HTTP answer of a failure that stands: refused, or no try is left.
pub fn failure_response(failure: &Failure) -> Response {
    let (status, error) = of_failure(failure);
    Response {
        status,
        body: error.to_bytes(),
        usage: Usage::default(),
        finish_reason: None,
        error_code: error.code,
        retryable: !matches!(failure, Failure::Refused { .. } | Failure::Cancelled),
    }
}

/// One word for several choices: theirs when they agree, else `length` when one was cut, else the first.
pub(super) fn common_reason<'a>(reasons: impl Iterator<Item = Option<&'a str>> + Clone) -> Option<String> {
    let mut known = reasons.flatten();
    let first = known.next()?;
    let cut = first == "length" || known.any(|reason| reason == "length");
    Some(if cut { "length" } else { first }.to_owned())
}
