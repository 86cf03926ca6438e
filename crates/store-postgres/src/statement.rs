//! Running a statement: by itself, or inside a write transaction; with the store's
//! errors and within a time that a vanished server cannot stretch.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use overnight_store::Error;
use sqlx::Postgres;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;

use crate::PostgresStore;
use crate::error::{failed, timed_out};
use crate::transaction::Write;

/// What a bound statement is run for. `doing` is words after "to", for errors; inside a
/// transaction they are the transaction's own. A trait with one implementation, because
/// only so does the end of a statement stand where its binds do: `.bind(a).rows(&mut write)`.
pub(crate) trait Statement: Sized {
    /// Every row, each by `read`.
    async fn list<T>(
        self,
        store: &PostgresStore,
        doing: &'static str,
        read: impl Fn(&PgRow) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        self.rows_of(store, doing).await?.iter().map(read).collect()
    }

    /// Every row; the statement is a transaction of its own.
    async fn rows_of(self, store: &PostgresStore, doing: &'static str) -> Result<Vec<PgRow>, Error>;

    /// The row, if there is one; the statement is a transaction of its own.
    async fn row_of(self, store: &PostgresStore, doing: &'static str) -> Result<Option<PgRow>, Error>;

    /// The row, if there is one, by `read`.
    async fn find<T>(
        self,
        store: &PostgresStore,
        doing: &'static str,
        read: impl Fn(&PgRow) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        self.row_of(store, doing).await?.as_ref().map(read).transpose()
    }

    /// Changes rows and says how many; the statement is a transaction of its own.
    async fn change_of(self, store: &PostgresStore, doing: &'static str) -> Result<u64, Error>;

    /// Changes rows and says how many.
    async fn change(self, write: &mut Write) -> Result<u64, Error>;

    /// Every row, inside a transaction.
    async fn rows(self, write: &mut Write) -> Result<Vec<PgRow>, Error>;

    /// The one row, inside a transaction.
    async fn row(self, write: &mut Write) -> Result<PgRow, Error>;

    /// The row, if there is one, inside a transaction.
    async fn row_if_any(self, write: &mut Write) -> Result<Option<PgRow>, Error>;
}

impl Statement for Query<'_, Postgres, PgArguments> {
    async fn rows_of(self, store: &PostgresStore, doing: &'static str) -> Result<Vec<PgRow>, Error> {
        in_time(store.call_max, doing, async { self.fetch_all(&store.pool).await.map_err(failed(doing)) }).await
    }

    async fn row_of(self, store: &PostgresStore, doing: &'static str) -> Result<Option<PgRow>, Error> {
        in_time(store.call_max, doing, async { self.fetch_optional(&store.pool).await.map_err(failed(doing)) }).await
    }

    async fn change_of(self, store: &PostgresStore, doing: &'static str) -> Result<u64, Error> {
        let changed = async { self.execute(&store.pool).await.map_err(failed(doing)) };
        Ok(in_time(store.call_max, doing, changed).await?.rows_affected())
    }

    async fn change(self, write: &mut Write) -> Result<u64, Error> {
        let doing = write.doing();
        let changed = in_time(write.call_max, doing, async { self.execute(&mut **write).await.map_err(failed(doing)) });
        Ok(changed.await?.rows_affected())
    }

    async fn rows(self, write: &mut Write) -> Result<Vec<PgRow>, Error> {
        let doing = write.doing();
        in_time(write.call_max, doing, async { self.fetch_all(&mut **write).await.map_err(failed(doing)) }).await
    }

    async fn row(self, write: &mut Write) -> Result<PgRow, Error> {
        let doing = write.doing();
        in_time(write.call_max, doing, async { self.fetch_one(&mut **write).await.map_err(failed(doing)) }).await
    }

    async fn row_if_any(self, write: &mut Write) -> Result<Option<PgRow>, Error> {
        let doing = write.doing();
        in_time(write.call_max, doing, async { self.fetch_optional(&mut **write).await.map_err(failed(doing)) }).await
    }
}

/// The work's answer, or an error once `limit` is over: a server that is cut off answers
/// nothing, and its socket alone may tell so only after many minutes.
pub(crate) async fn in_time<T>(
    limit: Duration,
    doing: &'static str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let mut work = std::pin::pin!(work);
    match tokio::time::timeout(limit, &mut work).await {
        Ok(done) => done,
        Err(_) => {
            // Before the work is dropped, and with it its connection.
            TIMED_OUT.store(since_start().max(1), Ordering::Relaxed);
            Err(timed_out(doing))
        }
    }
}

/// When a call last ran out of its time, milliseconds since the first look; 0: never.
static TIMED_OUT: AtomicU64 = AtomicU64::new(0);
/// Connections that come back are tried for so long after that.
const SUSPECT_MS: u64 = 60_000;

fn since_start() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_millis() as u64
}

/// Whether a call of this process has lately had no answer: then a connection that comes back to
/// the pool may be of a server that is gone, and waiting for it would keep its place for as long
/// as the network takes to say so.
pub(crate) fn is_suspect() -> bool {
    let at = TIMED_OUT.load(Ordering::Relaxed);
    at != 0 && since_start() < at + SUSPECT_MS
}
