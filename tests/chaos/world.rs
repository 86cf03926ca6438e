//! The installation that chaos comes over: Postgres, an S3 server, an API and three
//! workers, each process behind proxies of its own, and a supervisor that starts again
//! what has ended.

use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_testing::objects::BUCKET;
use overnight_testing::postgres::{Database, Server};
use overnight_testing::process::free_port;
use overnight_testing::{HttpProxy, Process, S3Server, TcpProxy};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::plan::{API, JUMPING, NUM_WORKERS};
use crate::harness::{batch_binary, missing};

/// What `abort` ends a process with.
const SIGABRT: i32 = 6;
/// A wall clock that is wrong; in C, since it stands in the place of the system's functions.
const CLOCK: &str = include_str!("clock.c");
/// Short leases and small checkpoints, so that a round meets many of each.
pub(crate) const SETTINGS: &[(&str, &str)] = &[
    ("OVERNIGHT_WORKER__LEASE_TTL", "1500ms"),
    ("OVERNIGHT_WORKER__RENEW_EVERY", "300ms"),
    ("OVERNIGHT_WORKER__CHECKPOINT_EVERY_REMOTE", "60ms"),
    ("OVERNIGHT_WORKER__CHECKPOINT_ITEMS_MAX", "24"),
    ("OVERNIGHT_WORKER__POLL_EVERY", "100ms"),
    ("OVERNIGHT_WORKER__SIGNALS_EVERY", "100ms"),
    ("OVERNIGHT_WORKER__SHUTDOWN_GRACE", "2s"),
    // Beside the work, and over the clock that jumps: ages far below what it jumps by, and
    // above what a process that is stopped takes for a write.
    ("OVERNIGHT_WORKER__SWEEP_EVERY", "400ms"),
    ("OVERNIGHT_WORKER__ORPHANS_KEPT_FOR", "10s"),
    ("OVERNIGHT_WORKER__UNCLAIMED_KEPT_FOR", "60s"),
    // A shard whose leases die again and again is not to blame here.
    ("OVERNIGHT_WORKER__CRASHES_MAX", "100"),
    ("OVERNIGHT_API__FREE_DISK_BYTES_MIN", "0"),
    ("OVERNIGHT_LOG__STATS_INTERVAL_S", "0"),
];

/// What the workers run on.
#[derive(Debug, Clone)]
pub(crate) enum Engine {
    /// A server at this address.
    Remote(String),
    /// The tiny model in this folder, on each worker's own CPU engine.
    Local(PathBuf),
}

/// One process, its proxies, and what the supervisor knows about it.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) name: String,
    pub(crate) process: Option<Process>,
    pub(crate) database: TcpProxy,
    pub(crate) objects: HttpProxy,
    /// For its next run alone.
    pub(crate) next_environment: Vec<(String, String)>,
    /// Its end is no surprise.
    pub(crate) may_end: bool,
    /// It stops itself: for how long, until which file is there, and since when it stands.
    pub(crate) stop: Option<(Duration, PathBuf, Option<Instant>)>,
    start_at: Instant,
    port: u16,
}

/// The whole. Dropping it ends every process.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) folder: PathBuf,
    temporary: Option<tempfile::TempDir>,
    pub(crate) seats: Vec<Seat>,
    pub(crate) objects: S3Server,
    pub(crate) database: Database,
    pub(crate) server: Arc<Server>,
    pub(crate) engine: Engine,
    environment: Vec<(String, String)>,
    /// What makes a wall clock wrong, once built.
    clock: PathBuf,
    /// Draws how long a supervisor waits.
    random: StdRng,
    /// No fault is under way: nobody stays stopped.
    pub(crate) is_calm: bool,
    /// Runs that ended themselves at a place, as they were told, and that stopped there.
    pub(crate) num_crashes: u64,
    pub(crate) num_self_stops: u64,
}

impl World {
    /// Starts everything; `None` when something is not installed.
    pub(crate) async fn start(engine: Engine, environment: &[(&str, &str)]) -> Option<Self> {
        let temporary = tempfile::Builder::new().prefix("overnight-chaos-").tempdir().expect("a temporary folder");
        let folder = temporary.path().to_owned();
        let server = Server::start()?;
        let objects = S3Server::start(&folder.join("objects")).map_err(|why| missing("s3", &why)).ok()?;
        let clock = build_clock(&folder);
        let mut seats = Vec::new();
        for index in 0..=NUM_WORKERS {
            let name = if index == API { "api".to_owned() } else { format!("worker-{index}") };
            let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
            seats.push(Seat {
                name,
                process: None,
                database: TcpProxy::start(server.address()).await.expect("a proxy starts"),
                objects: HttpProxy::start(loopback(objects.port()), 0).await.expect("a proxy starts"),
                next_environment: Vec::new(),
                may_end: false,
                stop: None,
                start_at: Instant::now(),
                port: free_port().expect("loopback has a free port"),
            });
        }
        let environment = SETTINGS.iter().chain(environment).map(|(name, value)| ((*name).into(), (*value).into()));
        let mut world = Self {
            folder,
            temporary: Some(temporary),
            seats,
            objects,
            database: server.database(),
            server: Arc::new(server),
            engine,
            environment: environment.collect(),
            clock,
            random: StdRng::seed_from_u64(0),
            is_calm: true,
            num_crashes: 0,
            num_self_stops: 0,
        };
        world.set_clock(0);
        world.wait_ready(Duration::from_secs(120)).await.unwrap_or_else(|why| panic!("{why}"));
        Some(world)
    }

    /// The address of a process that listens.
    pub(crate) fn url(&self, seat: usize) -> String {
        format!("http://127.0.0.1:{}", self.seats[seat].port)
    }

    /// Supervisors wait as this seed says.
    pub(crate) fn set_seed(&mut self, seed: u64) {
        self.random = StdRng::seed_from_u64(seed);
    }

    /// Moves the wall clock that the jumping worker sees.
    pub(crate) fn set_clock(&self, seconds: i64) {
        let file = std::fs::File::options().create(true).truncate(false).write(true).open(self.clock_file());
        let written = file.and_then(|mut file| file.write_all(&seconds.to_ne_bytes()));
        written.expect("eight bytes can be written in place");
    }

    fn clock_file(&self) -> PathBuf {
        self.folder.join("clock")
    }

    /// One look of the supervisor: starts what has ended, wakes what has stopped itself for
    /// long enough. Errors when something ended that nobody had told to.
    pub(crate) fn supervise(&mut self) -> Result<(), String> {
        for index in 0..self.seats.len() {
            self.wake_if_due(index);
            let wait = Duration::from_millis(self.random.random_range(20..250));
            let seat = &mut self.seats[index];
            if let Some(process) = &mut seat.process
                && let Some(status) = process.ended()
            {
                if !seat.may_end && has_begun(index, &process.said()) {
                    return Err(format!("{} ended by itself, {status}:\n{}", seat.name, process.log_tail()));
                }
                self.num_crashes += u64::from(status.signal() == Some(SIGABRT));
                seat.process = None;
                seat.start_at = Instant::now() + wait;
            }
            if self.seats[index].process.is_none() && self.seats[index].start_at <= Instant::now() {
                self.spawn(index);
            }
        }
        Ok(())
    }

    fn wake_if_due(&mut self, index: usize) {
        let seat = &mut self.seats[index];
        if self.is_calm {
            // Whoever comes late to the place where it was to stop goes on at once.
            if let Some(process) = seat.process.as_ref().filter(|process| process.is_stopped()) {
                process.go_on();
            }
            return;
        }
        let (Some(process), Some((wait, until, since))) = (&seat.process, &mut seat.stop) else { return };
        match since {
            None if process.is_stopped() => {
                *since = Some(Instant::now());
                self.num_self_stops += 1;
            }
            Some(since) if since.elapsed() >= *wait => {
                std::fs::write(until, b"").expect("the file can be made");
                process.go_on();
                seat.stop = None;
            }
            _ => {}
        }
    }

    /// Kills a process; the supervisor starts it again.
    pub(crate) fn kill(&mut self, index: usize) {
        let seat = &mut self.seats[index];
        if let Some(mut process) = seat.process.take() {
            process.kill();
        }
        seat.stop = None;
        seat.start_at = Instant::now();
    }

    fn spawn(&mut self, index: usize) {
        let mut command = Process::with_writes_that_can_be_refused();
        if index == JUMPING {
            command.arg("env").arg(format!("LD_PRELOAD={}", self.clock.display()));
            command.arg(format!("OVERNIGHT_TEST_CLOCK={}", self.clock_file().display()));
        }
        command.arg(batch_binary());
        self.add_arguments(&mut command, index);
        let seat = &mut self.seats[index];
        let own = std::mem::take(&mut seat.next_environment);
        seat.may_end = own.iter().any(|(name, _)| name == "OVERNIGHT_TEST_CRASH_AT");
        command.env("OVERNIGHT_DATABASE__URL", self.database.url_by(seat.database.address()));
        command.env("OVERNIGHT_OBJECTS__URL", format!("s3://{BUCKET}"));
        command.envs(S3Server::environment_by("127.0.0.1", seat.objects.address().port()));
        command.envs(self.environment.iter().cloned()).envs(own);
        let log = self.folder.join(format!("{}.log", seat.name));
        seat.process = Some(Process::spawn(&seat.name, command, &log).expect("batch starts"));
    }

    fn add_arguments(&self, command: &mut Command, index: usize) {
        let seat = &self.seats[index];
        command.arg("--data-dir").arg(self.folder.join(&seat.name));
        let port = seat.port.to_string();
        match (&self.engine, index) {
            (_, API) => command.args(["serve", "--port", &port, "--no-worker"]),
            // It has a door, so that its engine can be asked.
            (Engine::Local(_), 1) => command.args(["serve", "--port", &port]),
            _ => command.arg("worker"),
        };
        match &self.engine {
            Engine::Remote(url) => {
                command.args(["--set", "engine.kind=openai", "--set"]).arg(format!("engine.base_urls=[\"{url}\"]"))
            }
            Engine::Local(folder) => command.arg("--model").arg(folder).args(["--served-model-name", "tiny"]),
        };
    }

    /// Waits until every process says that it has begun.
    pub(crate) async fn wait_ready(&mut self, limit: Duration) -> Result<(), String> {
        let until = Instant::now() + limit;
        loop {
            self.supervise()?;
            let has_begun = |index, seat: &Seat| seat.process.as_ref().is_some_and(|it| has_begun(index, &it.said()));
            let late = self.seats.iter().enumerate().find(|&(index, seat)| !has_begun(index, seat));
            let Some((_, late)) = late else { return Ok(()) };
            if Instant::now() > until {
                let tail = late.process.as_ref().map(Process::log_tail).unwrap_or_default();
                return Err(format!("{} is not ready within {limit:?}:\n{tail}", late.name));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends `batch db check` here and now: what it finds, `None` when the database is sound.
    pub(crate) fn unsound(&self) -> Option<String> {
        let mut command = Command::new(batch_binary());
        command.arg("--data-dir").arg(self.folder.join("check")).args(["db", "check"]);
        let output = command.env("OVERNIGHT_DATABASE__URL", self.database.url()).output().expect("batch starts");
        (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// What all processes have said.
    pub(crate) fn logs(&self) -> String {
        let log = |seat: &Seat| std::fs::read_to_string(self.folder.join(format!("{}.log", seat.name)));
        self.seats.iter().filter_map(|seat| log(seat).ok()).collect()
    }

    /// Keeps the logs of all processes; says where.
    pub(crate) fn keep(&mut self) -> &Path {
        // The database's log lies in the server's own folder, which goes.
        let _ = std::fs::copy(self.server.log(), self.folder.join("postgres.log"));
        drop(self.temporary.take().map(tempfile::TempDir::keep));
        &self.folder
    }
}

/// Past its start a process ends only when somebody tells it to.
pub(crate) fn has_begun(index: usize, said: &str) -> bool {
    // The API listens before its lifecycle steps can run, which a start may fail at.
    said.contains(if index == API { "Worker lifecycle started" } else { "ready: " })
}

/// With the C compiler that the build of `batch` needs as well.
fn build_clock(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
    std::fs::write(&source, CLOCK).expect("a file can be written");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    let output = compiler.output().expect("there is a C compiler: batch was built with one");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}
