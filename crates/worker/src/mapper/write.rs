//! Writes finished choices as whole answers, and steps of choices as chunks.

use bytes::Bytes;
use overnight_engine::request::{TokenLogprob, TokenLogprobs, TokenOutput};
use overnight_types::Endpoint;
use serde::Serialize;

use super::answer::Response;
use super::choice::{AnswerRules, Choice, Choices};
use super::wire::{
    ChatChoice, ChatChunkChoice, ChatLogprobs, ChatPosition, ChatToken, Completion, Delta, Logprob, Message, NoChoice,
    PromptPosition, SYSTEM_FINGERPRINT, TextChoice, TextLogprobs, TopLogprobs, WireStop, WireUsage, token_text,
};

/// The whole answer. All choices are complete.
pub(super) fn whole(choices: &mut Choices) -> Response {
    let usage = choices.usage();
    let finish_reason = choices.finish_reason();
    let body = match choices.rules.endpoint {
        Endpoint::ChatCompletions => whole_chat(choices, usage.into()),
        Endpoint::Completions => whole_text(choices, usage.into()),
    };
    Response { status: 200, body, usage, finish_reason, error_code: None, retryable: false }
}

fn whole_chat(choices: &mut Choices, usage: WireUsage) -> Bytes {
    for choice in &mut choices.all {
        let text = std::mem::take(&mut choice.text);
        choice.text = match choice.echoed.take() {
            Some(echoed) => echoed + &text,
            None => text,
        };
    }
    let texts: Vec<String> = choices.all.iter_mut().map(|choice| std::mem::take(&mut choice.text)).collect();
    let rules = &choices.rules;
    let wire = choices.all.iter().zip(texts).enumerate().map(|(index, (choice, text))| ChatChoice {
        index,
        message: Message::assistant(text),
        logprobs: rules.logprobs.map(|_| chat_logprobs(choices, &choice.logprobs)),
        finish_reason: choice.finish.as_ref().map(|finish| finish.reason.as_str()),
        stop_reason: WireStop::of(choice.finish.as_ref()),
        token_ids: rules.return_token_ids.then_some(&choice.token_ids),
    });
    let first = choices.all.first();
    json(&Completion {
        prompt_logprobs: Some(first.and_then(|choice| prompt_positions(choices, choice))),
        prompt_token_ids: Some(first.filter(|_| rules.return_token_ids).map(|choice| choice.prompt.as_slice())),
        usage: Some(Some(usage)),
        ..head(rules, "chat.completion", wire.collect())
    })
}

fn whole_text(choices: &mut Choices, usage: WireUsage) -> Bytes {
    let texts: Vec<String> = choices.all.iter_mut().map(|choice| std::mem::take(&mut choice.text)).collect();
    let rules = &choices.rules;
    let wire = choices.all.iter().zip(texts).enumerate().map(|(index, (choice, text))| {
        let mut logprobs = rules.logprobs.map(|_| TextLogprobs::default());
        if let Some(logprobs) = &mut logprobs {
            let mut offset = 0;
            echoed_logprobs(choices, choice, logprobs, &mut offset);
            add_text_logprobs(choices, &choice.logprobs, logprobs, &mut offset);
        }
        TextChoice {
            index,
            text: choice.echoed.as_deref().unwrap_or_default().to_owned() + &text,
            logprobs,
            finish_reason: choice.finish.as_ref().map(|finish| finish.reason.as_str()),
            stop_reason: WireStop::of(choice.finish.as_ref()),
            token_ids: rules.return_token_ids.then_some(&choice.token_ids),
            prompt_logprobs: prompt_positions(choices, choice),
            prompt_token_ids: rules.return_token_ids.then_some(&choice.prompt),
        }
    });
    json(&Completion { usage: Some(Some(usage)), ..head(rules, "text_completion", wire.collect()) })
}

/// Chunks for one output of choice `index`, which has been taken already.
pub(super) fn chunks(choices: &mut Choices, index: usize, step: &TokenOutput) -> Vec<Bytes> {
    let begun = std::mem::replace(&mut choices.all[index].begun, true);
    match choices.rules.endpoint {
        Endpoint::ChatCompletions => chat_chunks(choices, index, step, begun),
        Endpoint::Completions => text_chunk(choices, index, step, begun).into_iter().collect(),
    }
}

fn chat_chunks(choices: &Choices, index: usize, step: &TokenOutput, begun: bool) -> Vec<Bytes> {
    let rules = &choices.rules;
    let chunk = |delta: Delta<'_>, step: Option<&TokenOutput>| {
        let finish = step.and_then(|step| step.finish.as_ref());
        let choice = ChatChunkChoice {
            index,
            delta,
            logprobs: step.filter(|_| rules.logprobs.is_some()).map(|step| chat_logprobs(choices, &step.logprobs)),
            finish_reason: finish.map(|finish| finish.reason.as_str()),
            stop_reason: WireStop::of(finish),
            token_ids: step.filter(|_| rules.return_token_ids).map(|step| step.token_ids.as_slice()),
        };
        json(&Completion {
            usage: rules.include_usage.then_some(None),
            ..head(rules, "chat.completion.chunk", vec![choice])
        })
    };
    let mut chunks = Vec::with_capacity(2);
    if !begun {
        chunks.push(chunk(Delta { role: Some("assistant"), content: Some("") }, None));
        if let Some(echoed) = choices.all[index].echoed.as_deref().filter(|echoed| !echoed.is_empty()) {
            chunks.push(chunk(Delta { role: None, content: Some(echoed) }, None));
        }
    }
    if !step.text.is_empty() || !step.logprobs.is_empty() || step.finish.is_some() {
        let content = (!step.text.is_empty() || step.finish.is_none()).then_some(step.text.as_str());
        chunks.push(chunk(Delta { role: None, content }, Some(step)));
    }
    chunks
}

fn text_chunk(choices: &mut Choices, index: usize, step: &TokenOutput, begun: bool) -> Option<Bytes> {
    let echoed = if begun { None } else { choices.all[index].echoed.take() };
    if echoed.is_none() && step.text.is_empty() && step.logprobs.is_empty() && step.finish.is_none() {
        return None;
    }
    let mut offset = choices.all[index].text_offset;
    let logprobs = choices.rules.logprobs.map(|_| {
        let mut logprobs = TextLogprobs::default();
        if !begun {
            echoed_logprobs(choices, &choices.all[index], &mut logprobs, &mut offset);
        }
        add_text_logprobs(choices, &step.logprobs, &mut logprobs, &mut offset);
        logprobs
    });
    choices.all[index].text_offset = offset;
    let rules = &choices.rules;
    let choice = TextChoice {
        index,
        text: echoed.unwrap_or_default() + &step.text,
        logprobs,
        finish_reason: step.finish.as_ref().map(|finish| finish.reason.as_str()),
        stop_reason: WireStop::of(step.finish.as_ref()),
        token_ids: rules.return_token_ids.then_some(&step.token_ids),
        prompt_logprobs: None,
        prompt_token_ids: None,
    };
    let usage = rules.include_usage.then_some(None);
    Some(json(&Completion { usage, ..head(rules, "text_completion", vec![choice]) }))
}

/// The chunk of `include_usage`, after the last choice's end.
pub(super) fn usage_chunk(choices: &Choices) -> Bytes {
    let object = match choices.rules.endpoint {
        Endpoint::ChatCompletions => "chat.completion.chunk",
        Endpoint::Completions => "text_completion",
    };
    let usage = Some(Some(choices.usage().into()));
    json(&Completion::<NoChoice> { usage, ..head(&choices.rules, object, Vec::new()) })
}

fn head<'a, C>(rules: &'a AnswerRules, object: &'static str, choices: Vec<C>) -> Completion<'a, C> {
    Completion {
        id: &rules.id,
        object,
        created: rules.created,
        model: &rules.model,
        choices,
        service_tier: None,
        system_fingerprint: SYSTEM_FINGERPRINT,
        usage: None,
        prompt_logprobs: None,
        prompt_token_ids: None,
    }
}

fn chat_logprobs(choices: &Choices, positions: &[TokenLogprobs]) -> ChatLogprobs {
    let token = |entry: &TokenLogprob| ChatToken {
        token: shown(choices, entry.token),
        logprob: Logprob(entry.logprob),
        bytes: choices.text.token_bytes(entry.token).unwrap_or_default().to_vec(),
    };
    let content = positions.iter().map(|position| ChatPosition {
        chosen: token(&position.chosen),
        top_logprobs: position.top.iter().map(token).collect(),
    });
    ChatLogprobs { content: content.collect(), refusal: None }
}

/// With `echo`, the prompt's tokens come first; the very first one has no logprob.
fn echoed_logprobs(choices: &Choices, choice: &Choice, out: &mut TextLogprobs, offset: &mut u32) {
    if !choices.rules.echo {
        return;
    }
    let scored = choice.prompt_logprobs.as_deref().unwrap_or_default();
    for (index, id) in choice.prompt.iter().enumerate() {
        out.text_offset.push(*offset);
        *offset += num_chars_begun(choices, *id);
        out.tokens.push(shown(choices, *id));
        let position = scored.get(index).and_then(Option::as_ref);
        out.token_logprobs.push(position.map(|position| Logprob(position.chosen.logprob)));
        out.top_logprobs.push(position.map(|position| top_logprobs(choices, position)));
    }
}

fn add_text_logprobs(choices: &Choices, positions: &[TokenLogprobs], out: &mut TextLogprobs, offset: &mut u32) {
    for position in positions {
        out.text_offset.push(*offset);
        *offset += num_chars_begun(choices, position.chosen.token);
        out.tokens.push(shown(choices, position.chosen.token));
        out.token_logprobs.push(Some(Logprob(position.chosen.logprob)));
        out.top_logprobs.push(Some(top_logprobs(choices, position)));
    }
}

/// The likeliest tokens, and the chosen one when it is none of them.
fn top_logprobs(choices: &Choices, position: &TokenLogprobs) -> TopLogprobs {
    let wanted = choices.rules.logprobs.unwrap_or(0) as usize;
    let mut entries: Vec<(String, Logprob)> = Vec::with_capacity(wanted + 1);
    for entry in position.top.iter().take(wanted).chain([&position.chosen]) {
        let token = shown(choices, entry.token);
        if entries.iter().all(|(before, _)| *before != token) {
            entries.push((token, Logprob(entry.logprob)));
        }
    }
    TopLogprobs(entries)
}

fn prompt_positions(choices: &Choices, choice: &Choice) -> Option<Vec<PromptPosition>> {
    let positions = choice.prompt_logprobs.as_deref().filter(|_| choices.rules.prompt_logprobs)?;
    let write = |position: &Option<TokenLogprobs>| {
        PromptPosition(position.as_ref().map(|position| {
            let others = position.top.iter().filter(|entry| entry.token != position.chosen.token);
            let all = [&position.chosen].into_iter().chain(others);
            all.map(|entry| (*entry, shown(choices, entry.token))).collect()
        }))
    };
    Some(positions.iter().map(write).collect())
}

fn shown(choices: &Choices, id: u32) -> String {
    if choices.rules.tokens_as_ids {
        return format!("token_id:{id}");
    }
    token_text(choices.text.token_bytes(id).unwrap_or_default())
}

/// Characters of the text that start in this token.
fn num_chars_begun(choices: &Choices, id: u32) -> u32 {
    if choices.rules.skip_special_tokens && choices.text.is_special(id) {
        return 0;
    }
    let bytes = choices.text.token_bytes(id).unwrap_or_default();
    let begun = bytes.iter().filter(|byte| **byte & 0b1100_0000 != 0b1000_0000).count();
    u32::try_from(begun).unwrap_or(u32::MAX)
}

fn json(value: &impl Serialize) -> Bytes {
    Bytes::from(serde_json::to_vec(value).expect("strings, numbers and string keys always serialize"))
}
