//! The messages of a chat body, and the prompt they render to.

use overnight_engine::text::{ChatPrompt, TemplateError, Text};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::refusal::Refusal;

/// Keys of our own answers that may come back in a message, and mean nothing when empty.
const EMPTY_ONLY: &[&str] = &["refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id"];
/// Keys that templates know.
const PASSED_ON: &[&str] = &["name", "reasoning", "reasoning_content"];

/// A chat ready to tokenize.
#[derive(Debug)]
pub(super) struct Chat {
    /// As the template wrote it.
    pub(super) rendered: String,
    /// Content of a final assistant message, for `echo`.
    pub(super) last_assistant: Option<String>,
}

/// What a chat body asks for, checked as far as that goes without a model.
pub(super) struct Request {
    messages: Vec<Value>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Option<Map<String, Value>>,
}

impl Request {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let messages: Option<Vec<Value>> = fields.get("messages")?;
        let messages = messages.ok_or_else(|| Refusal::field("messages", "messages is required"))?;
        if messages.is_empty() {
            return Err(Refusal::field("messages", "messages must hold at least one message"));
        }
        let messages: Vec<Value> = messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| checked(index, message))
            .collect::<Result<_, _>>()?;
        let continue_final_message = fields.flag("continue_final_message", false)?;
        let add_generation_prompt = fields.flag("add_generation_prompt", !continue_final_message)?;
        if continue_final_message && add_generation_prompt {
            let message = "continue_final_message and add_generation_prompt exclude each other";
            return Err(Refusal::field("continue_final_message", message));
        }
        let kwargs = fields.get("chat_template_kwargs")?;
        Ok(Self { messages, add_generation_prompt, continue_final_message, kwargs })
    }
}

pub(super) fn render(text: &Text, fields: &Fields<'_>) -> Result<Chat, Refusal> {
    let Request { messages, add_generation_prompt, continue_final_message, kwargs } = Request::read(fields)?;
    let prompt = ChatPrompt {
        messages: &messages,
        tools: None,
        add_generation_prompt,
        continue_final_message,
        kwargs: kwargs.as_ref(),
    };
    let rendered = text.render_chat(&prompt).map_err(|err| refused(&err))?;
    let last = messages.last().filter(|message| message["role"] == "assistant");
    let last_assistant = last.and_then(|message| message["content"].as_str()).map(str::to_owned);
    Ok(Chat { rendered, last_assistant })
}

fn refused(err: &TemplateError) -> Refusal {
    let code = if matches!(err, TemplateError::Missing) { "chat_template_missing" } else { "chat_template_error" };
    Refusal::field("messages", err.to_string()).with_code(code)
}

fn checked(index: usize, message: Value) -> Result<Value, Refusal> {
    let at = |key: &str| format!("messages[{index}]{}{key}", if key.is_empty() { "" } else { "." });
    let wrong = |key: &str, what: String| Refusal::field(at(key), format!("{}: {what}", at(key)));
    let Value::Object(mut given) = message else { return Err(wrong("", "must be an object".to_owned())) };
    let role = match given.remove("role") {
        Some(Value::String(role)) => role,
        _ => return Err(wrong("role", "must be a string".to_owned())),
    };
    let role = match role.as_str() {
        "system" | "user" | "assistant" => role,
        // OpenAI's newer word for the same thing; templates know the older one.
        "developer" => "system".to_owned(),
        "tool" | "function" => return Err(wrong("role", format!("{role} is not supported: tool calls are not built"))),
        _ => {
            let shown: String = role.chars().take(40).collect();
            return Err(wrong("role", format!("must be system, developer, user or assistant, got {shown:?}")));
        }
    };
    let content = match given.remove("content") {
        Some(Value::String(content)) => content,
        Some(Value::Array(parts)) => joined(&parts).map_err(|what| wrong("content", what))?,
        None | Some(Value::Null) if role == "assistant" => String::new(),
        _ => return Err(wrong("content", "must be a string or an array of text parts".to_owned())),
    };
    let mut message = Map::new();
    message.insert("role".to_owned(), Value::String(role));
    message.insert("content".to_owned(), Value::String(content));
    for (key, value) in given {
        let says_nothing = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
        if PASSED_ON.contains(&key.as_str()) {
            if value.is_string() {
                message.insert(key, value);
            } else if !says_nothing {
                return Err(wrong(&key, "must be a string".to_owned()));
            }
        } else if !(EMPTY_ONLY.contains(&key.as_str()) && says_nothing) {
            let key: String = key.chars().take(80).collect();
            return Err(wrong(&key, "is not supported".to_owned()));
        }
    }
    Ok(Value::Object(message))
}

/// Text parts after each other, with a line break between them as other engines join them.
fn joined(parts: &[Value]) -> Result<String, String> {
    let mut texts: Vec<&str> = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        if let Some(text) = part.as_str() {
            texts.push(text);
            continue;
        }
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(text)) => texts.push(text),
            (Some("text"), None) => return Err(format!("part {index} has no text")),
            (Some(kind), _) => {
                let kind: String = kind.chars().take(40).collect();
                return Err(format!("part {index} is of type {kind:?}; only text goes in"));
            }
            (None, _) => return Err(format!("part {index} has no type")),
        }
    }
    Ok(texts.join("\n"))
}
