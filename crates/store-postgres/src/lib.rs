//! The store's contract on PostgreSQL 14 to 17: one database, any number of processes
//! on any number of machines.
//!
//! Invariant: what is called often is one statement that carries its own guard, in one
//! round trip; every other change locks its job's row first (`transaction.rs` has the
//! whole order). Every moment is the server's, read where it is used.
//! Knows nothing about objects, the engine or HTTP.
//! Start with [`PostgresStore::open`], then `commit.rs`, the durable path's heart.
//!
//! Not served through a pooler in transaction mode without prepared statements
//! (PgBouncer: 1.21 with `max_prepared_statements`), and woken by polling alone there.

#![warn(missing_docs, clippy::unwrap_used)]

mod attempts;
mod audit;
mod claim;
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
mod progress;
mod purge;
mod reopen;
mod retention;
mod row;
mod segments;
mod settle;
mod shards;
mod statement;
mod steps;
mod take_back;
mod transaction;
mod wake;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{Error, Store, Wake, Woken};
use overnight_types::Timestamp;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

pub use migrate::{SchemaState, migrate, schema_state};
pub use options::{ClockOffset, Options, Url};

use crate::row::Read;
use crate::statement::Statement;
use crate::wake::Wakes;

/// A connection that comes back after a call without an answer must answer within this time.
const RELEASE_MAX: Duration = Duration::from_secs(3);
/// A connection that was idle for longer is tried before it is used: its server may have
/// been restarted since.
const IDLE_UNTRIED_MAX: Duration = Duration::from_secs(1);

/// The store in one Postgres database. Clones share their connections.
#[derive(Clone, Debug)]
pub struct PostgresStore {
    pool: PgPool,
    wakes: Arc<Wakes>,
    url: Url,
    call_max: Duration,
    clock_offset: ClockOffset,
    epoch_guard: bool,
}

impl PostgresStore {
    /// Opens the database, migrating it where needed. A database of a newer schema is
    /// [`Error::NewerSchema`]; without [`Options::migrate`] an older one is
    /// [`Error::Schema`]. A server that does not answer is [`Error::Unavailable`].
    pub async fn open(url: &Url, options: Options) -> Result<Self, Error> {
        let pool = pool(url, &options);
        if let Err(err) = migrate::prepare(&pool, options.migrate, options.call_max()).await {
            pool.close().await;
            return Err(err);
        }
        let wakes = Wakes::start(url, &options, pool.clone());
        Ok(Self {
            pool,
            wakes,
            url: url.clone(),
            call_max: options.call_max(),
            clock_offset: options.clock_offset,
            epoch_guard: !options.unsafe_without_epoch_guard,
        })
    }

    /// Closes every connection. Calls after it fail.
    pub async fn close(&self) {
        self.wakes.stop();
        self.pool.close().await;
    }

    /// Where the database is.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Whether wake-ups of other processes come in now; otherwise polling finds what they would tell.
    pub fn is_listening(&self) -> bool {
        self.wakes.is_listening()
    }

    pub(crate) fn wake_all(&self) {
        self.wakes.wake_all();
    }
}

pub(crate) fn pool(url: &Url, options: &Options) -> PgPool {
    PgPoolOptions::new()
        .max_connections(options.connections.max(1))
        .acquire_timeout(options.acquire_timeout)
        .idle_timeout(Duration::from_secs(300))
        .max_lifetime(Duration::from_secs(3_600))
        // A round trip at each call would double the cost of most; only what lay idle is tried.
        .test_before_acquire(false)
        .before_acquire(|connection, met| {
            Box::pin(async move {
                if met.idle_for < IDLE_UNTRIED_MAX {
                    return Ok(true);
                }
                let alive = sqlx::Connection::ping(connection);
                Ok(matches!(tokio::time::timeout(Duration::from_secs(3), alive).await, Ok(Ok(()))))
            })
        })
        .after_release(|connection, _| {
            Box::pin(async move {
                if !statement::is_suspect() {
                    return Ok(true);
                }
                let alive = tokio::time::timeout(RELEASE_MAX, sqlx::Connection::ping(connection)).await;
                // An error closes it without a word to a server that does not listen.
                alive.unwrap_or_else(|_| Err(sqlx::Error::PoolTimedOut)).map(|()| true)
            })
        })
        .connect_lazy_with(options.connect(url))
}

impl Wake for PostgresStore {
    fn woken(&self) -> Woken {
        self.wakes.woken()
    }
}

#[async_trait]
impl Store for PostgresStore {
    fn backend(&self) -> &'static str {
        "postgres"
    }

    async fn now(&self) -> Result<Timestamp, Error> {
        Ok(Timestamp::from_micros(self.read_now("read the database's clock").await?))
    }

    async fn keep_objects_id(&self, mine: uuid::Uuid) -> Result<uuid::Uuid, Error> {
        let doing = "keep the objects' id";
        sqlx::query("insert into installation (one, objects_id) values (1, $1) on conflict (one) do nothing")
            .bind(mine)
            .change_of(self, doing)
            .await?;
        // A statement of its own: what another process has just kept is not seen by the first.
        let kept = sqlx::query("select objects_id from installation").find(self, doing, |row| row.uuid("objects_id"));
        Ok(kept.await?.unwrap_or(mine))
    }

    async fn forget_objects_id(&self) -> Result<bool, Error> {
        Ok(sqlx::query("delete from installation").change_of(self, "forget the objects' id").await? > 0)
    }

    async fn check(&self) -> Result<Vec<String>, Error> {
        self.find_faults_of_structure().await
    }

    async fn size_bytes(&self) -> Result<u64, Error> {
        self.bytes_on_disk().await
    }

    async fn close(&self) {
        PostgresStore::close(self).await;
    }
}
