//! Bodies that go to a remote engine byte for byte, and its answers as they came.

use std::borrow::Cow;

use bytes::Bytes;
use overnight_engine::request::RequestId;
use overnight_types::{Endpoint, Usage};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::answer::{Answer, Response};
use super::refusal::{ErrorBody, Refusal};
use super::{PrepareOptions, Prepared};
use crate::generate::{Input, Request};

/// Longest piece of an odd answer that is quoted.
const QUOTED_CHARS_MAX: usize = 500;

/// The few fields that are read of a body.
#[derive(Deserialize)]
struct Peek<'a> {
    #[serde(borrow, default)]
    model: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    #[serde(borrow, default)]
    seed: Option<&'a RawValue>,
}

pub(super) fn prepare(
    names: Option<&[String]>,
    endpoint: Endpoint,
    body: &[u8],
    options: &PrepareOptions<'_>,
) -> Result<Prepared, Refusal> {
    if !is_object(body) {
        return Err(Refusal::bad("the body is not a JSON object").with_code("invalid_json"));
    }
    let peek: Peek<'_> =
        serde_json::from_slice(body).map_err(|err| Refusal::bad(format!("the body is not usable JSON: {err}")))?;
    let model = peek.model.ok_or_else(|| Refusal::field("model", "model is required"))?;
    if let Some(names) = names.filter(|names| !names.iter().any(|name| *name == model)) {
        return Err(Refusal::model_not_found(&model, names));
    }
    if peek.stream.is_some_and(|stream| stream.get() == "true") {
        let why = "a remote engine's answer is taken whole: leave stream out, or ask that server itself";
        return Err(Refusal::field("stream", why).with_code("stream_not_supported"));
    }
    let id = RequestId::next();
    let input = Input::Body { endpoint, json: Bytes::copy_from_slice(body) };
    Ok(Prepared {
        requests: vec![Request { id, class: options.class, input }],
        answer: Answer::remote(id),
        stream: false,
        seed_used: peek.seed.and_then(|seed| seed.get().parse().ok()),
    })
}

/// What is read of a remote answer; all of it optional and of any type.
#[derive(Deserialize)]
struct RemoteAnswer<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
struct RemoteUsage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<RemoteDetails>,
    #[serde(default)]
    completion_tokens_details: Option<RemoteDetails>,
}

#[derive(Deserialize, Default)]
struct RemoteDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
    #[serde(default)]
    reasoning_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct RemoteChoice {
    #[serde(default)]
    finish_reason: serde_json::Value,
}

#[derive(Deserialize, Default)]
struct RemoteError {
    #[serde(default)]
    code: serde_json::Value,
}

/// Judges a remote answer by its result, not by its status alone: an error object or no
/// choices inside a 2xx is a failure. The body is kept byte for byte when it is an object.
pub(super) fn judge(status: u16, body: Bytes) -> Response {
    let success = (200..300).contains(&status);
    let text = std::str::from_utf8(&body).ok().filter(|text| is_object(text.as_bytes()));
    let parsed: Option<RemoteAnswer<'_>> = text.and_then(|text| serde_json::from_str(text).ok());
    let Some(answer) = parsed else { return odd(status, &body) };
    let error = answer.error.filter(|error| !matches!(error.get(), "null" | "{}" | "false" | "\"\""));
    if let Some(error) = error {
        // Some servers write a bare text here; it carries no code.
        let code = serde_json::from_str::<RemoteError>(error.get()).unwrap_or_default().code;
        let status = if success { error_status(&code) } else { status };
        let code = match code {
            serde_json::Value::String(code) => Some(code),
            serde_json::Value::Number(code) => Some(code.to_string()),
            _ => None,
        };
        return failed(status, body, code);
    }
    if !success {
        return failed(status, body, None);
    }
    let choices: Vec<RemoteChoice> =
        answer.choices.and_then(|choices| serde_json::from_str(choices.get()).ok()).unwrap_or_default();
    if choices.is_empty() {
        return odd(status, &body);
    }
    let usage: RemoteUsage = answer.usage.and_then(|usage| serde_json::from_str(usage.get()).ok()).unwrap_or_default();
    let usage = Usage {
        input_tokens: usage.prompt_tokens.unwrap_or(0),
        cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0),
        output_tokens: usage.completion_tokens.unwrap_or(0),
        reasoning_tokens: usage.completion_tokens_details.and_then(|details| details.reasoning_tokens).unwrap_or(0),
    };
    let finish_reason = super::answer::common_reason(choices.iter().map(|choice| choice.finish_reason.as_str()));
    Response { status, body, usage, finish_reason, error_code: None, retryable: false }
}

fn is_object(body: &[u8]) -> bool {
    body.trim_ascii_start().first() == Some(&b'{')
}

fn failed(status: u16, body: Bytes, error_code: Option<String>) -> Response {
    let retryable = is_retryable(status);
    Response { status, body, usage: Usage::default(), finish_reason: None, error_code, retryable }
}

fn is_retryable(status: u16) -> bool {
    matches!(status, 408 | 409 | 425 | 429) || status >= 500
}

/// The status that an error object inside a 2xx stands for.
fn error_status(code: &serde_json::Value) -> u16 {
    let code = code.as_u64().or_else(|| code.as_str()?.parse().ok());
    code.and_then(|code| u16::try_from(code).ok()).filter(|code| (400..600).contains(code)).unwrap_or(502)
}

/// An answer that is no object with choices (a proxy's page, a cut body): quoted in an error object of ours.
fn odd(status: u16, body: &[u8]) -> Response {
    let quoted: String = String::from_utf8_lossy(body).chars().take(QUOTED_CHARS_MAX).collect();
    let code = "unusable_response".to_owned();
    let error = ErrorBody {
        message: format!("the remote engine answered {status} with a body that is no completion: {quoted}"),
        kind: "server_error",
        param: None,
        code: Some(code.clone()),
    };
    let status = if (200..400).contains(&status) || status < 200 { 502 } else { status };
    failed(status, error.to_bytes(), Some(code))
}
