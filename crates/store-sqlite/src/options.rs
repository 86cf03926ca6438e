//! How the file is opened.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use sqlx::sqlite::{SqliteAutoVacuum, SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};

/// Pages of log after which a commit folds them into the file (4 KiB each).
pub(crate) const WAL_PAGES_MAX: u32 = 256;

/// Bytes to which a log that ran longer is cut when it starts anew.
pub(crate) const WAL_BYTES_KEPT: u32 = 512 << 10;

/// How [`crate::SqliteStore::open`] opens the file.
#[derive(Debug, Clone)]
pub struct Options {
    /// Connections for reading.
    pub readers: u32,
    /// How long a statement waits for another process's write.
    pub busy_timeout: Duration,
    /// Bring an older schema up to date; otherwise it is refused.
    pub migrate: bool,
    /// Moves the database's clock. For tests; zero elsewhere.
    pub clock_offset: ClockOffset,
    /// Takes the lease out of commits, so that a stale worker's write is taken.
    /// A negative control for tests that must be seen to fail without the guard;
    /// no configuration reaches it.
    pub unsafe_without_epoch_guard: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            readers: 4,
            busy_timeout: Duration::from_secs(15),
            migrate: true,
            clock_offset: ClockOffset::default(),
            unsafe_without_epoch_guard: false,
        }
    }
}

impl Options {
    pub(crate) fn connect(&self, path: &Path) -> SqliteConnectOptions {
        SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .auto_vacuum(SqliteAutoVacuum::Incremental)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(self.busy_timeout)
            .pragma("wal_autocheckpoint", WAL_PAGES_MAX.to_string())
            .pragma("journal_size_limit", WAL_BYTES_KEPT.to_string())
            .pragma("temp_store", "memory")
            .statement_cache_capacity(256)
    }
}

/// How far the database's clock is moved, in tests. Clones move together.
#[derive(Debug, Clone, Default)]
pub struct ClockOffset(Arc<AtomicI64>);

impl ClockOffset {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX / 2), Ordering::SeqCst);
    }

    /// Microseconds that are added to the clock.
    pub(crate) fn micros(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use sqlx::SqlitePool;

    use crate::{Options, SqliteStore};

    async fn pragma(pool: &SqlitePool, statement: &'static str) -> String {
        let number: Result<i64, _> = sqlx::query_scalar(statement).fetch_one(pool).await;
        match number {
            Ok(number) => number.to_string(),
            Err(_) => sqlx::query_scalar(statement).fetch_one(pool).await.unwrap(),
        }
    }

    #[tokio::test]
    async fn settings_hold_on_pooled_connections() {
        let folder = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(folder.path().join("overnight.db"), Options::default()).await.unwrap();
        for pool in [&store.writer, &store.readers] {
            assert_eq!(pragma(pool, "pragma journal_mode").await, "wal");
            assert_eq!(pragma(pool, "pragma synchronous").await, "2", "full: durable at power loss");
            assert_eq!(pragma(pool, "pragma foreign_keys").await, "1");
            assert_eq!(pragma(pool, "pragma busy_timeout").await, "15000");
            assert_eq!(pragma(pool, "pragma wal_autocheckpoint").await, super::WAL_PAGES_MAX.to_string());
            assert_eq!(pragma(pool, "pragma journal_size_limit").await, super::WAL_BYTES_KEPT.to_string());
            assert_eq!(pragma(pool, "pragma auto_vacuum").await, "2", "incremental");
        }
        assert_eq!(pragma(&store.writer, "pragma query_only").await, "0");
        assert_eq!(pragma(&store.readers, "pragma query_only").await, "1");
        assert_eq!(store.writer.options().get_max_connections(), 1);
    }
}
