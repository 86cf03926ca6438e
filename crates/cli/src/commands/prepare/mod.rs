//! `batch prepare`: text lines, CSV or loose JSONL into valid batch lines, so that
//! mixed inputs are made alike before a job and not found out in it.
//!
//! Invariant: input rows = lines written + rows named as invalid; ids are the same
//! every time the same input is prepared.

mod line;
mod rows;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use overnight_types::{Endpoint, Limits};
use serde_json::{Value, json};

use crate::client::download::{Sink, Target};
use crate::config::{Config, Loaded};
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::validation::{aside_row, utf16_hint};
use crate::{App, models, outputs};
use line::Preparer;
use rows::InputFormat;

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
    /// What the lines are for: /v1/chat/completions or /v1/completions [default: chat, unless
    /// the model is here and has no chat template]
    #[arg(long, value_parser = parse_endpoint)]
    endpoint: Option<Endpoint>,
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
    let aside = args.aside();
    check_outputs(&args, &aside)?;
    let endpoint = endpoint(&args, &Loaded::read(&app.globals, Vec::new())?.config, app)?;
    let mut preparer = Preparer::new(&args, endpoint)?;
    let mut input = open(&args.input)?;
    let format = match args.format {
        Some(format) => format,
        None => rows::guess(&args.input.to_string_lossy(), input.fill_buf()?),
    };
    if format == InputFormat::Semicolons && args.format.is_none() {
        app.ui.say("the head has semicolons and no comma: read as separated by semicolons (--format csv for commas)");
    }
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
    let aside = if invalid.is_empty() || args.dry_run { None } else { Some(set_aside(aside, &invalid)?) };
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

impl PrepareArgs {
    /// Where rows go that cannot be used.
    fn aside(&self) -> PathBuf {
        let label = if self.input.as_os_str() == "-" { "stdin".into() } else { self.input.to_string_lossy() };
        outputs::beside_output(Some(&self.output_file), &label, "invalid")
    }
}

fn check_outputs(args: &PrepareArgs, aside: &Path) -> Result {
    if args.dry_run {
        return Ok(());
    }
    let mut paths = vec![args.output_file.as_path()];
    if args.on_invalid == OnInvalid::Skip {
        paths.push(aside);
    }
    let mut inputs = vec![args.input.as_os_str()];
    inputs.extend(args.template.as_ref().map(|path| path.as_os_str()));
    outputs::check(&paths, &inputs)
}

/// The endpoint asked for; else chat, unless it is known that the model cannot chat: every
/// such line would be refused.
fn endpoint(args: &PrepareArgs, config: &Config, app: &App) -> Result<Endpoint> {
    let chats = models::has_chat_template(config, &args.model);
    match (args.endpoint, chats) {
        (Some(Endpoint::ChatCompletions), Some(false)) => {
            app.ui.warn(format!(
                "{} has no chat template, so its engine refuses these lines unless it is started with --chat-template FILE; --endpoint /v1/completions needs none",
                args.model
            ));
            Ok(Endpoint::ChatCompletions)
        }
        (None, Some(false)) if args.system.is_some() => Err(Failure::usage(format!(
            "--system is for chat, and {} has no chat template",
            args.model
        ))
        .hint("put the text into the template, or give --endpoint /v1/chat/completions and start the engine with --chat-template FILE")),
        (None, Some(false)) => {
            app.ui.summary(format!("{} has no chat template: the lines are for /v1/completions", args.model));
            Ok(Endpoint::Completions)
        }
        (asked, _) => Ok(asked.unwrap_or(Endpoint::ChatCompletions)),
    }
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
    let count = human::counted(invalid.len() as u64, "row");
    let first = &invalid[0];
    let mut failure =
        Failure::new(Exit::InvalidInput, format!("line {} cannot be used: {}", human::count(first.line), first.reason))
            .note(format!("--> {}:{}", input.display(), first.line));
    for other in invalid.iter().skip(1).take(SHOWN_MAX - 1) {
        failure = failure.note(format!("= line {}: {}", human::count(other.line), other.reason));
    }
    failure = failure.note(format!("= {count} cannot be used; nothing was written"));
    let label = input.display().to_string();
    if let Some(hint) = utf16_hint(input, &label) {
        return failure.hint(hint);
    }
    if usable == 0 {
        return failure;
    }
    let others = human::counted(usable, "row");
    failure.hint(format!("correct them, or `--on-invalid skip` to write the other {others} and set these aside"))
}

/// Writes the invalid rows with their reasons, in the form of `batch submit` and `run`.
fn set_aside(path: PathBuf, invalid: &[Invalid]) -> Result<PathBuf> {
    let (mut sink, _) = Sink::open(&Target::new(&path, false)?, |_| false)?;
    for row in invalid {
        let reason = json!({"code": "invalid_row", "message": row.reason, "param": null});
        sink.write(format!("{}\n", aside_row(row.line, vec![reason], &row.raw)).as_bytes())?;
    }
    sink.finish()?;
    Ok(path)
}

fn report(args: &PrepareArgs, app: &App, written: u64, invalid: &[Invalid], blank: u64, aside: Option<&Path>) {
    let mut text = human::counted(written, "line");
    if args.dry_run {
        text.push_str(" would be written");
    } else {
        text.push_str(&format!(" in {}", args.output_file.display()));
    }
    if blank > 0 {
        text.push_str(&format!(" · {} passed over", human::counted(blank, "blank line")));
    }
    if let Some(aside) = aside {
        text.push_str(&format!(
            " · {} set aside with the reasons in {}",
            human::counted(invalid.len() as u64, "row"),
            aside.display()
        ));
    }
    app.ui.summary(text);
    if !args.dry_run && args.output_file.as_os_str() != "-" {
        app.ui.say(format!("next: batch submit {} --watch", args.output_file.display()));
    }
}

#[cfg(test)]
mod tests;
