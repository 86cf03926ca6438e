//! `batch bench durable`: starts this binary as `batch serve` on a temporary data
//! folder with the instant engine, and takes one job from upload to published files.
//!
//! Times are taken by this process's clock, memory is the server process's `VmHWM`.
//! With `--restart` the server is killed at half and started again; the time counts
//! from that start to the first new outcome.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use crate::App;
use crate::client::Client;
use crate::error::{Exit, Failure, Result};
use crate::host;
use crate::output::human;
use crate::progress::Counts;

/// A server that does not answer within this time never will.
const START_MAX: Duration = Duration::from_secs(30);
/// A job that does not move for this long hangs.
const STALL_MAX: Duration = Duration::from_secs(120);
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
    /// Database to use instead of a fresh SQLite file
    #[arg(long, value_name = "URL")]
    database: Option<String>,
    /// Kill the server at half of the items and start it again
    #[arg(long)]
    restart: bool,
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
    let mut builder = tempfile::Builder::new();
    builder.prefix("batch-bench-");
    let folder = match &args.dir {
        Some(dir) => builder.tempdir_in(dir)?,
        None => builder.tempdir()?,
    };
    let input = folder.path().join("items.jsonl");
    let input_bytes = write_items(&input, args.items, args.line_bytes)?;
    app.ui.say(format!("{} items, {}", human::count(args.items), human::bytes(input_bytes)));
    let data_dir = folder.path().join("data");
    let mut server = Server::start(&data_dir, args.database.as_deref()).await?;
    let figures = measure(&args, &mut server, &input, app).await;
    if args.keep {
        app.ui.summary(format!("data folder: {}", folder.keep().display()));
    }
    show(figures?, &args, app)
}

fn write_items(path: &Path, items: u64, line_bytes: u64) -> Result<u64> {
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

#[derive(Debug)]
struct Figures {
    upload: Duration,
    intake: Duration,
    run: Duration,
    whole: Duration,
    restart: Option<Duration>,
    peak_memory: Option<u64>,
    database_bytes: u64,
    output_lines: u64,
}

async fn measure(args: &DurableArgs, server: &mut Server, input: &Path, app: &App) -> Result<Figures> {
    let client = Client::at(server.url.clone(), None)?;
    let start = Instant::now();
    let file = client.upload(input, "items.jsonl", "batch").await?;
    let upload = start.elapsed();
    let body = json!({"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"});
    let batch = client.post("/v1/batches", &body, Some("bench")).await?;
    let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap_or_default());
    let mut intake = None;
    let mut restart = None;
    let mut last = (0, Instant::now());
    let mut peak = None;
    let ended = loop {
        let batch = client.get(&path, &[]).await?;
        let counts = Counts::of(&batch);
        if counts.status != "validating" && intake.is_none() {
            intake = Some(start.elapsed() - upload);
        }
        if crate::client::wait::is_terminal(&counts.status) {
            break batch;
        }
        if counts.done != last.0 || counts.status == "validating" && last.1.elapsed() < STALL_MAX / 2 {
            if counts.done != last.0 {
                last = (counts.done, Instant::now());
            }
        } else if last.1.elapsed() > STALL_MAX {
            return Err(Failure::new(Exit::Failure, format!("the job does not move: {batch}")));
        }
        if args.restart && restart.is_none() && counts.total > 0 && counts.done * 2 >= counts.total {
            peak = peak.max(server.peak_memory());
            restart = Some(server.kill_and_restart(&path, counts.done, app).await?);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    let whole = start.elapsed();
    if ended["status"] != "completed" || ended["request_counts"]["completed"].as_u64() != Some(args.items) {
        return Err(Failure::new(Exit::Failure, format!("the job did not complete: {ended}")));
    }
    peak = peak.max(server.peak_memory());
    let output_lines = count_lines(&client, &ended).await?;
    let intake = intake.unwrap_or_default();
    Ok(Figures {
        upload,
        intake,
        run: whole.saturating_sub(upload).saturating_sub(intake),
        whole,
        restart,
        peak_memory: peak,
        database_bytes: server.database_bytes(),
        output_lines,
    })
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
    if figures.output_lines != args.items {
        return Err(Failure::new(
            Exit::Failure,
            format!("the published file has {} lines for {} items", figures.output_lines, args.items),
        ));
    }
    let seconds = |duration: Duration| (duration.as_secs_f64() * 1_000.0).round() / 1_000.0;
    let rate = args.items as f64 / figures.whole.as_secs_f64();
    let record = json!({
        "items": args.items, "items_per_second": rate.round(), "elapsed_time": seconds(figures.whole),
        "upload_seconds": seconds(figures.upload), "intake_seconds": seconds(figures.intake),
        "run_and_publish_seconds": seconds(figures.run), "restart_seconds": figures.restart.map(seconds),
        "peak_memory_bytes": figures.peak_memory, "database_bytes": figures.database_bytes,
        "output_lines": figures.output_lines,
    });
    if app.ui.is_json() {
        return app.ui.data(&format!("{record}\n"));
    }
    let mut text = format!(
        "Durable path: {} items/s, {} items in {:.2} s (upload {:.2} s, intake {:.2} s, run and publish {:.2} s)\n",
        human::count(rate as u64),
        human::count(args.items),
        seconds(figures.whole),
        seconds(figures.upload),
        seconds(figures.intake),
        seconds(figures.run)
    );
    if let Some(restart) = figures.restart {
        text.push_str(&format!(
            "Restart after kill -9 at half until the first new outcome: {:.2} s\n",
            seconds(restart)
        ));
    }
    let peak = figures.peak_memory.map_or_else(|| "not known here".to_owned(), human::bytes);
    text.push_str(&format!("Peak memory of the server: {peak}\n"));
    text.push_str(&format!("Database: {}\n", human::bytes(figures.database_bytes)));
    app.ui.data(&text)
}

/// This binary as a server, killed when dropped.
struct Server {
    child: Child,
    data_dir: PathBuf,
    database: Option<String>,
    url: String,
    port: u16,
}

impl Server {
    async fn start(data_dir: &Path, database: Option<&str>) -> Result<Self> {
        let child = spawn(data_dir, database, 0)?;
        let mut server = Self {
            child,
            data_dir: data_dir.to_owned(),
            database: database.map(str::to_owned),
            url: String::new(),
            port: 0,
        };
        server.wait_ready().await?;
        Ok(server)
    }

    async fn wait_ready(&mut self) -> Result {
        let start = Instant::now();
        while start.elapsed() < START_MAX {
            if let Some(status) = self.child.try_wait()? {
                return Err(Failure::new(Exit::Failure, format!("the server ended at its start: {status}")));
            }
            if let Some(url) = host::live_server(&self.data_dir) {
                self.port = url.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
                self.url = url;
                let client = Client::at(self.url.clone(), None)?;
                if client.get("/version", &[]).await.is_ok() {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(Failure::new(Exit::TimedOut, format!("the server did not answer within {}", human::duration(START_MAX))))
    }

    /// Kills it, starts it again and waits for the first outcome beyond `done`.
    async fn kill_and_restart(&mut self, path: &str, done: u64, app: &App) -> Result<Duration> {
        self.child.kill()?;
        self.child.wait()?;
        app.ui.say(format!("killed at {} items, starting again", human::count(done)));
        // The card of the dead process must not be taken for that of the new one.
        let _ = std::fs::remove_file(self.data_dir.join("server.json"));
        let start = Instant::now();
        self.child = spawn(&self.data_dir, self.database.as_deref(), self.port)?;
        self.wait_ready().await?;
        let client = Client::at(self.url.clone(), None)?;
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

    fn peak_memory(&self) -> Option<u64> {
        host::peak_memory(self.child.id())
    }

    /// The database's files, its log included.
    fn database_bytes(&self) -> u64 {
        let size = |name: &str| std::fs::metadata(self.data_dir.join(name)).map_or(0, |meta| meta.len());
        ["overnight.db", "overnight.db-wal", "overnight.db-shm"].iter().map(|name| size(name)).sum()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(data_dir: &Path, database: Option<&str>, port: u16) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["serve", "--port", &port.to_string(), "--set", "engine.kind=instant", "--set", "log.filter=warn"])
        .arg("--data-dir")
        .arg(data_dir)
        // Only what is measured is configured.
        .args(["--config", "/dev/null"])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    if let Some(url) = database {
        command.args(["--set", &format!("database.url={url}")]);
    }
    Ok(command.spawn()?)
}
