//! `batch bench fleet`: several workers on one database, each with an engine that
//! answers at a fixed rate, so that what is measured is how well they share the work.
//!
//! - Speed-up: the same job by one worker and by all, from the first outcome asked
//!   for to the last one known.
//! - Takeover: one worker is killed (-9) at a third of a job; for each shard it held,
//!   the time from the end of its lease to the start of the next attempt, both by the
//!   database's clock.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use overnight_store::{Shard, Store};
use overnight_types::{JobId, ShardIndex, ShardState, WorkerId};
use serde_json::json;

use super::durable::{STALL_MAX, submit, write_items};
use super::site::{Process, Server, Site};
use crate::App;
use crate::client::Client;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::progress::Counts;

/// Pause between looks; short against what is measured.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Workers have registered by then.
const JOIN_MAX: Duration = Duration::from_secs(30);

/// Arguments of `batch bench fleet`.
#[derive(Debug, Args)]
pub(crate) struct FleetArgs {
    /// Workers to compare with one
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=64))]
    workers: u32,
    /// Answers a second of each worker's engine
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Requests in each job [default: what one worker answers in forty seconds]
    #[arg(long, value_parser = human::parse_count)]
    items: Option<u64>,
    /// Database to use instead of a fresh SQLite file; PGPASSWORD or ~/.pgpass may hold its password
    #[arg(long, value_name = "URL")]
    database: Option<String>,
    /// Object store to use instead of a fresh local folder
    #[arg(long, value_name = "URL")]
    objects: Option<String>,
    /// Where the temporary data folder is made [default: the system's]
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
}

pub(crate) async fn run(args: FleetArgs, app: &App) -> Result {
    let items = args.items.unwrap_or(u64::from(args.rate) * 40).max(1);
    let folder = super::temporary(args.dir.as_deref())?;
    let input = folder.path().join("items.jsonl");
    write_items(&input, items, 150)?;
    let site = Site::new(folder.path().join("data"), args.database.as_deref(), args.objects.as_deref())
        .with(format!("engine.instant_items_per_s={}", args.rate));
    site.require_no_others().await?;
    let server = Server::start(&site, false).await?;
    let fleet = Fleet { client: server.client()?, store: site.store().await?, site, input };

    let mut workers = Vec::new();
    fleet.join(&mut workers, 1).await?;
    app.ui.say(format!("{} items by one worker", human::count(items)));
    let alone = fleet.whole_job("alone").await?;
    fleet.join(&mut workers, args.workers as usize).await?;
    app.ui.say(format!("the same by {}", args.workers));
    let together = fleet.whole_job("together").await?;
    app.ui.say("the same, and one of them is killed");
    let takeover = fleet.takeover(&mut workers).await?;

    let speed_up = alone.as_secs_f64() / together.as_secs_f64();
    let peak = workers.iter().map(Process::peak_memory).chain([server.peak_memory()]).max().flatten();
    let seconds = super::seconds;
    let most = takeover.iter().max().copied().unwrap_or_default();
    let record = json!({
        "items": items, "workers": args.workers, "rate": args.rate, "alone_seconds": seconds(alone),
        "together_seconds": seconds(together), "speed_up": (speed_up * 1000.0).round() / 1000.0,
        "takeover_seconds": seconds(most), "shards_taken_over": takeover.len(), "peak_memory_bytes": peak,
    });
    if app.ui.is_json() {
        return app.ui.data(&format!("{record}\n"));
    }
    let text = format!(
        "Speed-up of {} workers: {speed_up:.2} ({:.2} s instead of {:.2} s)\nTakeover of a killed worker's {} after the end of its lease: at most {:.2} s\nPeak memory of a process: {}\n",
        args.workers,
        seconds(together),
        seconds(alone),
        human::counted(takeover.len() as u64, "shard"),
        seconds(most),
        peak.map_or_else(|| "not known here".to_owned(), human::bytes),
    );
    app.ui.data(&text)
}

/// What all measurements need.
struct Fleet {
    site: Site,
    client: Client,
    store: Arc<dyn Store>,
    input: PathBuf,
}

fn failed(doing: &str) -> impl Fn(overnight_store::Error) -> Failure + '_ {
    move |err| Failure::from_error(doing, &err)
}

impl Fleet {
    /// Starts workers until there are `num` whose engines answer.
    async fn join(&self, workers: &mut Vec<Process>, num: usize) -> Result {
        while workers.len() < num {
            workers.push(Process::worker(&self.site)?);
        }
        let start = Instant::now();
        loop {
            let live = self.store.list_live_workers().await.map_err(failed("list the workers"))?;
            let ready = |process: &Process| {
                live.iter().any(|live| live.worker.pid == process.id() && !live.worker.models.is_empty())
            };
            if workers.iter().all(ready) {
                return Ok(());
            }
            if start.elapsed() > JOIN_MAX {
                return Err(Failure::new(Exit::TimedOut, "a worker did not join"));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Runs the job; from the end of its intake to its last outcome.
    async fn whole_job(&self, key: &str) -> Result<Duration> {
        let (path, _) = submit(&self.client, &self.input, key).await?;
        let begun = self.wait(&path, |counts| counts.status != "validating").await?;
        let ended = self.wait(&path, |counts| !matches!(counts.status.as_str(), "validating" | "in_progress")).await?;
        let end = self.wait(&path, |counts| crate::client::wait::is_terminal(&counts.status)).await;
        end.map(|_| ended - begun)
    }

    /// When the job was first seen as asked for.
    async fn wait(&self, path: &str, is_there: impl Fn(&Counts) -> bool) -> Result<Instant> {
        let mut moved = (0, Instant::now());
        loop {
            let batch = self.client.get(path, &[]).await?;
            let counts = Counts::of(&batch);
            if is_there(&counts) {
                return Ok(Instant::now());
            }
            if counts.done != moved.0 {
                moved = (counts.done, Instant::now());
            }
            if moved.1.elapsed() > STALL_MAX || counts.status == "failed" {
                return Err(Failure::new(Exit::Failure, format!("the job does not move: {batch}")));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Kills the last worker at a third of a job. For each shard it held: the time from its
    /// lease's end to the next attempt.
    async fn takeover(&self, workers: &mut Vec<Process>) -> Result<Vec<Duration>> {
        let (path, _) = submit(&self.client, &self.input, "takeover").await?;
        let job: JobId = path
            .rsplit('/')
            .next()
            .and_then(|id| id.parse().ok())
            .ok_or_else(|| Failure::new(Exit::Failure, format!("{path} names no batch")))?;
        self.wait(&path, |counts| counts.total > 0 && counts.done * 3 >= counts.total).await?;
        let Some(mut killed) = workers.pop() else { return Ok(Vec::new()) };
        let pid = killed.id();
        killed.kill()?;
        let live = self.store.list_live_workers().await.map_err(failed("list the workers"))?;
        let ids: Vec<WorkerId> = live.iter().filter(|live| live.worker.pid == pid).map(|live| live.worker.id).collect();
        let mut held: Vec<Shard> = Vec::new();
        let mut from = ShardIndex(0);
        loop {
            let page = self.store.list_shards(job, from, 1_000).await.map_err(failed("list the shards"))?;
            let Some(last) = page.last() else { break };
            from = ShardIndex(last.cut.shard.0 + 1);
            let is_held = |shard: &Shard| {
                shard.state == ShardState::Leased && shard.owner.is_some_and(|owner| ids.contains(&owner))
            };
            held.extend(page.into_iter().filter(is_held));
        }
        if held.is_empty() {
            return Err(Failure::new(Exit::Failure, "the killed worker held no shard; give more --items"));
        }
        let mut waits = Vec::with_capacity(held.len());
        let start = Instant::now();
        for shard in held {
            waits.push(self.next_attempt(job, &shard, start).await?);
        }
        self.wait(&path, |counts| crate::client::wait::is_terminal(&counts.status)).await?;
        Ok(waits)
    }

    async fn next_attempt(&self, job: JobId, shard: &Shard, start: Instant) -> Result<Duration> {
        let lease_end = shard.lease_until.ok_or_else(|| Failure::new(Exit::Failure, "a leased shard has no end"))?;
        loop {
            let attempts =
                self.store.list_attempts(job, shard.cut.shard, 1).await.map_err(failed("list the attempts"))?;
            if let Some(next) = attempts.first().filter(|attempt| attempt.epoch > shard.epoch) {
                let micros = next.started_at.micros() - lease_end.micros();
                return Ok(Duration::from_micros(u64::try_from(micros).unwrap_or(0)));
            }
            if start.elapsed() > STALL_MAX {
                return Err(Failure::new(Exit::TimedOut, format!("nobody took shard {} over", shard.cut.shard)));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}
