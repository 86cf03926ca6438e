//! An S3 server whose objects are files below a folder, so that it can be killed and
//! started again without losing what it answered for: s3s-fs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::objects::BUCKET;
use crate::process::{Process, free_port};

const ACCESS_KEY: &str = "OVERNIGHTTEST";
const SECRET_KEY: &str = "overnight-test-secret";
/// Longest that a start may take.
const START_MAX: Duration = Duration::from_secs(20);

/// A running server. Dropping it ends the server; the folder is the caller's.
#[derive(Debug)]
pub struct S3Server {
    program: PathBuf,
    root: PathBuf,
    port: u16,
    process: Option<Process>,
}

impl S3Server {
    /// The program: `OVERNIGHT_TEST_S3_FS_BIN`, or `target/tools/bin/s3s-fs` beside the
    /// folder that this test was built into.
    pub fn find() -> Option<PathBuf> {
        let beside = || Some(std::env::current_exe().ok()?.ancestors().nth(3)?.join("tools/bin/s3s-fs"));
        let path = crate::setting("OVERNIGHT_TEST_S3_FS_BIN").map(PathBuf::from).or_else(beside);
        path.filter(|path| path.is_file())
    }

    /// Starts it with an empty bucket below `root`. Errors say what is missing or what it said.
    pub fn start(root: &Path) -> Result<Self, String> {
        let program = Self::find().ok_or(
            "s3s-fs (cargo install s3s-fs --version 0.14.1 --features binary --root target/tools, as tests/setup.sh does)",
        )?;
        std::fs::create_dir_all(root.join(BUCKET)).map_err(|err| format!("{}: {err}", root.display()))?;
        let port = free_port().map_err(|err| err.to_string())?;
        let mut server = Self { program, root: root.to_owned(), port, process: None };
        server.start_again()?;
        Ok(server)
    }

    /// Starts it after [`S3Server::kill`], on the same port.
    pub fn start_again(&mut self) -> Result<(), String> {
        let mut command = Process::with_writes_that_can_be_refused();
        let port = self.port.to_string();
        command.arg(&self.program).args(["--host", "127.0.0.1", "--port", &port]);
        command.args(["--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY]).arg(&self.root);
        let log = self.root.with_extension("log");
        let mut process = Process::spawn("object server", command, &log).map_err(|err| format!("s3s-fs: {err}"))?;
        let until = Instant::now() + START_MAX;
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if process.ended().is_some() || Instant::now() > until {
                return Err(format!("s3s-fs does not listen on {}: {}", self.port, process.log_tail()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.process = Some(process);
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| process.ended().is_none())
    }

    /// Fills its disk up, or frees it.
    pub fn set_disk_full(&self, is_full: bool) -> std::io::Result<()> {
        let bytes = is_full.then_some(0);
        self.process.as_ref().map_or(Ok(()), |process| process.limit_files(bytes))
    }

    /// Where it listens on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder that holds the bucket's objects under their names.
    pub fn bucket(&self) -> PathBuf {
        self.root.join(BUCKET)
    }

    /// Pieces of uploads that nobody completed or aborted.
    pub fn num_upload_pieces(&self) -> usize {
        let entries = std::fs::read_dir(&self.root).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().contains(".part-")).count()
    }

    /// What a process needs in its environment to use it by way of `port`: its own, or a proxy's.
    pub fn environment_by(host: &str, port: u16) -> Vec<(String, String)> {
        let endpoint = format!("http://{host}:{port}");
        let variables = [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ENDPOINT_URL", &endpoint),
        ];
        variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
    }
}
