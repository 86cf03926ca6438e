//! `batch run`: a file in one process without a server, on the same durable path.
//!
//! A run is known by the sha256 of its input, endpoint, model, overrides and output
//! path: the same command again goes on where it was, and repeats no finished request.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use overnight_store::Job;
use overnight_types::{Endpoint, JobId, JobState, OutcomeCounts};
use overnight_worker::WorkerHandle;
use overnight_worker::generate::Generate;
use overnight_worker::lock::DataDirUse;
use tokio::time::Instant;

use crate::App;
use crate::commands::prepare::{OnInvalid, parse_endpoint};
use crate::config::Loaded;
use crate::error::{Exit, Failure, Result};
use crate::logging;
use crate::output::human;
use crate::outputs;
use crate::progress::{Beside, Counts, Display, Rate, line};
use crate::service::flags::EngineFlags;
use crate::service::late::{self, LateEngine};
use crate::service::{Place, Stops, clean_up, engine};
use crate::validation::{self, Bodies, Door, Input};

mod publish;
mod record;

use publish::publish;
use record::{find_or_create, identity, reopen};

/// Pause between looks at the job.
const LOOK_EVERY: Duration = Duration::from_millis(200);

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
    check_outputs(&args)?;
    let mut stops = Stops::listen()?;
    let mut settings = args.engine.settings()?;
    if app.globals.verbose == 0 {
        // The log of a run is for whoever asks for it; progress and summary say the rest.
        // Under --json stderr holds an error object or nothing.
        let filter = if app.ui.is_json() { "off" } else { "warn,sqlx=error" };
        settings.insert(0, crate::config::Setting::flag("batch run", "log.filter", filter));
    }
    let config = Loaded::read(&app.globals, settings)?.config;
    logging::start(&config.log)?;
    engine::check_seed(&config)?;
    if config.database.url.as_ref().is_some_and(crate::config::DatabaseUrl::is_postgres) {
        // Its worker would take up everybody's work, and end in the middle of it.
        return Err(Failure::usage("batch run keeps its work in a file of its own, not in a shared Postgres database")
            .hint("use `batch submit` with a server on that database, or leave database.url out"));
    }
    let Begun { place, mut job, errors } = tokio::select! {
        begun = begin(&args, &config, app) => begun?,
        _ = stops.next() => return Err(interrupted(app, "stopped before the first request; the same command starts it")),
    };
    if !job.state.is_terminal() {
        engine::check(&config)?;
        job = work(&config, &place, job.id, app, &mut stops).await?;
    }
    let ended = tokio::select! {
        ended = publish(&place, &job, &args.output_file, &errors, app) => ended,
        _ = stops.next() => Err(interrupted(app, "stopped while writing the answers; the same command writes them")),
    };
    place.store.close().await;
    ended
}

impl RunArgs {
    /// As it was given; without a name it is stdin.
    fn input(&self) -> &OsStr {
        self.input.as_deref().or(self.input_file.as_deref()).unwrap_or(OsStr::new("-"))
    }

    /// Where lines of this kind go: `errors` and `invalid`.
    fn beside(&self, kind: &str) -> PathBuf {
        let label = if self.input() == "-" { "stdin".into() } else { self.input().to_string_lossy() };
        outputs::beside_output(Some(&self.output_file), &label, kind)
    }
}

fn check_outputs(args: &RunArgs) -> Result {
    let (errors, invalid) = (args.beside("errors"), args.beside("invalid"));
    let mut paths = vec![args.output_file.as_path(), &errors];
    if args.on_invalid == OnInvalid::Skip {
        paths.push(&invalid);
    }
    outputs::check(&paths, &[args.input()])
}

fn interrupted(app: &App, text: &str) -> Failure {
    app.ui.summary(text);
    Failure::shown(Exit::Interrupted, text)
}

/// Reads and checks the input, opens the data folder and finds or records the job.
/// Dropped in the middle it leaves nothing that the same command would trip over.
async fn begin(args: &RunArgs, config: &crate::config::Config, app: &App) -> Result<Begun> {
    let input = cleaned(Input::open(args.input()).await?, args, Bodies::of(config), app).await?;
    let endpoint = validation::endpoint(&input, args.endpoint)?;
    let place = Place::open(config, DataDirUse::Exclusive).await?;
    let identity = identity(&input, endpoint, args, config).await?;
    let mut job = find_or_create(&place, &input, endpoint, &identity, &args.output_file, &app.ui).await?;
    if args.retry_failed || matches!(job.state, JobState::Expired | JobState::Cancelled) {
        job = reopen(&place, job, &app.ui).await?;
    }
    Ok(Begun { place, job, errors: args.beside("errors") })
}

async fn cleaned(input: Input, args: &RunArgs, bodies: Bodies, app: &App) -> Result<Input> {
    let endpoint = validation::endpoint(&input, args.endpoint)?;
    let kept = if args.on_invalid == OnInvalid::Skip { 1_000_000 } else { 1_000 };
    let report = validation::check(&input, endpoint, kept, bodies).await?;
    validation::warn_of_bodies(&input, &report, &app.ui);
    if report.is_valid() {
        return Ok(input);
    }
    if args.on_invalid == OnInvalid::Fail {
        return Err(validation::failure(&input, &report, validation::SHOWN_DEFAULT, Door::Run));
    }
    let place = args.beside("invalid");
    let aside = place.clone();
    let cutting =
        tokio::task::spawn_blocking(move || validation::without_invalid(&input, &report, &aside, Door::Run)).await;
    let cleaned = cutting.map_err(|err| Failure::from_error("set the invalid lines aside", &err))??;
    app.ui.summary(format!(
        "not valid: {}, now in {} with the reasons",
        human::counted(cleaned.num_aside, "line"),
        place.display()
    ));
    Ok(cleaned.input)
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
            // The loading thread cannot be interrupted and holds nothing durable. It may be inside
            // the driver, which must not be unloaded under it.
            overnight_engine::exit_at_once(Exit::Interrupted as u8);
        }
    };
    let late = LateEngine::new(engine::served_names(config), config.worker.engine_stall_max);
    late.set(&started);
    // The stand-in alone holds the engine, so that a broken one frees its memory.
    drop((started.generate, started.handle));
    let worker = place.start_worker(config, Some((late.clone(), started.mapper, started.producer)), Vec::new()).await?;
    let mut display = Display::new(&app.ui);
    let ended = tokio::select! {
        ended = until_ended(place, job, &late, &mut display, app.globals.timeout) => ended,
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

async fn until_ended(
    place: &Place,
    id: JobId,
    late: &LateEngine,
    display: &mut Display,
    timeout: Option<Duration>,
) -> Result<Job> {
    let start = Instant::now();
    let mut rate = Rate::default();
    loop {
        let job = find(place, id).await?;
        let progress = place.store.find_progress(id).await.map_err(store_error("read the run's progress"))?;
        let counts = Counts {
            id: id.to_string(),
            status: job.state.to_string(),
            paused: job.paused_at.is_some(),
            total: progress.counts.total,
            done: progress.counts.total - progress.counts.unfinished(),
            failed: progress.counts.failed,
            given_up: progress.counts.cancelled + progress.counts.expired,
            tokens: progress.usage.total_tokens(),
        };
        rate.push(start.elapsed(), counts.done, counts.tokens);
        let usage = f64::from(late.status().kv_cache_usage);
        let beside = Beside { kv_cache_usage: Some(usage).filter(|usage| *usage > 0.0), ..Beside::default() };
        display.show(start.elapsed(), &counts.status, &line(&counts, &rate, beside));
        // Only now, so that the last line that stays shows the end.
        if job.state.is_terminal() {
            return Ok(job);
        }
        if let Some(limit) = timeout.filter(|limit| start.elapsed() >= *limit) {
            return Err(Failure::new(Exit::TimedOut, format!("the run did not end within {}", human::duration(limit))));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn store_error(doing: &str) -> impl FnOnce(overnight_store::Error) -> Failure {
    let doing = doing.to_owned();
    move |err| Failure::from_error(&doing, &err)
}

async fn counts_of(place: &Place, job: &Job) -> Result<OutcomeCounts> {
    if let Some(counts) = job.final_counts {
        return Ok(counts);
    }
    let progress = place.store.find_progress(job.id).await.map_err(store_error("read the run's progress"))?;
    Ok(progress.counts)
}
