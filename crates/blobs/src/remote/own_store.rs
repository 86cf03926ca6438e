//! An s3s-fs that a test may kill, and waiting for what others do.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::Options;
use crate::test_stores::{BUCKET, s3_environment, service, setting};

/// An s3s-fs of a test's own, killed with it.
pub(super) struct OwnStore {
    child: Child,
    binary: String,
    port: u16,
    pub(super) dir: tempfile::TempDir,
}

impl OwnStore {
    pub(super) async fn start() -> Option<Self> {
        let binary = service("s3", "OVERNIGHT_TEST_S3_FS_BIN")?;
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(BUCKET)).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Self::spawn(&binary, port, dir.path());
        let store = Self { child, binary, port, dir };
        store.wait().await;
        Some(store)
    }

    fn spawn(binary: &str, port: u16, root: &Path) -> Child {
        let [key, secret] = ["ACCESS", "SECRET"].map(|name| setting(&format!("OVERNIGHT_TEST_S3_{name}_KEY")).unwrap());
        Command::new(binary)
            .args(["--host", "127.0.0.1", "--port", &port.to_string(), "--access-key", &key, "--secret-key", &secret])
            .arg(root)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    async fn wait(&self) {
        let port = self.port;
        let answers = async || usize::from(tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok());
        eventually("the store answers", 1, answers).await;
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(super) async fn restart(&mut self) {
        self.child = Self::spawn(&self.binary, self.port, self.dir.path());
        self.wait().await;
    }

    pub(super) fn options(&self) -> Options {
        Options { environment: s3_environment(&format!("http://127.0.0.1:{}", self.port)), ..Options::default() }
    }
}

impl Drop for OwnStore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for what a task of its own will have done, and says what it was last.
pub(super) async fn eventually(what: &str, wanted: usize, mut look: impl AsyncFnMut() -> usize) {
    let started = Instant::now();
    loop {
        let found = look().await;
        if found == wanted {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{what}: {found} instead of {wanted}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
