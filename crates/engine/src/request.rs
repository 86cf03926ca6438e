//! What a caller gives the engine and what comes back.

use std::sync::atomic::{AtomicU64, Ordering};

/// Names a request within this process; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl RequestId {
    /// A fresh id.
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Online requests are scheduled before job items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Somebody waits for the answer.
    Online,
    /// An item of a job.
    Job,
}

/// How the next token is chosen. Order of filters: penalties and bias,
/// temperature, top-k, top-p, min-p.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0…2 and more; below 1e-5 the choice is greedy.
    pub temperature: f32,
    /// Keep the likeliest tokens whose probabilities sum to this; (0, 1].
    pub top_p: f32,
    /// Keep this many likeliest tokens; `None` keeps all. Larger than the vocabulary is clamped.
    pub top_k: Option<u32>,
    /// Keep tokens at least this likely relative to the likeliest; [0, 1].
    pub min_p: f32,
    /// Of the counter-based generator: the same seed gives the same text, alone or in company.
    pub seed: u64,
    /// Subtracted once from logits of tokens already generated; [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted per occurrence among generated tokens; [-2, 2].
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; > 0, 1 = none.
    pub repetition_penalty: f32,
    /// Added to the logits of these token ids; each [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
}

impl SamplingParams {
    /// Whether the likeliest token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < 1e-5
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// When generation ends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopRules {
    /// Most tokens to generate; 0 only together with prompt logprobs.
    pub max_tokens: u32,
    /// End-of-sequence tokens do not end it.
    pub ignore_eos: bool,
    /// No end-of-sequence or stop token before this many tokens.
    pub min_tokens: u32,
    /// Texts that end it, even across token boundaries.
    pub stop: Vec<String>,
    /// Token ids that end it, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The stop text stays in the output.
    pub include_stop_str_in_output: bool,
}

/// One sequence to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// From [`RequestId::next`].
    pub id: RequestId,
    /// Who waits.
    pub class: Class,
    /// Prompt token ids, special tokens included; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// When it ends.
    pub stop: StopRules,
    /// Logprobs of the chosen token and of this many likeliest ones per position.
    pub logprobs: Option<u32>,
    /// The same for each prompt position; turns the prefix cache off for this request.
    pub prompt_logprobs: Option<u32>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Outputs after every step; otherwise one output at the end.
    pub stream: bool,
}

/// One token with its log probability (natural logarithm, before sampling filters).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its log probability under the raw logits: before temperature, penalties and masks,
    /// so a masked token has the value that it would have had.
    pub logprob: f32,
    /// Its place by likelihood, from 1.
    pub rank: u32,
}

/// Logprobs at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The chosen (or the prompt's own) token.
    pub chosen: TokenLogprob,
    /// The likeliest ones, likeliest first, as many as asked for.
    pub top: Vec<TokenLogprob>,
}

/// Why generation ended; the wire's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// End of sequence, stop token or stop text.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    /// Cancelled by the caller.
    Abort,
}

impl FinishReason {
    /// The word on the wire.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// What exactly stopped it, when it was not the model's own end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A token of `stop_token_ids`.
    Token(u32),
    /// A text of `stop`.
    Text(String),
}

/// The end of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// What exactly.
    pub stop_reason: Option<StopReason>,
    /// Prompt length.
    pub num_prompt_tokens: u32,
    /// Of it, found in the prefix cache.
    pub num_cached_tokens: u32,
    /// Generated, stop text's tokens cut off included in the count of work done.
    pub num_output_tokens: u32,
}

/// Something generated: every step when streaming, else once with everything.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOutput {
    /// Whose.
    pub id: RequestId,
    /// New token ids, cut at the same place as the text.
    pub token_ids: Vec<u32>,
    /// New text; never splits a character, never holds back text without need.
    pub text: String,
    /// One per new token when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// With the first output, when asked for: one per prompt position, the first is `None`.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Set on the last output.
    pub finish: Option<Finish>,
}

/// A request that the engine refuses or cannot finish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// Whether trying again may help (engine poisoned, shutting down) or not (refused at the door).
    pub transient: bool,
    /// Stable code, for example `context_length_exceeded`.
    pub code: &'static str,
    /// The request field at fault, when one is.
    pub param: Option<&'static str>,
    /// What is wrong, with the numbers.
    pub message: String,
}

impl RequestError {
    /// Code of a request whose logits are not finite numbers.
    pub const LOGITS_NOT_FINITE: &'static str = "logits_not_finite";
    /// Code of a request whose tokens cannot be turned into text.
    pub const DETOKENIZATION_FAILED: &'static str = "detokenization_failed";

    /// Of a request whose id is in use.
    pub(crate) fn duplicate_id(id: RequestId) -> Self {
        let message = format!("request id {} is already in the engine", id.0);
        Self { transient: false, code: "duplicate_request_id", param: Some("id"), message }
    }

    /// Whether model or tokenizer broke down on a request that the door had let in.
    pub fn is_breakdown(&self) -> bool {
        [Self::LOGITS_NOT_FINITE, Self::DETOKENIZATION_FAILED].contains(&self.code)
    }
}
