//! `batch doctor`: one line per check, PASS, WARN or FAIL, then the remedy.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use overnight_blobs::{Blobs, Capabilities, Unmarked};
use overnight_engine::cuda::find_parts;
use overnight_engine::request::Class;
use overnight_engine::{DeviceKind, Event, Request, RequestId, SamplingParams, Sink, StopRules};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::client::Client;
use crate::config::{Config, EngineKind, Loaded};
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::output::table::Column;
use crate::output::{Field, plain};
use crate::service::database::{Database, Opening};
use crate::service::engine;
use crate::{App, environment, host, models};

/// Less room than this is a warning.
const FREE_DISK_LOW: u64 = 2 << 30;
/// Open files below this are a warning.
const OPEN_FILES_LOW: u64 = 1_024;
/// One token takes at most this long.
const TOKEN_MAX: Duration = Duration::from_secs(120);

/// Arguments of `batch doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Load this model and generate one token [default: engine.model, when set]
    #[arg(long)]
    model: Option<String>,
    /// Ask this running server too: whether it answers, with this key, and whether it is ready
    #[arg(long, value_name = "URL")]
    live: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Pass,
    Warn,
    Fail,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Pass => "PASS",
            Verdict::Warn => "WARN",
            Verdict::Fail => "FAIL",
        }
    }
}

#[derive(Debug, Clone)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    found: String,
    remedy: Option<String>,
}

impl Check {
    fn pass(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Pass, found: found.into(), remedy: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Warn, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Fail, found: found.into(), remedy: Some(remedy.into()) }
    }
}

const COLUMNS: &[Field] = &[
    Field { column: Column::left("RESULT"), cell: |check, _| plain(&check["result"]) },
    Field { column: Column::left("CHECK"), cell: |check, _| plain(&check["id"]) },
    Field { column: Column::shrink("FOUND"), cell: |check, _| plain(&check["found"]) },
    Field { column: Column::shrink("REMEDY"), cell: |check, _| plain(&check["remedy"]) },
];

pub(crate) async fn run(args: DoctorArgs, app: &App) -> Result {
    let mut checks = vec![on_path()];
    match Loaded::read(&app.globals, Vec::new()) {
        Ok(loaded) => {
            checks.push(Check::pass("configuration", "valid"));
            let mut config = loaded.config;
            if args.model.is_some() {
                config.engine.source.model = args.model.clone();
            }
            checks.extend(of_machine(&config).await);
            checks.extend(model(&config).await);
        }
        Err(failure) => checks.push(Check::fail(
            "configuration",
            failure.message(),
            "correct it; `batch config path` lists the files",
        )),
    }
    if let Some(url) = &args.live {
        checks.push(live(url, app).await);
    }
    show(&checks, app)?;
    if checks.iter().any(|check| check.verdict == Verdict::Fail) {
        let failed: Vec<&str> =
            checks.iter().filter(|check| check.verdict == Verdict::Fail).map(|check| check.name).collect();
        return Err(Failure::shown(Exit::Failure, format!("failed: {}", failed.join(", "))));
    }
    Ok(())
}

/// What needs no model and no server.
async fn of_machine(config: &Config) -> Vec<Check> {
    let mut checks = vec![database(config).await, disk(config), objects(config).await, open_files(), port(config)];
    checks.extend(gpu(config).await);
    checks
}

/// The same for a report: result, finding and remedy by the check's name.
pub(super) async fn report_of_machine(config: &Config) -> Value {
    by_name(&[vec![on_path()], of_machine(config).await].concat())
}

fn by_name(checks: &[Check]) -> Value {
    let map = checks.iter().map(|check| {
        let value = json!({"result": check.verdict.word(), "found": check.found, "remedy": check.remedy});
        (check.name.to_owned(), value)
    });
    Value::Object(map.collect())
}

fn show(checks: &[Check], app: &App) -> Result {
    if app.ui.is_json() {
        return app.ui.data(&format!("{}\n", by_name(checks)));
    }
    if app.ui.format.is_none() && app.ui.fields.is_none() && app.ui.stdout_is_terminal {
        let lines = checks.iter().map(|check| {
            let remedy = check.remedy.as_ref().map_or(String::new(), |remedy| format!("\n      {remedy}"));
            format!("{}  {}: {}{remedy}\n", check.verdict.word(), check.name, crate::output::escape(&check.found))
        });
        return app.ui.data(&lines.collect::<String>());
    }
    let rows: Vec<Value> = checks
        .iter()
        .map(|check| json!({"id": check.name, "result": check.verdict.word(), "found": check.found, "remedy": check.remedy}))
        .collect();
    app.ui.rows(&rows, COLUMNS)
}

/// Whether a running server answers, takes our key and has its model loaded.
async fn live(url: &str, app: &App) -> Check {
    let name = "live server";
    let globals = crate::args::Globals { server: Some(url.to_owned()), ..app.globals.clone() };
    let client = match Client::new(&globals) {
        Ok(client) => client,
        Err(failure) => return Check::fail(name, failure.message(), "give --live as http://HOST:PORT"),
    };
    let key = client.get("/v1/models", &[]).await;
    let health = client.get("/health", &[]).await;
    match (key, health) {
        (Err(failure), _) if failure.exit == Exit::Unreachable => {
            Check::fail(name, failure.message(), "start it with `batch serve --model M`, or correct the address")
        }
        (Err(failure), _) => Check::fail(name, failure.message(), "give its key with --api-key-file or BATCH_API_KEY"),
        (Ok(_), Err(failure)) => {
            let remedy = "it answers and its engine does not: its log says why; while it loads, wait";
            Check::warn(name, failure.message(), remedy)
        }
        (Ok(models), Ok(_)) => {
            let models = models["data"].as_array().map(Vec::as_slice).unwrap_or_default();
            let names: Vec<String> = models.iter().map(|model| plain(&model["id"])).collect();
            Check::pass(name, format!("{} is ready, models: {}", client.base(), names.join(", ")))
        }
    }
}

/// Whether `batch` on PATH is this one; another program of that name ships with `at`.
fn on_path() -> Check {
    let name = "binary on PATH";
    let folders = environment::text("PATH").unwrap_or_default();
    let first = std::env::split_paths(&folders).map(|folder| folder.join("batch")).find(|path| path.is_file());
    let ours = std::env::current_exe().and_then(|path| path.canonicalize()).ok();
    match first {
        None => Check::warn(name, "no batch on PATH", "add the folder of this binary to PATH"),
        Some(path) if path.canonicalize().ok() == ours => Check::pass(name, path.display().to_string()),
        Some(path) => Check::warn(
            name,
            format!("another batch comes first: {}", path.display()),
            "put the folder of this binary before it; the at package ships a program of the same name",
        ),
    }
}

async fn database(config: &Config) -> Check {
    let name = "database";
    let database = match Database::of(config) {
        Ok(database) => database,
        Err(failure) => return Check::fail(name, failure.message(), "correct database.url"),
    };
    if database.is_there().is_err() {
        return Check::pass(name, format!("none yet at {database}; the first start makes it"));
    }
    match database.schema().await {
        Ok(state) if !state.is_current() => Check::warn(
            name,
            format!("schema version {}, this binary needs {}", state.found, state.needed),
            "batch db migrate",
        ),
        Err(err) => Check::fail(name, overnight_types::chain(&err), "batch db check"),
        Ok(state) => {
            let store = match database.open(Opening::Look).await {
                Ok(store) => store,
                Err(failure) => return Check::fail(name, failure.message(), "batch db check"),
            };
            let size = store.size_bytes().await.map(human::bytes).unwrap_or_default();
            let answer = store.now().await;
            store.close().await;
            match answer {
                Ok(now) => {
                    let skew = now.since(overnight_types::Timestamp::now());
                    Check::pass(
                        name,
                        format!(
                            "{} {database} answers, version {}, {size}, clock {}",
                            store.backend(),
                            state.found,
                            if skew.as_secs() > 1 { "ahead" } else { "in step" }
                        ),
                    )
                }
                Err(err) => Check::fail(name, overnight_types::chain(&err), "batch db check"),
            }
        }
    }
}

fn disk(config: &Config) -> Check {
    let name = "free disk";
    match host::free_disk(&config.data_dir()) {
        Ok(free) if free < FREE_DISK_LOW => {
            Check::warn(name, format!("{} free", human::bytes(free)), "make room or choose another --data-dir")
        }
        Ok(free) => Check::pass(name, format!("{} free", human::bytes(free))),
        Err(reason) => Check::fail(name, reason, "choose another --data-dir"),
    }
}

/// Writes, reads and deletes an object, in a folder of its own when there is none yet.
async fn objects(config: &Config) -> Check {
    let name = "objects";
    let url = match config.objects_url() {
        Ok(url) => url,
        Err(failure) => return Check::fail(name, failure.message(), "choose another --data-dir"),
    };
    let folder = url.strip_prefix("file://").map(Path::new);
    let remedy = match folder {
        Some(_) => "look at the folder's owner and rights, or set objects.url",
        None => "config/README.md names the variables of object stores; correct objects.url or them",
    };
    let scratch;
    let blobs = match folder {
        Some(folder) if !folder.is_dir() => {
            // Nothing is made where nothing was: the system's temporary folder stands in.
            scratch = match tempfile::tempdir() {
                Ok(scratch) => scratch,
                Err(err) => return Check::fail(name, err.to_string(), remedy),
            };
            match Blobs::local(scratch.path()) {
                Ok(_) => {
                    return Check::pass(name, format!("none yet at {}; the first start makes it", folder.display()));
                }
                Err(err) => return Check::fail(name, overnight_types::chain(&err), remedy),
            }
        }
        _ => Blobs::open(&url, &crate::service::objects::options(config, Unmarked::IsFine)).await,
    };
    match blobs {
        Err(err) => Check::fail(name, overnight_types::chain(&err), remedy),
        Ok(blobs) => match blobs.probe().await {
            Ok(_) if blobs.is_local() => Check::pass(name, format!("{url}: written, read, deleted")),
            Ok(found) => Check::pass(name, format!("{url}: {}", capabilities(found))),
            Err(err) => Check::fail(name, overnight_types::chain(&err), remedy),
        },
    }
}

/// What a remote store can do, in words.
fn capabilities(found: Capabilities) -> String {
    let conditional = if found.conditional_create { "kept" } else { "not kept (nothing depends on it)" };
    let listed = if found.listed_at_once { "at once" } else { "late (what it leaves out is swept later)" };
    format!("written, read by ranges, deleted, uploaded in parts; conditional writes {conditional}; listed {listed}")
}

fn open_files() -> Check {
    let name = "open files";
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    match limit {
        Some(limit) if limit < OPEN_FILES_LOW => {
            Check::warn(name, format!("at most {limit}"), format!("raise it: ulimit -n {OPEN_FILES_LOW}"))
        }
        Some(limit) => Check::pass(name, format!("at most {limit}")),
        None => Check::pass(name, "no limit"),
    }
}

fn port(config: &Config) -> Check {
    let name = "port";
    if let Some(url) = host::live_server(&config.data_dir()) {
        return Check::pass(name, format!("a server of this data folder runs at {url}"));
    }
    let address = (config.api.host.trim_start_matches('[').trim_end_matches(']'), config.api.port);
    match std::net::TcpListener::bind(address) {
        Ok(_) => Check::pass(name, format!("{}:{} is free", address.0, address.1)),
        Err(err) => Check::warn(name, format!("{}:{}: {err}", address.0, address.1), "choose another one with --port"),
    }
}

/// The card, its driver and the two libraries that a start on it needs.
async fn gpu(config: &Config) -> Vec<Check> {
    if config.engine.source.kind != EngineKind::Local || config.engine.local.device == DeviceKind::Cpu {
        return Vec::new();
    }
    let parts = tokio::task::spawn_blocking(|| find_parts(&engine::device_options())).await;
    let Ok(parts) = parts else {
        return vec![Check::fail("gpu", "the driver broke down", "reinstall the NVIDIA driver, or use --device cpu")];
    };
    let properties = match parts.device {
        Ok(properties) => properties,
        Err(error) if config.engine.local.device == DeviceKind::Auto => {
            let found = format!("the engine runs on the CPU: {error}");
            // One that is there and does not open is what somebody wants to know.
            return vec![match overnight_engine::cuda::is_there() {
                true => Check::warn("gpu", found, "`nvidia-smi` and `dmesg` tell more; --device cpu does without it"),
                false => Check::pass("gpu", found),
            }];
        }
        Err(error) => return vec![Check::fail("gpu", error.to_string(), "correct it, or use --device cpu")],
    };
    let (major, minor) = properties.compute_capability;
    let driver = properties.driver_version;
    let found = format!(
        "{}, {}, compute capability {major}.{minor}, {} SMs, driver for CUDA {}.{}",
        properties.name,
        human::bytes(properties.memory_bytes),
        properties.num_sms,
        driver / 1000,
        driver % 1000 / 10
    );
    let is_auto = config.engine.local.device == DeviceKind::Auto;
    let library = |name, found: Result<(String, PathBuf), String>| match found {
        Ok((version, path)) => Check::pass(name, format!("{version}, {}", path.display())),
        Err(error) if is_auto => Check::warn(name, error, "install it as said; until then the engine runs on the CPU"),
        Err(error) => Check::fail(name, error, "install it as said, or use --device cpu"),
    };
    vec![
        Check::pass("gpu", found),
        library("nvrtc", parts.nvrtc.map_err(|error| error.to_string())),
        library("cublaslt", parts.cublaslt.map_err(|error| error.to_string())),
    ]
}

async fn model(config: &Config) -> Vec<Check> {
    let source = &config.engine.source;
    if source.kind != EngineKind::Local {
        return vec![Check::pass("model", "the engine is a remote one")];
    }
    let Some(name) = &source.model else {
        return vec![Check::warn("model", "none is named", "batch doctor --model NAME loads it and generates a token")];
    };
    let found = match models::find(config, name) {
        Ok(found) => found,
        Err(failure) => return vec![Check::fail("model", failure.message(), format!("batch models pull {name}"))],
    };
    let mut checks = vec![Check::pass("model", found.path.display().to_string())];
    let to_load = config.clone();
    let started = tokio::task::spawn_blocking(move || engine::start(&to_load, |_| {})).await;
    let started = started.unwrap_or_else(|err| Err(Failure::from_error("load the model", &err)));
    checks.push(match started {
        Err(failure) => {
            Check::fail("one token", failure.message(), failure.remedy().unwrap_or("look at the model's files"))
        }
        Ok(started) => match tokio::time::timeout(TOKEN_MAX, one_token(&started)).await {
            Ok(Ok(text)) => {
                let found = format!("{text:?}, by {}", started.producer);
                let is_second_best = started.device == Some(DeviceKind::Cpu)
                    && config.engine.local.device == DeviceKind::Auto
                    && overnight_engine::cuda::is_there();
                match is_second_best {
                    true => {
                        Check::warn("one token", format!("{found}, although there is a GPU"), "--device cuda says why")
                    }
                    false => Check::pass("one token", found),
                }
            }
            Ok(Err(reason)) => {
                Check::fail("one token", reason, "the log of `batch serve` tells more, or try --device cpu")
            }
            Err(_) => Check::fail("one token", "none within two minutes", "a smaller model, or fewer other programs"),
        },
    });
    checks
}

async fn one_token(started: &engine::Started) -> Result<String, String> {
    let handle = started.handle.as_ref().ok_or("the engine is not a local one")?;
    let text = started.mapper.text().ok_or("the model has no tokenizer")?;
    let prompt = text.encode("The capital of France is", true).map_err(|err| overnight_types::chain(&err))?;
    let (send, mut events) = mpsc::unbounded_channel::<Vec<Event>>();
    let sink: Sink = Arc::new(move |batch| send.send(batch).is_ok());
    let request = Request {
        id: RequestId::next(),
        class: Class::Online,
        prompt,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        stop: StopRules { max_tokens: 1, ..StopRules::default() },
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        stream: false,
    };
    handle.submit(vec![request], sink).await.map_err(|err| overnight_types::chain(&err))?;
    while let Some(events) = events.recv().await {
        for event in events {
            match event {
                Event::Output(output) if output.finish.is_some() => return Ok(output.text),
                Event::Begun { .. } | Event::Output(_) => {}
                Event::Failed { error, .. } => return Err(error.to_string()),
            }
        }
    }
    Err("the engine stopped".to_owned())
}
