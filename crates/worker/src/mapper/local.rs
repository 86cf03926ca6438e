//! A body for the engine in this process: prompts become token ids, choices become requests.

use std::sync::Arc;

use overnight_engine::request::RequestId;
use overnight_engine::text::Text;
use overnight_types::Endpoint;
use serde::Deserialize;

use super::answer::Answer;
use super::chat;
use super::choice::{AnswerRules, Choice, Choices};
use super::fields::Fields;
use super::params::{Params, token_id};
use super::refusal::Refusal;
use super::surrogates::replace_lone;
use super::{ModelLimits, PrepareOptions, Prepared};
use crate::generate::{Input, Request};

/// Most prompts in one body, and most choices of all of them together.
const PROMPTS_MAX: usize = 2_048;
const CHOICES_MAX: usize = 4_096;
/// Most prompt tokens of one body, each counted once per choice: each choice is a request that
/// holds its prompt, 16 MiB in all.
const CHOICE_TOKENS_MAX: usize = 1 << 22;
/// Holds whatever a model could hold.
const ANY_MODEL: ModelLimits = ModelLimits { max_model_len: u32::MAX, vocab_size: u32::MAX, max_logprobs: u32::MAX };

/// One prompt of a body.
#[derive(Debug)]
struct Prompt {
    ids: Vec<u32>,
    /// What `echo` puts before the output.
    echoed: Option<String>,
}

pub(super) fn prepare(
    text: &Arc<Text>,
    names: &[String],
    limits: ModelLimits,
    endpoint: Endpoint,
    body: &[u8],
    options: &PrepareOptions<'_>,
) -> Result<Prepared, Refusal> {
    let body = replace_lone(body);
    let fields = Fields::split(endpoint, &body)?;
    let model: String = fields.get("model")?.ok_or_else(|| Refusal::field("model", "model is required"))?;
    if !names.contains(&model) {
        return Err(Refusal::model_not_found(&model, names));
    }
    let params = Params::read(endpoint, &fields, limits, options.seed)?;
    check_stream(&params, options.allow_stream)?;
    let mut prompts = match endpoint {
        Endpoint::ChatCompletions => vec![chat_prompt(text, &fields, params.echo)?],
        Endpoint::Completions => completion_prompts(text, &fields, limits, params.echo, params.skip_special_tokens)?,
    };
    if let Some(kept) = kept_part(&fields, limits.max_model_len)? {
        prompts.iter_mut().for_each(|prompt| kept.cut(&mut prompt.ids));
    }
    check_choices(prompts.len(), &params)?;
    let num_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum::<usize>() * params.n as usize;
    if num_tokens > CHOICE_TOKENS_MAX {
        let remedy = "ask in several requests, or for fewer choices";
        let message = format!(
            "{} prompts with n = {} hold {num_tokens} tokens over all choices, the limit is {CHOICE_TOKENS_MAX}; {remedy}",
            prompts.len(),
            params.n
        );
        return Err(Refusal::field("n", message));
    }
    let rules = AnswerRules {
        endpoint,
        id: format!(
            "{}-{}",
            if endpoint == Endpoint::ChatCompletions { "chatcmpl" } else { "cmpl" },
            options.request_id
        ),
        created: options.created,
        model,
        logprobs: params.logprobs,
        prompt_logprobs: params.prompt_logprobs.is_some(),
        echo: params.echo,
        skip_special_tokens: params.skip_special_tokens,
        return_token_ids: params.return_token_ids,
        tokens_as_ids: params.tokens_as_ids,
        include_usage: params.include_usage,
        samples_per_prompt: params.n,
    };
    let (requests, choices) = requests(endpoint, prompts, &params, limits, options)?;
    Ok(Prepared {
        requests,
        answer: Answer::local(Choices::new(Arc::clone(text), rules, choices)),
        stream: params.stream,
        seed_used: Some(params.sampling.seed),
    })
}

/// Judges a body of a job without a model: what is refused here, every model refuses.
/// Fits of tokens to a model's context, vocabulary and template are taken for granted.
pub(super) fn check_without_model(endpoint: Endpoint, body: &[u8]) -> Result<(), Refusal> {
    let body = replace_lone(body);
    let fields = Fields::split(endpoint, &body)?;
    let _: String = fields.get("model")?.ok_or_else(|| Refusal::field("model", "model is required"))?;
    let params = Params::read(endpoint, &fields, ANY_MODEL, 0)?;
    check_stream(&params, false)?;
    let num_prompts = match endpoint {
        Endpoint::ChatCompletions => {
            chat::Request::read(&fields)?;
            fields.flag("add_special_tokens", false)?;
            1
        }
        Endpoint::Completions => {
            fields.flag("add_special_tokens", true)?;
            PromptForm::read(&fields, ANY_MODEL.vocab_size)?.len()
        }
    };
    kept_part(&fields, ANY_MODEL.max_model_len)?;
    check_choices(num_prompts, &params)
}

fn check_stream(params: &Params, allow_stream: bool) -> Result<(), Refusal> {
    if params.stream && !allow_stream {
        let message = "stream is not supported for items of a job: their answers are written whole";
        return Err(Refusal::field("stream", message).with_code("unsupported_parameter"));
    }
    Ok(())
}

fn check_choices(num_prompts: usize, params: &Params) -> Result<(), Refusal> {
    if num_prompts * params.n as usize > CHOICES_MAX {
        let message = format!("{num_prompts} prompts with n = {} are more than {CHOICES_MAX} choices", params.n);
        return Err(Refusal::field("n", message));
    }
    Ok(())
}

fn requests(
    endpoint: Endpoint,
    prompts: Vec<Prompt>,
    params: &Params,
    limits: ModelLimits,
    options: &PrepareOptions<'_>,
) -> Result<(Vec<Request>, Vec<Choice>), Refusal> {
    let prompt_logprobs = params.engine_prompt_logprobs(endpoint);
    let keeps_prompt = params.return_token_ids || (params.echo && params.logprobs.is_some());
    let mut requests = Vec::with_capacity(prompts.len() * params.n as usize);
    let mut choices = Vec::with_capacity(requests.capacity());
    for (prompt_index, prompt) in (0u32..).zip(prompts) {
        let num_prompt = u32::try_from(prompt.ids.len()).unwrap_or(u32::MAX);
        let stop = params.stop_rules(endpoint, num_prompt, limits.max_model_len)?;
        for sample in 0..params.n {
            let id = RequestId::next();
            let mut sampling = params.sampling.clone();
            // Samples differ, and each can be had again.
            sampling.seed = params.seed_of(prompt_index, sample);
            let request = overnight_engine::Request {
                id,
                class: options.class,
                prompt: prompt.ids.clone(),
                sampling,
                stop: stop.clone(),
                logprobs: params.logprobs,
                prompt_logprobs,
                skip_special_tokens: params.skip_special_tokens,
                stream: params.stream,
            };
            requests.push(Request { id, class: options.class, input: Input::Tokens(Box::new(request)) });
            let kept = if keeps_prompt { prompt.ids.clone() } else { Vec::new() };
            choices.push(Choice::new(id, num_prompt, kept, prompt.echoed.clone()));
        }
    }
    Ok((requests, choices))
}

fn chat_prompt(text: &Text, fields: &Fields<'_>, echo: bool) -> Result<Prompt, Refusal> {
    let chat = chat::render(text, fields)?;
    // Templates write their own special tokens, BOS included.
    let add_special = fields.flag("add_special_tokens", false)?;
    let ids = text.encode(&chat.rendered, add_special).map_err(|err| Refusal::field("messages", err.to_string()))?;
    if ids.is_empty() {
        return Err(Refusal::field("messages", "messages: the chat renders to an empty prompt"));
    }
    Ok(Prompt { ids, echoed: chat.last_assistant.filter(|_| echo) })
}

/// The forms of `prompt`.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawPrompts {
    Text(String),
    Ids(Vec<i64>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<i64>>),
}

/// The prompts of a body, none of them empty; ids are of the vocabulary.
enum PromptForm {
    Texts(Vec<String>),
    Ids(Vec<Vec<u32>>),
}

impl PromptForm {
    fn read(fields: &Fields<'_>, vocab_size: u32) -> Result<Self, Refusal> {
        let raw = fields.raw("prompt").ok_or_else(|| Refusal::field("prompt", "prompt is required"))?;
        let raw = serde_json::from_str(raw.get()).map_err(|_| {
            let forms = "a string, an array of strings, an array of token ids or an array of such arrays";
            Refusal::field("prompt", format!("prompt must be {forms}"))
        })?;
        let of_vocabulary = |ids: Vec<i64>| -> Result<Vec<u32>, Refusal> {
            ids.into_iter().map(|id| token_id("prompt", id, vocab_size)).collect()
        };
        let form = match raw {
            RawPrompts::Text(prompt) => Self::Texts(vec![prompt]),
            RawPrompts::Ids(ids) => Self::Ids(vec![of_vocabulary(ids)?]),
            RawPrompts::Texts(prompts) => {
                few_enough(prompts.len())?;
                Self::Texts(prompts)
            }
            RawPrompts::IdLists(lists) => {
                few_enough(lists.len())?;
                Self::Ids(lists.into_iter().map(of_vocabulary).collect::<Result<_, _>>()?)
            }
        };
        let holds_empty = match &form {
            Self::Texts(prompts) => prompts.iter().any(String::is_empty),
            Self::Ids(lists) => lists.iter().any(Vec::is_empty),
        };
        if holds_empty || form.len() == 0 { Err(empty()) } else { Ok(form) }
    }

    fn len(&self) -> usize {
        match self {
            Self::Texts(prompts) => prompts.len(),
            Self::Ids(lists) => lists.len(),
        }
    }
}

fn completion_prompts(
    text: &Text,
    fields: &Fields<'_>,
    limits: ModelLimits,
    echo: bool,
    skip_special: bool,
) -> Result<Vec<Prompt>, Refusal> {
    let form = PromptForm::read(fields, limits.vocab_size)?;
    let add_special = fields.flag("add_special_tokens", true)?;
    let failed = |err: overnight_engine::text::TextError| Refusal::field("prompt", err.to_string());
    let from_text = |prompt: String| {
        let ids = text.encode(&prompt, add_special).map_err(failed)?;
        if ids.is_empty() { Err(empty()) } else { Ok(Prompt { ids, echoed: echo.then_some(prompt) }) }
    };
    let from_ids = |ids: Vec<u32>| {
        let echoed = if echo { Some(text.decode(&ids, skip_special)) } else { None };
        Ok(Prompt { ids, echoed: echoed.transpose().map_err(failed)? })
    };
    match form {
        PromptForm::Texts(prompts) => prompts.into_iter().map(from_text).collect(),
        PromptForm::Ids(lists) => lists.into_iter().map(from_ids).collect(),
    }
}

fn few_enough(num_prompts: usize) -> Result<(), Refusal> {
    if num_prompts <= PROMPTS_MAX {
        return Ok(());
    }
    Err(Refusal::field("prompt", format!("prompt takes at most {PROMPTS_MAX} prompts, got {num_prompts}")))
}

fn empty() -> Refusal {
    Refusal::field("prompt", "prompt is empty; it must hold at least one token")
}

/// What `truncate_prompt_tokens` keeps of each prompt.
struct KeptPart {
    num_tokens: usize,
    /// The first ones; else the last ones.
    start: bool,
}

impl KeptPart {
    fn cut(&self, ids: &mut Vec<u32>) {
        if self.start {
            ids.truncate(self.num_tokens);
        } else {
            ids.drain(..ids.len().saturating_sub(self.num_tokens));
        }
    }
}

fn kept_part(fields: &Fields<'_>, max_model_len: u32) -> Result<Option<KeptPart>, Refusal> {
    let start = match fields.get::<String>("truncation_side")?.as_deref() {
        None | Some("left") => false,
        Some("right") => true,
        Some(_) => return Err(Refusal::field("truncation_side", "truncation_side must be left or right")),
    };
    let Some(keep) = fields.get::<i64>("truncate_prompt_tokens")? else { return Ok(None) };
    let num_tokens = match keep {
        -1 => max_model_len as usize,
        ..1 => {
            let message = format!("truncate_prompt_tokens must be -1 (all that fits) or at least 1, got {keep}");
            return Err(Refusal::field("truncate_prompt_tokens", message));
        }
        keep => {
            usize::try_from(keep).ok().filter(|keep| (1..=max_model_len as usize).contains(keep)).ok_or_else(|| {
                let message = format!("truncate_prompt_tokens must be -1 or within 1…{max_model_len}, got {keep}");
                Refusal::field("truncate_prompt_tokens", message)
            })?
        }
    };
    Ok(Some(KeptPart { num_tokens, start }))
}
