//! From an item's body to requests, and from outputs to an OpenAI answer.
//!
//! The only place where items and requests meet: jobs and the online routes use it
//! alike, for the local engine and for a remote one. Invariants: a field is
//! implemented, or cannot change the answer, or is refused by name; the same body,
//! seed and request id give the same requests and ids.
//! Knows nothing of shards, leases or HTTP serving.
//! Start with [`Mapper::prepare`].

mod answer;
mod chat;
mod choice;
mod fields;
mod local;
mod params;
mod refusal;
mod remote;
mod surrogates;
#[cfg(test)]
mod tests;
mod wire;
mod write;

use std::sync::Arc;

use overnight_engine::request::Class;
use overnight_engine::text::Text;
use overnight_types::Endpoint;

use crate::generate::{Input, Request};

pub use answer::{Answer, AnswerState, Response, StreamEnd, StreamStep, failure_response};
pub use refusal::{ErrorBody, Refusal};

/// Maps for one engine. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Mapper {
    target: Arc<Target>,
}

#[derive(Debug)]
enum Target {
    Local { text: Arc<Text>, names: Vec<String>, limits: ModelLimits },
    Remote { names: Option<Vec<String>> },
}

/// What the engine can hold; from its model and settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelLimits {
    /// Longest prompt plus output, tokens.
    pub max_model_len: u32,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Most logprobs per position.
    pub max_logprobs: u32,
}

/// What the caller adds to a body.
#[derive(Debug, Clone, Copy)]
pub struct PrepareOptions<'a> {
    /// Who waits.
    pub class: Class,
    /// Whether the caller can send chunks. Where not, `stream: true` is refused.
    pub allow_stream: bool,
    /// Used when the body has no seed.
    pub seed: u64,
    /// Unique part of the answer's id, without a prefix.
    pub request_id: &'a str,
    /// The answer's `created`, Unix seconds.
    pub created: i64,
}

/// A body ready to run.
#[derive(Debug)]
pub struct Prepared {
    /// One for each choice: `n` for each prompt.
    pub requests: Vec<Request>,
    /// Takes their outputs.
    pub answer: Answer,
    /// The body asks for chunks: give outputs to [`Answer::push_stream`].
    pub stream: bool,
    /// The seed that the samples depend on and the first one has; `None` when a remote engine draws it.
    pub seed_used: Option<u64>,
}

impl Prepared {
    /// The first prompt's ids, for ordering a window by shared prefix; empty for a remote engine.
    pub fn order_key(&self) -> &[u32] {
        match self.requests.first().map(|request| &request.input) {
            Some(Input::Tokens(request)) => &request.prompt,
            _ => &[],
        }
    }
}

impl Mapper {
    /// For the engine in this process. `names` are the model names it answers to.
    pub fn local(text: Arc<Text>, names: Vec<String>, limits: ModelLimits) -> Self {
        Self { target: Arc::new(Target::Local { text, names, limits }) }
    }

    /// For a remote engine, which gets bodies byte for byte; `None` passes any model name on.
    pub fn remote(names: Option<Vec<String>>) -> Self {
        Self { target: Arc::new(Target::Remote { names }) }
    }

    /// The local tokenizer; `None` for a remote engine.
    pub fn text(&self) -> Option<&Arc<Text>> {
        match &*self.target {
            Target::Local { text, .. } => Some(text),
            Target::Remote { .. } => None,
        }
    }

    /// Names answered to; `None` when any is passed on.
    pub fn names(&self) -> Option<&[String]> {
        match &*self.target {
            Target::Local { names, .. } => Some(names),
            Target::Remote { names } => names.as_deref(),
        }
    }

    /// What the local engine can hold; `None` for a remote one.
    pub fn limits(&self) -> Option<ModelLimits> {
        match &*self.target {
            Target::Local { limits, .. } => Some(*limits),
            Target::Remote { .. } => None,
        }
    }

    /// Checks a body and turns it into requests. A refusal is this item's answer and nobody else's.
    pub fn prepare(&self, endpoint: Endpoint, body: &[u8], options: PrepareOptions<'_>) -> Result<Prepared, Refusal> {
        match &*self.target {
            Target::Local { text, names, limits } => local::prepare(text, names, *limits, endpoint, body, &options),
            Target::Remote { names } => remote::prepare(names.as_deref(), endpoint, body, &options),
        }
    }
}

/// Judges a body of a job as every model of the local engine would, where none is loaded:
/// unknown and unsupported fields, types, and ranges that hang on no model.
pub fn check_without_model(endpoint: Endpoint, body: &[u8]) -> Result<(), Refusal> {
    local::check_without_model(endpoint, body)
}
