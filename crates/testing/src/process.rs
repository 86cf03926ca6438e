//! A child process as a supervisor sees it: started, signalled, watched, with its log.
//!
//! Owns the child: dropping a [`Process`] kills it. Knows nothing of what it runs.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

/// One run of a program.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// Bytes that earlier runs had written into the log.
    log_begin: u64,
}

impl Process {
    /// Starts `command`; what it says is appended to `log`.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(log)?;
        let log_begin = file.metadata()?.len();
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Ok(Self { name: name.to_owned(), child: command.spawn()?, log: log.to_owned(), log_begin })
    }

    /// A command that runs what is added to it so that a write past a limit is an error of
    /// that write and not the end of the process (see [`Process::limit_files`]). What it
    /// says goes through another process, which has no limit. The process keeps its id.
    pub fn with_writes_that_can_be_refused() -> Command {
        let mut command = Command::new("bash");
        command.args(["-c", "trap '' XFSZ; exec \"$@\" > >(exec cat) 2>&1", "bash"]);
        command
    }

    /// What it is called in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal; a process that is gone already is what the caller wanted.
    fn signal(&self, signal: Signal) {
        let _gone = kill_process(Pid::from_child(&self.child), signal);
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().expect("a killed child can be waited for");
    }

    /// SIGTERM: asks it to end in order.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGSTOP.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Whether it is stopped now.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        // The state stands after the name, which is in parentheses and may hold any character.
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
    }

    /// How it ended, once it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be asked")
    }

    /// Waits for its end; `None` after `limit`.
    pub fn wait_end(&mut self, limit: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + limit;
        loop {
            match self.ended() {
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                ended => return ended,
            }
        }
    }

    /// Refuses every write that would make a file longer than `bytes`, as a full disk does;
    /// `None` ends that. Needs [`Process::with_writes_that_can_be_refused`], and that it has
    /// begun: earlier the limit would hold for the process that writes its log as well.
    pub fn limit_files(&self, bytes: Option<u64>) -> io::Result<()> {
        prlimit(Some(Pid::from_child(&self.child)), Resource::Fsize, Rlimit { current: bytes, maximum: None })?;
        Ok(())
    }

    /// What this run has said so far.
    pub fn said(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let begin = usize::try_from(self.log_begin).unwrap_or(usize::MAX).min(text.len());
        String::from_utf8_lossy(&text[begin..]).into_owned()
    }

    /// The end of its log, for a failure's message.
    pub fn log_tail(&self) -> String {
        let text = self.said();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A port of loopback that was free a moment ago.
pub fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str) -> (tempfile::TempDir, Process) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Process::with_writes_that_can_be_refused();
        command.args(["bash", "-c", script]).current_dir(folder.path());
        let process = Process::spawn("script", command, &folder.path().join("log")).unwrap();
        (folder, process)
    }

    fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
        let until = Instant::now() + Duration::from_secs(10);
        while !is_there() {
            assert!(Instant::now() < until, "{what} did not happen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn stopped_process_goes_on_and_ends_when_asked() {
        let (_folder, mut process) = start("echo ready; while :; do read -t 0.01 <> <(:); done");
        wait_for("its first word", || process.said().contains("ready"));
        process.stop();
        wait_for("the stop", || process.is_stopped());
        process.terminate();
        assert!(process.ended().is_none(), "a stopped process does not see SIGTERM");
        process.go_on();
        assert!(process.wait_end(Duration::from_secs(10)).is_some());
    }

    #[test]
    fn refused_write_is_an_error_and_its_end_is_the_end_of_it() {
        let script = "echo ready; until [ -e go ]; do sleep 0.01; done; echo x >a 2>/dev/null || echo refused; \
            until [ -e on ]; do sleep 0.01; done; echo x >a && echo written";
        let (folder, mut process) = start(script);
        wait_for("its first word", || process.said().contains("ready"));
        process.limit_files(Some(0)).unwrap();
        std::fs::write(folder.path().join("go"), b"").unwrap();
        wait_for("the refusal", || process.said().contains("refused"));
        process.limit_files(None).unwrap();
        std::fs::write(folder.path().join("on"), b"").unwrap();
        assert!(process.wait_end(Duration::from_secs(10)).unwrap().success());
        wait_for("the last word", || process.said().contains("written"));
    }
}
