//! A database in a temporary folder.

use std::sync::Arc;
use std::time::Duration;

use overnight_store::conformance::{EpochGuard, Fixture, TestClock};
use overnight_store_sqlite::{ClockOffset, Options, SqliteStore};

/// Moves the offset that the store adds to SQLite's clock.
struct OffsetClock(ClockOffset);

#[async_trait::async_trait]
impl TestClock for OffsetClock {
    async fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

/// An empty database that vanishes with the fixture.
pub(crate) async fn open(guard: EpochGuard) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let unsafe_without_epoch_guard = guard == EpochGuard::TakenOut;
    let options = Options { unsafe_without_epoch_guard, ..Options::default() };
    let clock = Arc::new(OffsetClock(options.clock_offset.clone()));
    let store = SqliteStore::open(folder.path().join("overnight.db"), options).await.unwrap();
    Fixture { store: Arc::new(store), clock, keep: Box::new(folder) }
}
