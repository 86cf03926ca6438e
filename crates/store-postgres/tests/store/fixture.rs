//! A database of a test's own.

use std::sync::Arc;
use std::time::Duration;

use overnight_store::conformance::{EpochGuard, Fixture, TestClock};
use overnight_store_postgres::{ClockOffset, Options};
use overnight_testing::postgres::Database;

/// Moves the offset that the store adds to the server's clock.
struct OffsetClock(ClockOffset);

#[async_trait::async_trait]
impl TestClock for OffsetClock {
    async fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

/// An empty database that vanishes with the fixture; `None` without a server.
pub(crate) async fn open(guard: EpochGuard) -> Option<Fixture> {
    let database = Database::create()?;
    let unsafe_without_epoch_guard = guard == EpochGuard::TakenOut;
    let options = Options { unsafe_without_epoch_guard, ..Options::default() };
    let clock = Arc::new(OffsetClock(options.clock_offset.clone()));
    let store = database.open(options).await;
    Some(Fixture { store: Arc::new(store), clock, keep: Box::new(database) })
}
