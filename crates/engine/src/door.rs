//! The door: what a request may ask, by the model, the settings and the KV pool.
//!
//! Every parameter is checked before a request reaches the scheduler; what passes can
//! always be placed and can break no neighbour. Pure and cheap to clone: it runs on
//! the caller's thread.

use crate::Error;
use crate::config::EngineConfig;
use crate::model::ModelShape;
use crate::request::{Request, RequestError, SamplingParams};

/// Defaults of the CPU back end, and the rows that the KV pool is sized for.
const DEFAULT_MAX_NUM_SEQS: u32 = 32;
const DEFAULT_MAX_NUM_BATCHED_TOKENS: u32 = 512;
/// Short outputs are admitted only when there is room for all of them.
const EXPECTED_OUTPUT_MIN: u32 = 256;
/// Stop texts, stop ids and biases that one request may carry.
const STOP_TEXTS_MAX: usize = 64;
const STOP_TEXT_BYTES_MAX: usize = 4096;
const STOP_IDS_MAX: usize = 1024;
const LOGIT_BIAS_MAX: usize = 4096;

/// Everything that bounds a request, resolved for one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Ids below this are real tokens.
    pub vocab_size: u32,
    /// Logits in a row; those from `vocab_size` on are padding.
    pub logits_width: u32,
    /// Longest prompt plus output, tokens.
    pub max_model_len: u32,
    /// Most sequences in a step.
    pub max_num_seqs: u32,
    /// Most tokens in a step.
    pub max_num_batched_tokens: u32,
    /// Token slots in a block.
    pub block_size: u32,
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Most logprobs per position.
    pub max_logprobs: u32,
    /// Output tokens that admission keeps room for; see [`crate::scheduler::SchedulerLimits`].
    pub expected_output_min: u32,
    /// The model's own end tokens.
    pub eos_token_ids: Vec<u32>,
    /// Stop texts can be matched.
    pub has_text: bool,
}

impl Limits {
    /// Combines settings and model. `text_vocab_size`: ids that the tokenizer knows, when
    /// there is one. `free_memory_bytes`: what the machine has left, when known; it sizes
    /// the KV cache when no setting does.
    pub fn resolve(
        shape: &ModelShape,
        config: &EngineConfig,
        text_vocab_size: Option<u32>,
        free_memory_bytes: Option<u64>,
    ) -> Result<Self, Error> {
        config.validate()?;
        let max_num_seqs = config.max_num_seqs.unwrap_or_else(|| {
            let tokens = config.max_num_batched_tokens.unwrap_or(u32::MAX);
            DEFAULT_MAX_NUM_SEQS.min(tokens)
        });
        let max_num_batched_tokens =
            config.max_num_batched_tokens.unwrap_or(DEFAULT_MAX_NUM_BATCHED_TOKENS).max(max_num_seqs);
        check_model_len(config, shape.max_position)?;
        let model_len = config.max_model_len.unwrap_or(shape.max_position);
        let num_blocks = num_blocks(shape, config, model_len, max_num_seqs, free_memory_bytes)?;
        let pool_tokens = u64::from(num_blocks) * u64::from(config.block_size);
        // A length that was asked for stays; the model's own yields to the pool.
        let max_model_len = match config.max_model_len {
            Some(len) => len,
            None => model_len.min(u32::try_from(pool_tokens).unwrap_or(u32::MAX)),
        };
        Ok(Self {
            vocab_size: text_vocab_size.map_or(shape.vocab_size, |size| size.min(shape.vocab_size)),
            logits_width: shape.vocab_size,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            block_size: config.block_size,
            num_blocks,
            max_logprobs: config.max_logprobs,
            expected_output_min: EXPECTED_OUTPUT_MIN,
            eos_token_ids: shape.eos_token_ids.clone(),
            has_text: text_vocab_size.is_some(),
        })
    }

    /// Tokens that the KV pool holds.
    pub fn pool_tokens(&self) -> u64 {
        u64::from(self.num_blocks) * u64::from(self.block_size)
    }

    /// Sequences of full length that the KV pool holds at once.
    pub fn max_concurrency(&self) -> f64 {
        self.pool_tokens() as f64 / f64::from(self.max_model_len)
    }

    /// Refuses what cannot be served, naming the field and the numbers.
    pub fn check(&self, request: &Request) -> Result<(), RequestError> {
        self.check_lengths(request)?;
        self.check_ids("prompt", request.prompt.iter().copied())?;
        check_sampling(&request.sampling)?;
        self.check_ids("logit_bias", request.sampling.logit_bias.iter().map(|&(id, _)| id))?;
        self.check_stop(request)?;
        for (param, asked) in [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)] {
            let limit = self.max_logprobs.min(self.vocab_size);
            if let Some(asked) = asked.filter(|&asked| asked > limit) {
                return refuse("invalid_value", param, format!("{param} is {asked}; the limit is {limit}"));
            }
        }
        Ok(())
    }

    fn check_lengths(&self, request: &Request) -> Result<(), RequestError> {
        let limit = self.max_model_len;
        let num_prompt = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let max_tokens = request.stop.max_tokens;
        if num_prompt == 0 {
            return refuse("empty_prompt", "prompt", "the prompt has no tokens; at least one is needed".to_owned());
        }
        if max_tokens == 0 && request.prompt_logprobs.is_none() {
            let message = "max_tokens is 0; at least 1 is needed unless prompt_logprobs is set".to_owned();
            return refuse("invalid_value", "max_tokens", message);
        }
        if num_prompt > limit || (num_prompt == limit && max_tokens > 0) {
            let message = format!(
                "the prompt has {num_prompt} tokens; the model's context is {limit} tokens, and the output needs at \
                 least one of them"
            );
            return refuse("context_length_exceeded", "prompt", message);
        }
        let num_output = max_tokens.min(limit - num_prompt);
        // The last token is chosen but never computed.
        let num_computed = num_prompt + num_output.saturating_sub(1);
        if u64::from(num_computed) > self.pool_tokens() {
            return Err(self.kv_cache_exceeded(num_computed, num_prompt));
        }
        Ok(())
    }

    /// A request that the KV pool can never hold.
    pub(crate) fn kv_cache_exceeded(&self, num_tokens: u32, num_prompt: u32) -> RequestError {
        RequestError {
            transient: false,
            code: "kv_cache_exceeded",
            param: Some("max_tokens"),
            message: format!(
                "the request needs {num_tokens} tokens of KV cache ({num_prompt} of them its prompt); the whole cache \
                 has {} ({} blocks of {}): lower max_tokens or raise kv_cache_memory_bytes",
                self.pool_tokens(),
                self.num_blocks,
                self.block_size
            ),
        }
    }

    fn check_stop(&self, request: &Request) -> Result<(), RequestError> {
        let stop = &request.stop;
        if stop.min_tokens > stop.max_tokens {
            let message = format!("min_tokens is {}, above max_tokens = {}", stop.min_tokens, stop.max_tokens);
            return refuse("invalid_value", "min_tokens", message);
        }
        if !stop.stop.is_empty() && !self.has_text {
            let message = "stop texts need a tokenizer, and the engine was started without one".to_owned();
            return refuse("unsupported_parameter", "stop", message);
        }
        check_count("stop", stop.stop.len(), STOP_TEXTS_MAX)?;
        check_count("stop_token_ids", stop.stop_token_ids.len(), STOP_IDS_MAX)?;
        check_count("logit_bias", request.sampling.logit_bias.len(), LOGIT_BIAS_MAX)?;
        if let Some(text) = stop.stop.iter().find(|text| text.is_empty() || text.len() > STOP_TEXT_BYTES_MAX) {
            let len = text.len();
            let message = format!("a stop text has {len} bytes; 1 to {STOP_TEXT_BYTES_MAX} are allowed");
            return refuse("invalid_value", "stop", message);
        }
        self.check_ids("stop_token_ids", stop.stop_token_ids.iter().copied())
    }

    fn check_ids(&self, param: &'static str, mut ids: impl Iterator<Item = u32>) -> Result<(), RequestError> {
        match ids.find(|&id| id >= self.vocab_size) {
            None => Ok(()),
            Some(id) => {
                let message = format!("{param} has token id {id}; the vocabulary has {} ids", self.vocab_size);
                refuse("invalid_token_id", param, message)
            }
        }
    }
}

/// Refuses a length that the model was not made for. Loading looks before the weights are read.
pub(crate) fn check_model_len(config: &EngineConfig, max_position: u32) -> Result<(), Error> {
    match config.max_model_len.filter(|&len| len > max_position) {
        None => Ok(()),
        Some(len) => {
            let what = format!("{len} is above the {max_position} positions the model was made for; lower it");
            Err(Error::Config { key: "max_model_len", what })
        }
    }
}

fn check_sampling(sampling: &SamplingParams) -> Result<(), RequestError> {
    let SamplingParams { temperature, top_p, top_k, min_p, .. } = *sampling;
    let checks = [
        ("temperature", temperature, temperature >= 0.0 && temperature.is_finite(), "a number from 0"),
        ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, at most 1"),
        ("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1"),
        (
            "presence_penalty",
            sampling.presence_penalty,
            (-2.0..=2.0).contains(&sampling.presence_penalty),
            "from -2 to 2",
        ),
        (
            "frequency_penalty",
            sampling.frequency_penalty,
            (-2.0..=2.0).contains(&sampling.frequency_penalty),
            "from -2 to 2",
        ),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            sampling.repetition_penalty > 0.0 && sampling.repetition_penalty.is_finite(),
            "a number above 0",
        ),
    ];
    for (param, value, is_good, range) in checks {
        if !is_good {
            return refuse("invalid_value", param, format!("{param} is {value}; it must be {range}"));
        }
    }
    if top_k == Some(0) {
        return refuse("invalid_value", "top_k", "top_k is 0; it must be at least 1, or absent".to_owned());
    }
    match sampling.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias)) {
        None => Ok(()),
        Some((id, bias)) => {
            let message = format!("logit_bias of token {id} is {bias}; it must be from -100 to 100");
            refuse("invalid_value", "logit_bias", message)
        }
    }
}

fn check_count(param: &'static str, count: usize, limit: usize) -> Result<(), RequestError> {
    if count > limit {
        return refuse("invalid_value", param, format!("{param} has {count} entries; the limit is {limit}"));
    }
    Ok(())
}

fn refuse(code: &'static str, param: &'static str, message: String) -> Result<(), RequestError> {
    Err(RequestError { transient: false, code, param: Some(param), message })
}

/// Slots are numbered as the kernels read them: i32, of which a negative one is padding and stores
/// nothing. One block more is the device's own.
fn blocks_max(block_size: u32) -> u32 {
    i32::MAX as u32 / block_size - 1
}

/// Blocks of the KV cache: the override, or what the memory setting holds, or a quarter
/// of free memory; never more than `max_num_seqs` sequences of full length need.
fn num_blocks(
    shape: &ModelShape,
    config: &EngineConfig,
    model_len: u32,
    max_num_seqs: u32,
    free_memory_bytes: Option<u64>,
) -> Result<u32, Error> {
    /// Where free memory is not known.
    const FALLBACK_BYTES: u64 = 1 << 30;
    if let Some(num_blocks) = config.num_gpu_blocks_override {
        if num_blocks == 0 {
            let what = "0 leaves no room for a token; use 1 or more".to_owned();
            return Err(Error::Config { key: "num_gpu_blocks_override", what });
        }
        let most = blocks_max(config.block_size);
        if num_blocks > most {
            let what = format!(
                "{num_blocks} is above {most}, the most that slots of {} can be numbered in",
                config.block_size
            );
            return Err(Error::Config { key: "num_gpu_blocks_override", what });
        }
        return Ok(num_blocks);
    }
    let bytes =
        config.kv_cache_memory_bytes.unwrap_or_else(|| free_memory_bytes.map_or(FALLBACK_BYTES, |free| free / 4));
    let block_bytes = shape.kv_bytes_per_token.max(1) * u64::from(config.block_size);
    let needed = u64::from(model_len.div_ceil(config.block_size)) * u64::from(max_num_seqs);
    let num_blocks = (bytes / block_bytes).min(needed);
    if num_blocks == 0 {
        let what = format!("{bytes} bytes hold no block; one block takes {block_bytes} bytes: raise it");
        return Err(Error::Config { key: "kv_cache_memory_bytes", what });
    }
    let blocks_max = blocks_max(config.block_size);
    Ok(u32::try_from(num_blocks.min(u64::from(blocks_max))).expect("bounded by blocks_max"))
}
