//! Postgres for tests: a database of one test's own on the server that `make test` starts,
//! and servers of a test's own, which it may stop and start.
//!
//! Both need the environment that `tests/with_services.sh` gives. Without it a test says
//! so and ends, or fails when `OVERNIGHT_TEST_REQUIRE` lists `postgres`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use overnight_store_postgres::{ClockOffset, Options, PostgresStore, Url};

use crate::setting;

/// Says that there is no Postgres; a panic when `OVERNIGHT_TEST_REQUIRE` lists it.
fn lacking(what: &str) {
    let required = setting("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == "postgres"), "postgres is required: {what}");
    eprintln!("skipped: {what}; `tests/with_services.sh` starts one");
}

/// An empty database, dropped with this.
#[derive(Debug)]
pub struct Database {
    url: String,
    name: String,
    admin: String,
    bin: PathBuf,
}

impl Database {
    /// Makes one on the common server; `None`, with a word about it, when there is none.
    pub fn create() -> Option<Self> {
        let Some(admin) = setting("OVERNIGHT_TEST_POSTGRES_URL") else {
            lacking("OVERNIGHT_TEST_POSTGRES_URL is not set");
            return None;
        };
        Some(Self::on(&admin, Path::new(&setting("OVERNIGHT_TEST_POSTGRES_BIN").unwrap_or_default())))
    }

    fn on(admin: &str, bin: &Path) -> Self {
        let name = format!("test_{:016x}", rand::random::<u64>());
        let maintenance = format!("--maintenance-db={admin}");
        succeed(Command::new(bin.join("createdb")).args([&maintenance, "--template=template0", &name]));
        let (server, _) = admin.rsplit_once('/').expect("the URL names a database");
        Self { url: format!("{server}/{name}"), name, admin: admin.to_owned(), bin: bin.to_owned() }
    }

    /// Where it is, with its password.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same as the store takes it.
    pub fn store_url(&self) -> Url {
        Url::parse(&self.url).expect("the URL is one of ours")
    }

    /// Opens the store on it, few connections wide.
    pub async fn open(&self, options: Options) -> PostgresStore {
        let options = Options { connections: options.connections.min(6), ..options };
        PostgresStore::open(&self.store_url(), options).await.expect("the database opens")
    }

    /// Opens it with a clock that the test moves.
    pub async fn open_with_clock(&self) -> (PostgresStore, ClockOffset) {
        let options = Options::default();
        let clock = options.clock_offset.clone();
        (self.open(options).await, clock)
    }

    /// The same by way of another address, such as a proxy's.
    pub fn url_by(&self, address: SocketAddr) -> String {
        let (server, name) = self.url.rsplit_once('/').expect("the URL names a database");
        let (user, _) = server.rsplit_once('@').expect("the URL names a user");
        format!("{user}@{address}/{name}")
    }

    /// Runs a script of SQL as the superuser; its output, unaligned and without headers.
    #[track_caller]
    pub fn sql(&self, script: &str) -> String {
        self.try_sql(script).unwrap_or_else(|why| panic!("{why}"))
    }

    /// The same, for a server that may be away.
    pub fn try_sql(&self, script: &str) -> Result<String, String> {
        let options = ["--no-psqlrc", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1", "--command", script];
        let mut command = Command::new(self.bin.join("psql"));
        command.env("PGCONNECT_TIMEOUT", "10").args(options).arg(&self.url).stdin(Stdio::null());
        let output = command.output().map_err(|err| format!("psql does not run: {err}"))?;
        if !output.status.success() {
            return Err(format!("psql: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let maintenance = format!("--maintenance-db={}", self.admin);
        // Forced: a pool of the test's may still be open. A server that is gone took it along.
        let _ = Command::new(self.bin.join("dropdb"))
            .args([&maintenance, "--if-exists", "--force", &self.name])
            .stderr(Stdio::null())
            .status();
    }
}

/// A server of a test's own, ended with this.
#[derive(Debug)]
pub struct Server {
    folder: tempfile::TempDir,
    url: String,
    bin: PathBuf,
}

impl Server {
    /// Starts one; `None`, with a word about it, when there are no binaries.
    pub fn start() -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        // The server does not run as root and must reach its folder.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        std::fs::set_permissions(folder.path(), open).expect("the folder is ours");
        let exports = script("start", folder.path(), "fast");
        let value = |name: &str| {
            let line = exports.lines().find(|line| line.starts_with(&format!("export {name}=")))?;
            Some(line.split('\'').nth(1)?.to_owned())
        };
        let Some(url) = value("OVERNIGHT_TEST_POSTGRES_URL") else {
            lacking("there are no binaries of a PostgreSQL server");
            return None;
        };
        let bin = value("OVERNIGHT_TEST_POSTGRES_BIN").expect("the script tells where its programs are").into();
        Some(Self { folder, url, bin })
    }

    /// An empty database on it.
    pub fn database(&self) -> Database {
        Database::on(&self.url, &self.bin)
    }

    /// Where it listens on loopback.
    pub fn address(&self) -> SocketAddr {
        let (_, host) = self.url.rsplit_once('@').expect("the URL names a user");
        let (address, _) = host.split_once('/').expect("the URL names a database");
        address.parse().expect("the server listens on an address of loopback")
    }

    /// What it says.
    pub fn log(&self) -> PathBuf {
        self.folder.path().join("postgres/log")
    }

    /// Stops it: `fast` in order, `immediate` as a crash.
    pub fn stop(&self, mode: &str) {
        script("stop", self.folder.path(), mode);
    }

    /// Starts it again where it was.
    pub fn start_again(&self) {
        script("start", self.folder.path(), "fast");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        script("stop", self.folder.path(), "immediate");
    }
}

fn script(verb: &str, folder: &Path, mode: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/services/postgres.sh");
    let output = succeed(Command::new(path).arg(verb).arg(folder).arg(mode));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a program of the server's; panics with its words when it fails.
#[track_caller]
fn succeed(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|err| panic!("{command:?} does not run: {err}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}
