//! The suite that defines what each method promises; every backend runs all of it.
//!
//! [`store_conformance!`](crate::store_conformance) lists every promise once, so that
//! no backend can forget one; a test here compares the list with the functions.
//! Each promise gets a database of its own. A function's name is the promise.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::Store;

pub mod builders;
pub mod claims;

/// Moves the database's clock, the only clock that decides anything.
#[async_trait]
pub trait TestClock: Send + Sync {
    /// Moves it forward.
    async fn advance(&self, by: Duration);
}

/// An empty database of one test's own.
pub struct Fixture {
    /// The store on it.
    pub store: Arc<dyn Store>,
    /// Its clock.
    pub clock: Arc<dyn TestClock>,
    /// What must live as long as the test (a temporary folder, a server's lease).
    pub keep: Box<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Fixture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fixture").field("store", &self.store).finish_non_exhaustive()
    }
}

/// Makes one test of each promise. `$open` is an async function without arguments
/// that returns a [`Fixture`].
#[macro_export]
macro_rules! store_conformance {
    ($open:path) => {
        $crate::store_conformance! { @tests $open;
            claims::a_job_runs_from_create_to_completed,
        }
    };
    (@tests $open:path; $($module:ident::$promise:ident),+ $(,)?) => {
        $(
            #[tokio::test]
            async fn $promise() {
                let fixture = $open().await;
                $crate::conformance::$module::$promise(&*fixture.store, &*fixture.clock).await;
            }
        )+
    };
}
