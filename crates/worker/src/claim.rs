//! How the pools wait: for work, for room, after an error; and for how long a
//! shard that met trouble is left alone.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rand::Rng;

use crate::worker::Shared;

/// Longest wait between claims while the database does not answer.
const ERROR_WAIT_MAX: Duration = Duration::from_secs(15);

/// Waits between claims. Every wait ends at shutdown, with `None`.
#[derive(Debug)]
pub(crate) struct Idle {
    shared: Arc<Shared>,
    errors_in_a_row: u32,
}

impl Idle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, errors_in_a_row: 0 }
    }

    /// Resolves when the store says that something may be due since this call.
    pub(crate) fn woken(&self) -> overnight_store::Woken {
        self.shared.store.woken()
    }

    /// Waits for `event`, at most about the poll interval.
    pub(crate) async fn wait_for(&mut self, event: impl Future<Output = ()>) -> Option<()> {
        self.errors_in_a_row = 0;
        let poll = self.shared.config.poll_every;
        // Workers that started together must not poll together.
        let poll = poll.mul_f64(rand::rng().random_range(0.8..1.2));
        let wait = tokio::time::timeout(poll, event);
        self.shared.stop_claiming.run_until_cancelled(wait).await.map(drop)
    }

    /// Waits for the poll interval.
    pub(crate) async fn wait_poll(&mut self) -> Option<()> {
        self.wait_for(std::future::pending()).await
    }

    /// Waits longer after each error in a row.
    pub(crate) async fn wait_after_error(&mut self, doing: &str, what: &str) -> Option<()> {
        let most = (self.shared.config.poll_every * 2u32.pow(self.errors_in_a_row.min(8))).min(ERROR_WAIT_MAX);
        self.errors_in_a_row += 1;
        tracing::warn!(errors_in_a_row = self.errors_in_a_row, "could not {doing}, trying again: {what}");
        let wait = most.mul_f64(rand::rng().random_range(0.5..=1.0));
        self.shared.stop_claiming.run_until_cancelled(tokio::time::sleep(wait)).await
    }
}

/// Trouble that is not the items', over all shards of a worker: the wait doubles
/// while it lasts, however many shards report it at once, and ends with a commit.
#[derive(Debug, Default)]
pub(crate) struct Troubles {
    state: Mutex<(u32, Option<Instant>)>,
}

impl Troubles {
    pub(crate) const FIRST_DELAY: Duration = Duration::from_secs(1);
    const DELAY_MAX: Duration = Duration::from_secs(60);

    /// How long a shard waits now.
    pub(crate) fn next_delay(&self) -> Duration {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (level, raised_at) = &mut *state;
        let delay_of = |level: u32| (Self::FIRST_DELAY * 2u32.pow(level.min(6))).min(Self::DELAY_MAX);
        match raised_at {
            None => *raised_at = Some(Instant::now()),
            Some(at) if at.elapsed() >= delay_of(*level) / 2 => (*level, *at) = (*level + 1, Instant::now()),
            Some(_) => {}
        }
        delay_of(*level).mul_f64(rand::rng().random_range(0.5..=1.0))
    }

    /// Something worked again.
    pub(crate) fn over(&self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = (0, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_that_meet_the_same_trouble_wait_alike() {
        let troubles = Troubles::default();
        let longest = (0..64).map(|_| troubles.next_delay()).max().unwrap();
        assert!(longest <= Troubles::FIRST_DELAY, "{longest:?}");
    }
}
