//! One write transaction: immediate, with the database's clock read inside it.

use std::ops::{Deref, DerefMut};

use overnight_store::Error;
use overnight_types::{JobId, Timestamp};
use sqlx::{Sqlite, SqliteConnection, Transaction};

use crate::error::failed;
use crate::row::key;
use crate::{ClockOffset, SqliteStore};

/// A running write transaction; dropped without `SqliteStore::commit` it rolls back.
pub(crate) struct Write {
    inner: Transaction<'static, Sqlite>,
    /// Microseconds since 1970, one moment for the whole transaction.
    pub(crate) now: i64,
    doing: &'static str,
    wakes: bool,
}

impl SqliteStore {
    /// Begins a write transaction. `doing` is words after "to", for errors.
    pub(crate) async fn write(&self, doing: &'static str) -> Result<Write, Error> {
        let mut inner = self.writer.begin_with("begin immediate").await.map_err(failed(doing))?;
        let now = read_clock(&mut inner, &self.clock_offset).await.map_err(failed(doing))?;
        Ok(Write { inner, now, doing, wakes: false })
    }

    /// Makes the transaction durable, then wakes waiting loops if it made something due.
    pub(crate) async fn commit(&self, write: Write) -> Result<(), Error> {
        let Write { inner, doing, wakes, .. } = write;
        inner.commit().await.map_err(failed(doing))?;
        if wakes {
            self.wake.notify_waiters();
        }
        Ok(())
    }

    /// The clock, for a read.
    pub(crate) async fn read_now(&self, doing: &'static str) -> Result<i64, Error> {
        let mut connection = self.readers.acquire().await.map_err(failed(doing))?;
        read_clock(&mut connection, &self.clock_offset).await.map_err(failed(doing))
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

    /// Writes the audit row of a change.
    pub(crate) async fn record_event(&mut self, job: JobId, what: &str, note: &str) -> Result<(), Error> {
        let doing = self.doing;
        sqlx::query("insert into events (job_id, at, what, note) values (?1, ?2, ?3, ?4)")
            .bind(key(job.uuid()))
            .bind(self.now)
            .bind(what)
            .bind(note)
            .execute(&mut **self)
            .await
            .map_err(failed(doing))?;
        Ok(())
    }

    /// The transaction's moment.
    pub(crate) fn moment(&self) -> Timestamp {
        Timestamp::from_micros(self.now)
    }
}

impl Deref for Write {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.inner
    }
}

impl DerefMut for Write {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.inner
    }
}

/// The database's clock in microseconds. SQLite keeps milliseconds.
pub(crate) async fn read_clock(connection: &mut SqliteConnection, offset: &ClockOffset) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar("select cast(round(unixepoch('subsec') * 1000) as integer) * 1000 + ?1")
        .bind(offset.micros())
        .fetch_one(connection)
        .await
}

#[cfg(test)]
mod tests {
    use crate::{Options, SqliteStore};

    /// SQLite rolls back by itself when the disk is full in mid-transaction; the writer
    /// must not be lost with it, since there is only one.
    #[tokio::test]
    async fn transaction_that_sqlite_ended_by_itself_spoils_no_later_one() {
        let folder = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(folder.path().join("overnight.db"), Options::default()).await.unwrap();
        let mut write = store.write("test").await.unwrap();
        sqlx::query("rollback").execute(&mut *write).await.unwrap();
        drop(write);
        for _ in 0..2 {
            let write = store.write("test").await.unwrap();
            store.commit(write).await.unwrap();
        }
        let failed = store.write("test").await.unwrap();
        drop(failed);
        let write = store.write("test").await.unwrap();
        store.commit(write).await.unwrap();
    }
}
