//! `batch prepare`: text lines, CSV or loose JSONL into valid batch lines, so that
//! mixed inputs are made alike before a job and not found out in it.
//!
//! Invariant: input rows = lines written + rows named as invalid; ids are the same
//! every time the same input is prepared.

mod rows;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use overnight_types::{Endpoint, Limits};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::App;
use crate::client::download::{Sink, Target};
use crate::error::{Exit, Failure, Result};
use crate::output::{human, plain};
use rows::{Content, InputFormat, Row};

/// Invalid rows that are printed one by one.
const SHOWN_MAX: usize = 20;

/// What to do with rows that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum OnInvalid {
    /// Write nothing and say what is wrong.
    #[default]
    Fail,
    /// Go on without them and write them to a file of their own, with their reasons.
    Skip,
}

/// Arguments of `batch prepare`.
#[derive(Debug, Args)]
pub(crate) struct PrepareArgs {
    /// Text lines, CSV, TSV or JSONL; - is stdin
    input: PathBuf,
    /// Where the batch lines go; - is stdout
    #[arg(short = 'o', long = "output-file", value_name = "OUT.jsonl")]
    output_file: PathBuf,
    /// The model that every line names
    #[arg(long)]
    model: String,
    /// A Jinja template of the prompt; it sees the row's fields, `line` and `row`
    #[arg(long, value_name = "T.j2")]
    template: Option<PathBuf>,
    /// Without a template: the field that is the prompt [default: text, prompt or the only one]
    #[arg(long, value_name = "FIELD", conflicts_with = "template")]
    prompt_field: Option<String>,
    /// The field that is the custom id [default: line-000001 and so on]
    #[arg(long, value_name = "FIELD")]
    id_field: Option<String>,
    /// What the lines are for: /v1/chat/completions or /v1/completions
    #[arg(long, default_value = "/v1/chat/completions", value_parser = parse_endpoint)]
    endpoint: Endpoint,
    /// A system message before each prompt (chat only)
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// max_tokens of every line
    #[arg(long, value_parser = human::parse_count)]
    max_tokens: Option<u64>,
    /// temperature of every line
    #[arg(long)]
    temperature: Option<f64>,
    /// A stop text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Any other body key, for example top_p=0.9; may be given several times
    #[arg(long, value_name = "KEY=JSON")]
    param: Vec<String>,
    /// How the input is read [default: by its name and first bytes]
    #[arg(long)]
    format: Option<InputFormat>,
    /// What to do with rows that cannot be used
    #[arg(long, default_value = "fail")]
    on_invalid: OnInvalid,
    /// Check every row and print the first line; write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// An endpoint of a batch, or why it is none.
pub(crate) fn parse_endpoint(text: &str) -> Result<Endpoint, String> {
    text.parse().map_err(|_| {
        let served: Vec<&str> = Endpoint::ALL.iter().map(Endpoint::as_str).collect();
        let why = if Endpoint::NOT_SERVED.contains(&text) { "not served here" } else { "not an endpoint" };
        format!("{why}; served are {}", served.join(" and "))
    })
}

pub(crate) fn run(args: PrepareArgs, app: &App) -> Result {
    let limits = Limits::default();
    let mut preparer = Preparer::new(&args)?;
    let mut input = open(&args.input)?;
    let format = match args.format {
        Some(format) => format,
        None => rows::guess(&args.input.to_string_lossy(), input.fill_buf()?),
    };
    let mut target = Target::new(&args.output_file, false)?;
    if target.is_stdout() && !args.dry_run {
        if app.ui.is_json() {
            return Err(Failure::usage("--json and the lines do not share stdout").hint("write the lines with -o PATH"));
        }
        if args.on_invalid == OnInvalid::Fail {
            // Whoever reads the pipe must not take the good rows for all of them.
            target = target.held();
        }
    }
    let mut sink = if args.dry_run { None } else { Some(Sink::open(&target, |_| false)?.0) };
    let mut first_line = None;
    let mut invalid: Vec<Invalid> = Vec::new();
    let mut written = 0u64;
    let blank = rows::read(format, &mut input, limits.line_bytes_max, &mut |row| {
        match preparer.line(&row) {
            Ok(line) => {
                written += 1;
                if let Some(sink) = &mut sink {
                    sink.write(format!("{line}\n").as_bytes())?;
                }
                first_line.get_or_insert(line);
            }
            Err(reason) => invalid.push(Invalid { line: row.line, reason, raw: row.raw }),
        }
        Ok(())
    });
    let blank = match blank {
        Ok(blank) => blank,
        Err(failure) => {
            sink.iter().for_each(Sink::discard);
            return Err(failure);
        }
    };
    if written == 0 && invalid.is_empty() {
        sink.iter().for_each(Sink::discard);
        return Err(Failure::new(Exit::InvalidInput, format!("no row in {}", args.input.display())).code("empty_file"));
    }
    if !invalid.is_empty() && args.on_invalid == OnInvalid::Fail {
        sink.iter().for_each(Sink::discard);
        return Err(refuse(&args.input, &invalid, written));
    }
    if args.dry_run && !app.ui.is_json() {
        app.ui.data(&format!("{}\n", first_line.as_deref().unwrap_or_default()))?;
    }
    let aside = if invalid.is_empty() || args.dry_run { None } else { Some(set_aside(&args.input, &invalid)?) };
    if let Some(sink) = sink {
        sink.finish()?;
    }
    report(&args, app, written, &invalid, blank, aside.as_deref());
    let first_line = first_line.and_then(|line| serde_json::from_str::<Value>(&line).ok());
    let output = (!args.dry_run).then(|| args.output_file.to_string_lossy());
    let record = json!({"output": output, "lines": written, "blank": blank, "invalid": invalid.len(),
        "set_aside": aside.as_ref().map(|path| path.to_string_lossy()), "first_line": first_line});
    app.ui.json_record(&record).map(drop)
}

fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(BufReader::new(std::io::stdin())));
    }
    let file = std::fs::File::open(path)
        .map_err(|err| Failure::new(Exit::NotFound, format!("could not read {}: {err}", path.display())))?;
    Ok(Box::new(BufReader::with_capacity(1 << 16, file)))
}

#[derive(Debug)]
struct Invalid {
    line: u64,
    reason: String,
    raw: String,
}

fn refuse(input: &Path, invalid: &[Invalid], usable: u64) -> Failure {
    let (count, rows) = (human::count(invalid.len() as u64), if invalid.len() == 1 { "row" } else { "rows" });
    let first = &invalid[0];
    let mut failure =
        Failure::new(Exit::InvalidInput, format!("line {} cannot be used: {}", human::count(first.line), first.reason))
            .note(format!("--> {}:{}", input.display(), first.line));
    for other in invalid.iter().skip(1).take(SHOWN_MAX - 1) {
        failure = failure.note(format!("= line {}: {}", human::count(other.line), other.reason));
    }
    failure.note(format!("= {count} {rows} cannot be used; nothing was written")).hint(format!(
        "correct them, or `--on-invalid skip` to write the other {} and set these aside",
        human::count(usable)
    ))
}

/// Writes the invalid rows with their reasons beside the input.
fn set_aside(input: &Path, invalid: &[Invalid]) -> Result<PathBuf> {
    let name = if input.as_os_str() == "-" { PathBuf::from("stdin") } else { input.to_owned() };
    let mut path = name.into_os_string();
    path.push(".invalid.jsonl");
    let path = PathBuf::from(path);
    let (mut sink, _) = Sink::open(&Target::new(&path, false)?, |_| false)?;
    for row in invalid {
        sink.write(format!("{}\n", json!({"line": row.line, "reason": row.reason, "row": row.raw})).as_bytes())?;
    }
    sink.finish()?;
    Ok(path)
}

fn report(args: &PrepareArgs, app: &App, written: u64, invalid: &[Invalid], blank: u64, aside: Option<&Path>) {
    let mut text = format!("{} lines", human::count(written));
    if args.dry_run {
        text.push_str(" would be written");
    } else {
        text.push_str(&format!(" in {}", args.output_file.display()));
    }
    if blank > 0 {
        text.push_str(&format!(" · {} blank lines passed over", human::count(blank)));
    }
    if let Some(aside) = aside {
        text.push_str(&format!(
            " · {} rows set aside with their reasons in {}",
            human::count(invalid.len() as u64),
            aside.display()
        ));
    }
    app.ui.summary(text);
    if !args.dry_run && args.output_file.as_os_str() != "-" {
        app.ui.say(format!("next: batch submit {} --watch", args.output_file.display()));
    }
}

/// Makes a batch line of a row.
struct Preparer<'a> {
    args: &'a PrepareArgs,
    template: Option<minijinja::Environment<'a>>,
    extra: Map<String, Value>,
    /// Hash of a custom id → the line that used it first.
    seen: HashMap<[u8; 16], u64>,
}

impl<'a> Preparer<'a> {
    fn new(args: &'a PrepareArgs) -> Result<Self> {
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
        if args.system.is_some() && args.endpoint != Endpoint::ChatCompletions {
            return Err(Failure::usage("--system is for chat; put the text into the template"));
        }
        Ok(Self { args, template, extra: extra_parameters(args)?, seen: HashMap::new() })
    }

    fn line(&mut self, row: &Row) -> Result<String, String> {
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
                let line = json!({"custom_id": id, "method": "POST", "url": self.args.endpoint.as_str(), "body": body});
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
        if line["url"] != self.args.endpoint.as_str() {
            return Err(format!("a batch line already, but url is not {:?}", self.args.endpoint.as_str()));
        }
        if line["body"]["model"] != self.args.model.as_str() {
            return Err(format!("a batch line already, but body.model is not {:?}", self.args.model));
        }
        Ok(())
    }

    fn prompt(&self, fields: &Map<String, Value>, line: u64) -> Result<String, String> {
        let text = match &self.template {
            Some(engine) => {
                let mut values = fields.clone();
                values.entry("line").or_insert_with(|| Value::from(line));
                values.entry("row").or_insert_with(|| Value::Object(fields.clone()));
                let template = engine.get_template("prompt").map_err(|err| template_words(&err))?;
                template.render(minijinja::value::Serde(&values)).map_err(|err| template_words(&err))?
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
            return fields.get(name).ok_or_else(|| format!("no field {name:?}"));
        }
        let usual = fields.get("text").or_else(|| fields.get("prompt"));
        let only = || fields.values().next().filter(|_| fields.len() == 1);
        usual
            .or_else(only)
            .ok_or_else(|| "no field \"text\" or \"prompt\"; give --template or --prompt-field".to_owned())
    }

    fn custom_id(&self, fields: &Map<String, Value>, line: u64) -> Result<String, String> {
        let Some(name) = &self.args.id_field else { return Ok(format!("line-{line:06}")) };
        let id = match fields.get(name) {
            None => return Err(format!("no field {name:?} for the custom id")),
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
        match self.args.endpoint {
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

/// The engine's error in one line, with its detail and the template's line.
fn template_words(err: &minijinja::Error) -> String {
    let place = err.line().map_or(String::new(), |line| format!(" (template line {line})"));
    match err.detail() {
        Some(detail) => format!("{}: {detail}{place}", err.kind()),
        None => format!("{}{place}", err.kind()),
    }
}

#[cfg(test)]
mod tests;
