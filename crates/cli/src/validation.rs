//! Checking a file of requests before anything is sent, with the worker's own intake;
//! showing what is wrong; setting bad lines aside.
//!
//! A fault of the envelope fails a whole batch. A fault of a body ends its own request
//! with HTTP 400: `batch validate` counts it as a problem, `submit` and `run` warn of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use overnight_types::{Endpoint, Limits};
use overnight_worker::intake::{self, BodyCheck, IntakeOptions, KnownModels, ModelFree, Source, ValidationReport};
use serde_json::{Value, json};

use crate::config::{Config, EngineKind};
use crate::error::{Exit, Failure, Result};
use crate::output::table::shorten;
use crate::output::{Ui, escape, human};

/// Lines that are searched for the first `url`.
const LOOK_MAX: usize = 1_000;
/// Problems that are printed one by one.
const SHOWN_MAX: usize = 10;

/// A file of requests on this machine; stdin is put into a temporary one first.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) path: PathBuf,
    /// What people know it as, fit for a terminal.
    pub(crate) label: String,
    spool: Option<tempfile::TempPath>,
}

impl Input {
    /// Opens a path, whatever bytes it is made of; `-` is stdin. Reading stdin waits
    /// without blocking, so that a signal is heard meanwhile.
    pub(crate) async fn open(path: &OsStr) -> Result<Self> {
        if path == "-" {
            let mut spool = tempfile::Builder::new().prefix("batch-stdin-").suffix(".jsonl").tempfile()?;
            let mut pieces = read_stdin();
            while let Some(piece) = pieces.recv().await {
                spool.write_all(&piece?)?;
            }
            let spool = spool.into_temp_path();
            return Ok(Self { path: spool.to_path_buf(), label: "stdin".to_owned(), spool: Some(spool) });
        }
        if let Some((scheme, _)) = path.to_str().and_then(|text| text.split_once("://")) {
            return Err(Failure::usage(format!("{scheme}:// inputs are not built yet"))
                .code("not_built")
                .hint("copy the object to a file, or pipe it into `batch submit -`"));
        }
        let path = PathBuf::from(path);
        let label = escape(&path.to_string_lossy()).into_owned();
        match std::fs::metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(Self { path, label, spool: None }),
            Ok(meta) if meta.is_dir() => Err(Failure::usage(format!("a folder is no input: {label}"))),
            Ok(_) => Err(Failure::usage(format!("not a file: {label}"))
                .hint("- is stdin: pipe into it, for example `COMMAND | batch validate -`")),
            Err(err) => Err(Failure::new(Exit::NotFound, format!("could not read {label}: {err}"))),
        }
    }

    /// Whether it came by a pipe, so that no command finds it again.
    pub(crate) fn is_stdin(&self) -> bool {
        self.label == "stdin" && self.spool.is_some()
    }

    /// A name for the server, which takes `.jsonl` only.
    pub(crate) fn upload_name(&self) -> String {
        let name =
            if self.spool.is_some() { "stdin.jsonl".to_owned() } else { crate::commands::files::file_name(&self.path) };
        if name.ends_with(".jsonl") { name } else { format!("{name}.jsonl") }
    }
}

/// Pieces of stdin, read by a thread of its own: a read that never ends is left behind
/// when nobody waits for it any more.
fn read_stdin() -> tokio::sync::mpsc::Receiver<std::io::Result<Vec<u8>>> {
    let (sender, receiver) = tokio::sync::mpsc::channel(4);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        loop {
            let mut piece = vec![0; 1 << 16];
            let read = std::io::Read::read(&mut stdin, &mut piece);
            let (sent, ends) = match read {
                Ok(0) => return,
                Ok(read) => {
                    piece.truncate(read);
                    (sender.blocking_send(Ok(piece)), false)
                }
                Err(err) if err.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(err) => (sender.blocking_send(Err(err)), true),
            };
            if ends || sent.is_err() {
                return;
            }
        }
    });
    receiver
}

/// The endpoint asked for, else the `url` of the first line that has one.
pub(crate) fn endpoint(input: &Input, asked: Option<Endpoint>) -> Result<Endpoint> {
    if let Some(endpoint) = asked {
        return Ok(endpoint);
    }
    let file = std::fs::File::open(&input.path)
        .map_err(|err| Failure::new(Exit::NotFound, format!("could not read {}: {err}", input.label)))?;
    let mut first_other = None;
    for line in BufReader::new(file).split(b'\n').take(LOOK_MAX) {
        let line = line?;
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line);
        let Ok(value) = serde_json::from_slice::<Value>(line) else { continue };
        let Some(url) = value["url"].as_str() else { continue };
        match crate::commands::prepare::parse_endpoint(url) {
            Ok(endpoint) => return Ok(endpoint),
            Err(why) => first_other = first_other.or(Some(format!("{url}: {why}"))),
        }
    }
    Ok(match first_other {
        Some(why) => {
            return Err(Failure::new(
                Exit::InvalidInput,
                format!("the url of the first line is no endpoint here: {why}"),
            ));
        }
        // The check that follows says what is wrong with the lines.
        None => Endpoint::ChatCompletions,
    })
}

/// Who judges bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bodies {
    /// The rules of the local engine, as far as they hang on no model.
    LocalEngine,
    /// A remote engine takes bodies as they are.
    Elsewhere,
}

impl Bodies {
    /// As `[engine]` is set on this machine.
    pub(crate) fn of(config: &Config) -> Self {
        if config.engine.source.kind == EngineKind::Local { Self::LocalEngine } else { Self::Elsewhere }
    }

    /// What is not looked at, in words.
    pub(crate) fn unchecked(self) -> &'static str {
        match self {
            Self::LocalEngine => ModelFree::UNCHECKED,
            Self::Elsewhere => "bodies: engine.kind says that another server judges them",
        }
    }
}

/// Finds every problem of the input. Any model name is taken: only a server knows its own.
pub(crate) async fn check(
    input: &Input,
    endpoint: Endpoint,
    errors_kept_max: usize,
    bodies: Bodies,
) -> Result<ValidationReport> {
    let limits = Limits { errors_kept_max, ..Limits::default() };
    let options = IntakeOptions { limits, ..IntakeOptions::new(endpoint, KnownModels::Any) };
    let body_check: Option<&dyn BodyCheck> = if bodies == Bodies::LocalEngine { Some(&ModelFree) } else { None };
    intake::validate(&Source::Path(input.path.clone()), options, body_check)
        .await
        .map_err(|err| Failure::from_error(&format!("read {}", input.label), &err))
}

/// Says of a batch that would run how many of its requests would be refused.
pub(crate) fn warn_of_bodies(input: &Input, report: &ValidationReport, ui: &Ui) {
    let Some(first) = report.body_findings.first() else { return };
    let code = first.fault.code.as_ref().map_or(String::new(), |code| format!(" ({code})"));
    ui.warn(format!(
        "{} of {} would end with HTTP 400 in the local engine; the first is line {}: {}{code}",
        human::count(report.num_body_findings),
        human::counted(report.requests, "request"),
        human::count(first.line),
        escape(&first.fault.message)
    ));
    if !input.is_stdin() {
        ui.say(format!("         `batch validate {}` lists them", input.label));
    }
}

/// Whose words a failure is told in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    Validate,
    Submit,
    Run,
}

/// One problem of either kind.
struct Problem<'a> {
    line: Option<u64>,
    message: &'a str,
    code: &'a str,
}

fn problems(report: &ValidationReport) -> Vec<Problem<'_>> {
    let of_file = report.findings.kept.iter();
    let of_file = of_file.map(|found| Problem { line: found.line, message: &found.message, code: found.code.as_str() });
    let of_bodies = report.body_findings.iter().map(|found| Problem {
        line: Some(found.line),
        message: &found.fault.message,
        code: found.fault.code.as_deref().unwrap_or("invalid_body"),
    });
    let mut all: Vec<Problem<'_>> = of_file.chain(of_bodies).collect();
    all.sort_by_key(|problem| problem.line);
    all
}

/// What is wrong, where, how many more, what to do.
pub(crate) fn failure(input: &Input, report: &ValidationReport, shown_max: usize, door: Door) -> Failure {
    let problems = problems(report);
    let Some(first) = problems.first() else {
        return Failure::new(Exit::InvalidInput, format!("{} is not valid", input.label));
    };
    let message = match first.line {
        Some(line) => format!("line {} is not valid: {}", human::count(line), first.message),
        None => first.message.to_owned(),
    };
    let place = first.line.map_or(String::new(), |line| format!(":{line}"));
    let mut failure =
        Failure::new(Exit::InvalidInput, message).code(first.code).note(format!("--> {}{place}", input.label));
    if let Some(text) = first.line.and_then(|line| line_text(&input.path, line)) {
        failure = failure.note(format!("|  {}", shorten(&escape(&text), 100)));
    }
    let shown_max = shown_max.clamp(1, 1_000);
    for other in problems.iter().skip(1).take(shown_max - 1) {
        let line = other.line.map_or(String::new(), |line| format!("line {}: ", human::count(line)));
        failure = failure.note(format!("= {line}{} ({})", other.message, other.code));
    }
    let total = report.findings.total + report.num_body_findings;
    if total > 1 {
        let counts = report.findings.counts.iter();
        let mut counts: Vec<String> =
            counts.map(|(code, count)| format!("{} {}", human::count(*count), code.as_str())).collect();
        if report.num_body_findings > 0 {
            counts.push(format!("{} in bodies, refused with HTTP 400", human::count(report.num_body_findings)));
        }
        failure = failure.note(format!("= {}: {}", human::counted(total, "problem"), counts.join(", ")));
    }
    match remedy(input, report, problems.len().min(shown_max) as u64 >= total, door) {
        Some(remedy) => failure.hint(remedy),
        None => failure,
    }
}

fn remedy(input: &Input, report: &ValidationReport, all_shown: bool, door: Door) -> Option<String> {
    if let Some(hint) = utf16_hint(&input.path, &input.label) {
        return Some(hint);
    }
    let mut remedies = Vec::new();
    if !all_shown {
        let name = if input.is_stdin() { "-" } else { &input.label };
        remedies.push(format!("run `batch validate {name} --json` for the first 1,000 of them"));
    }
    let bad_lines = bad_lines(report);
    let others = report.requests.saturating_sub(bad_lines.len() as u64);
    let all_known = report.findings.total as usize <= report.findings.kept.len();
    if all_known && !bad_lines.is_empty() && others > 0 {
        let others = human::counted(others, "request");
        remedies.push(match door {
            Door::Validate if input.is_stdin() => {
                format!("`batch submit - --on-invalid skip` submits the other {others}")
            }
            Door::Validate => format!("`batch submit {} --on-invalid skip` submits the other {others}", input.label),
            Door::Submit => format!("`--on-invalid skip` submits the other {others}"),
            Door::Run => format!("`--on-invalid skip` runs the other {others}"),
        });
    }
    (!remedies.is_empty()).then(|| remedies.join(", or "))
}

/// What to do with a file that begins as UTF-16 does; no other file does.
pub(crate) fn utf16_hint(path: &Path, label: &str) -> Option<String> {
    let mut first = [0; 2];
    std::io::Read::read_exact(&mut std::fs::File::open(path).ok()?, &mut first).ok()?;
    matches!(first, [0xff, 0xfe] | [0xfe, 0xff])
        .then(|| format!("the file is UTF-16: make UTF-8 of it with `iconv -f UTF-16 -t UTF-8 {label} > NEW`"))
}

/// Physical lines that have a problem, as far as they were kept.
pub(crate) fn bad_lines(report: &ValidationReport) -> BTreeSet<u64> {
    report.findings.kept.iter().filter_map(|finding| finding.line).collect()
}

/// How many problems `batch submit` prints.
pub(crate) const SHOWN_DEFAULT: usize = SHOWN_MAX;

fn line_text(path: &Path, wanted: u64) -> Option<String> {
    let file = std::fs::File::open(path).ok()?;
    let index = usize::try_from(wanted.checked_sub(1)?).ok()?;
    let line = BufReader::new(file).split(b'\n').nth(index)?.ok()?;
    Some(String::from_utf8_lossy(&line[..line.len().min(400)]).into_owned())
}

/// A copy of the input without its bad lines.
#[derive(Debug)]
pub(crate) struct Cleaned {
    pub(crate) input: Input,
    pub(crate) num_aside: u64,
}

/// Writes the good lines to a temporary file and the bad ones, with their reasons, to `aside`.
pub(crate) fn without_invalid(input: &Input, report: &ValidationReport, aside: &Path, door: Door) -> Result<Cleaned> {
    let mut reasons: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
    for finding in &report.findings.kept {
        let Some(line) = finding.line else {
            return Err(failure(input, report, SHOWN_MAX, door));
        };
        let reason = json!({"code": finding.code.as_str(), "message": finding.message, "param": finding.param});
        reasons.entry(line).or_default().push(reason);
    }
    let mut good = tempfile::Builder::new().prefix("batch-valid-").suffix(".jsonl").tempfile()?;
    let mut bad = std::io::BufWriter::new(std::fs::File::create(aside).map_err(|err| {
        Failure::new(Exit::Failure, format!("could not write the invalid lines to {}: {err}", aside.display()))
    })?);
    let mut writer = std::io::BufWriter::new(&mut good);
    for (index, line) in BufReader::new(std::fs::File::open(&input.path)?).split(b'\n').enumerate() {
        let line = line?;
        match reasons.get(&(index as u64 + 1)) {
            Some(why) => {
                writeln!(bad, "{}", aside_row(index as u64 + 1, why.clone(), &String::from_utf8_lossy(&line)))?;
            }
            None => {
                writer.write_all(&line)?;
                writer.write_all(b"\n")?;
            }
        }
    }
    writer.flush()?;
    bad.flush()?;
    drop(writer);
    let spool = good.into_temp_path();
    let label = input.label.clone();
    let input = Input { path: spool.to_path_buf(), label, spool: Some(spool) };
    Ok(Cleaned { input, num_aside: reasons.len() as u64 })
}

/// A line of the file of what was set aside: the same for whoever sets aside.
pub(crate) fn aside_row(line: u64, reasons: Vec<Value>, text: &str) -> Value {
    json!({"line": line, "reasons": reasons, "text": text})
}

/// Cuts a valid input into files of at most `max` requests each.
pub(crate) fn split(input: &Input, max: u64) -> Result<Vec<Input>> {
    let mut parts: Vec<Input> = Vec::new();
    let mut current: Option<(std::io::BufWriter<tempfile::NamedTempFile>, u64)> = None;
    let finish = |writer: std::io::BufWriter<tempfile::NamedTempFile>, parts: &mut Vec<Input>| -> Result {
        let spool = writer.into_inner().map_err(|err| Failure::from(err.into_error()))?.into_temp_path();
        let label = format!("{} part {}", input.label, parts.len() + 1);
        parts.push(Input { path: spool.to_path_buf(), label, spool: Some(spool) });
        Ok(())
    };
    for line in BufReader::new(std::fs::File::open(&input.path)?).split(b'\n') {
        let line = line?;
        if line.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')) {
            continue;
        }
        if let Some((writer, _)) = current.take_if(|(_, count)| *count >= max) {
            finish(writer, &mut parts)?;
        }
        let (writer, count) = match &mut current {
            Some(open) => open,
            None => {
                let file = tempfile::Builder::new().prefix("batch-part-").suffix(".jsonl").tempfile()?;
                current.insert((std::io::BufWriter::new(file), 0))
            }
        };
        writer.write_all(&line)?;
        writer.write_all(b"\n")?;
        *count += 1;
    }
    if let Some((writer, _)) = current {
        finish(writer, &mut parts)?;
    }
    Ok(parts)
}
