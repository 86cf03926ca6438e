//! OpenAI's shapes: every key is always there, null when unset, but for what streams leave out.

use overnight_engine::request::{Finish, StopReason, TokenLogprob};
use overnight_types::Usage;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

/// The build that answered.
pub(super) const SYSTEM_FINGERPRINT: &str = concat!("overnight-", env!("CARGO_PKG_VERSION"));
/// Negative infinity on the wire, which JSON cannot write; OpenAI's and vLLM's value.
const LOGPROB_MIN: f32 = -9999.0;

/// A whole answer or one chunk.
#[derive(Serialize)]
pub(super) struct Completion<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: i64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<C>,
    pub(super) service_tier: Option<&'static str>,
    pub(super) system_fingerprint: &'static str,
    /// Outer `None` leaves the key out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<WireUsage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Option<Vec<PromptPosition>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Option<&'a [u32]>>,
}

#[derive(Serialize)]
pub(super) struct WireUsage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
}

impl From<Usage> for WireUsage {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.input_tokens,
            total_tokens: usage.total_tokens(),
            completion_tokens: usage.output_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached_tokens },
        }
    }
}

#[derive(Serialize)]
pub(super) struct ChatChoice<'a> {
    pub(super) index: usize,
    pub(super) message: Message,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    pub(super) stop_reason: Option<WireStop<'a>>,
    pub(super) token_ids: Option<&'a [u32]>,
}

/// The reasoning text is sent under the names of both families of clients.
#[derive(Serialize)]
pub(super) struct Message {
    pub(super) role: &'static str,
    pub(super) content: String,
    pub(super) refusal: Option<String>,
    pub(super) annotations: Option<Vec<String>>,
    pub(super) audio: Option<String>,
    pub(super) function_call: Option<String>,
    pub(super) tool_calls: [String; 0],
    pub(super) reasoning: Option<String>,
    pub(super) reasoning_content: Option<String>,
}

impl Message {
    pub(super) fn assistant(content: String) -> Self {
        Self {
            role: "assistant",
            content,
            refusal: None,
            annotations: None,
            audio: None,
            function_call: None,
            tool_calls: [],
            reasoning: None,
            reasoning_content: None,
        }
    }
}

#[derive(Serialize)]
pub(super) struct ChatChunkChoice<'a> {
    pub(super) index: usize,
    pub(super) delta: Delta<'a>,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    pub(super) stop_reason: Option<WireStop<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<&'a [u32]>,
}

#[derive(Serialize, Default)]
pub(super) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<&'a str>,
}

#[derive(Serialize)]
pub(super) struct TextChoice<'a> {
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) logprobs: Option<TextLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    pub(super) stop_reason: Option<WireStop<'a>>,
    pub(super) token_ids: Option<&'a [u32]>,
    pub(super) prompt_logprobs: Option<Vec<PromptPosition>>,
    pub(super) prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
pub(super) struct ChatLogprobs {
    pub(super) content: Vec<ChatPosition>,
    pub(super) refusal: Option<String>,
}

#[derive(Serialize)]
pub(super) struct ChatPosition {
    #[serde(flatten)]
    pub(super) chosen: ChatToken,
    pub(super) top_logprobs: Vec<ChatToken>,
}

#[derive(Serialize)]
pub(super) struct ChatToken {
    pub(super) token: String,
    pub(super) logprob: Logprob,
    pub(super) bytes: Vec<u8>,
}

#[derive(Serialize, Default)]
pub(super) struct TextLogprobs {
    pub(super) text_offset: Vec<u32>,
    pub(super) token_logprobs: Vec<Option<Logprob>>,
    pub(super) tokens: Vec<String>,
    pub(super) top_logprobs: Vec<Option<TopLogprobs>>,
}

/// Token text to logprob, likeliest first.
pub(super) struct TopLogprobs(pub(super) Vec<(String, Logprob)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}

/// One prompt position: the prompt's own token first, then the likeliest ones. Null for the first position.
pub(super) struct PromptPosition(pub(super) Option<Vec<(TokenLogprob, String)>>);

#[derive(Serialize)]
struct PromptEntry<'a> {
    logprob: Logprob,
    rank: u32,
    decoded_token: &'a str,
    /// Whether it is the prompt's own token.
    is_prompt_token: bool,
}

impl Serialize for PromptPosition {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(entries) = &self.0 else { return serializer.serialize_none() };
        let mut map = serializer.serialize_map(Some(entries.len()))?;
        for (index, (entry, decoded_token)) in entries.iter().enumerate() {
            let is_prompt_token = index == 0;
            let value =
                PromptEntry { logprob: Logprob(entry.logprob), rank: entry.rank, decoded_token, is_prompt_token };
            map.serialize_entry(&entry.token, &value)?;
        }
        map.end()
    }
}

/// A log probability that is always a JSON number.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Logprob(pub(super) f32);

impl Serialize for Logprob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let number = if self.0.is_nan() { LOGPROB_MIN } else { self.0.clamp(LOGPROB_MIN, 0.0) };
        serializer.serialize_f32(number)
    }
}

/// What stopped an output besides the model's own end: a text or a token id.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum WireStop<'a> {
    Token(u32),
    Text(&'a str),
}

impl<'a> WireStop<'a> {
    pub(super) fn of(finish: Option<&'a Finish>) -> Option<Self> {
        finish?.stop_reason.as_ref().map(|reason| match reason {
            StopReason::Token(id) => Self::Token(*id),
            StopReason::Text(text) => Self::Text(text),
        })
    }
}

/// Bytes of the token as OpenAI writes them where they are no text.
pub(super) fn token_text(bytes: &[u8]) -> String {
    use std::fmt::Write;

    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.to_owned();
    }
    let mut text = String::from("bytes:");
    for byte in bytes {
        write!(text, "\\x{byte:02x}").expect("a string takes any text");
    }
    text
}

/// Serializes an empty array, for `choices` of a usage chunk.
pub(super) struct NoChoice;

impl Serialize for NoChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_seq(Some(0))?.end()
    }
}
