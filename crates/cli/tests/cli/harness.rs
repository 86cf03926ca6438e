//! Runs the built binary in a folder of its own, with nothing of the machine's settings.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Bound of every wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A folder with a home of its own.
pub(crate) struct Home {
    folder: tempfile::TempDir,
}

/// What a command said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|err| panic!("stdout is not JSON ({err}): {self:?}"))
    }

    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Home {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file and returns its name.
    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        std::fs::write(self.path().join(name), text).expect("written");
        name.to_owned()
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path().join(name)).unwrap_or_else(|err| panic!("{name}: {err}"))
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_batch"));
        let keep: Vec<(String, String)> =
            std::env::vars().filter(|(name, _)| matches!(name.as_str(), "PATH" | "LANG" | "TMPDIR")).collect();
        command.env_clear().envs(keep).env("HOME", self.path()).current_dir(self.path()).args(arguments);
        command
    }

    pub(crate) fn batch(&self, arguments: &[&str]) -> Said {
        self.command(arguments).stdin(Stdio::null()).output().expect("batch starts").into()
    }

    pub(crate) fn batch_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Said {
        let mut command = self.command(arguments);
        command.envs(variables.iter().copied()).stdin(Stdio::null()).output().expect("batch starts").into()
    }

    pub(crate) fn batch_fed(&self, input: &str, arguments: &[&str]) -> Said {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("batch starts");
        child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("read by the command");
        child.wait_with_output().expect("batch ends").into()
    }
}

/// Lines for a batch, `custom_id` c0, c1, ….
pub(crate) fn items(num: usize, model: &str) -> String {
    (0..num)
        .map(|index| {
            format!(
                r#"{{"custom_id":"c{index}","method":"POST","url":"/v1/completions","body":{{"model":"{model}","prompt":"p{index}","max_tokens":1}}}}"#
            ) + "\n"
        })
        .collect()
}

/// A running `batch serve`; killed when dropped.
pub(crate) struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts it on the home's own data folder and waits until it answers.
    pub(crate) fn start(home: &Home, arguments: &[&str]) -> Self {
        let log = home.path().join("serve.log");
        let stderr = std::fs::File::create(&log).expect("a log file");
        // A killed server leaves its card, which must not be taken for the new one's.
        let card = home.path().join("overnight-data/server.json");
        let _ = std::fs::remove_file(&card);
        let mut all = vec!["serve", "--port", "0"];
        all.extend(arguments);
        let child =
            home.command(&all).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().expect("starts");
        let mut server = Self { child, log };
        let start = Instant::now();
        while !card.is_file() {
            if let Some(status) = server.child.try_wait().expect("a child can be asked") {
                panic!("batch serve ended at its start: {status}\n{}", server.log());
            }
            assert!(start.elapsed() < LIMIT, "batch serve does not answer\n{}", server.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        server
    }

    pub(crate) fn instant(home: &Home) -> Self {
        Self::start(home, &["--set", "engine.kind=instant"])
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn terminate(mut self) -> i32 {
        signal(&self.child, rustix::process::Signal::TERM);
        wait(&mut self.child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that does not outlive its test.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).expect("the child lives");
}

/// The exit code; panics when it does not come.
pub(crate) fn wait(child: &mut Child) -> i32 {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child can be asked") {
            return status.code().unwrap_or(-1);
        }
        assert!(start.elapsed() < LIMIT, "the process does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the process has taken this signal over; Linux says so in /proc.
pub(crate) fn wait_until_caught(child: &mut Child, signal: rustix::process::Signal) {
    let start = Instant::now();
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        if caught & (1 << (signal.as_raw() - 1)) != 0 {
            return;
        }
        assert_eq!(child.try_wait().expect("a child can be asked"), None, "it ended before the signal");
        assert!(start.elapsed() < LIMIT, "the signal is not taken over");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A server that answers every request with this status and body.
pub(crate) fn answering(status: &'static str, body: &'static str) -> String {
    serving(move |_| Some((status.to_owned(), body.to_owned())))
}

/// A server that takes requests and never answers.
pub(crate) fn silent() -> String {
    serving(|_| None)
}

/// A server that answers each request line (`GET /path HTTP/1.1`) as it is told to;
/// `None` leaves it without an answer.
pub(crate) fn serving(answer: impl Fn(&str) -> Option<(String, String)> + Send + Sync + 'static) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let answer = std::sync::Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = std::sync::Arc::clone(&answer);
            std::thread::spawn(move || answer_all(stream, answer.as_ref()));
        }
    });
    format!("http://{address}")
}

fn answer_all(mut stream: std::net::TcpStream, answer: &dyn Fn(&str) -> Option<(String, String)>) {
    let mut buffer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let head_end = buffer.windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(end) = head_end {
            let head = String::from_utf8_lossy(&buffer[..end]).to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            let whole = end + 4 + length.unwrap_or(0);
            if buffer.len() >= whole {
                let line = String::from_utf8_lossy(&buffer).lines().next().unwrap_or_default().to_owned();
                buffer.drain(..whole);
                let Some((status, body)) = answer(&line) else { continue };
                let answer = format!(
                    "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                if stream.write_all(answer.as_bytes()).is_err() {
                    return;
                }
                continue;
            }
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(read) => buffer.extend_from_slice(&piece[..read]),
        }
    }
}
