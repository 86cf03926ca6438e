//! Every field that a body may carry, and what becomes of it.
//!
//! Invariant: a field is implemented, or cannot change the answer, or is refused by
//! name unless its value says "nothing". What is not in the table is refused too:
//! an ignored parameter that would have changed the answer is worse than an error.
//! The lists are those of vLLM's request models and OpenAI's API reference.

use std::borrow::Cow;
use std::fmt;

use overnight_types::Endpoint;
use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::refusal::Refusal;

/// Where a field may stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Both,
    Chat,
    Completions,
}

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Treatment {
    /// Read by the mapper.
    Implemented,
    /// Accepted with any value: it cannot change the answer.
    NoEffect,
    /// Accepted only with one of these values (JSON), besides null; else refused for this reason.
    Only(&'static [&'static str], &'static str),
}

use At::{Both, Chat, Completions};
use Treatment::{Implemented, NoEffect, Only};

const NOT_BUILT: &str = "is not supported";
const NO_TOOLS: &str = "is not supported: tool calls are not built";
const NO_GRAMMAR: &str = "is not supported: output cannot be constrained to a format; ask for it in the prompt";
const TEXT_ONLY: &str = "is not supported: only text goes in and comes out";

const FIELDS: &[(&str, At, Treatment)] = &[
    ("model", Both, Implemented),
    ("messages", Chat, Implemented),
    ("prompt", Completions, Implemented),
    ("max_tokens", Both, Implemented),
    ("max_completion_tokens", Chat, Implemented),
    ("temperature", Both, Implemented),
    ("top_p", Both, Implemented),
    ("top_k", Both, Implemented),
    ("min_p", Both, Implemented),
    ("seed", Both, Implemented),
    ("n", Both, Implemented),
    ("best_of", Both, Implemented),
    ("stop", Both, Implemented),
    ("stop_token_ids", Both, Implemented),
    ("ignore_eos", Both, Implemented),
    ("min_tokens", Both, Implemented),
    ("include_stop_str_in_output", Both, Implemented),
    ("skip_special_tokens", Both, Implemented),
    ("presence_penalty", Both, Implemented),
    ("frequency_penalty", Both, Implemented),
    ("repetition_penalty", Both, Implemented),
    ("logit_bias", Both, Implemented),
    ("logprobs", Both, Implemented),
    ("top_logprobs", Chat, Implemented),
    ("prompt_logprobs", Both, Implemented),
    ("echo", Both, Implemented),
    ("add_special_tokens", Both, Implemented),
    ("add_generation_prompt", Chat, Implemented),
    ("continue_final_message", Chat, Implemented),
    ("chat_template_kwargs", Chat, Implemented),
    ("truncate_prompt_tokens", Both, Implemented),
    ("truncation_side", Both, Implemented),
    ("stream", Both, Implemented),
    ("stream_options", Both, Implemented),
    ("return_token_ids", Both, Implemented),
    ("return_tokens_as_token_ids", Both, Implemented),
    // For accounting, caching and routing on the side of whoever serves.
    ("user", Both, NoEffect),
    ("metadata", Both, NoEffect),
    ("store", Both, NoEffect),
    ("service_tier", Both, NoEffect),
    ("safety_identifier", Both, NoEffect),
    ("prompt_cache_key", Both, NoEffect),
    ("prompt_cache_retention", Both, NoEffect),
    ("cache_salt", Both, NoEffect),
    ("request_id", Both, NoEffect),
    ("priority", Both, NoEffect),
    // Says how tools may be called; there are none.
    ("parallel_tool_calls", Chat, NoEffect),
    // Of beam search only, which is refused.
    ("length_penalty", Both, NoEffect),
    // No tokenizer here puts spaces between special tokens.
    ("spaces_between_special_tokens", Both, NoEffect),
    // Ours is never split off, so it is always included.
    ("include_reasoning", Chat, Only(&["true"], NOT_BUILT)),
    ("tools", Chat, Only(&["[]"], NO_TOOLS)),
    ("tool_choice", Chat, Only(&["\"none\"", "\"auto\""], NO_TOOLS)),
    ("functions", Chat, Only(&["[]"], NO_TOOLS)),
    ("function_call", Chat, Only(&["\"none\"", "\"auto\""], NO_TOOLS)),
    ("response_format", Both, Only(&["{\"type\":\"text\"}"], NO_GRAMMAR)),
    ("structured_outputs", Both, Only(&["{}"], NO_GRAMMAR)),
    ("guided_json", Both, Only(&[], NO_GRAMMAR)),
    ("guided_regex", Both, Only(&[], NO_GRAMMAR)),
    ("guided_choice", Both, Only(&[], NO_GRAMMAR)),
    ("guided_grammar", Both, Only(&[], NO_GRAMMAR)),
    ("allowed_token_ids", Both, Only(&[], "is not supported; give the others a logit_bias of -100")),
    ("bad_words", Both, Only(&["[]"], NOT_BUILT)),
    ("use_beam_search", Both, Only(&["false"], NOT_BUILT)),
    ("suffix", Completions, Only(&["\"\""], NOT_BUILT)),
    ("prompt_embeds", Completions, Only(&[], TEXT_ONLY)),
    ("modalities", Chat, Only(&["[\"text\"]"], TEXT_ONLY)),
    ("audio", Chat, Only(&[], TEXT_ONLY)),
    ("media_io_kwargs", Chat, Only(&["{}"], TEXT_ONLY)),
    ("mm_processor_kwargs", Chat, Only(&["{}"], TEXT_ONLY)),
    ("prediction", Chat, Only(&[], NOT_BUILT)),
    ("web_search_options", Chat, Only(&[], NOT_BUILT)),
    ("verbosity", Chat, Only(&[], "is not supported; ask for it in the prompt")),
    ("reasoning_effort", Chat, Only(&[], "is not supported; templates that know it take it in chat_template_kwargs")),
    ("thinking_token_budget", Both, Only(&[], NOT_BUILT)),
    ("documents", Chat, Only(&["[]"], NOT_BUILT)),
    ("chat_template", Chat, Only(&[], "is not supported in a request; start with --chat-template FILE")),
    ("return_prompt_text", Chat, Only(&["false"], NOT_BUILT)),
    ("kv_transfer_params", Both, Only(&["{}"], NOT_BUILT)),
    ("vllm_xargs", Both, Only(&["{}"], NOT_BUILT)),
    ("repetition_detection", Both, Only(&[], NOT_BUILT)),
];

/// The implemented fields that a body carries with a value other than null.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    given: Vec<(&'static str, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Splits a body by key and judges each. Nothing is parsed below the first level yet.
    pub(super) fn split(endpoint: Endpoint, body: &'a [u8]) -> Result<Self, Refusal> {
        let Raw(pairs) = serde_json::from_slice(body).map_err(|err| {
            Refusal::bad(format!("the body is not a usable JSON object: {err}")).with_code("invalid_json")
        })?;
        let mut given: Vec<(&'static str, &'a RawValue)> = Vec::with_capacity(pairs.len());
        for (name, value) in pairs {
            let known = FIELDS.iter().find(|(known, at, _)| *known == name && fits(*at, endpoint));
            let Some((known, _, treatment)) = known else { return Err(unknown(&name, endpoint)) };
            if given.iter().any(|(before, _)| before == known) {
                return Err(Refusal::field(*known, format!("{known} stands in the body twice")));
            }
            let neutral = value.get() == "null";
            match treatment {
                Implemented if !neutral => given.push((known, value)),
                Only(accepted, why)
                    if !neutral && !accepted.iter().any(|accepted| same_json(accepted, value.get())) =>
                {
                    return Err(Refusal::field(*known, format!("{known} {why}")).with_code("unsupported_parameter"));
                }
                Implemented | NoEffect | Only(..) => {}
            }
        }
        Ok(Self { given })
    }

    /// The raw value of an implemented field; `None` when missing or null.
    pub(super) fn raw(&self, name: &'static str) -> Option<&'a RawValue> {
        debug_assert!(FIELDS.iter().any(|(known, _, what)| *known == name && *what == Implemented), "{name}");
        self.given.iter().find(|(given, _)| *given == name).map(|(_, value)| *value)
    }

    /// A field of a plain type; the error names it.
    pub(super) fn get<T: DeserializeOwned>(&self, name: &'static str) -> Result<Option<T>, Refusal> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        serde_json::from_str(raw.get()).map(Some).map_err(|err| {
            // The position counts from the field's own start and would mislead.
            let text = err.to_string();
            let what = text.split(" at line ").next().unwrap_or_default();
            Refusal::field(name, format!("{name}: {what}"))
        })
    }

    /// A true-or-false field and its default.
    pub(super) fn flag(&self, name: &'static str, default: bool) -> Result<bool, Refusal> {
        Ok(self.get(name)?.unwrap_or(default))
    }
}

fn fits(at: At, endpoint: Endpoint) -> bool {
    match endpoint {
        Endpoint::ChatCompletions => at != Completions,
        Endpoint::Completions => at != Chat,
    }
}

fn unknown(name: &str, endpoint: Endpoint) -> Refusal {
    let shown: String = name.chars().take(80).collect();
    let elsewhere = FIELDS.iter().any(|(known, ..)| *known == name);
    let message = if elsewhere {
        format!("{shown} is no parameter of {endpoint}")
    } else {
        format!("unknown parameter: {shown}")
    };
    Refusal::field(shown, message).with_code("unknown_parameter")
}

/// Whether two JSON texts are equal but for white space outside strings; the first has none.
fn same_json(plain: &str, given: &str) -> bool {
    plain == given || (given.len() < 80 && given.chars().filter(|char| !char.is_ascii_whitespace()).eq(plain.chars()))
}

struct Raw<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Raw<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        /// Most keys in a body; far above the table's length.
        const KEYS_MAX: usize = 256;

        impl<'de> Visitor<'de> for Pairs {
            type Value = Raw<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw<'de>, A::Error> {
                let mut pairs = Vec::with_capacity(16);
                while let Some(Key(key)) = map.next_key()? {
                    if pairs.len() == KEYS_MAX {
                        return Err(A::Error::custom(format_args!("more than {KEYS_MAX} keys")));
                    }
                    pairs.push((key, map.next_value()?));
                }
                Ok(Raw(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    /// The lists of a running vLLM's request models.
    const VLLM_CHAT: &str = "messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens \
        max_completion_tokens n presence_penalty response_format seed stop stream stream_options temperature top_p tools \
        tool_choice reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search \
        top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens \
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs \
        allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens documents \
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id \
        return_tokens_as_token_ids return_token_ids return_prompt_text cache_salt kv_transfer_params vllm_xargs \
        repetition_detection";
    const VLLM_COMPLETIONS: &str = "model prompt echo frequency_penalty logit_bias logprobs max_tokens n \
        presence_penalty seed stop stream stream_options suffix temperature top_p user use_beam_search top_k min_p \
        repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens \
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids \
        prompt_logprobs prompt_embeds add_special_tokens response_format structured_outputs priority request_id \
        return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs repetition_detection \
        thinking_token_budget";

    #[test]
    fn every_field_of_other_engines_has_a_treatment() {
        for (endpoint, names) in [(Endpoint::ChatCompletions, VLLM_CHAT), (Endpoint::Completions, VLLM_COMPLETIONS)] {
            for name in names.split_whitespace() {
                assert!(FIELDS.iter().any(|(known, at, _)| *known == name && fits(*at, endpoint)), "{endpoint} {name}");
            }
        }
    }

    #[test]
    fn no_field_stands_in_the_table_twice() {
        for (index, (name, ..)) in FIELDS.iter().enumerate() {
            assert!(FIELDS[index + 1..].iter().all(|(other, ..)| other != name), "{name}");
        }
    }

    fn split(body: &str) -> Result<usize, Refusal> {
        Fields::split(Endpoint::ChatCompletions, body.as_bytes()).map(|fields| fields.given.len())
    }

    #[test]
    fn unsupported_and_unknown_fields_are_refused_by_name() {
        for (body, param) in [
            (r#"{"tools":[{"type":"function"}]}"#, "tools"),
            (r#"{"response_format":{"type":"json_object"}}"#, "response_format"),
            (r#"{"use_beam_search":true}"#, "use_beam_search"),
            (r#"{"temprature":1}"#, "temprature"),
            (r#"{"prompt":"x"}"#, "prompt"),
            (r#"{"seed":1,"seed":1}"#, "seed"),
        ] {
            let refusal = split(body).unwrap_err();
            assert_eq!((refusal.status, refusal.error.param.as_deref()), (400, Some(param)), "{body}");
            assert!(refusal.error.message.contains(param), "{}", refusal.error.message);
        }
    }

    #[test]
    fn fields_that_say_nothing_are_accepted() {
        let body = r#"{"tools":[],"tool_choice":"none","response_format":{ "type" : "text" },"stop":null,"user":"u",
            "metadata":{"a":["b"]},"suffix2":null}"#;
        assert_eq!(split(body).unwrap_err().error.param.as_deref(), Some("suffix2"));
        assert_eq!(split(&body.replace(r#","suffix2":null"#, "")), Ok(0));
    }

    #[test]
    fn body_that_is_no_object_is_refused() {
        for body in ["", "[]", "null", "\"x\"", "{", "{\"a\":1}}", "{\"a\":\u{0}1}"] {
            assert_eq!(split(body).unwrap_err().status, 400, "{body}");
        }
    }
}
