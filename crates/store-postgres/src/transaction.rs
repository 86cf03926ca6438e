//! One write transaction of several statements.
//!
//! Invariant, for every statement of this crate, which keeps it free of deadlocks: a
//! job's row is locked before any row of its shards; shards are locked in the order of
//! their keys; who holds a shard's lock waits for no job's. What is called often
//! (claim, commit, renewal, release) is one statement outside of any transaction of
//! several, so that no process that stands still can hold its locks.

use std::ops::{Deref, DerefMut};

use overnight_store::{Error, Guarded};
use overnight_types::{JobId, Timestamp};
use sqlx::pool::PoolConnection;
use sqlx::{Executor, PgConnection, Postgres};

use crate::error::failed;
use crate::row::text;
use crate::statement::{Statement, in_time};
use crate::{ClockOffset, PostgresStore};

/// A running write transaction; dropped without `PostgresStore::commit` it rolls back.
///
/// Not the driver's: of a `begin` that is dropped in the middle, because its caller gave up, that
/// one knows nothing (sqlx 0.9), and the connection goes back to the pool with a transaction open,
/// of which the statements of its next users are then a part, and with which they may go. Here a
/// connection whose transaction has not ended is closed, which ends it.
pub(crate) struct Write {
    /// `None` once it has ended.
    inner: Option<PoolConnection<Postgres>>,
    /// Microseconds since 1970, one moment for the whole transaction.
    pub(crate) now: i64,
    pub(crate) call_max: std::time::Duration,
    doing: &'static str,
    wakes: bool,
}

/// The database's clock in microseconds, moved by the parameter `$1`.
macro_rules! clock {
    () => {
        "(extract(epoch from clock_timestamp()) * 1000000)::bigint + $1"
    };
}
pub(crate) use clock;

impl PostgresStore {
    /// Begins a write transaction. `doing` is words after "to", for errors.
    pub(crate) async fn write(&self, doing: &'static str) -> Result<Write, Error> {
        let begun = async {
            let inner = Some(self.pool.acquire().await.map_err(failed(doing))?);
            // From here on whoever drops it ends it.
            let mut write = Write { inner, now: 0, call_max: self.call_max, doing, wakes: false };
            write.execute("begin").await.map_err(failed(doing))?;
            write.now = read_clock(&mut write, &self.clock_offset).await.map_err(failed(doing))?;
            Ok(write)
        };
        in_time(self.call_max, doing, begun).await
    }

    /// Makes the transaction durable, then wakes waiting loops if it made something due.
    pub(crate) async fn commit(&self, mut write: Write) -> Result<(), Error> {
        write.end("commit").await?;
        if write.wakes {
            self.wake_all();
        }
        Ok(())
    }

    /// The clock, for a read.
    pub(crate) async fn read_now(&self, doing: &'static str) -> Result<i64, Error> {
        let read = async {
            let mut connection = self.pool.acquire().await.map_err(failed(doing))?;
            read_clock(&mut connection, &self.clock_offset).await.map_err(failed(doing))
        };
        in_time(self.call_max, doing, read).await
    }
}

impl Write {
    /// For errors of statements in this transaction.
    pub(crate) fn doing(&self) -> &'static str {
        self.doing
    }

    /// Says that this transaction makes a job or shard due.
    pub(crate) fn wakes(&mut self) {
        self.wakes = true;
    }

    /// Gives the locks back now, with nothing written, and answers that the guard was lost. A
    /// transaction that is only dropped is rolled back a moment later, and until then claims
    /// pass its job over.
    pub(crate) async fn lose<S, T>(mut self, now: Option<S>) -> Result<Guarded<S, T>, Error> {
        self.end("rollback").await?;
        Ok(Guarded::Lost { now })
    }

    /// By its last statement; the connection goes back to the pool.
    async fn end(&mut self, statement: &'static str) -> Result<(), Error> {
        let (doing, limit) = (self.doing, self.call_max);
        let ended = async { self.execute(statement).await.map(drop).map_err(failed(doing)) };
        in_time(limit, doing, ended).await?;
        self.inner = None;
        Ok(())
    }

    /// Writes the audit row of a change. The job's row is locked, so that its events are
    /// numbered in the order in which they commit.
    pub(crate) async fn record_event(&mut self, job: JobId, what: &str, note: &str) -> Result<(), Error> {
        let now = self.now;
        sqlx::query("insert into events (job_id, at, what, note) values ($1, $2, $3, $4)")
            .bind(job.uuid())
            .bind(now)
            .bind(what)
            .bind(text(note))
            .change(self)
            .await?;
        Ok(())
    }

    /// The transaction's moment.
    pub(crate) fn moment(&self) -> Timestamp {
        Timestamp::from_micros(self.now)
    }
}

impl Deref for Write {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.inner.as_deref().expect(RUNNING)
    }
}

impl DerefMut for Write {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.inner.as_deref_mut().expect(RUNNING)
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        // Closed, not given back: what has become of its transaction is not known.
        drop(self.inner.take().map(PoolConnection::detach));
    }
}

const RUNNING: &str = "the transaction has not ended";

/// The database's clock in microseconds.
pub(crate) async fn read_clock(connection: &mut PgConnection, offset: &ClockOffset) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(concat!("select ", clock!())).bind(offset.micros()).fetch_one(connection).await
}
