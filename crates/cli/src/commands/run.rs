//! `batch run`: a file in one process without a server, on the same durable path.
//!
//! A run is known by the sha256 of its input, endpoint, model, overrides and output
//! path: the same command again goes on where it was, and repeats no finished request.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use futures::StreamExt;
use overnight_blobs::{Blobs, ObjectName};
use overnight_store::{FilePurpose, Files, IdempotencyKey, InsertJob, Job, Jobs, NewFile, NewJob, Reopen, ReopenItems};
use overnight_types::{Endpoint, FileId, JobId, JobState, OutcomeCounts};
use overnight_worker::WorkerHandle;
use overnight_worker::lock::DataDirUse;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::App;
use crate::client::download::{Sink, Target, hex};
use crate::commands::prepare::{OnInvalid, parse_endpoint};
use crate::commands::results::errors_beside;
use crate::config::Loaded;
use crate::error::{Exit, Failure, Result};
use crate::output::{Ui, human};
use crate::progress::{Counts, Display, Rate, line};
use crate::service::flags::EngineFlags;
use crate::service::late::{self, LateEngine};
use crate::service::{Place, Stops, clean_up, engine};
use crate::validation::{self, Input};
use crate::{batches, logging};

/// A run may take this long before its unfinished requests expire.
const WINDOW: Duration = Duration::from_secs(30 * 86_400);
/// Pause between looks at the job.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Bytes handed to the object store at once.
const PIECE: usize = 1 << 20;

/// Arguments of `batch run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// A file of requests; - is stdin
    #[arg(value_name = "IN", required_unless_present = "input_file")]
    input: Option<OsString>,
    /// The same, as `vllm run-batch` spells it
    #[arg(short = 'i', long, value_name = "IN", conflicts_with = "input")]
    input_file: Option<OsString>,
    /// Where the answers go, - is stdout; failed lines go beside it, to OUT with .errors.jsonl
    #[arg(short = 'o', long, value_name = "OUT")]
    output_file: PathBuf,
    /// What the lines are for [default: the url of the first line]
    #[arg(long, value_parser = parse_endpoint)]
    endpoint: Option<Endpoint>,
    /// What to do with lines that are not valid
    #[arg(long, default_value = "fail")]
    on_invalid: OnInvalid,
    /// When the run has ended before: run its failed requests again
    #[arg(long)]
    retry_failed: bool,
    #[command(flatten)]
    engine: EngineFlags,
}

/// What is kept of a run in the data folder, so that the same command finds it.
#[derive(Debug, Serialize, Deserialize)]
struct RunRecord {
    job: JobId,
    output: PathBuf,
}

/// What is known once the input is good and the run is recorded.
struct Begun {
    place: Place,
    job: Job,
    /// Where lines without an answer go.
    errors: PathBuf,
}

pub(crate) async fn run(args: RunArgs, app: &App) -> Result {
    if app.ui.is_json() && args.output_file.as_os_str() == "-" {
        return Err(Failure::usage("--json and the answers do not share stdout").hint("write them with -o PATH"));
    }
    let mut stops = Stops::listen()?;
    let mut settings = args.engine.settings()?;
    if app.globals.verbose == 0 {
        // The log of a run is for whoever asks for it; progress and summary say the rest.
        // Under --json stderr holds an error object or nothing.
        let filter = if app.ui.is_json() { "off" } else { "warn" };
        settings.insert(0, crate::config::Setting::flag("batch run", "log.filter", filter));
    }
    let config = Loaded::read(&app.globals, settings)?.config;
    logging::start(&config.log)?;
    engine::check_seed(&config)?;
    let Begun { place, mut job, errors } = tokio::select! {
        begun = begin(&args, &config, app) => begun?,
        _ = stops.next() => return Err(interrupted(app, "stopped before the first request; the same command starts it")),
    };
    if !job.state.is_terminal() {
        engine::check(&config)?;
        job = work(&config, &place, job.id, app, &mut stops).await?;
    }
    let ended = tokio::select! {
        ended = publish(&place.blobs, &place, &job, &args.output_file, &errors, app) => ended,
        _ = stops.next() => Err(interrupted(app, "stopped while writing the answers; the same command writes them")),
    };
    place.store.close().await;
    ended
}

fn interrupted(app: &App, text: &str) -> Failure {
    app.ui.summary(text);
    Failure::shown(Exit::Interrupted, text)
}

/// Reads and checks the input, opens the data folder and finds or records the job.
/// Dropped in the middle it leaves nothing that the same command would trip over.
async fn begin(args: &RunArgs, config: &crate::config::Config, app: &App) -> Result<Begun> {
    let path = args.input.as_deref().or(args.input_file.as_deref()).unwrap_or(OsStr::new("-"));
    let input = cleaned(Input::open(path).await?, args, app).await?;
    let endpoint = validation::endpoint(&input, args.endpoint)?;
    let place = Place::open(config, DataDirUse::Exclusive).await?;
    let identity = identity(&input, endpoint, args, config).await?;
    let mut job = find_or_create(&place, &input, endpoint, &identity, &args.output_file, &app.ui).await?;
    if args.retry_failed || matches!(job.state, JobState::Expired | JobState::Cancelled) {
        job = reopen(&place, job, &app.ui).await?;
    }
    let errors = match args.output_file.as_os_str() == "-" {
        // Beside nothing: named after the input, in the current folder.
        true => errors_beside(Path::new(Path::new(&input.label).file_name().unwrap_or(OsStr::new("run")))),
        false => errors_beside(&args.output_file),
    };
    Ok(Begun { place, job, errors })
}

async fn cleaned(input: Input, args: &RunArgs, app: &App) -> Result<Input> {
    let endpoint = validation::endpoint(&input, args.endpoint)?;
    let kept = if args.on_invalid == OnInvalid::Skip { 1_000_000 } else { 1_000 };
    let report = validation::check(&input, endpoint, kept).await?;
    if report.is_valid() {
        return Ok(input);
    }
    if args.on_invalid == OnInvalid::Fail {
        return Err(validation::failure(&input, &report, validation::SHOWN_DEFAULT));
    }
    let cutting = tokio::task::spawn_blocking(move || validation::without_invalid(&input, &report)).await;
    let cleaned = cutting.map_err(|err| Failure::from_error("set the invalid lines aside", &err))??;
    app.ui.summary(format!(
        "{} lines are not valid and are in {} with their reasons",
        human::count(cleaned.num_aside),
        cleaned.aside.display()
    ));
    Ok(cleaned.input)
}

async fn identity(input: &Input, endpoint: Endpoint, args: &RunArgs, config: &crate::config::Config) -> Result<String> {
    let path = input.path.clone();
    let hashing = tokio::task::spawn_blocking(move || -> std::io::Result<Sha256> {
        let mut hash = Sha256::new();
        std::io::copy(&mut std::fs::File::open(&path)?, &mut hash)?;
        Ok(hash)
    });
    let hash = hashing.await.map_err(|err| Failure::from_error("hash the input", &err))??;
    let output = std::path::absolute(&args.output_file)?;
    let mut whole = json!({
        "input": hex(&hash.finalize()), "endpoint": endpoint.as_str(), "model": config.engine.source.model,
        "overrides": {"seed": config.engine.local.seed, "served": config.engine.source.served_model_name,
            "load_format": format!("{:?}", config.engine.source.load_format)},
        "output": output.to_string_lossy(),
    });
    // Only when there is one, so that runs without keep their identity.
    if let Some(template) = engine::chat_template(config)? {
        whole["overrides"]["chat_template"] = hex(&Sha256::digest(template.as_bytes())).into();
    }
    Ok(hex(&Sha256::digest(whole.to_string().as_bytes())))
}

fn store_error(doing: &str) -> impl FnOnce(overnight_store::Error) -> Failure {
    let doing = doing.to_owned();
    move |err| Failure::from_error(&doing, &err)
}

async fn find_or_create(
    place: &Place,
    input: &Input,
    endpoint: Endpoint,
    identity: &str,
    output: &Path,
    ui: &Ui,
) -> Result<Job> {
    let folder = place.data_dir.join("runs");
    std::fs::create_dir_all(&folder)?;
    let card = folder.join(identity);
    let known: Option<RunRecord> = std::fs::read(&card).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(record) = known
        && let Some(job) = place.store.find_job(record.job).await.map_err(store_error("look the run up"))?
        && job.state != JobState::Failed
    {
        say_where_it_stands(place, &job, ui).await?;
        return Ok(job);
    }
    let file = upload(place, input).await?;
    let key = IdempotencyKey { key: format!("run-{identity}-{file}"), params_sha256: Sha256::digest(identity).into() };
    let new = NewJob {
        id: JobId::new(),
        endpoint,
        input_file_id: file,
        completion_window: "30d".to_owned(),
        window: WINDOW,
        metadata: None,
        name: Some(format!("batch run {}", input.label)),
        priority: 0,
        output_expires_after: None,
    };
    let made = place.store.insert_job(new, Some(key)).await.map_err(store_error("record the run"))?;
    let job = match made {
        InsertJob::Created(job) | InsertJob::Existing(job) => job,
        InsertJob::KeyReused | InsertJob::NoInput => {
            return Err(Failure::new(Exit::Failure, "the run could not be recorded: its input vanished"));
        }
    };
    let record = RunRecord { job: job.id, output: std::path::absolute(output)? };
    let fresh = folder.join(format!("{identity}.new"));
    std::fs::write(&fresh, serde_json::to_vec(&record).map_err(|err| Failure::from_error("note the run", &err))?)?;
    std::fs::rename(&fresh, &card)?;
    Ok(job)
}

async fn say_where_it_stands(place: &Place, job: &Job, ui: &Ui) -> Result {
    let counts = counts_of(place, job).await?;
    if job.state.is_terminal() || counts.total == 0 {
        return Ok(());
    }
    let done = counts.total - counts.unfinished();
    ui.summary(format!("resumed: {} done, {} to go", human::count(done), human::count(counts.unfinished())));
    Ok(())
}

async fn counts_of(place: &Place, job: &Job) -> Result<OutcomeCounts> {
    if let Some(counts) = job.final_counts {
        return Ok(counts);
    }
    let progress = place.store.find_progress(job.id).await.map_err(store_error("read the run's progress"))?;
    Ok(progress.counts)
}

async fn upload(place: &Place, input: &Input) -> Result<FileId> {
    let id = FileId::new();
    let name = ObjectName::file(id);
    let fail = |err: overnight_blobs::Error| Failure::from_error("store the input", &err);
    let mut writer = place.blobs.writer(&name).await.map_err(fail)?;
    let mut file = tokio::fs::File::open(&input.path).await?;
    loop {
        let mut piece = bytes::BytesMut::with_capacity(PIECE);
        if tokio::io::AsyncReadExt::read_buf(&mut file, &mut piece).await? == 0 {
            break;
        }
        writer.write(piece.freeze()).await.map_err(fail)?;
    }
    let written = writer.finish().await.map_err(fail)?;
    let file = NewFile {
        id,
        filename: input.upload_name(),
        purpose: FilePurpose::Batch,
        bytes: written.bytes,
        sha256: written.sha256,
        expires_after_s: None,
    };
    place.store.insert_file(file).await.map_err(store_error("record the input"))?;
    Ok(id)
}

/// Opens a new round of an ended run, when something of it is left.
async fn reopen(place: &Place, job: Job, ui: &Ui) -> Result<Job> {
    if !job.state.is_terminal() || job.state == JobState::Failed {
        return Ok(job);
    }
    let window = Some(("30d".to_owned(), WINDOW));
    let reopen = Reopen { items: ReopenItems::NotCompleted, window, leftover_segments: Vec::new() };
    let reopened = place.store.reopen_job_if_ended(job.id, reopen).await.map_err(store_error("re-open the run"))?;
    match reopened.applied() {
        Some(reopened) => {
            ui.summary(format!(
                "{} kept; {} failed and {} unfinished will run",
                human::count(reopened.num_kept),
                human::count(reopened.num_failed_again),
                human::count(reopened.num_unfinished)
            ));
            Ok(reopened.job)
        }
        None => Ok(job),
    }
}

/// Loads the engine, works until the job has ended, and stops the worker in order.
async fn work(config: &crate::config::Config, place: &Place, job: JobId, app: &App, stops: &mut Stops) -> Result<Job> {
    let (to_load, ui) = (config.clone(), app.ui.clone());
    let mut loading = tokio::task::spawn_blocking(move || engine::start(&to_load, |text| ui.say(text)));
    let started = tokio::select! {
        started = &mut loading => started.unwrap_or_else(|err| Err(Failure::from_error("load the model", &err)))?,
        _ = stops.next() => {
            app.ui.summary("stopped before the first request; the same command starts it");
            place.store.close().await;
            // The loading thread cannot be interrupted and holds nothing durable.
            std::process::exit(Exit::Interrupted as i32);
        }
    };
    let late = LateEngine::new(engine::served_names(config));
    late.set(&started);
    // The stand-in alone holds the engine, so that a broken one frees its memory.
    drop((started.generate, started.handle));
    let worker = place.start_worker(config, Some((late.clone(), started.mapper, started.producer))).await?;
    let mut display = Display::new(&app.ui);
    let ended = tokio::select! {
        ended = until_ended(place, job, &mut display, app.globals.timeout) => ended,
        failure = late::keep(config, &late) => Err(failure),
        name = stops.next() => Err(Failure::new(Exit::Interrupted, name.to_owned())),
    };
    display.clear();
    stop(&worker, config.worker.shutdown_grace, ended.is_ok(), stops).await;
    match ended {
        Ok(job) => Ok(job),
        Err(failure) => {
            let job = find(place, job).await?;
            let counts = counts_of(place, &job).await?;
            app.ui.summary(format!(
                "stopped: {} of {} done and kept; the same command goes on",
                human::count(counts.total - counts.unfinished()),
                human::count(counts.total)
            ));
            place.store.close().await;
            let interrupted = || Failure::shown(Exit::Interrupted, "interrupted; the same command goes on");
            Err(if failure.exit == Exit::Interrupted { interrupted() } else { failure })
        }
    }
}

async fn stop(worker: &WorkerHandle, grace: Duration, ended: bool, stops: &mut Stops) {
    // With the job ended there is nothing to wait for but the pools.
    let grace = if ended { Duration::from_secs(1) } else { grace };
    clean_up(stops, worker.shutdown(grace)).await;
}

async fn find(place: &Place, job: JobId) -> Result<Job> {
    let found = place.store.find_job(job).await.map_err(store_error("read the run"))?;
    found.ok_or_else(|| Failure::new(Exit::Failure, "the run is not in the database any more"))
}

async fn until_ended(place: &Place, id: JobId, display: &mut Display, timeout: Option<Duration>) -> Result<Job> {
    let start = Instant::now();
    let mut rate = Rate::default();
    loop {
        let job = find(place, id).await?;
        if job.state.is_terminal() {
            return Ok(job);
        }
        let progress = place.store.find_progress(id).await.map_err(store_error("read the run's progress"))?;
        let counts = Counts {
            id: id.to_string(),
            status: job.state.to_string(),
            paused: job.paused_at.is_some(),
            total: progress.counts.total,
            done: progress.counts.total - progress.counts.unfinished(),
            failed: progress.counts.failed,
            tokens: progress.usage.total_tokens(),
        };
        rate.push(start.elapsed(), counts.done, counts.tokens);
        display.show(start.elapsed(), &counts.status, &line(&counts, &rate, None));
        if let Some(limit) = timeout.filter(|limit| start.elapsed() >= *limit) {
            return Err(Failure::new(Exit::TimedOut, format!("the run did not end within {}", human::duration(limit))));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Copies the published files to where they were asked for.
async fn publish(blobs: &Blobs, place: &Place, job: &Job, output: &Path, errors: &Path, app: &App) -> Result {
    if job.state == JobState::Failed {
        let errors: Value =
            job.errors.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null);
        let batch = json!({"errors": errors});
        let mut failure = Failure::new(Exit::InvalidInput, "the input is not valid, nothing ran");
        for problem in batches::problems(&batch).lines() {
            failure = failure.note(format!("={}", problem.trim_start().replacen("", " ", 1)));
        }
        return Err(failure);
    }
    let counts = counts_of(place, job).await?;
    copy(blobs, place, job.output_file_id, output).await?;
    let without_answer = counts.total - counts.completed;
    if without_answer > 0 {
        copy(blobs, place, job.error_file_id, errors).await?;
    } else if errors.is_file() && output.as_os_str() != "-" {
        // Those of an earlier round of this run, all of which have an answer now.
        std::fs::remove_file(errors)?;
    }
    let place = if output.as_os_str() == "-" { "stdout".to_owned() } else { output.display().to_string() };
    let mut text = format!("{} answers in {place}", human::count(counts.completed));
    if without_answer > 0 {
        text.push_str(&format!(" · {} without an answer in {}", human::count(without_answer), errors.display()));
    }
    app.ui.summary(&text);
    if app.ui.is_json() {
        let record = json!({"id": job.id, "status": job.state.as_str(), "output": output.to_string_lossy(),
            "errors": (without_answer > 0).then(|| errors.to_string_lossy().into_owned()),
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed}});
        app.ui.data(&format!("{record}\n"))?;
    }
    match job.state {
        JobState::Completed if counts.failed == 0 => Ok(()),
        JobState::Completed => Err(Failure::shown(Exit::RequestsFailed, text)),
        _ => Err(Failure::shown(Exit::JobFailed, text)),
    }
}

async fn copy(blobs: &Blobs, place: &Place, id: Option<FileId>, to: &Path) -> Result {
    let (mut sink, _) = Sink::open(&Target::new(to, false)?, |_| false)?;
    let file = match id {
        Some(id) => place.store.find_file(id).await.map_err(store_error("find the results"))?,
        None => None,
    };
    if let Some(file) = file {
        let mut stream = blobs.stream(&ObjectName::file(file.id), 0..file.bytes);
        while let Some(piece) = stream.next().await {
            sink.write(&piece.map_err(|err| Failure::from_error("read the results", &err))?)?;
        }
    }
    sink.finish()
}
