//! Which database and which objects the processes of these tests use.
//!
//! `OVERNIGHT_TEST_BACKEND` is `sqlite` with a local folder (also when unset), `postgres`
//! with a local folder, or `postgres-s3`. Invariant: each data folder has a database, and
//! a prefix in the bucket, of its own, so that a test reads the same on every back end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::TryStreamExt;
use overnight_blobs::{Blobs, ObjectName, Prefix};
use overnight_store::Store;
use overnight_store_postgres::PostgresStore;
use overnight_store_sqlite::{Options, SqliteStore};
use overnight_testing::postgres::Database;
use overnight_types::JobId;
use sha2::{Digest, Sha256};

use crate::harness::setting;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Sqlite,
    Postgres,
    PostgresS3,
}

/// The one of this run.
pub(crate) fn backend() -> Backend {
    match setting("OVERNIGHT_TEST_BACKEND").as_deref() {
        None | Some("sqlite") => Backend::Sqlite,
        Some("postgres") => Backend::Postgres,
        Some("postgres-s3") => Backend::PostgresS3,
        Some(other) => panic!("OVERNIGHT_TEST_BACKEND is sqlite, postgres or postgres-s3, not {other}"),
    }
}

/// True, after a word on stderr, where a test is about a part that this back end has not.
pub(crate) fn is_without(part: &str, has_it: impl Fn(Backend) -> bool) -> bool {
    let backend = backend();
    if has_it(backend) {
        return false;
    }
    eprintln!("not for {backend:?}: this test is about {part}");
    true
}

/// Settings of the processes of this data folder; its database is made at the first call.
pub(crate) fn environment(data_dir: &Path) -> Vec<(String, String)> {
    let backend = backend();
    if backend == Backend::Sqlite {
        return Vec::new();
    }
    let url = with_database(data_dir, |database| database.url().to_owned());
    let mut all = vec![("OVERNIGHT_DATABASE__URL".to_owned(), url)];
    if backend == Backend::PostgresS3 {
        all.push(("OVERNIGHT_OBJECTS__URL".to_owned(), objects_url(data_dir)));
        all.extend(object_store());
    }
    all
}

/// Databases that this process has made, by data folder.
static MADE: Mutex<BTreeMap<PathBuf, Database>> = Mutex::new(BTreeMap::new());

fn made() -> MutexGuard<'static, BTreeMap<PathBuf, Database>> {
    // One map operation per section, whole across a panic.
    MADE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the database of a data folder, which is made at the first time.
fn with_database<T>(data_dir: &Path, ask: impl FnOnce(&Database) -> T) -> T {
    let path = std::path::absolute(data_dir).expect("a test's folder has a path");
    let create = || Database::create().expect("this back end needs Postgres; tests/with_services.sh starts one");
    ask(made().entry(path).or_insert_with(create))
}

/// Lets a data folder go that nobody uses any more, and its database.
pub(crate) fn forget(data_dir: &Path) {
    std::fs::remove_dir_all(data_dir).expect("a round's folder can go");
    made().remove(&std::path::absolute(data_dir).expect("a test's folder has a path"));
}

fn service(name: &str) -> String {
    setting(name).unwrap_or_else(|| panic!("this back end needs {name}; tests/with_services.sh sets it"))
}

fn objects_url(data_dir: &Path) -> String {
    // A short name that is the folder's own.
    let path = std::path::absolute(data_dir).expect("a test's folder has a path");
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    let name: String = digest[..10].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("s3://overnight/{name}")
}

fn object_store() -> Vec<(String, String)> {
    let of = |name: &str, value: String| (name.to_owned(), value);
    vec![
        of("AWS_ENDPOINT_URL", service("OVERNIGHT_TEST_S3_FS")),
        of("AWS_ACCESS_KEY_ID", service("OVERNIGHT_TEST_S3_ACCESS_KEY")),
        of("AWS_SECRET_ACCESS_KEY", service("OVERNIGHT_TEST_S3_SECRET_KEY")),
        of("AWS_REGION", "us-east-1".to_owned()),
        of("AWS_ALLOW_HTTP", "true".to_owned()),
    ]
}

/// The database of a data folder, read beside its processes or after them.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) store: Arc<dyn Store>,
    /// A copy of what a kill left, where the database is a file.
    _copy: Option<tempfile::TempDir>,
}

impl Opened {
    /// As its processes see it.
    pub(crate) async fn beside(data_dir: &Path) -> Self {
        Self::if_there(data_dir).await.expect("the database opens")
    }

    /// The same; `None` while no process has made it.
    pub(crate) async fn if_there(data_dir: &Path) -> Option<Self> {
        if backend() == Backend::Sqlite {
            return Self::sqlite(&data_dir.join("overnight.db"), None).await;
        }
        let url = with_database(data_dir, Database::store_url);
        let options = overnight_store_postgres::Options { connections: 2, migrate: false, ..Default::default() };
        let store = PostgresStore::open(&url, options).await.ok()?;
        Some(Self { store: Arc::new(store), _copy: None })
    }

    /// As a kill left it. A file is copied first: the next start finds the original as the
    /// kill left it, its log not taken over.
    pub(crate) async fn after_kill(data_dir: &Path) -> Self {
        if backend() != Backend::Sqlite {
            return Self::beside(data_dir).await;
        }
        let copy = tempfile::tempdir().expect("a temporary folder");
        for name in ["overnight.db", "overnight.db-wal"] {
            // Without a log when all of it had been taken over.
            if data_dir.join(name).exists() {
                std::fs::copy(data_dir.join(name), copy.path().join(name)).expect("a database's file can be copied");
            }
        }
        let path = copy.path().join("overnight.db");
        Self::sqlite(&path, Some(copy)).await.expect("the database opens")
    }

    async fn sqlite(path: &Path, copy: Option<tempfile::TempDir>) -> Option<Self> {
        let options = Options { migrate: false, ..Options::default() };
        let store = SqliteStore::open(path, options).await.ok()?;
        Some(Self { store: Arc::new(store), _copy: copy })
    }

    /// Closes it.
    pub(crate) async fn close(self) {
        self.store.close().await;
    }
}

/// Whether no other session is within a transaction: a process that is stopped there would
/// stop everybody else too.
pub(crate) async fn is_database_free(data_dir: &Path) -> bool {
    if backend() == Backend::Sqlite {
        // Opening looks at the schema under the lock for writing.
        let options = Options { busy_timeout: Duration::from_millis(200), ..Options::default() };
        let Ok(store) = SqliteStore::open(data_dir.join("overnight.db"), options).await else { return false };
        store.close().await;
        return true;
    }
    let num_open = with_database(data_dir, |database| {
        database.sql(
            "select count(*) from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid() and xact_start is not null
                and state <> 'active'",
        )
    });
    num_open == "0"
}

/// Segment objects of a job, also those that no row names, and halves where they can be seen.
pub(crate) async fn num_segment_objects(data_dir: &Path, job: JobId) -> usize {
    if backend() == Backend::PostgresS3 {
        let options = overnight_blobs::Options { environment: object_store(), ..Default::default() };
        let blobs = Blobs::open(&objects_url(data_dir), &options).await.expect("the bucket opens");
        let listed: Vec<_> = blobs.list(Prefix::Job(job)).try_collect().await.expect("the bucket can be listed");
        return listed.iter().filter(|object| matches!(object.name, ObjectName::Segment { .. })).count();
    }
    let mut objects: Vec<PathBuf> = Vec::new();
    let folder = data_dir.join("objects/jobs").join(job.to_string()).join("segments");
    if folder.is_dir() {
        crate::sync_order::files_below(&folder, &mut objects);
    }
    objects.len()
}
