//! Chat templates: Jinja as Hugging Face's `apply_chat_template` runs it.
//!
//! Invariant: a template renders as it does there (transformers,
//! `utils/chat_template_utils.py`: trim_blocks, lstrip_blocks, loop controls, its
//! `tojson`, `raise_exception` and `strftime_now`), or fails with its reason.
//! Knows nothing of token ids. A template is code of whoever chose the model, not of
//! a client.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Value as Json;

use super::{SpecialTokens, TemplateError};

const NAME: &str = "chat";
/// Marks an error that the template raised on purpose.
const RAISED: &str = "raised: ";
/// Deepest nesting that `tojson` writes.
const JSON_DEPTH_MAX: u32 = 128;

/// A chat to render.
#[derive(Debug, Clone, Copy)]
pub struct ChatPrompt<'a> {
    /// Objects with `role` and `content`, in order.
    pub messages: &'a [Json],
    /// Tool definitions, for templates that know them.
    pub tools: Option<&'a Json>,
    /// End with the header of the assistant's turn.
    pub add_generation_prompt: bool,
    /// End inside the final message, so that the model goes on with it.
    pub continue_final_message: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub kwargs: Option<&'a serde_json::Map<String, Json>>,
}

/// A parsed template.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
}

impl Template {
    pub(super) fn parse(source: String) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|err| TemplateError::Parse(describe(&err)))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, without_generation_tags(&source))
            .map_err(|err| TemplateError::Parse(describe(&err)))?;
        Ok(Self { environment })
    }

    pub(super) fn render(&self, prompt: &ChatPrompt<'_>, special: &SpecialTokens) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|err| TemplateError::Parse(describe(&err)))?;
        let rendered = template.render(variables(prompt, special)).map_err(|err| classify(&err))?;
        if !prompt.continue_final_message {
            return Ok(rendered);
        }
        cut_after_final_message(rendered, prompt.messages)
    }
}

fn variables(prompt: &ChatPrompt<'_>, special: &SpecialTokens) -> Value {
    let mut pairs: Vec<(String, Value)> = Vec::with_capacity(12);
    let named = [
        ("bos_token", special.bos.as_ref().map(|(_, text)| text)),
        ("eos_token", special.eos_text.as_ref()),
        ("unk_token", special.unk_text.as_ref()),
        ("pad_token", special.pad_text.as_ref()),
    ];
    pairs.extend(named.into_iter().filter_map(|(name, text)| Some((name.to_owned(), Value::from(text?.as_str())))));
    pairs.extend(prompt.kwargs.into_iter().flatten().map(|(name, value)| (name.clone(), from_json(value))));
    pairs.push(("messages".to_owned(), prompt.messages.iter().map(from_json).collect()));
    pairs.push(("tools".to_owned(), prompt.tools.map_or(Value::from(()), from_json)));
    pairs.push(("documents".to_owned(), Value::from(())));
    pairs.push(("add_generation_prompt".to_owned(), Value::from(prompt.add_generation_prompt)));
    Value::from_pairs(pairs)
}

/// Like transformers: the final message is looked for from the end, and what the template wrote after it goes.
fn cut_after_final_message(mut rendered: String, messages: &[Json]) -> Result<String, TemplateError> {
    let content = messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default();
    let trimmed = content.trim();
    let at = rendered.rfind(trimmed).filter(|_| !trimmed.is_empty()).ok_or(TemplateError::FinalMessageNotLast)?;
    let untrimmed_end = content.trim_start();
    let kept = if rendered[at..].starts_with(untrimmed_end) { untrimmed_end.len() } else { trimmed.len() };
    rendered.truncate(at + kept);
    Ok(rendered)
}

/// `{% generation %}` only marks the assistant's text for training: as a block it is its body.
fn without_generation_tags(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_owned();
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let tag = &rest[start..start + len + 2];
        let inner = tag[2..tag.len() - 2].trim_start_matches(['-', '+']).trim_end_matches(['-', '+']);
        out.push_str(&rest[..start]);
        match inner.trim() {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    out
}

fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(from_json).collect(),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), from_json(value)))),
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

fn strftime_now(format: String) -> Result<String, Error> {
    use std::fmt::Write;

    let mut text = String::new();
    match write!(text, "{}", chrono::Local::now().format(&format)) {
        Ok(()) => Ok(text),
        Err(_) => Err(Error::new(ErrorKind::InvalidOperation, format!("strftime_now: bad format: {format:?}"))),
    }
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let (between, after_key) = match separators.as_deref() {
        Some([between, after_key]) => (between.clone(), after_key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut writer = JsonWriter { out: String::new(), indent, between, after_key, sort_keys };
    writer.write(value, 0)?;
    Ok(Value::from(writer.out))
}

struct JsonWriter {
    out: String,
    indent: Option<usize>,
    between: String,
    after_key: String,
    sort_keys: bool,
}

impl JsonWriter {
    fn write(&mut self, value: &Value, depth: u32) -> Result<(), Error> {
        if depth > JSON_DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: deeper than {JSON_DEPTH_MAX}")));
        }
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', depth, &items, |writer, item| writer.write(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut pairs: Vec<(String, Value)> = Vec::new();
                for key in value.try_iter()? {
                    pairs.push((key.to_string(), value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list('{', '}', depth, &pairs, |writer, (key, item)| {
                    writer.string(key);
                    let after_key = writer.after_key.clone();
                    writer.out.push_str(&after_key);
                    writer.write(item, depth + 1)
                })?;
            }
            other => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: cannot write a {other}"))),
        }
        Ok(())
    }

    fn list<T>(
        &mut self,
        open: char,
        close: char,
        depth: u32,
        items: &[T],
        mut each: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                let between = self.between.clone();
                self.out.push_str(&between);
            }
            self.new_line(depth + 1);
            each(self, item)?;
        }
        if !items.is_empty() {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: u32) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth as usize));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push_str(&Json::from(text).to_string());
    }
}

fn classify(err: &Error) -> TemplateError {
    match err.detail().and_then(|detail| detail.strip_prefix(RAISED)) {
        Some(message) => TemplateError::Raised(message.to_owned()),
        None => TemplateError::Render(describe(err)),
    }
}

fn describe(err: &Error) -> String {
    let detail = err.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    let line = err.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    format!("{}{detail}{line}", err.kind())
}
