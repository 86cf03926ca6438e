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
use sqlx::{PgConnection, Postgres, Transaction};

use crate::error::failed;
use crate::row::text;
use crate::statement::{Statement, in_time};
use crate::{ClockOffset, PostgresStore};

/// A running write transaction; dropped without `PostgresStore::commit` it rolls back.
pub(crate) struct Write {
    inner: Transaction<'static, Postgres>,
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
            let mut inner = self.pool.begin().await.map_err(failed(doing))?;
            let now = read_clock(&mut inner, &self.clock_offset).await.map_err(failed(doing))?;
            Ok((inner, now))
        };
        let (inner, now) = in_time(self.call_max, doing, begun).await?;
        Ok(Write { inner, now, call_max: self.call_max, doing, wakes: false })
    }

    /// Makes the transaction durable, then wakes waiting loops if it made something due.
    pub(crate) async fn commit(&self, write: Write) -> Result<(), Error> {
        let Write { inner, doing, wakes, .. } = write;
        in_time(self.call_max, doing, async { inner.commit().await.map_err(failed(doing)) }).await?;
        if wakes {
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
    pub(crate) async fn lose<S, T>(self, now: Option<S>) -> Result<Guarded<S, T>, Error> {
        let (doing, limit) = (self.doing, self.call_max);
        in_time(limit, doing, async { self.inner.rollback().await.map_err(failed(doing)) }).await?;
        Ok(Guarded::Lost { now })
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
        &self.inner
    }
}

impl DerefMut for Write {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.inner
    }
}

/// The database's clock in microseconds.
pub(crate) async fn read_clock(connection: &mut PgConnection, offset: &ClockOffset) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(concat!("select ", clock!())).bind(offset.micros()).fetch_one(connection).await
}
