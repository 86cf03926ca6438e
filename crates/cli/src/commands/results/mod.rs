//! `batch results`: the published files of an ended batch, or what is committed so
//! far of a running one.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use futures::StreamExt;
use serde_json::{Value, json};

use crate::client::download::{self, Sink, Target};
use crate::client::wait::is_terminal;
use crate::client::{Client, ids, wait};
use crate::error::{Exit, Failure, Result};
use crate::output::{human, plain};
use crate::progress::{Counts, short_id};
use crate::{App, outputs};

mod join;
mod lines;
mod writer;

pub(crate) use lines::Lines;
use writer::Writer;

/// Lines asked for at once while the batch runs.
const PAGE_LINES: u32 = 1_000;
/// Pause between looks for new lines under `--follow`.
const FOLLOW_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// How lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResultFormat {
    /// The lines as they are.
    Jsonl,
    /// custom_id, status, text and error.
    Csv,
}

/// Which lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Only {
    /// With an answer.
    Ok,
    /// Without one: refused, failed, expired or cancelled.
    Failed,
}

/// In which order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// As in the input.
    Input,
    /// As they were finished.
    Completion,
}

/// Arguments of `batch results`.
#[derive(Debug, Args)]
pub(crate) struct ResultsArgs {
    /// A batch
    id: String,
    /// Where to; - is stdout. Failed lines go beside it, to PATH with .errors.jsonl
    #[arg(short = 'o', long = "output-file", value_name = "PATH", default_value = "-")]
    output_file: PathBuf,
    /// How lines are written
    #[arg(long, default_value = "jsonl")]
    format: ResultFormat,
    /// Only lines with, or only lines without an answer
    #[arg(long)]
    only: Option<Only>,
    /// In which order [default: input; completion while the batch runs]
    #[arg(long)]
    order: Option<Order>,
    /// Go on with an interrupted download
    #[arg(long)]
    resume: bool,
    /// Go on until the batch has ended
    #[arg(long)]
    follow: bool,
    /// Put each answer beside its line of this input file
    #[arg(long, value_name = "INPUT")]
    join: Option<PathBuf>,
    /// Write only this part of each line, for example response.body.choices.0.message.content
    #[arg(long, value_name = "PATH")]
    field: Option<String>,
}

impl ResultsArgs {
    /// What `submit --results PATH` and `--wait` ask for.
    pub(crate) fn plain(id: String, output_file: PathBuf) -> Self {
        Self {
            id,
            output_file,
            format: ResultFormat::Jsonl,
            only: None,
            order: None,
            resume: false,
            follow: false,
            join: None,
            field: None,
        }
    }

    fn is_raw(&self) -> bool {
        self.format == ResultFormat::Jsonl && self.field.is_none() && self.join.is_none()
    }
}

pub(crate) async fn run(args: ResultsArgs, app: &App) -> Result {
    check_outputs(&args)?;
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let batch = client.get(&format!("/v1/batches/{id}"), &[]).await?;
    refuse_copy_of_input(&args.output_file, &batch, &client).await?;
    write(&args, &batch, &client, app).await?;
    if args.output_file.as_os_str() == "-" {
        return Ok(());
    }
    let beside = outputs::beside(&args.output_file, "errors");
    let record = json!({"id": batch["id"], "status": batch["status"], "output": args.output_file.to_string_lossy(),
        "errors": beside.is_file().then(|| beside.to_string_lossy()), "request_counts": batch["request_counts"]});
    app.ui.json_record(&record).map(drop)
}

fn check_outputs(args: &ResultsArgs) -> Result {
    let errors = outputs::beside(&args.output_file, "errors");
    let mut paths = vec![args.output_file.as_path()];
    if args.is_raw() && args.only.is_none() && args.output_file.as_os_str() != "-" {
        paths.push(&errors);
    }
    let inputs: Vec<&OsStr> = args.join.iter().map(|path| path.as_os_str()).collect();
    outputs::check(&paths, &inputs)
}

/// Which file of this machine a batch was made of nobody noted; one with the very bytes of
/// its input is taken for it, and not replaced.
async fn refuse_copy_of_input(output: &Path, batch: &Value, client: &Client) -> Result {
    let Ok(meta) = std::fs::metadata(output) else { return Ok(()) };
    let Some(id) = batch["input_file_id"].as_str().filter(|_| meta.is_file()) else { return Ok(()) };
    // An input that is gone from the server cannot be compared.
    let Ok(object) = client.get(&format!("/v1/files/{id}"), &[]).await else { return Ok(()) };
    if object["bytes"].as_u64() != Some(meta.len()) || meta.len() == 0 {
        return Ok(());
    }
    let path = output.to_owned();
    let hashing = tokio::task::spawn_blocking(move || download::sha256_of(&path)).await;
    let found = hashing.map_err(|err| Failure::from_error("hash the output that is there", &err))??;
    if object["sha256"] != found.as_str() {
        return Ok(());
    }
    Err(Failure::usage(format!("{} is the input of this batch: it would be replaced", output.display()))
        .code("output_is_input")
        .hint("give the output another name"))
}

/// Where to; under `--json` the lines of stdout become one array.
fn target(args: &ResultsArgs, app: &App) -> Result<Target> {
    let target = Target::new(&args.output_file, args.resume)?;
    if !app.ui.is_json() || !target.is_stdout() {
        return Ok(target);
    }
    if args.format == ResultFormat::Csv {
        return Err(Failure::usage("--format csv is no JSON").hint("leave --json out, or write the CSV with -o PATH"));
    }
    Ok(target.into_array())
}

/// Writes the results of a batch that was looked up already.
pub(crate) async fn write(args: &ResultsArgs, batch: &Value, client: &Client, app: &App) -> Result {
    let counts = Counts::of(batch);
    if counts.status == "failed" {
        return Err(Failure::new(
            Exit::JobFailed,
            format!("{} never ran: its file is not valid", short_id(&counts.id)),
        )
        .hint(format!("`batch errors {}` shows the problems", wait::lookup_id(&counts.id))));
    }
    let ended = is_terminal(&counts.status);
    if let Some(input) = &args.join {
        if !ended {
            return Err(
                Failure::usage("--join needs a batch that has ended").hint("wait for it with `batch status ID --wait`")
            );
        }
        return join::run(args, input, batch, client, app).await;
    }
    if !ended || args.follow || args.order == Some(Order::Completion) {
        return committed(args, batch, client, app).await;
    }
    published(args, batch, client, app).await
}

/// Writes the published files.
async fn published(args: &ResultsArgs, batch: &Value, client: &Client, app: &App) -> Result {
    let target = target(args, app)?;
    let to_stdout = target.is_stdout();
    let (answers, failures) = (batch["output_file_id"].as_str(), batch["error_file_id"].as_str());
    match args.only {
        Some(Only::Failed) => one_file(args, failures, target, client, app).await?,
        _ => one_file(args, answers, target, client, app).await?,
    }
    let failed = Counts::of(batch);
    let without_answer = failed.total.saturating_sub(batch["request_counts"]["completed"].as_u64().unwrap_or(0));
    if args.only.is_some() {
        return Ok(());
    }
    let beside = outputs::beside(&args.output_file, "errors");
    if without_answer == 0 {
        if !to_stdout && args.is_raw() {
            outputs::remove_failures(&beside, &app.ui)?;
        }
        return Ok(());
    }
    if to_stdout || !args.is_raw() {
        app.ui.say(format!(
            "without an answer: {}; batch results {} --only failed",
            human::counted(without_answer, "request"),
            wait::lookup_id(&failed.id)
        ));
        return Ok(());
    }
    let target = Target::new(&beside, args.resume)?;
    one_file(args, failures, target, client, app).await?;
    app.ui.say(format!(
        "without an answer: {}; the lines are in {}",
        human::counted(without_answer, "request"),
        beside.display()
    ));
    Ok(())
}

async fn one_file(args: &ResultsArgs, id: Option<&str>, target: Target, client: &Client, app: &App) -> Result {
    let Some(id) = id else {
        // Nothing of this kind: an empty output is the truth, said in words as well.
        let (sink, _) = Sink::open(&target, |_| false)?;
        app.ui.say("no such lines");
        return sink.finish();
    };
    let object = client.get(&format!("/v1/files/{id}"), &[]).await?;
    if args.is_raw() {
        return download::file(client, &app.ui, &object, target).await;
    }
    let (mut sink, _) = Sink::open(&target, |_| false)?;
    let mut writer = Writer::new(args, target.is_stdout(), app);
    sink.write(&writer.head()?)?;
    let response = client.stream(&format!("/v1/files/{id}/content"), &[], 0).await?;
    let mut lines = Lines::default();
    let mut body = response.bytes_stream();
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|err| Failure::from_error(&format!("download {id}"), &err))?;
        for line in lines.push(&piece) {
            sink.write(&writer.line(&line)?)?;
        }
    }
    writer.warn_of_field(app);
    sink.finish()
}

/// Writes committed lines by cursor, once or until the batch has ended.
async fn committed(args: &ResultsArgs, batch: &Value, client: &Client, app: &App) -> Result {
    if !args.follow {
        return pages(args, batch, client, app).await;
    }
    app.interrupts.listen()?;
    tokio::select! {
        biased;
        ended = pages(args, batch, client, app) => ended,
        () = app.interrupts.wait() => Err(wait::interrupted(app, &plain(&batch["id"]))),
    }
}

async fn pages(args: &ResultsArgs, batch: &Value, client: &Client, app: &App) -> Result {
    let id = plain(&batch["id"]);
    let target = target(args, app)?;
    let order = if args.order == Some(Order::Input) { "input" } else { "completion" };
    let round = batch["round"].clone();
    let fits = |notes: &Value| notes["batch"] == id.as_str() && notes["round"] == round && notes["order"] == order;
    let (mut sink, notes) = Sink::open(&target, fits)?;
    let mut cursor = notes.as_ref().and_then(|notes| notes["cursor"].as_str()).map(str::to_owned);
    let mut writer = Writer::new(args, target.is_stdout(), app);
    if notes.is_none() {
        sink.write(&writer.head()?)?;
    }
    let mut lines_written = 0u64;
    loop {
        let mut query = vec![("limit", PAGE_LINES.to_string()), ("order", order.to_owned())];
        query.extend(cursor.clone().map(|cursor| ("after", cursor)));
        let response = client.stream(&format!("/v1/batches/{id}/results"), &query, 0).await?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let (next, incomplete) = (header("x-next-cursor"), header("x-incomplete").is_none_or(|flag| flag != "false"));
        let bytes = response.bytes().await.map_err(|err| Failure::from_error("read the results", &err))?;
        let mut lines = Lines::default();
        let page = lines.push(&bytes);
        for line in &page {
            if writer.wants(line) {
                sink.write(&writer.line(line)?)?;
                lines_written += 1;
            }
        }
        if let Some(next) = next {
            cursor = Some(next);
            sink.note(json!({"batch": id, "round": round, "order": order, "cursor": cursor}))?;
        }
        if !page.is_empty() {
            continue;
        }
        if !incomplete {
            break;
        }
        if !args.follow {
            app.ui.summary(format!(
                "the batch still runs: {} so far; --follow goes on until its end",
                human::counted(lines_written, "line")
            ));
            break;
        }
        tokio::time::sleep(FOLLOW_EVERY).await;
    }
    writer.warn_of_field(app);
    sink.finish()
}
