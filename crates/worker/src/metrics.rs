//! Counts of a worker since its start, for whoever shows them.
//!
//! Invariant: outcomes are counted after the transaction that makes them true, so a count never
//! runs ahead of the database. Codes may come from a remote server: only short words are kept as
//! they are, and not too many of them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use overnight_engine::metrics::Histogram;

/// Upper bounds for seconds of a checkpoint or of its transaction.
const SECONDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Codes that are told apart.
const CODES_MAX: usize = 64;
/// Longest of them.
const CODE_BYTES_MAX: usize = 40;
/// What stands for the others.
const OTHER: &str = "other";

/// Counts so far.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerCounts {
    /// Final outcomes by code; `ok` for answers.
    pub outcomes: BTreeMap<String, u64>,
    /// Failed tries that are followed by another one.
    pub retries: u64,
    /// Segments named in the database, and their bytes.
    pub segments: u64,
    /// See above.
    pub segment_bytes: u64,
    /// Shards leased.
    pub leases: u64,
    /// Of these, shards whose last lease ran out without a commit.
    pub leases_expired: u64,
    /// Requests of such shards that had no outcome: they may have run before.
    pub requests_reexecuted: u64,
    /// Leases that were another's, or void, when this worker wanted to write.
    pub leases_lost: u64,
    /// Batches in progress with outcomes at this worker's start.
    pub resumed: u64,
    /// Seconds of whole checkpoints: object, then transaction.
    pub checkpoint: Histogram,
    /// Seconds of their transactions.
    pub commit: Histogram,
}

/// [`WorkerCounts`] that all parts of a worker add to; a few times per shard, never per item.
#[derive(Debug)]
pub struct WorkerMetrics(Mutex<WorkerCounts>);

impl Default for WorkerMetrics {
    fn default() -> Self {
        Self(Mutex::new(WorkerCounts {
            outcomes: BTreeMap::from([("ok".to_owned(), 0)]),
            retries: 0,
            segments: 0,
            segment_bytes: 0,
            leases: 0,
            leases_expired: 0,
            requests_reexecuted: 0,
            leases_lost: 0,
            resumed: 0,
            checkpoint: Histogram::new(SECONDS),
            commit: Histogram::new(SECONDS),
        }))
    }
}

impl WorkerMetrics {
    /// The counts now.
    pub fn counts(&self) -> WorkerCounts {
        self.lock().clone()
    }

    /// A segment is in the database. `code_counts`: its outcomes by code, a JSON object.
    pub(crate) fn committed(&self, code_counts: &str, byte_len: u64, checkpoint: Duration, commit: Duration) {
        let codes: BTreeMap<String, u64> = serde_json::from_str(code_counts).unwrap_or_default();
        let mut counts = self.lock();
        for (code, num) in codes {
            let code = counts.word(code);
            *counts.outcomes.entry(code).or_default() += num;
        }
        counts.segments += 1;
        counts.segment_bytes += byte_len;
        counts.checkpoint.observe(checkpoint.as_secs_f64());
        counts.commit.observe(commit.as_secs_f64());
    }

    pub(crate) fn retried(&self, num: usize) {
        self.lock().retries += num as u64;
    }

    /// A shard was leased; `num_undone` of its items have no outcome.
    pub(crate) fn leased(&self, has_crashed: bool, num_undone: u32) {
        let mut counts = self.lock();
        counts.leases += 1;
        if has_crashed {
            counts.leases_expired += 1;
            counts.requests_reexecuted += u64::from(num_undone);
        }
    }

    pub(crate) fn lost(&self) {
        self.lock().leases_lost += 1;
    }

    pub(crate) fn resumed(&self) {
        self.lock().resumed += 1;
    }

    fn lock(&self) -> MutexGuard<'_, WorkerCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WorkerCounts {
    /// The code as it is told.
    fn word(&self, code: String) -> String {
        let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        let is_short = !code.is_empty() && code.len() <= CODE_BYTES_MAX && code.bytes().all(is_word);
        let has_room = self.outcomes.len() < CODES_MAX || self.outcomes.contains_key(&code);
        if is_short && has_room { code } else { OTHER.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_codes_make_a_bounded_number_of_words() {
        let metrics = WorkerMetrics::default();
        let tell = |code: &str| metrics.committed(&format!("{{\"{code}\": 2}}"), 10, Duration::ZERO, Duration::ZERO);
        tell("ok");
        tell("request_timeout");
        tell("Somebody's Own Words");
        (0..200).for_each(|number| tell(&format!("code_{number}")));
        let counts = metrics.counts();
        assert_eq!(counts.outcomes["ok"], 2);
        assert_eq!(counts.outcomes["request_timeout"], 2);
        assert!(counts.outcomes.len() <= CODES_MAX + 1, "{}", counts.outcomes.len());
        assert_eq!(counts.outcomes.values().sum::<u64>(), 406, "every outcome is counted under some word");
        assert!(counts.outcomes[OTHER] > 2);
        assert_eq!((counts.segments, counts.segment_bytes, counts.commit.count()), (203, 2030, 203));
    }
}
