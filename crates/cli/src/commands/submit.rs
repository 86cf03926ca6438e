//! `batch submit`: check, upload, create, and wait if asked.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::Args;
use overnight_types::Endpoint;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::App;
use crate::batches;
use crate::client::Client;
use crate::client::download::sha256_of;
use crate::client::wait::{self, Waiting};
use crate::commands::prepare::{OnInvalid, parse_endpoint};
use crate::commands::results::{self, ResultsArgs};
use crate::config::Loaded;
use crate::error::{Exit, Failure, Result};
use crate::output::{human, plain};
use crate::validation::{self, Bodies, Door, Input};
use crate::{outputs, state};

/// Lines that are kept by number so that they can be left out.
const SKIPPED_MAX: usize = 1_000_000;

/// Arguments of `batch submit`.
#[derive(Debug, Args)]
pub(crate) struct SubmitArgs {
    /// Files of requests, one batch each; - is stdin
    #[arg(required = true, value_name = "FILE|-")]
    files: Vec<OsString>,
    /// What the lines are for [default: the url of the first line]
    #[arg(long, value_parser = parse_endpoint)]
    endpoint: Option<Endpoint>,
    /// The model that the lines must name
    #[arg(long)]
    model: Option<String>,
    /// How long it may take, 5m to 30d
    #[arg(long, default_value = "24h", value_name = "DURATION", value_parser = window)]
    window: String,
    /// Lower runs first
    #[arg(long, allow_negative_numbers = true)]
    priority: Option<i32>,
    /// A pair for your own use; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    metadata: Vec<String>,
    /// What people call it
    #[arg(long)]
    name: Option<String>,
    /// Makes a repeated submit of the same file return the first batch [default: a fresh one]
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Wait until it has ended; the exit code says how
    #[arg(long)]
    wait: bool,
    /// Like --wait, with progress
    #[arg(long)]
    watch: bool,
    /// Wait and write the results there; - is stdout
    #[arg(long, value_name = "PATH")]
    results: Option<PathBuf>,
    /// Make several batches of at most this many requests
    #[arg(long, value_name = "N", value_parser = human::parse_count)]
    split: Option<u64>,
    /// Check and say what would be sent; send nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Only check, like `batch validate`
    #[arg(long)]
    validate_only: bool,
    /// What to do with lines that are not valid
    #[arg(long, default_value = "fail")]
    on_invalid: OnInvalid,
}

/// A window that the server takes, before anything is uploaded for it.
pub(crate) fn window(text: &str) -> Result<String, String> {
    overnight_api::check_window(text).map(|()| text.to_owned())
}

impl SubmitArgs {
    fn waits(&self) -> bool {
        self.wait || self.watch || self.results.is_some()
    }
}

/// Where each file's invalid lines go: a name of its own for each.
fn places_of_asides(args: &SubmitArgs) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = Vec::new();
    for file in &args.files {
        let label = if file == "-" { "stdin".into() } else { file.to_string_lossy() };
        let first = outputs::beside_output(args.results.as_deref(), &label, "invalid");
        let numbered =
            (2..).map(|number| outputs::beside_output(args.results.as_deref(), &label, &format!("{number}.invalid")));
        let free = std::iter::once(first).chain(numbered).find(|place| !places.contains(place));
        places.extend(free);
    }
    places
}

fn check_outputs(args: &SubmitArgs, asides: &[PathBuf]) -> Result {
    let errors = args.results.as_ref().map(|path| outputs::beside(path, "errors"));
    let mut paths: Vec<&Path> = args.results.iter().map(PathBuf::as_path).collect();
    if args.results.as_ref().is_some_and(|path| path.as_os_str() != "-") {
        paths.extend(errors.as_deref());
    }
    if args.on_invalid == OnInvalid::Skip && !args.dry_run && !args.validate_only {
        paths.extend(asides.iter().map(PathBuf::as_path));
    }
    let inputs: Vec<&OsStr> = args.files.iter().map(OsString::as_os_str).collect();
    outputs::check(&paths, &inputs)
}

/// A checked file, ready to send.
struct Ready {
    input: Input,
    endpoint: Endpoint,
    requests: u64,
    model: Option<String>,
}

pub(crate) async fn run(args: SubmitArgs, app: &App) -> Result {
    let metadata = metadata(&args.metadata)?;
    if args.results.is_some() && args.files.len() + usize::from(args.split.is_some()) > 1 {
        return Err(Failure::usage("--results takes one batch; submit the files one by one"));
    }
    if args.split == Some(0) {
        return Err(Failure::usage("--split must be at least 1"));
    }
    let asides = places_of_asides(&args);
    check_outputs(&args, &asides)?;
    let bodies = Bodies::of(&Loaded::read(&app.globals, Vec::new())?.config);
    // All files are checked before anything is sent.
    let mut ready = Vec::new();
    for (file, aside) in args.files.iter().zip(&asides) {
        ready.push(check(file, aside, bodies, &args, app).await?);
    }
    if args.dry_run || args.validate_only {
        return describe(&ready, &args, app);
    }
    let client = app.client()?;
    if args.waits() {
        client.wait_for_start(app).await?;
    }
    let key = args.idempotency_key.clone().unwrap_or_else(|| format!("cli-{}", Uuid::now_v7().simple()));
    let mut made = Vec::new();
    for (index, file) in ready.into_iter().enumerate() {
        let key = if index == 0 { key.clone() } else { format!("{key}-{index}") };
        send(file, &args, &metadata, &key, &client, app, &mut made).await?;
    }
    report(&args, &made, &client, app).await
}

fn metadata(pairs: &[String]) -> Result<Value> {
    let mut map = Map::new();
    for pair in pairs {
        let (key, value) =
            pair.split_once('=').ok_or_else(|| Failure::usage(format!("--metadata wants KEY=VALUE: {pair}")))?;
        map.insert(key.to_owned(), Value::from(value));
    }
    Ok(if map.is_empty() { Value::Null } else { Value::Object(map) })
}

async fn check(file: &OsStr, aside: &Path, bodies: Bodies, args: &SubmitArgs, app: &App) -> Result<Ready> {
    let input = Input::open(file).await?;
    let endpoint = validation::endpoint(&input, args.endpoint)?;
    let kept = if args.on_invalid == OnInvalid::Skip { SKIPPED_MAX } else { 1_000 };
    let report = validation::check(&input, endpoint, kept, bodies).await?;
    let model = report.model.clone();
    if let (Some(wanted), Some(found)) = (&args.model, &model)
        && wanted != found
    {
        return Err(Failure::new(Exit::InvalidInput, format!("the lines name the model {found:?}, not {wanted:?}"))
            .code("model_mismatch")
            .note(format!("--> {}", input.label))
            .hint("leave --model out, or make the lines with `batch prepare --model`"));
    }
    if args.validate_only && report.num_body_findings > 0 {
        return Err(validation::failure(&input, &report, validation::SHOWN_DEFAULT, Door::Submit));
    }
    validation::warn_of_bodies(&input, &report, &app.ui);
    if report.is_valid() {
        return Ok(Ready { input, endpoint, requests: report.requests, model });
    }
    if args.on_invalid == OnInvalid::Fail || report.findings.total as usize > SKIPPED_MAX {
        return Err(validation::failure(&input, &report, validation::SHOWN_DEFAULT, Door::Submit));
    }
    if args.dry_run || args.validate_only {
        let bad = validation::bad_lines(&report).len() as u64;
        app.ui.summary(format!("{} of {} would be set aside", human::counted(bad, "line"), input.label));
        return Ok(Ready { input, endpoint, requests: report.requests.saturating_sub(bad), model });
    }
    let cleaned = validation::without_invalid(&input, &report, aside, Door::Submit)?;
    let requests = report.requests.saturating_sub(cleaned.num_aside);
    if requests == 0 {
        return Err(validation::failure(&input, &report, validation::SHOWN_DEFAULT, Door::Submit));
    }
    app.ui.summary(format!(
        "not valid: {} of {}, now in {} with the reasons; submitted: the other {}",
        human::counted(cleaned.num_aside, "line"),
        input.label,
        aside.display(),
        human::counted(requests, "request")
    ));
    Ok(Ready { input: cleaned.input, endpoint, requests, model })
}

fn describe(ready: &[Ready], args: &SubmitArgs, app: &App) -> Result {
    let rows: Vec<Value> = ready
        .iter()
        .map(|file| {
            let batches = args.split.map_or(1, |split| file.requests.div_ceil(split));
            json!({"id": file.input.label, "file": file.input.label, "requests": file.requests,
                "endpoint": file.endpoint.as_str(), "model": file.model, "batches": batches})
        })
        .collect();
    for row in &rows {
        app.ui.summary(format!(
            "{}: valid, {} for {}, model {}; nothing was sent",
            plain(&row["file"]),
            human::counted(row["requests"].as_u64().unwrap_or(0), "request"),
            plain(&row["endpoint"]),
            plain(&row["model"])
        ));
    }
    if app.ui.format.is_some() { app.ui.rows(&rows, &[]) } else { Ok(()) }
}

async fn send(
    file: Ready,
    args: &SubmitArgs,
    metadata: &Value,
    key: &str,
    client: &Client,
    app: &App,
    made: &mut Vec<Value>,
) -> Result {
    let name = file.input.upload_name();
    let parts = match args.split {
        Some(max) if file.requests > max => validation::split(&file.input, max)?,
        _ => vec![file.input],
    };
    let several = parts.len() > 1;
    for (index, part) in parts.iter().enumerate() {
        let (uploaded, is_new) = upload(client, &part.path, &name, args.idempotency_key.is_some()).await?;
        let mut body = json!({
            "input_file_id": uploaded, "endpoint": file.endpoint.as_str(),
            "completion_window": args.window, "metadata": metadata,
        });
        if let Some(name) = &args.name {
            body["name"] = Value::from(if several { format!("{name} {}", index + 1) } else { name.clone() });
        }
        if let Some(priority) = args.priority {
            body["priority"] = Value::from(priority);
        }
        let key = if several { format!("{key}-part{index}") } else { key.to_owned() };
        let batch = match client.post("/v1/batches", &body, Some(&key)).await {
            Ok(batch) => batch,
            Err(failure) => return Err(refused(client, &uploaded, is_new, failure).await),
        };
        state::remember(client.base(), &plain(&batch["id"]));
        // The id is out as soon as there is one: a later failure must not hide it.
        if app.ui.format.is_none() && args.results.is_none() {
            app.ui.data(&format!("{}\n", plain(&batch["id"])))?;
        }
        made.push(batch);
    }
    Ok(())
}

/// The id of the uploaded file, and whether it was uploaded just now. With a key of the
/// user's, an equal file of an earlier submit is taken: the server compares a repeated
/// create by the file's id.
async fn upload(client: &Client, path: &Path, name: &str, is_keyed: bool) -> Result<(String, bool)> {
    if is_keyed && let Some(id) = equal_upload(client, path, name).await? {
        return Ok((id, false));
    }
    let uploaded = client.upload(path, name, "batch").await?;
    Ok((plain(&uploaded["id"]), true))
}

/// The oldest file of the server with this name and these bytes: the one that the first
/// submit of a key used.
async fn equal_upload(client: &Client, path: &Path, name: &str) -> Result<Option<String>> {
    let owned = path.to_owned();
    let hashed = tokio::task::spawn_blocking(move || sha256_of(&owned)).await;
    let sha256 = hashed.map_err(|err| Failure::from_error("hash the input", &err))??;
    let mut after: Option<String> = None;
    loop {
        let mut query =
            vec![("purpose", "batch".to_owned()), ("order", "asc".to_owned()), ("limit", "1000".to_owned())];
        query.extend(after.take().map(|id| ("after", id)));
        let page = client.get("/v1/files", &query).await?;
        let files = page["data"].as_array().map(Vec::as_slice).unwrap_or_default();
        if let Some(file) = files.iter().find(|file| file["sha256"] == sha256.as_str() && file["filename"] == name) {
            return Ok(Some(plain(&file["id"])));
        }
        match page["last_id"].as_str() {
            Some(last) if page["has_more"] == Value::Bool(true) => after = Some(last.to_owned()),
            _ => return Ok(None),
        }
    }
}

/// The server made no batch: what was uploaded for it goes again. After trouble without
/// an answer nobody knows, so the upload stays.
async fn refused(client: &Client, uploaded: &str, is_new: bool, failure: Failure) -> Failure {
    if is_new
        && failure.is_refusal()
        && let Err(kept) = client.delete(&format!("/v1/files/{uploaded}")).await
    {
        tracing::debug!("the upload {uploaded} stays: {}", kept.message());
    }
    if failure.has_code("idempotency_key_reused") {
        return failure.hint("the key was used for another file or other parameters: choose another --idempotency-key");
    }
    failure
}

async fn report(args: &SubmitArgs, made: &[Value], client: &Client, app: &App) -> Result {
    let waits = args.waits();
    let mut ended = made.to_vec();
    if waits {
        let waiting = Waiting { interval: wait::INTERVAL, timeout: app.globals.timeout };
        for batch in &mut ended {
            let id = plain(&batch["id"]);
            *batch = wait::until_ended(client, app, &id, waiting).await?;
            app.ui.summary(batches::summary(batch));
            if batch["status"] == "failed" {
                app.ui.summary(batches::problems(batch).trim_end());
            }
        }
    }
    if app.ui.format.is_some() && args.results.as_ref().is_none_or(|path| path.as_os_str() != "-") {
        match ended.as_slice() {
            [one] => app.ui.record(one, batches::COLUMNS, || batches::card(one))?,
            several => app.ui.rows(several, batches::COLUMNS)?,
        }
    }
    if let (Some(path), [batch]) = (&args.results, ended.as_slice())
        && batch["status"] != "failed"
    {
        let arguments = ResultsArgs::plain(plain(&batch["id"]), path.clone());
        results::write(&arguments, batch, client, app).await?;
        if path.as_os_str() != "-" {
            let completed = batch["request_counts"]["completed"].as_u64().unwrap_or(0);
            app.ui.summary(format!("{} in {}", human::counted(completed, "answer"), path.display()));
        }
    }
    // Whose results are written already needs no command that writes them.
    let are_left = |batch: &&Value| args.results.is_none() || wait::exit_of(batch) != Exit::Success;
    for batch in ended.iter().filter(are_left) {
        app.ui.say(format!("next: {}", batches::next_step(batch)));
    }
    if !waits {
        return Ok(());
    }
    let worst = ended.iter().map(wait::exit_of).max_by_key(|exit| *exit as u8).unwrap_or(Exit::Success);
    if worst == Exit::Success {
        return Ok(());
    }
    let summaries: Vec<String> = ended.iter().map(batches::summary).collect();
    Err(Failure::shown(worst, summaries.join("; ")))
}
