//! `batch bench durable`: starts this binary as `batch serve` on a temporary data
//! folder with the instant engine, and takes one job from upload to published files.
//!
//! Times are taken by this process's clock, memory is the server process's `VmHWM`.
//! With `--restart` the server is killed at half and started again; the time counts
//! from that start to the first new outcome. With `--cancel` the job is cancelled at
//! half; the time counts from the request to the last new outcome that was seen.

mod looks;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::site::{Server, Site};
use crate::App;
use crate::client::Client;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::progress::Counts;
use looks::Looks;

/// A job that does not move for this long hangs.
pub(super) const STALL_MAX: Duration = Duration::from_secs(120);
/// Pause between looks at the job; short against what is measured.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Arguments of `batch bench durable`.
#[derive(Debug, Args)]
pub(crate) struct DurableArgs {
    /// Requests in the job
    #[arg(long, default_value = "100k", value_parser = human::parse_count)]
    items: u64,
    /// Bytes of each line, about; at least 120
    #[arg(long, default_value = "150", value_parser = human::parse_bytes)]
    line_bytes: u64,
    /// Database to use instead of a fresh SQLite file; PGPASSWORD or ~/.pgpass may hold its password
    #[arg(long, value_name = "URL")]
    database: Option<String>,
    /// Object store to use instead of a fresh local folder
    #[arg(long, value_name = "URL")]
    objects: Option<String>,
    /// Kill the server at half of the items and start it again
    #[arg(long)]
    restart: bool,
    /// Cancel the job at half of its items; the file is then not counted
    #[arg(long, conflicts_with = "restart")]
    cancel: bool,
    /// Ask the API for status, items and the list all the while and report how long it takes
    #[arg(long, conflicts_with = "restart")]
    looks: bool,
    /// Keep the data folder and say where it is
    #[arg(long)]
    keep: bool,
    /// Where the temporary data folder is made [default: the system's]
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
}

pub(crate) async fn run(args: DurableArgs, app: &App) -> Result {
    if args.items == 0 {
        return Err(Failure::usage("--items must be at least 1"));
    }
    let folder = super::temporary(args.dir.as_deref())?;
    let input = folder.path().join("items.jsonl");
    let input_bytes = write_items(&input, args.items, args.line_bytes)?;
    app.ui.say(format!("{} items, {}", human::count(args.items), human::bytes(input_bytes)));
    let site = Site::new(folder.path().join("data"), args.database.as_deref(), args.objects.as_deref());
    site.require_no_others().await?;
    let mut server = Server::start(&site, true).await?;
    let figures = measure(&args, &site, &mut server, &input, app).await;
    if args.keep {
        app.ui.summary(format!("data folder: {}", folder.keep().display()));
    }
    show(figures?, &args, app)
}

pub(super) fn write_items(path: &Path, items: u64, line_bytes: u64) -> Result<u64> {
    let mut file = std::io::BufWriter::with_capacity(1 << 20, std::fs::File::create(path)?);
    let filler = "x".repeat(usize::try_from(line_bytes.saturating_sub(115)).unwrap_or(0));
    for index in 0..items {
        writeln!(
            file,
            r#"{{"custom_id":"item-{index:09}","method":"POST","url":"/v1/completions","body":{{"model":"instant","prompt":"{index}{filler}","max_tokens":1}}}}"#
        )?;
    }
    file.flush()?;
    Ok(std::fs::metadata(path)?.len())
}

/// Uploads an input and makes a batch of it: the batch's path, and when the upload was over.
pub(super) async fn submit(client: &Client, input: &Path, key: &str) -> Result<(String, Instant)> {
    let file = client.upload(input, "items.jsonl", "batch").await?;
    let uploaded = Instant::now();
    let body = json!({"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"});
    let batch = client.post("/v1/batches", &body, Some(key)).await?;
    Ok((format!("/v1/batches/{}", batch["id"].as_str().unwrap_or_default()), uploaded))
}

#[derive(Debug)]
struct Figures {
    upload: Duration,
    intake: Duration,
    run: Duration,
    whole: Duration,
    restart: Option<Duration>,
    cancel: Option<Duration>,
    looks: Option<Value>,
    peak_memory: Option<u64>,
    database_bytes: u64,
    /// `None` for a job that was cancelled.
    output_lines: Option<u64>,
}

/// The job as it is seen from outside.
#[derive(Debug)]
struct Watch {
    done: u64,
    /// When `done` was seen to rise.
    moved: Instant,
}

async fn measure(args: &DurableArgs, site: &Site, server: &mut Server, input: &Path, app: &App) -> Result<Figures> {
    let client = server.client()?;
    let store = site.store().await?;
    let size_before =
        store.size_bytes().await.map_err(|err| Failure::from_error("ask for the database's size", &err))?;
    let start = Instant::now();
    let (path, uploaded) = submit(&client, input, "bench").await?;
    let upload = uploaded - start;
    let stop_looks = CancellationToken::new();
    let mut looking = None;
    let (mut intake, mut restart, mut cancelled, mut peak) = (None, None, None, None);
    let mut watch = Watch { done: 0, moved: Instant::now() };
    let ended = loop {
        let batch = client.get(&path, &[]).await?;
        let counts = Counts::of(&batch);
        if counts.status != "validating" && intake.is_none() {
            intake = Some(start.elapsed() - upload);
            let id = batch["id"].as_str().unwrap_or_default().to_owned();
            looking = args.looks.then(|| tokio::spawn(Looks::take(client.clone(), id, args.items, stop_looks.clone())));
        }
        if crate::client::wait::is_terminal(&counts.status) {
            break batch;
        }
        if counts.done != watch.done {
            watch = Watch { done: counts.done, moved: Instant::now() };
        } else if watch.moved.elapsed() > STALL_MAX && counts.status == "in_progress" {
            return Err(Failure::new(Exit::Failure, format!("the job does not move: {batch}")));
        }
        let at_half = counts.total > 0 && counts.done * 2 >= counts.total;
        if args.restart && restart.is_none() && at_half {
            peak = peak.max(server.peak_memory());
            restart = Some(kill_and_restart(server, &path, counts.done, app).await?);
        }
        if args.cancel && cancelled.is_none() && at_half {
            cancelled = Some(Instant::now());
            client.post(&format!("{path}/cancel"), &json!({}), Some("bench-cancel")).await?;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    let whole = start.elapsed();
    stop_looks.cancel();
    let looks = match looking {
        Some(looking) => Some(looking.await.map_err(|err| Failure::from_error("look at the job", &err))??.figures()),
        None => None,
    };
    peak = peak.max(server.peak_memory());
    let output_lines = match cancelled {
        Some(_) if ended["status"] == "cancelled" => None,
        None if ended["status"] == "completed" && ended["request_counts"]["completed"] == args.items => {
            Some(count_lines(&client, &ended).await?)
        }
        _ => return Err(Failure::new(Exit::Failure, format!("the job did not end as it should: {ended}"))),
    };
    let intake = intake.unwrap_or_default();
    let size = store.size_bytes().await.map_err(|err| Failure::from_error("ask for the database's size", &err))?;
    Ok(Figures {
        upload,
        intake,
        run: whole.saturating_sub(upload).saturating_sub(intake),
        whole,
        restart,
        cancel: cancelled.map(|asked| watch.moved.saturating_duration_since(asked)),
        looks,
        peak_memory: peak,
        // An own file is all the job's; a server's database was there before.
        database_bytes: if args.database.is_some() { size.saturating_sub(size_before) } else { size },
        output_lines,
    })
}

/// Kills the server, starts it again and waits for the first outcome beyond those kept.
async fn kill_and_restart(server: &mut Server, path: &str, done: u64, app: &App) -> Result<Duration> {
    server.kill()?;
    app.ui.say(format!("killed at {} items, starting again", human::count(done)));
    let start = Instant::now();
    server.restart().await?;
    let client = server.client()?;
    // What was committed between the last look and the kill is not new.
    let kept = Counts::of(&client.get(path, &[]).await?).done;
    loop {
        let counts = Counts::of(&client.get(path, &[]).await?);
        if counts.done > kept || crate::client::wait::is_terminal(&counts.status) {
            return Ok(start.elapsed());
        }
        if start.elapsed() > STALL_MAX {
            return Err(Failure::new(Exit::TimedOut, "nothing ran after the restart"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn count_lines(client: &Client, batch: &Value) -> Result<u64> {
    let id = batch["output_file_id"].as_str().unwrap_or_default();
    let response = client.stream(&format!("/v1/files/{id}/content"), &[], 0).await?;
    let mut body = response.bytes_stream();
    let mut lines = 0;
    while let Some(piece) = futures::StreamExt::next(&mut body).await {
        let piece = piece.map_err(|err| Failure::from_error("read the published file", &err))?;
        lines += piece.iter().filter(|&&byte| byte == b'\n').count() as u64;
    }
    Ok(lines)
}

fn show(figures: Figures, args: &DurableArgs, app: &App) -> Result {
    if let Some(lines) = figures.output_lines.filter(|&lines| lines != args.items) {
        let what = format!("the published file has {lines} lines for {} items", args.items);
        return Err(Failure::new(Exit::Failure, what));
    }
    let seconds = super::seconds;
    let rate = args.items as f64 / figures.whole.as_secs_f64();
    let record = json!({
        "items": args.items, "items_per_second": figures.output_lines.map(|_| rate.round()),
        "elapsed_time": seconds(figures.whole),
        "upload_seconds": seconds(figures.upload), "intake_seconds": seconds(figures.intake),
        "run_and_publish_seconds": seconds(figures.run), "restart_seconds": figures.restart.map(seconds),
        "cancel_seconds": figures.cancel.map(seconds), "api": figures.looks,
        "peak_memory_bytes": figures.peak_memory, "database_bytes": figures.database_bytes,
        "output_lines": figures.output_lines,
    });
    if app.ui.is_json() {
        return app.ui.data(&format!("{record}\n"));
    }
    let parts = format!(
        "{} items in {:.2} s (upload {:.2} s, intake {:.2} s, run and publish {:.2} s)",
        human::count(args.items),
        seconds(figures.whole),
        seconds(figures.upload),
        seconds(figures.intake),
        seconds(figures.run)
    );
    let mut text = match figures.cancel {
        None => format!("Durable path: {} items/s, {parts}\n", human::count(rate as u64)),
        Some(cancel) => {
            let cancel = seconds(cancel);
            format!("Durable path, cancelled at half: {parts}\nLast new outcome after the cancel: {cancel:.2} s\n")
        }
    };
    if let Some(restart) = figures.restart.map(seconds) {
        text.push_str(&format!("Restart after kill -9 at half until the first new outcome: {restart:.2} s\n"));
    }
    for (name, look) in figures.looks.iter().filter_map(Value::as_object).flatten() {
        let [p50, p99, max] = ["p50_ms", "p99_ms", "max_ms"].map(|key| look[key].as_f64().unwrap_or(f64::NAN));
        text.push_str(&format!("API, {name}: p50 {p50} ms, p99 {p99} ms, most {max} ms, {} requests\n", look["num"]));
    }
    let peak = figures.peak_memory.map_or_else(|| "not known here".to_owned(), human::bytes);
    text.push_str(&format!("Peak memory of the server: {peak}\n"));
    text.push_str(&format!("Database: {}\n", human::bytes(figures.database_bytes)));
    app.ui.data(&text)
}
