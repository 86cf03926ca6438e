//! Collects the outputs of a body's requests into one answer.

use bytes::Bytes;
use overnight_engine::request::RequestId;
use overnight_types::Usage;

use super::refusal::of_failure;
use super::remote;
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
    /// The chunks end with the error object; before the first chunk the caller may send this instead.
    Failed(Response),
}

/// Collects outputs of one body.
#[derive(Debug)]
pub struct Answer {
    ids: Vec<RequestId>,
    over: bool,
}

impl Answer {
    pub(super) fn remote(id: RequestId) -> Self {
        Self { ids: vec![id], over: false }
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
        self.over = true;
        match output {
            Output::Failed { failure: refused @ Failure::Refused { .. }, .. } => {
                AnswerState::Done(failure_response(&refused))
            }
            Output::Failed { failure, .. } => AnswerState::Failed(failure),
            Output::Response { status, body, .. } => AnswerState::Done(remote::judge(status, body)),
            Output::Tokens(_) => AnswerState::Pending,
        }
    }

    /// The same for a body that asked for a stream.
    pub fn push_stream(&mut self, output: Output) -> StreamStep {
        match self.push(output) {
            AnswerState::Pending => StreamStep::default(),
            AnswerState::Done(response) => StreamStep { chunks: Vec::new(), end: Some(StreamEnd::Failed(response)) },
            AnswerState::Failed(failure) => {
                StreamStep { chunks: Vec::new(), end: Some(StreamEnd::Failed(failure_response(&failure))) }
            }
        }
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
