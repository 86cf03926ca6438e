//! Starts, kills and asks the real `batch`, as a user's supervisor would.
//!
//! Every wait has a limit and says the last thing it saw. Owns the child process:
//! dropping a [`Service`] kills it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::backend;

/// The binary under test: `OVERNIGHT_TEST_BATCH`, or the one beside this test's folder.
pub(crate) fn batch_binary() -> PathBuf {
    if let Some(path) = setting("OVERNIGHT_TEST_BATCH") {
        return path.into();
    }
    let test = std::env::current_exe().expect("a test knows its own path");
    let folder = test.parent().and_then(Path::parent).expect("tests lie in target/<profile>/deps");
    let path = folder.join("batch");
    assert!(path.is_file(), "{} is not built; run `cargo build --workspace --all-targets` first", path.display());
    path
}

/// A variable that steers the tests; `None` when unset or empty.
#[expect(clippy::disallowed_methods, reason = "tests are steered by the environment, here alone")]
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    listener.local_addr().expect("a bound socket has an address").port()
}

/// A `batch serve` process on loopback.
#[derive(Debug)]
pub(crate) struct Service {
    child: Child,
    pub(crate) url: String,
    data_dir: PathBuf,
    log: PathBuf,
    /// A worker that stops itself does so until this file exists.
    stops_until: Option<PathBuf>,
}

/// Workers so far: each has a log of its own.
static NUM_WORKERS: AtomicU32 = AtomicU32::new(0);

impl Service {
    /// Starts `batch serve` on `data_dir`; extra arguments and environment come last.
    pub(crate) fn start(data_dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Self {
        let port = free_port();
        let mut all = vec!["serve".to_owned(), "--port".to_owned(), port.to_string()];
        all.extend(args.iter().map(|&arg| arg.to_owned()));
        let log = data_dir.with_extension("log");
        Self::spawn(Command::new(batch_binary()), data_dir, &all, env, port, log)
    }

    /// Starts `batch serve` below another program, for example `strace`.
    pub(crate) fn start_below(program: Command, data_dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Self {
        let port = free_port();
        let mut all = vec!["serve".to_owned(), "--port".to_owned(), port.to_string()];
        all.extend(args.iter().map(|&arg| arg.to_owned()));
        let log = data_dir.with_extension("log");
        Self::spawn(program, data_dir, &all, env, port, log)
    }

    /// Starts `batch worker` on `data_dir`. It has no door: only signals reach it.
    pub(crate) fn start_worker(data_dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut all = vec!["worker".to_owned()];
        all.extend(args.iter().map(|&arg| arg.to_owned()));
        let number = NUM_WORKERS.fetch_add(1, Ordering::Relaxed);
        let log = data_dir.with_extension(format!("worker-{number}.log"));
        Self::spawn(Command::new(batch_binary()), data_dir, &all, env, 0, log)
    }

    fn spawn(
        mut program: Command,
        data_dir: &Path,
        args: &[String],
        env: &[(&str, &str)],
        port: u16,
        log: PathBuf,
    ) -> Self {
        let file = std::fs::File::options().create(true).append(true).open(&log).expect("log can be written");
        let child = program
            .args(["--data-dir", data_dir.to_str().expect("test paths are UTF-8")])
            .args(args)
            .envs(backend::environment(data_dir))
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("batch starts");
        let url = format!("http://127.0.0.1:{port}");
        Self { child, url, data_dir: data_dir.to_owned(), log, stops_until: None }
    }

    /// Of the process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts `batch worker` that stops itself at the n-th pass of a place, `place=n`.
    pub(crate) fn start_worker_that_stops(data_dir: &Path, args: &[&str], env: &[(&str, &str)], at: &str) -> Self {
        let until = data_dir.with_extension(format!("go-on-{}", NUM_WORKERS.load(Ordering::Relaxed)));
        let stop = [
            ("OVERNIGHT_TEST_STOP_AT", at),
            ("OVERNIGHT_TEST_STOP_UNTIL", until.to_str().expect("test paths are UTF-8")),
        ];
        let mut worker = Self::start_worker(data_dir, args, &[env, &stop].concat());
        worker.stops_until = Some(until);
        worker
    }

    /// Waits until such a worker has stopped itself while none of its threads holds the
    /// database's lock, which would stop everybody else too; panics after `limit`.
    pub(crate) async fn wait_stopped(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            if self.is_stopped() {
                if backend::is_database_free(&self.data_dir).await {
                    return;
                }
                self.signal("CONT");
            }
            assert!(!self.has_exited(), "batch ended and was to stop itself\n{}", self.log_tail());
            assert!(Instant::now() < end, "batch did not stop itself within {limit:?}\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Wakes such a worker up for good.
    pub(crate) fn go_on(&self) {
        let until = self.stops_until.as_ref().expect("only a worker that stops goes on");
        std::fs::write(until, b"").expect("the file can be made");
        self.signal("CONT");
    }

    /// Whether the process is stopped now.
    pub(crate) fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        // The state stands after the name, which is in parentheses and may hold any character.
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
    }

    /// Waits until its log says `text`; panics after `limit`.
    pub(crate) async fn wait_log(&self, text: &str, limit: Duration) {
        let end = Instant::now() + limit;
        while !std::fs::read_to_string(&self.log).is_ok_and(|log| log.contains(text)) {
            assert!(Instant::now() < end, "the log does not say {text:?} within {limit:?}\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// What `batch db check` finds on its data folder; `None` when it is sound.
    pub(crate) fn unsound(&self) -> Option<String> {
        self.unsound_below(Command::new(batch_binary()))
    }

    /// The same below another program, as [`Service::start_below`].
    pub(crate) fn unsound_below(&self, mut program: Command) -> Option<String> {
        let data_dir = self.data_dir.to_str().expect("test paths are UTF-8");
        program.args(["--data-dir", data_dir, "db", "check"]).envs(backend::environment(&self.data_dir));
        let output = program.output().expect("batch starts");
        (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Sends a signal by name, for example `KILL`, `STOP`, `CONT`, `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let signal = match name {
            "KILL" => rustix::process::Signal::KILL,
            "STOP" => rustix::process::Signal::STOP,
            "CONT" => rustix::process::Signal::CONT,
            "TERM" => rustix::process::Signal::TERM,
            _ => panic!("no such signal in this harness: {name}"),
        };
        let pid = rustix::process::Pid::from_child(&self.child);
        // A process that is gone already is what the caller wanted.
        let _gone = rustix::process::kill_process(pid, signal);
    }

    /// Kills it at once and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        self.signal("KILL");
        self.child.wait().expect("a killed child can be waited for");
    }

    /// Waits for its own end; panics after `limit`.
    pub(crate) async fn wait_exit(&mut self, limit: Duration) -> std::process::ExitStatus {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child can be asked") {
                return status;
            }
            assert!(Instant::now() < end, "batch serve did not exit within {limit:?}\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether the process has ended by itself.
    pub(crate) fn has_exited(&mut self) -> bool {
        self.child.try_wait().expect("a child can be asked").is_some()
    }

    /// All of its log so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The end of its log, for a failure's message.
    pub(crate) fn log_tail(&self) -> String {
        let text = self.log();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// One GET or POST; `None` when the server is not there.
    pub(crate) async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Option<(u16, Value)> {
        let client = reqwest::Client::new();
        let url = format!("{}{path}", self.url);
        let request = match method {
            "GET" => client.get(url),
            "POST" => client.post(url),
            "DELETE" => client.delete(url),
            _ => panic!("no such method in this harness: {method}"),
        };
        let request = request.timeout(Duration::from_secs(20));
        let request = if let Some(body) = body { request.json(&body) } else { request };
        let response = request.send().await.ok()?;
        let status = response.status().as_u16();
        let text = response.text().await.ok()?;
        Some((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// Waits until it answers (engine ready or not); panics after `limit`.
    pub(crate) async fn wait_up(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.call("GET", "/version", None).await.is_none() {
            assert!(!self.has_exited(), "batch serve ended at its start\n{}", self.log_tail());
            assert!(Instant::now() < end, "batch serve did not answer within {limit:?}\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the engine can answer; panics after `limit`.
    pub(crate) async fn wait_ready(&mut self, limit: Duration) {
        self.wait_up(limit).await;
        let end = Instant::now() + limit;
        while self.call("GET", "/health", None).await.is_none_or(|(status, _)| status != 200) {
            assert!(!self.has_exited(), "batch serve ended before it was ready\n{}", self.log_tail());
            assert!(Instant::now() < end, "batch serve was not ready within {limit:?}\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Creates a batch; `None` when the server is gone before it answers.
    pub(crate) async fn create_or_crash(&self, file: &str, endpoint: &str) -> Option<String> {
        let body = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"});
        let (_, batch) = self.call("POST", "/v1/batches", Some(body)).await?;
        batch["id"].as_str().map(str::to_owned)
    }

    /// Waits until the process has ended by itself (true) or the batch is terminal (false).
    pub(crate) async fn wait_end_of(&mut self, id: Option<&str>, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            if self.has_exited() {
                return true;
            }
            if let Some(id) = id
                && self.batch(id).await.is_some_and(|batch| is_terminal(&batch))
            {
                // The last places lie just behind the terminal state: in order to end, the
                // process finishes the step that it is in.
                self.signal("TERM");
                let left = end.saturating_duration_since(Instant::now());
                return !self.wait_exit(left).await.success();
            }
            assert!(Instant::now() < end, "neither crashed nor ended within {limit:?}\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The id of the newest batch.
    pub(crate) async fn newest_batch(&self) -> Option<String> {
        let (_, list) = self.call("GET", "/v1/batches?limit=1", None).await?;
        list["data"][0]["id"].as_str().map(str::to_owned)
    }

    /// Uploads a batch input file and returns its id.
    pub(crate) async fn upload(&self, name: &str, bytes: Vec<u8>) -> String {
        let part = reqwest::multipart::Part::bytes(bytes).file_name(name.to_owned());
        let form = reqwest::multipart::Form::new().text("purpose", "batch").part("file", part);
        let request = reqwest::Client::new().post(format!("{}/v1/files", self.url)).multipart(form);
        let response = request.timeout(Duration::from_secs(60)).send().await.expect("upload is answered");
        let status = response.status();
        let body: Value = response.json().await.expect("upload answers JSON");
        assert!(status.is_success(), "upload: {status} {body}");
        body["id"].as_str().expect("a file has an id").to_owned()
    }

    /// Creates a batch on an uploaded file and returns its id.
    pub(crate) async fn create(&self, file: &str, endpoint: &str) -> String {
        let body = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"});
        let (status, batch) = self.call("POST", "/v1/batches", Some(body)).await.expect("create is answered");
        assert_eq!(status, 200, "create: {batch}");
        batch["id"].as_str().expect("a batch has an id").to_owned()
    }

    /// The batch object; `None` while the server is not there.
    pub(crate) async fn batch(&self, id: &str) -> Option<Value> {
        let (status, batch) = self.call("GET", &format!("/v1/batches/{id}"), None).await?;
        (status == 200).then_some(batch)
    }

    /// Polls until the batch satisfies `wanted`; panics after `limit` with the last object seen.
    pub(crate) async fn wait_batch(&self, id: &str, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + limit;
        let mut last = Value::Null;
        loop {
            if let Some(batch) = self.batch(id).await {
                if wanted(&batch) {
                    return batch;
                }
                last = batch;
            }
            assert!(
                Instant::now() < end,
                "batch not as wanted within {limit:?}, last seen {last}\n{}",
                self.log_tail()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Lines of a published file, parsed; empty when `id` is null.
    pub(crate) async fn file_lines(&self, id: &Value) -> Vec<Value> {
        let Some(id) = id.as_str() else { return Vec::new() };
        let url = format!("{}/v1/files/{id}/content", self.url);
        let response = reqwest::Client::new().get(url).send().await.expect("content is answered");
        assert!(response.status().is_success(), "content of {id}: {}", response.status());
        let text = response.text().await.expect("content is text");
        text.lines().map(|line| serde_json::from_str(line).expect("a published line is JSON")).collect()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Whether a batch has ended.
pub(crate) fn is_terminal(batch: &Value) -> bool {
    matches!(batch["status"].as_str(), Some("completed" | "failed" | "expired" | "cancelled"))
}

/// A fetched model below `OVERNIGHT_TEST_MODELS`. Without it the test says so and
/// ends, unless `OVERNIGHT_TEST_REQUIRE` lists `model`.
pub(crate) fn real_model(name: &str) -> Option<PathBuf> {
    let path = setting("OVERNIGHT_TEST_MODELS").map(|folder| Path::new(&folder).join(name));
    let path = path.filter(|path| path.is_file());
    if path.is_none() {
        missing("model", &format!("{name} in the folder OVERNIGHT_TEST_MODELS"));
    }
    path
}

/// Says what a test lacks; a panic when `OVERNIGHT_TEST_REQUIRE` lists it.
#[track_caller]
pub(crate) fn missing(what: &str, detail: &str) {
    let required = setting("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == what), "this test needs {detail}");
    eprintln!("skipped: this test needs {detail}");
}
