//! The store's contract on SQLite: one file, one writer connection, readers apart.
//!
//! Invariant: every write transaction is `begin immediate` on the one writer
//! connection, is short, and is durable on return (WAL, synchronous=FULL).
//! Several processes of one machine may open the same file; never put it on a
//! network file system. Knows nothing about objects, the engine or HTTP.
//! Start with [`SqliteStore::open`], then `commit.rs`, the durable path's heart.
//! Every moment is read from the database inside the transaction that uses it.

#![warn(missing_docs, clippy::unwrap_used)]

mod attempts;
mod audit;
mod commit;
mod error;
mod events;
mod faults;
mod files;
mod job_insert;
mod job_row;
mod jobs;
mod maintain;
mod migrate;
mod options;
mod outbox;
mod purge;
mod reopen;
mod retention;
mod row;
mod segments;
mod shards;
mod statement;
mod steps;
mod take_back;
mod transaction;
mod workers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{Error, Store, Wake, Woken};
use overnight_types::Timestamp;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{Connection, SqlitePool};
use tokio::sync::Notify;

use crate::row::Read;
use crate::statement::Statement;

pub use migrate::{SchemaState, migrate, schema_state};
pub use options::{ClockOffset, Options};

/// How long a call waits for a free connection before it is an error.
const ACQUIRE_MAX: Duration = Duration::from_secs(30);

/// The store in one SQLite file. Clones share their connections.
#[derive(Clone, Debug)]
pub struct SqliteStore {
    writer: SqlitePool,
    readers: SqlitePool,
    wake: Arc<Notify>,
    path: PathBuf,
    connect: SqliteConnectOptions,
    clock_offset: ClockOffset,
    epoch_guard: bool,
}

impl SqliteStore {
    /// Opens the file, creating and migrating it where needed. A database of a
    /// newer schema is [`Error::NewerSchema`]; without [`Options::migrate`] an
    /// older one is [`Error::Schema`].
    pub async fn open(path: impl AsRef<Path>, options: Options) -> Result<Self, Error> {
        let path = path.as_ref().to_owned();
        let doing = "open the database";
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .min_connections(1)
            .acquire_timeout(ACQUIRE_MAX)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            // SQLite may end a transaction by itself, for example when the disk is full.
            // sqlx's rollback then fails, and it counts the transaction as open for good;
            // such a connection is closed, and the next one begins anew.
            .before_acquire(|connection, _| Box::pin(async { Ok(!connection.is_in_transaction()) }))
            .connect_with(options.connect(&path))
            .await
            .map_err(error::failed(doing))?;
        if let Err(err) = migrate::prepare(&writer, options.migrate).await {
            writer.close().await;
            return Err(err);
        }
        let readers = SqlitePoolOptions::new()
            .max_connections(options.readers.max(1))
            .acquire_timeout(ACQUIRE_MAX)
            .test_before_acquire(false)
            .connect_with(options.connect(&path).pragma("query_only", "on"))
            .await
            .map_err(error::failed(doing))?;
        Ok(Self {
            writer,
            readers,
            wake: Arc::new(Notify::new()),
            connect: options.connect(&path),
            path,
            clock_offset: options.clock_offset,
            epoch_guard: !options.unsafe_without_epoch_guard,
        })
    }

    /// Closes every connection, with the log folded into the file. Calls after it fail.
    pub async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Wake for SqliteStore {
    fn woken(&self) -> Woken {
        // Registered from here on, not from its first poll.
        Box::pin(self.wake.clone().notified_owned())
    }
}

#[async_trait]
impl Store for SqliteStore {
    fn backend(&self) -> &'static str {
        "sqlite"
    }

    async fn now(&self) -> Result<Timestamp, Error> {
        let doing = "read the database's clock";
        let mut connection = self.readers.acquire().await.map_err(error::failed(doing))?;
        let now = transaction::read_clock(&mut connection, &self.clock_offset).await.map_err(error::failed(doing))?;
        Ok(Timestamp::from_micros(now))
    }

    async fn keep_objects_id(&self, mine: uuid::Uuid) -> Result<uuid::Uuid, Error> {
        let doing = "keep the objects' id";
        let kept = || {
            sqlx::query("select objects_id from installation").find(&self.readers, doing, |row| row.uuid("objects_id"))
        };
        // Read first: every start but one writes nothing.
        if let Some(kept) = kept().await? {
            return Ok(kept);
        }
        let mut write = self.write(doing).await?;
        sqlx::query("insert into installation (one, objects_id) values (1, ?1) on conflict (one) do nothing")
            .bind(row::key(mine))
            .change(&mut write)
            .await?;
        self.commit(write).await?;
        Ok(kept().await?.unwrap_or(mine))
    }

    async fn forget_objects_id(&self) -> Result<bool, Error> {
        let mut write = self.write("forget the objects' id").await?;
        let num = sqlx::query("delete from installation").change(&mut write).await?;
        self.commit(write).await?;
        Ok(num > 0)
    }

    async fn check(&self) -> Result<Vec<String>, Error> {
        self.find_faults_of_structure().await
    }

    async fn size_bytes(&self) -> Result<u64, Error> {
        self.bytes_on_disk()
    }

    async fn close(&self) {
        SqliteStore::close(self).await;
    }
}
