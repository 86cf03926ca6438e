//! Making a batch line of a row: prompt, custom id, body.

use std::collections::HashMap;

use overnight_types::Endpoint;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::PrepareArgs;
use super::rows::{Content, Row};
use crate::error::{Exit, Failure, Result};
use crate::output::{human, plain};

/// Fields of a row that a message names.
const FIELDS_SHOWN: usize = 10;

/// Makes a batch line of a row.
pub(super) struct Preparer<'a> {
    args: &'a PrepareArgs,
    endpoint: Endpoint,
    template: Option<minijinja::Environment<'a>>,
    extra: Map<String, Value>,
    /// Hash of a custom id → the line that used it first.
    seen: HashMap<[u8; 16], u64>,
    /// The only field of the first row, if it has but one: that is the prompt, of all rows.
    only_field: Option<Option<String>>,
}

impl<'a> Preparer<'a> {
    pub(super) fn new(args: &'a PrepareArgs, endpoint: Endpoint) -> Result<Self> {
        let template = match &args.template {
            None => None,
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|err| Failure::new(Exit::NotFound, format!("could not read {}: {err}", path.display())))?;
                let mut engine = minijinja::Environment::new();
                engine.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
                engine.add_template_owned("prompt", text).map_err(|err| {
                    let at = format!("--> {}:{}", path.display(), err.line().unwrap_or(1));
                    Failure::new(Exit::InvalidInput, format!("the template is not valid: {}", template_words(&err)))
                        .note(at)
                })?;
                Some(engine)
            }
        };
        if args.system.is_some() && endpoint != Endpoint::ChatCompletions {
            return Err(Failure::usage("--system is for chat; put the text into the template"));
        }
        let extra = extra_parameters(args)?;
        Ok(Self { args, endpoint, template, extra, seen: HashMap::new(), only_field: None })
    }

    /// The line of a row, or why there is none.
    pub(super) fn line(&mut self, row: &Row) -> Result<String, String> {
        match row.content.as_ref().map_err(Clone::clone)? {
            Content::BatchLine(line) => {
                self.check_batch_line(line)?;
                let id = line["custom_id"].as_str().unwrap_or_default().to_owned();
                self.claim_id(&id, row.line)?;
                Ok(row.raw.clone())
            }
            Content::Fields(fields) => {
                let prompt = self.prompt(fields, row.line)?;
                let id = self.custom_id(fields, row.line)?;
                let body = self.body(prompt);
                let line = json!({"custom_id": id, "method": "POST", "url": self.endpoint.as_str(), "body": body});
                self.claim_id(&id, row.line)?;
                Ok(line.to_string())
            }
        }
    }

    fn check_batch_line(&self, line: &Value) -> Result<(), String> {
        if line["custom_id"].as_str().is_none_or(str::is_empty) {
            return Err("a batch line already, but custom_id is not a non-empty string".to_owned());
        }
        if line["method"] != "POST" {
            return Err("a batch line already, but method is not \"POST\"".to_owned());
        }
        if line["url"] != self.endpoint.as_str() {
            return Err(format!("a batch line already, but url is not {:?}", self.endpoint.as_str()));
        }
        if line["body"]["model"] != self.args.model.as_str() {
            return Err(format!("a batch line already, but body.model is not {:?}", self.args.model));
        }
        Ok(())
    }

    fn prompt(&mut self, fields: &Map<String, Value>, line: u64) -> Result<String, String> {
        self.only_field.get_or_insert_with(|| only_text(fields));
        let text = match &self.template {
            Some(engine) => {
                let mut values = fields.clone();
                values.entry("line").or_insert_with(|| Value::from(line));
                values.entry("row").or_insert_with(|| Value::Object(fields.clone()));
                let template = engine.get_template("prompt").map_err(|err| template_words(&err))?;
                let rendered = template.render(minijinja::value::Serde(&values));
                rendered.map_err(|err| match err.kind() {
                    minijinja::ErrorKind::UndefinedError => undefined_words(&err, engine, &template, fields),
                    _ => template_words(&err),
                })?
            }
            None => plain(self.prompt_value(fields)?),
        };
        if text.trim().is_empty() {
            return Err("the prompt is empty".to_owned());
        }
        Ok(text)
    }

    fn prompt_value<'f>(&self, fields: &'f Map<String, Value>) -> Result<&'f Value, String> {
        if let Some(name) = &self.args.prompt_field {
            return fields.get(name).ok_or_else(|| no_field(name, fields));
        }
        let only_field = self.only_field.as_ref().and_then(Option::as_ref);
        let only = || fields.get(only_field?).filter(|value| value.is_string());
        fields.get("text").or_else(|| fields.get("prompt")).or_else(only).ok_or_else(|| match only_field {
            Some(name) => format!("{}, the prompt of the rows before it", no_field(name, fields)),
            None => format!("{}; give --template or --prompt-field", no_field("text\" or \"prompt", fields)),
        })
    }

    fn custom_id(&self, fields: &Map<String, Value>, line: u64) -> Result<String, String> {
        let Some(name) = &self.args.id_field else { return Ok(format!("line-{line:06}")) };
        let id = match fields.get(name) {
            None => return Err(format!("{} for the custom id", no_field(name, fields))),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Number(number)) => number.to_string(),
            Some(_) => {
                return Err(format!("field {name:?} is neither text nor a number, so it cannot be the custom id"));
            }
        };
        if id.is_empty() { Err(format!("field {name:?} is empty, so it cannot be the custom id")) } else { Ok(id) }
    }

    fn claim_id(&mut self, id: &str, line: u64) -> Result<(), String> {
        let hash: [u8; 32] = Sha256::digest(id.as_bytes()).into();
        let key: [u8; 16] = hash[..16].try_into().expect("half of the hash");
        match self.seen.insert(key, line) {
            None => Ok(()),
            Some(first) => {
                self.seen.insert(key, first);
                Err(format!("the custom id {id:?} is that of line {}", human::count(first)))
            }
        }
    }

    fn body(&self, prompt: String) -> Map<String, Value> {
        let mut body = Map::from_iter([("model".to_owned(), Value::from(self.args.model.as_str()))]);
        match self.endpoint {
            Endpoint::Completions => {
                body.insert("prompt".to_owned(), Value::from(prompt));
            }
            Endpoint::ChatCompletions => {
                let mut messages = Vec::new();
                messages.extend(self.args.system.as_ref().map(|text| json!({"role": "system", "content": text})));
                messages.push(json!({"role": "user", "content": prompt}));
                body.insert("messages".to_owned(), Value::Array(messages));
            }
        }
        body.extend(self.extra.clone());
        body
    }
}

fn extra_parameters(args: &PrepareArgs) -> Result<Map<String, Value>> {
    let mut extra = Map::new();
    if let Some(max) = args.max_tokens {
        extra.insert("max_tokens".to_owned(), Value::from(max));
    }
    if let Some(temperature) = args.temperature {
        extra.insert("temperature".to_owned(), Value::from(temperature));
    }
    if !args.stop.is_empty() {
        extra.insert("stop".to_owned(), Value::from(args.stop.clone()));
    }
    for text in &args.param {
        let (key, value) =
            text.split_once('=').ok_or_else(|| Failure::usage(format!("--param wants KEY=JSON: {text}")))?;
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        if matches!(key, "model" | "messages" | "prompt" | "stream") {
            return Err(Failure::usage(format!("--param cannot set {key}")));
        }
        extra.insert(key.to_owned(), value);
    }
    Ok(extra)
}

/// The name of a row's only field, when it holds text.
fn only_text(fields: &Map<String, Value>) -> Option<String> {
    let (name, value) = fields.iter().next().filter(|_| fields.len() == 1)?;
    value.is_string().then(|| name.clone())
}

/// What is missing, and what there is.
fn no_field(name: &str, fields: &Map<String, Value>) -> String {
    format!("no field \"{name}\" ({})", given(fields))
}

fn given(fields: &Map<String, Value>) -> String {
    if fields.is_empty() {
        return "the row has none".to_owned();
    }
    let names: Vec<&str> = fields.keys().map(String::as_str).take(FIELDS_SHOWN).collect();
    let more = if fields.len() > FIELDS_SHOWN { ", …" } else { "" };
    format!("the row has {}{more}", names.join(", "))
}

/// The names that a template asks for in vain. The engine does not always say which, so all
/// are named that neither the row nor the template itself gives.
fn undefined_words(
    err: &minijinja::Error,
    engine: &minijinja::Environment<'_>,
    template: &minijinja::Template<'_, '_>,
    fields: &Map<String, Value>,
) -> String {
    let is_given = |name: &str| {
        fields.contains_key(name) || ["line", "row"].contains(&name) || engine.globals().any(|(known, _)| known == name)
    };
    let words = template_words(err);
    let mut missing: Vec<String> =
        template.undeclared_variables(false).into_iter().filter(|name| !is_given(name)).collect();
    missing.sort_unstable();
    if missing.is_empty() || missing.iter().all(|name| words.contains(&format!("`{name}`"))) {
        return format!("{words} ({})", given(fields));
    }
    format!("{words}: {} ({})", missing.join(", "), given(fields))
}

/// The engine's error in one line, with its detail and the template's line.
fn template_words(err: &minijinja::Error) -> String {
    let place = err.line().map_or(String::new(), |line| format!(" (template line {line})"));
    match err.detail() {
        Some(detail) => format!("{}: {detail}{place}", err.kind()),
        None => format!("{}{place}", err.kind()),
    }
}
