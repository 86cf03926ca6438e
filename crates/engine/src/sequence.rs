//! A sequence: the engine's mutable state for one request.
//!
//! Owns the tokens, the block table and what sampling must remember. Knows nothing
//! of other sequences; the scheduler moves it.

use crate::blocks::ChainHash;
use crate::model::BlockId;
use crate::request::{
    Class, Finish, FinishReason, Request, RequestId, SamplingParams, StopReason, StopRules, TokenLogprobs,
};
use crate::sampler::Penalties;

/// Where a sequence is kept in the scheduler; used again after its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u32);

/// The state of one request.
#[derive(Debug)]
pub struct Sequence {
    /// Whose.
    pub id: RequestId,
    /// Who waits; a job's sequence that was passed over too often becomes `Online`.
    pub class: Class,
    /// Place in the order of arrival, unique.
    pub arrival: u64,
    /// Prompt, then output as far as it is known.
    pub tokens: Vec<u32>,
    /// Tokens after `tokens` that started steps choose.
    pub num_pending: u32,
    /// The row of logits that chooses the last of them, in the step started last.
    pub last_choice: u32,
    /// Of `tokens`, the prompt.
    pub num_prompt_tokens: u32,
    /// Of `tokens`, those whose K and V are in the cache.
    pub num_computed: u32,
    /// Of `tokens`, those that the current step computes.
    pub num_scheduled: u32,
    /// Of the prompt, found in the prefix cache when first admitted.
    pub num_cached_tokens: Option<u32>,
    /// Most tokens to generate, the context's end already taken into account.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// When it ends.
    pub stop: StopRules,
    /// Logprobs asked for per generated token.
    pub num_logprobs: Option<u32>,
    /// Logprobs asked for per prompt position.
    pub num_prompt_logprobs: Option<u32>,
    /// Logprobs of the prompt positions computed so far; the first is `None`.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    /// Block ids in token order.
    pub blocks: Vec<BlockId>,
    /// Chain of the full blocks of `tokens`.
    pub hashes: Vec<ChainHash>,
    /// Of `blocks`, those offered to the prefix cache.
    pub num_published: u32,
    /// Use of tokens so far, when a penalty is on.
    pub penalties: Option<Penalties>,
    /// Ids that may not be chosen before `min_tokens`.
    pub ending_ids: Vec<u32>,
    /// Somebody must see each step's token at once (streaming, stop texts).
    pub is_watched: bool,
    /// Somebody is to be told when a step computes it, which none has done yet.
    pub tells_begin: bool,
}

impl Sequence {
    /// The state of a request that the door let in. `max_model_len` bounds prompt plus output.
    pub fn new(request: Request, arrival: u64, max_model_len: u32, eos_token_ids: &[u32]) -> Self {
        let num_prompt_tokens = u32::try_from(request.prompt.len()).expect("the door bounds prompts");
        let mut ending_ids = Vec::new();
        if request.stop.min_tokens > 0 {
            ending_ids.extend_from_slice(&request.stop.stop_token_ids);
            if !request.stop.ignore_eos {
                ending_ids.extend_from_slice(eos_token_ids);
            }
        }
        Self {
            id: request.id,
            class: request.class,
            tells_begin: request.class == Class::Job,
            arrival,
            num_prompt_tokens,
            num_computed: 0,
            num_scheduled: 0,
            num_cached_tokens: None,
            max_tokens: request.stop.max_tokens.min(max_model_len.saturating_sub(num_prompt_tokens)),
            penalties: Penalties::new(&request.sampling, &request.prompt),
            is_watched: request.stream || !request.stop.stop.is_empty(),
            tokens: request.prompt,
            num_pending: 0,
            last_choice: 0,
            sampling: request.sampling,
            stop: request.stop,
            num_logprobs: request.logprobs,
            num_prompt_logprobs: request.prompt_logprobs,
            prompt_logprobs: Vec::new(),
            blocks: Vec::new(),
            hashes: Vec::new(),
            num_published: 0,
            ending_ids,
        }
    }

    /// Prompt and output tokens, pending ones included.
    pub fn num_tokens(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("bounded by max_model_len") + self.num_pending
    }

    /// Output tokens so far; also the position that the next choice has for the generator.
    pub fn num_output_tokens(&self) -> u32 {
        self.num_tokens() - self.num_prompt_tokens
    }

    /// Output tokens whose ids are known.
    pub fn num_known_output_tokens(&self) -> u32 {
        self.num_output_tokens() - self.num_pending
    }

    /// Tokens still to be computed before the next one can be chosen.
    pub fn num_uncomputed(&self) -> u32 {
        self.num_tokens() - self.num_computed
    }

    /// Tokens that a step may compute now: none while the next choice needs a token that is not
    /// known yet, or when a pending one is the last.
    pub fn num_computable(&self) -> u32 {
        let waits = self.num_pending > 0 && (self.penalties.is_some() || self.num_output_tokens() >= self.max_tokens);
        if waits { 0 } else { self.num_uncomputed() }
    }

    /// Whether the scheduled tokens reach the end, so that a token is chosen after the step.
    pub fn samples_after_step(&self) -> bool {
        self.num_computed + self.num_scheduled == self.num_tokens() && self.max_tokens > 0
    }

    /// Whether logits at position `position` are wanted for the logprobs of the next prompt token.
    pub fn wants_prompt_logits(&self, position: u32) -> bool {
        self.num_prompt_logprobs.is_some()
            && position + 1 < self.num_prompt_tokens
            && position + 1 >= u32::try_from(self.prompt_logprobs.len()).expect("at most the prompt's length").max(1)
    }

    /// Whether logprobs of prompt positions are still missing; the prefix cache cannot give them.
    pub fn misses_prompt_logprobs(&self) -> bool {
        self.num_prompt_logprobs.is_some() && self.prompt_logprobs.len() < self.num_prompt_tokens as usize
    }

    /// Brings the chain of full blocks up to date.
    pub fn extend_hashes(&mut self, block_size: u32) {
        let size = block_size as usize;
        for index in self.hashes.len()..self.tokens.len() / size {
            let parent = index.checked_sub(1).map_or(ChainHash::default(), |last| self.hashes[last]);
            self.hashes.push(parent.then(&self.tokens[index * size..(index + 1) * size]));
        }
    }

    /// Appends a chosen token, the first pending one if there is one, and says whether the sequence ends with it. An end of
    /// sequence or stop token is appended too, and counted.
    pub fn push_token(&mut self, token: u32, eos_token_ids: &[u32]) -> Option<Finish> {
        self.num_pending = self.num_pending.saturating_sub(1);
        self.tokens.push(token);
        if let Some(penalties) = &mut self.penalties {
            penalties.count(token);
        }
        if self.stop.stop_token_ids.contains(&token) {
            return Some(self.finish(FinishReason::Stop, Some(StopReason::Token(token))));
        }
        if !self.stop.ignore_eos && eos_token_ids.contains(&token) {
            return Some(self.finish(FinishReason::Stop, None));
        }
        (self.num_known_output_tokens() >= self.max_tokens).then(|| self.finish(FinishReason::Length, None))
    }

    /// The end, with the counts so far; pending tokens do not count.
    pub fn finish(&self, reason: FinishReason, stop_reason: Option<StopReason>) -> Finish {
        Finish {
            reason,
            stop_reason,
            num_prompt_tokens: self.num_prompt_tokens,
            num_cached_tokens: self.num_cached_tokens.unwrap_or(0),
            num_output_tokens: self.num_known_output_tokens(),
        }
    }
}
