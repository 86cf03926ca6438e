//! Sampling parameters, stop rules and lengths of a body, each checked with its range.

use std::collections::BTreeMap;

use overnight_engine::request::{SamplingParams, StopRules};
use overnight_engine::sampler::choice_seed;
use overnight_types::Endpoint;
use serde::Deserialize;

use super::ModelLimits;
use super::fields::Fields;
use super::refusal::Refusal;

/// Most samples of one prompt.
pub(super) const N_MAX: u32 = 128;
/// Most stop strings, and most characters in one.
const STOPS_MAX: usize = 64;
const STOP_CHARS_MAX: usize = 1_000;
/// Most entries of `logit_bias` and of `stop_token_ids`.
const IDS_MAX: usize = 1_024;
/// OpenAI's default for completions.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;

/// What a body says about sampling, without its prompt.
#[derive(Debug, Clone)]
pub(super) struct Params {
    /// With the seed of the first sample.
    pub(super) sampling: SamplingParams,
    /// The body names a seed.
    pub(super) is_seeded: bool,
    /// `max_tokens` is set by [`Params::stop_rules`].
    stop: StopRules,
    max_tokens: Option<u32>,
    pub(super) n: u32,
    pub(super) logprobs: Option<u32>,
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) echo: bool,
    pub(super) skip_special_tokens: bool,
    pub(super) return_token_ids: bool,
    pub(super) tokens_as_ids: bool,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
    #[serde(default)]
    include_obfuscation: Option<bool>,
    #[serde(default)]
    continuous_usage_stats: Option<bool>,
}

impl Params {
    pub(super) fn read(
        endpoint: Endpoint,
        fields: &Fields<'_>,
        limits: ModelLimits,
        default_seed: u64,
    ) -> Result<Self, Refusal> {
        let n = number(fields, "n", 1, |n: &u32| (1..=N_MAX).contains(n), &format!("within 1…{N_MAX}"))?;
        if let Some(best_of) = fields.get::<u32>("best_of")?.filter(|best_of| *best_of != n) {
            let message = format!("best_of = {best_of} with n = {n} is not supported; leave best_of out");
            return Err(Refusal::field("best_of", message).with_code("unsupported_parameter"));
        }
        let (max_tokens, max_name) = max_tokens(fields)?;
        let (stream, include_usage) = stream(fields)?;
        let seed = seed(fields)?;
        let params = Self {
            sampling: sampling(fields, limits, seed.unwrap_or(default_seed))?,
            is_seeded: seed.is_some(),
            stop: stop_rules(fields, limits)?,
            max_tokens,
            n,
            logprobs: logprobs(endpoint, fields, limits)?,
            prompt_logprobs: prompt_logprobs(fields, limits)?,
            echo: fields.flag("echo", false)?,
            skip_special_tokens: fields.flag("skip_special_tokens", true)?,
            return_token_ids: fields.flag("return_token_ids", false)?,
            tokens_as_ids: fields.flag("return_tokens_as_token_ids", false)?,
            stream,
            include_usage,
        };
        params.check_together(endpoint, max_name)?;
        Ok(params)
    }

    fn check_together(&self, endpoint: Endpoint, max_name: &'static str) -> Result<(), Refusal> {
        let scores_prompt = self.prompt_logprobs.is_some() || (self.echo && endpoint == Endpoint::Completions);
        if self.max_tokens == Some(0) && !scores_prompt {
            let message = format!("{max_name} must be at least 1, got 0; 0 is for prompt_logprobs or echo only");
            return Err(Refusal::field(max_name, message));
        }
        if let Some(max) = self.max_tokens.filter(|max| self.stop.min_tokens > *max) {
            let message = format!("min_tokens = {} is above {max_name} = {max}", self.stop.min_tokens);
            return Err(Refusal::field("min_tokens", message));
        }
        if self.stream && self.prompt_logprobs.is_some() {
            return Err(Refusal::field("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out"));
        }
        Ok(())
    }

    /// Prompt logprobs as the engine must compute them: asked for, or needed for `echo`.
    pub(super) fn engine_prompt_logprobs(&self, endpoint: Endpoint) -> Option<u32> {
        let echoed = (self.echo && endpoint == Endpoint::Completions).then_some(self.logprobs).flatten();
        let scored = if self.max_tokens == Some(0) { Some(0) } else { None };
        [self.prompt_logprobs, echoed, scored].into_iter().flatten().max()
    }

    /// The seed of a sample. With a seed in the body, each prompt gives what it gives alone;
    /// without one, equal prompts differ too.
    pub(super) fn seed_of(&self, prompt: u32, sample: u32) -> u64 {
        let index = if self.is_seeded { sample } else { prompt * self.n + sample };
        choice_seed(self.sampling.seed, index)
    }

    /// Stop rules for a prompt of this length. Refuses a prompt that fills the context;
    /// `max_tokens` is cut to what fits, and the output then ends with `length`.
    pub(super) fn stop_rules(
        &self,
        endpoint: Endpoint,
        num_prompt: u32,
        max_model_len: u32,
    ) -> Result<StopRules, Refusal> {
        let (param, what) = match endpoint {
            Endpoint::ChatCompletions => ("messages", "the chat"),
            Endpoint::Completions => ("prompt", "the prompt"),
        };
        // A prompt that is only scored may fill the context.
        let wanted = u64::from(num_prompt) + u64::from(self.max_tokens.unwrap_or(1).min(1));
        if wanted > u64::from(max_model_len) {
            let message = format!(
                "{what} has {num_prompt} tokens, which leaves no room for output in max_model_len = {max_model_len}"
            );
            return Err(Refusal::field(param, message).with_code("context_length_exceeded"));
        }
        let room = max_model_len - num_prompt;
        let max_tokens = match self.max_tokens {
            Some(max) => max.min(room),
            None if endpoint == Endpoint::Completions => room.min(COMPLETION_TOKENS_DEFAULT.max(self.stop.min_tokens)),
            None => room,
        };
        if self.stop.min_tokens > max_tokens {
            let message = format!("min_tokens = {} does not fit: {max_tokens} tokens are left", self.stop.min_tokens);
            return Err(Refusal::field("min_tokens", message));
        }
        Ok(StopRules { max_tokens, ..self.stop.clone() })
    }
}

fn sampling(fields: &Fields<'_>, limits: ModelLimits, seed: u64) -> Result<SamplingParams, Refusal> {
    let vocab_size = limits.vocab_size;
    Ok(SamplingParams {
        temperature: float(fields, "temperature", 1.0, |t| t >= 0.0, "0 or more")?,
        top_p: float(fields, "top_p", 1.0, |p| p > 0.0 && p <= 1.0, "above 0, at most 1")?,
        // −1 and 0 keep every token, and so does anything from the vocabulary's size on.
        top_k: match number(fields, "top_k", 0, |k: &i64| *k >= -1, "-1 (all), 0 (all) or more")? {
            ..=0 => None,
            k => u32::try_from(k).ok().filter(|k| *k < vocab_size),
        },
        min_p: float(fields, "min_p", 0.0, |p| (0.0..=1.0).contains(&p), "within 0…1")?,
        seed,
        presence_penalty: float(fields, "presence_penalty", 0.0, |p| (-2.0..=2.0).contains(&p), "within -2…2")?,
        frequency_penalty: float(fields, "frequency_penalty", 0.0, |p| (-2.0..=2.0).contains(&p), "within -2…2")?,
        repetition_penalty: float(fields, "repetition_penalty", 1.0, |p| p > 0.0, "above 0")?,
        logit_bias: logit_bias(fields, vocab_size)?,
    })
}

fn stop_rules(fields: &Fields<'_>, limits: ModelLimits) -> Result<StopRules, Refusal> {
    let stop = match fields.raw("stop").map(|raw| serde_json::from_str(raw.get())) {
        None => Vec::new(),
        Some(Ok(OneOrMany::One(stop))) => vec![stop],
        Some(Ok(OneOrMany::Many(stops))) => stops,
        Some(Err(_)) => return Err(Refusal::field("stop", "stop must be a string or an array of strings")),
    };
    if stop.iter().any(String::is_empty) {
        return Err(Refusal::field("stop", "stop must not hold an empty string"));
    }
    if stop.len() > STOPS_MAX || stop.iter().any(|stop| stop.chars().count() > STOP_CHARS_MAX) {
        let message = format!("stop takes at most {STOPS_MAX} strings of at most {STOP_CHARS_MAX} characters");
        return Err(Refusal::field("stop", message));
    }
    let stop_token_ids: Vec<i64> = fields.get("stop_token_ids")?.unwrap_or_default();
    if stop_token_ids.len() > IDS_MAX {
        return Err(Refusal::field("stop_token_ids", format!("stop_token_ids takes at most {IDS_MAX} ids")));
    }
    let stop_token_ids = stop_token_ids.into_iter().map(|id| token_id("stop_token_ids", id, limits.vocab_size));
    Ok(StopRules {
        max_tokens: 0,
        ignore_eos: fields.flag("ignore_eos", false)?,
        min_tokens: fields.get("min_tokens")?.unwrap_or(0),
        stop,
        stop_token_ids: stop_token_ids.collect::<Result<_, _>>()?,
        include_stop_str_in_output: fields.flag("include_stop_str_in_output", false)?,
    })
}

fn logit_bias(fields: &Fields<'_>, vocab_size: u32) -> Result<Vec<(u32, f32)>, Refusal> {
    let Some(bias) = fields.get::<BTreeMap<String, f32>>("logit_bias")? else { return Ok(Vec::new()) };
    if bias.len() > IDS_MAX {
        return Err(Refusal::field(
            "logit_bias",
            format!("logit_bias takes at most {IDS_MAX} ids, got {}", bias.len()),
        ));
    }
    let entry = |(id, bias): (String, f32)| {
        let parsed = id.parse::<i64>().map_err(|_| {
            Refusal::field("logit_bias", format!("logit_bias: keys are token ids, got {:?}", shorten(&id)))
        })?;
        if !(-100.0..=100.0).contains(&bias) {
            return Err(Refusal::field(
                "logit_bias",
                format!("logit_bias of {parsed} must be within -100…100, got {bias}"),
            ));
        }
        Ok((token_id("logit_bias", parsed, vocab_size)?, bias))
    };
    bias.into_iter().map(entry).collect()
}

fn seed(fields: &Fields<'_>) -> Result<Option<u64>, Refusal> {
    let Some(raw) = fields.raw("seed") else { return Ok(None) };
    let text = raw.get();
    let seed = text.parse::<u64>().ok().or_else(|| text.parse::<i64>().ok().map(i64::cast_unsigned));
    let wrong = || Refusal::field("seed", format!("seed must be a 64-bit integer, got {}", shorten(text)));
    seed.map(Some).ok_or_else(wrong)
}

/// The newer name wins, as the older one is deprecated.
fn max_tokens(fields: &Fields<'_>) -> Result<(Option<u32>, &'static str), Refusal> {
    let old = fields.get::<u32>("max_tokens")?;
    match fields.raw("max_completion_tokens") {
        Some(_) => Ok((fields.get("max_completion_tokens")?, "max_completion_tokens")),
        None => Ok((old, "max_tokens")),
    }
}

fn stream(fields: &Fields<'_>) -> Result<(bool, bool), Refusal> {
    let stream = fields.flag("stream", false)?;
    let Some(options) = fields.get::<StreamOptions>("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        return Err(Refusal::field("stream_options", "stream_options is for stream = true only"));
    }
    if options.continuous_usage_stats == Some(true) {
        let message = "stream_options.continuous_usage_stats is not supported; include_usage adds one chunk at the end";
        return Err(Refusal::field("stream_options.continuous_usage_stats", message).with_code("unsupported_parameter"));
    }
    // Obfuscation pads chunks against eavesdroppers; leaving it out changes no text.
    let _ = options.include_obfuscation;
    Ok((stream, options.include_usage.unwrap_or(false)))
}

fn logprobs(endpoint: Endpoint, fields: &Fields<'_>, limits: ModelLimits) -> Result<Option<u32>, Refusal> {
    if endpoint == Endpoint::Completions {
        let wanted = fields.get::<i64>("logprobs")?;
        return wanted.map(|wanted| logprob_count("logprobs", wanted, limits)).transpose();
    }
    let on = fields.flag("logprobs", false)?;
    match fields.get::<i64>("top_logprobs")? {
        Some(top) if !on && top != 0 => {
            Err(Refusal::field("top_logprobs", format!("top_logprobs = {top} needs logprobs = true")))
        }
        top if on => logprob_count("top_logprobs", top.unwrap_or(0), limits).map(Some),
        _ => Ok(None),
    }
}

fn prompt_logprobs(fields: &Fields<'_>, limits: ModelLimits) -> Result<Option<u32>, Refusal> {
    let wanted = fields.get::<i64>("prompt_logprobs")?;
    wanted.map(|wanted| logprob_count("prompt_logprobs", wanted, limits)).transpose()
}

fn logprob_count(name: &'static str, wanted: i64, limits: ModelLimits) -> Result<u32, Refusal> {
    if wanted < 0 {
        return Err(Refusal::field(name, format!("{name} must be 0 or more, got {wanted}")));
    }
    let max = limits.max_logprobs.min(limits.vocab_size);
    u32::try_from(wanted)
        .ok()
        .filter(|wanted| *wanted <= max)
        .ok_or_else(|| Refusal::field(name, format!("{name} must be within 0…{max} (--max-logprobs), got {wanted}")))
}

/// An id of the vocabulary.
pub(super) fn token_id(name: &'static str, id: i64, vocab_size: u32) -> Result<u32, Refusal> {
    if id < 0 {
        return Err(Refusal::field(name, format!("{name}: a token id is 0 or more, got {id}")));
    }
    u32::try_from(id)
        .ok()
        .filter(|id| *id < vocab_size)
        .ok_or_else(|| Refusal::field(name, format!("{name}: token id {id} is outside the vocabulary of {vocab_size}")))
}

fn float(
    fields: &Fields<'_>,
    name: &'static str,
    default: f32,
    fits: impl Fn(f32) -> bool,
    range: &str,
) -> Result<f32, Refusal> {
    let value = fields.get::<f32>(name)?.unwrap_or(default);
    if value.is_finite() && fits(value) {
        return Ok(value);
    }
    let given = fields.raw(name).map_or("", |raw| raw.get());
    Err(Refusal::field(name, format!("{name} must be {range}, got {}", shorten(given))))
}

fn number<T: serde::de::DeserializeOwned + std::fmt::Display>(
    fields: &Fields<'_>,
    name: &'static str,
    default: T,
    fits: impl Fn(&T) -> bool,
    range: &str,
) -> Result<T, Refusal> {
    let value = fields.get::<T>(name)?.unwrap_or(default);
    if fits(&value) { Ok(value) } else { Err(Refusal::field(name, format!("{name} must be {range}, got {value}"))) }
}

fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}
