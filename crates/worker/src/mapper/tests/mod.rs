//! The mapper without an engine: a tokenizer of the 256 bytes, outputs written by hand.

mod bodies;
mod chats;
mod completions;
mod remotes;
mod streams;

use std::sync::Arc;

use overnight_engine::request::{
    Class, Finish, FinishReason, RequestId, StopReason, TokenLogprob, TokenLogprobs, TokenOutput,
};
use overnight_engine::text::Text;
use overnight_types::Endpoint;
use serde_json::{Value, json};

use super::{AnswerState, Mapper, ModelLimits, PrepareOptions, Prepared, Refusal, Response, check_without_model};
use crate::generate::{Input, Output, Request};

const LIMITS: ModelLimits = ModelLimits { max_model_len: 64, vocab_size: 258, max_logprobs: 20 };
const BOS: u32 = 256;
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning_content or '' }}{% endfor %}\
    {% if add_generation_prompt %}[assistant]{% endif %}{{ extra or '' }}";

/// GPT-2's stand-in of a byte.
fn stand_in(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !printable(*other)).count();
    char::from_u32(0x100 + u32::try_from(before).unwrap()).unwrap()
}

fn text(template: Option<&str>) -> Arc<Text> {
    let vocabulary: serde_json::Map<_, _> = (0..=255u8).map(|b| (stand_in(b).to_string(), json!(b))).collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(BOS, "<bos>"), special(257, "<eos>")],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    let config = json!({"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": true, "chat_template": template});
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Arc::new(Text::from_dir(folder.path()).unwrap())
}

fn mapper() -> Mapper {
    Mapper::local(text(Some(TEMPLATE)), vec!["toy".to_owned()], LIMITS)
}

fn options() -> PrepareOptions<'static> {
    PrepareOptions { class: Class::Job, allow_stream: true, seed: 1_000, request_id: "r1", created: 1_700_000_000 }
}

fn prepare_raw(endpoint: Endpoint, body: &[u8]) -> Result<Prepared, Refusal> {
    mapper().prepare(endpoint, body, options())
}

/// A completion body with these fields besides the model.
fn completion(fields: Value) -> Result<Prepared, Refusal> {
    with_model(Endpoint::Completions, fields)
}

/// The same for a chat.
fn chat(fields: Value) -> Result<Prepared, Refusal> {
    with_model(Endpoint::ChatCompletions, fields)
}

fn with_model(endpoint: Endpoint, mut fields: Value) -> Result<Prepared, Refusal> {
    fields["model"] = json!("toy");
    prepare_raw(endpoint, fields.to_string().as_bytes())
}

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

fn tokens(request: &Request) -> &overnight_engine::Request {
    let Input::Tokens(request) = &request.input else { panic!("not for the local engine") };
    request
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn logprobs(token: u32, logprob: f32, top: &[(u32, f32)]) -> TokenLogprobs {
    let entry = |token, logprob, rank| TokenLogprob { token, logprob, rank };
    let top = (1u32..).zip(top).map(|(rank, (token, logprob))| entry(*token, *logprob, rank)).collect();
    TokenLogprobs { chosen: entry(token, logprob, 1), top }
}

/// An output of one request; `ends` with this reason.
fn output(id: RequestId, text: &str, ends: Option<FinishReason>) -> TokenOutput {
    let finish = ends.map(|reason| Finish {
        reason,
        stop_reason: None,
        num_prompt_tokens: 5,
        num_cached_tokens: 2,
        num_output_tokens: u32::try_from(text.len()).unwrap(),
    });
    TokenOutput { id, token_ids: ids(text), text: text.to_owned(), logprobs: Vec::new(), prompt_logprobs: None, finish }
}

/// Answers every request with its text, and expects the whole answer after the last one.
#[track_caller]
fn answered(prepared: &mut Prepared, texts: &[&str]) -> (Response, Value) {
    let outputs = prepared.requests.iter().zip(texts);
    let outputs: Vec<TokenOutput> =
        outputs.map(|(request, text)| output(request.id, text, Some(FinishReason::Stop))).collect();
    finished(prepared, outputs)
}

#[track_caller]
fn finished(prepared: &mut Prepared, outputs: Vec<TokenOutput>) -> (Response, Value) {
    let mut last = AnswerState::Pending;
    for output in outputs {
        assert_eq!(last, AnswerState::Pending);
        last = prepared.answer.push(Output::Tokens(output));
    }
    let AnswerState::Done(response) = last else { panic!("no answer: {last:?}") };
    let body = serde_json::from_slice(&response.body).unwrap();
    (response, body)
}

#[track_caller]
fn assert_refused(result: Result<Prepared, Refusal>, param: &str, part: &str) {
    let refusal = result.expect_err("a refusal");
    assert_eq!(refusal.status, 400, "{refusal:?}");
    assert_eq!(refusal.error.param.as_deref(), Some(param), "{refusal:?}");
    assert!(refusal.error.message.contains(part), "{refusal:?}");
    let body: Value = serde_json::from_slice(&refusal.body()).unwrap();
    let keys: Vec<&String> = body["error"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["message", "type", "param", "code"]);
    assert_eq!(body["error"]["type"], "invalid_request_error");
}

fn stopped_by(mut output: TokenOutput, reason: StopReason) -> TokenOutput {
    output.finish.as_mut().expect("a last output").stop_reason = Some(reason);
    output
}
