//! The `[worker]` section.

use std::time::Duration;

use overnight_types::humane;
use serde::{Deserialize, Serialize};

use crate::Error;

/// Settings of leases, the window, checkpoints, retries and shutdown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerConfig {
    /// How long a lease lasts without renewal.
    #[serde(with = "humane::duration")]
    pub lease_ttl: Duration,
    /// How often leases are renewed; at most a third of `lease_ttl`.
    #[serde(with = "humane::duration")]
    pub renew_every: Duration,
    /// An engine that has work and ends no step for this long counts as stalled: its
    /// shards are given back and none is leased until it goes on.
    #[serde(with = "humane::duration")]
    pub engine_stall_max: Duration,
    /// Items prepared or at the engine at once; `None`: four times its `max_num_seqs`.
    pub window_items_max: Option<u32>,
    /// Input bytes of open shards; one shard may pass it.
    #[serde(with = "humane::bytes")]
    pub window_bytes_max: u64,
    /// Shards open at once.
    pub open_shards_max: u32,
    /// Outcomes per segment.
    pub checkpoint_items_max: u32,
    /// Bytes per segment; one outcome may pass it.
    #[serde(with = "humane::bytes")]
    pub checkpoint_bytes_max: u64,
    /// Longest wait of a finished outcome on a local folder.
    #[serde(with = "humane::duration")]
    pub checkpoint_every_local: Duration,
    /// The same on a remote object store.
    #[serde(with = "humane::duration")]
    pub checkpoint_every_remote: Duration,
    /// Leases in a row that ran out without a commit before a shard's items run one at a time.
    pub crashes_max: u32,
    /// Tries of an item before a transient failure becomes its outcome.
    pub attempts_max: u32,
    /// Wait before the first retry; doubles with each further one, with full jitter.
    #[serde(with = "humane::duration")]
    pub backoff_min: Duration,
    /// Longest wait before a retry.
    #[serde(with = "humane::duration")]
    pub backoff_max: Duration,
    /// Retries that a job may always use.
    pub retry_budget_min: u64,
    /// Retries that a job may use as a share of its items, percent; the larger of the two counts.
    pub retry_budget_percent: u32,
    /// Longest run of a request on the local engine, from its first scheduling.
    #[serde(with = "humane::duration")]
    pub request_timeout: Duration,
    /// Longest wait for a remote engine's answer.
    #[serde(with = "humane::duration")]
    pub request_timeout_remote: Duration,
    /// How long a shutdown lets running items finish.
    #[serde(with = "humane::duration")]
    pub shutdown_grace: Duration,
    /// How long a cancelled job's running items may finish.
    #[serde(with = "humane::duration")]
    pub cancel_drain: Duration,
    /// How often to look for work when nothing wakes the worker.
    #[serde(with = "humane::duration")]
    pub poll_every: Duration,
    /// How often the states of running jobs are read.
    #[serde(with = "humane::duration")]
    pub signals_every: Duration,
    /// Lifecycle steps at once (intake, finalize, expiry, sweep).
    pub lifecycle_steps_max: u32,
    /// How often orphans, expired files and deleted jobs are swept.
    #[serde(with = "humane::duration")]
    pub sweep_every: Duration,
    /// How old an object of a job must be before the sweep takes it when no row names it; longer
    /// than any write.
    #[serde(with = "humane::duration")]
    pub orphans_kept_for: Duration,
    /// The same for uploads without a row and what killed writes left; longer than any upload.
    #[serde(with = "humane::duration")]
    pub unclaimed_kept_for: Duration,
    /// How long a job stays after its end, with its files; `0s` keeps it.
    #[serde(with = "humane::duration")]
    pub jobs_kept_for: Duration,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            lease_ttl: seconds(15),
            renew_every: seconds(4),
            engine_stall_max: seconds(120),
            window_items_max: None,
            window_bytes_max: 256 << 20,
            open_shards_max: 64,
            checkpoint_items_max: 512,
            checkpoint_bytes_max: 4 << 20,
            checkpoint_every_local: seconds(1),
            checkpoint_every_remote: seconds(5),
            crashes_max: 3,
            attempts_max: 5,
            backoff_min: seconds(1),
            backoff_max: seconds(300),
            retry_budget_min: 1_000,
            retry_budget_percent: 10,
            request_timeout: seconds(30 * 60),
            request_timeout_remote: seconds(10 * 60),
            shutdown_grace: seconds(25),
            cancel_drain: seconds(600),
            poll_every: seconds(1),
            signals_every: seconds(1),
            lifecycle_steps_max: 4,
            sweep_every: seconds(3600),
            orphans_kept_for: seconds(3600),
            unclaimed_kept_for: seconds(24 * 3600),
            jobs_kept_for: Duration::ZERO,
        }
    }
}

impl WorkerConfig {
    /// Refuses values out of range, by key.
    pub fn validate(&self) -> Result<(), Error> {
        self.validate_leases()?;
        self.validate_counts()?;
        self.validate_waits()
    }

    /// Retries that a job of so many items may use.
    pub fn retry_budget(&self, num_items: u64) -> u64 {
        self.retry_budget_min.max(num_items.saturating_mul(u64::from(self.retry_budget_percent)) / 100)
    }

    fn validate_leases(&self) -> Result<(), Error> {
        within("lease_ttl", self.lease_ttl, Duration::from_millis(300), Duration::from_secs(3600))?;
        if self.renew_every.is_zero() || self.renew_every > self.lease_ttl / 3 {
            let limit = humane::format_duration(self.lease_ttl / 3);
            let given = humane::format_duration(self.renew_every);
            let what = format!("{given} is not within 1ms…{limit}, a third of lease_ttl; lower it or raise lease_ttl");
            return Err(Error::Config { key: "renew_every", what });
        }
        within("engine_stall_max", self.engine_stall_max, Duration::from_millis(100), DAY)
    }

    fn validate_counts(&self) -> Result<(), Error> {
        let items = self.window_items_max.unwrap_or(1);
        in_range("window_items_max", u64::from(items), 1, 1 << 20)?;
        in_range("window_bytes_max", self.window_bytes_max, 1 << 20, 1 << 40)?;
        in_range("open_shards_max", u64::from(self.open_shards_max), 1, 4_096)?;
        in_range("checkpoint_items_max", u64::from(self.checkpoint_items_max), 1, 65_536)?;
        in_range("checkpoint_bytes_max", self.checkpoint_bytes_max, 1 << 10, 1 << 30)?;
        in_range("crashes_max", u64::from(self.crashes_max), 1, 100)?;
        in_range("attempts_max", u64::from(self.attempts_max), 1, 100)?;
        in_range("retry_budget_percent", u64::from(self.retry_budget_percent), 0, 10_000)?;
        in_range("lifecycle_steps_max", u64::from(self.lifecycle_steps_max), 1, 64)
    }

    fn validate_waits(&self) -> Result<(), Error> {
        let ms = Duration::from_millis;
        within("checkpoint_every_local", self.checkpoint_every_local, ms(1), Duration::from_secs(600))?;
        within("checkpoint_every_remote", self.checkpoint_every_remote, ms(1), Duration::from_secs(600))?;
        within("backoff_min", self.backoff_min, ms(1), DAY)?;
        within("backoff_max", self.backoff_max, self.backoff_min, DAY)?;
        within("request_timeout", self.request_timeout, ms(1), 7 * DAY)?;
        within("request_timeout_remote", self.request_timeout_remote, ms(1), 7 * DAY)?;
        within("shutdown_grace", self.shutdown_grace, ms(0), DAY)?;
        within("cancel_drain", self.cancel_drain, ms(0), DAY)?;
        within("poll_every", self.poll_every, ms(1), Duration::from_secs(600))?;
        within("signals_every", self.signals_every, ms(1), Duration::from_secs(600))?;
        within("sweep_every", self.sweep_every, ms(100), 7 * DAY)?;
        within("orphans_kept_for", self.orphans_kept_for, Duration::from_secs(1), 30 * DAY)?;
        within("unclaimed_kept_for", self.unclaimed_kept_for, Duration::from_secs(1), 30 * DAY)?;
        within("jobs_kept_for", self.jobs_kept_for, Duration::ZERO, 3_650 * DAY)
    }
}

const DAY: Duration = Duration::from_secs(86_400);

fn within(key: &'static str, value: Duration, min: Duration, max: Duration) -> Result<(), Error> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let [value, min, max] = [value, min, max].map(humane::format_duration);
    Err(Error::Config { key, what: format!("{value} is not within {min}…{max}") })
}

fn in_range(key: &'static str, value: u64, min: u64, max: u64) -> Result<(), Error> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::Config { key, what: format!("{value} is not within {min}…{max}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_read_back() {
        let config = WorkerConfig::default();
        config.validate().unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<WorkerConfig>(&text).unwrap(), config);
    }

    #[test]
    fn unknown_key_is_refused() {
        let err = serde_json::from_str::<WorkerConfig>(r#"{"lease": "15s"}"#).unwrap_err();
        assert!(err.to_string().contains("lease"), "{err}");
    }

    #[test]
    fn renewal_slower_than_a_third_of_the_lease_is_refused() {
        let config = WorkerConfig { renew_every: Duration::from_secs(6), ..WorkerConfig::default() };
        let Err(Error::Config { key, what }) = config.validate() else { panic!("accepted") };
        assert_eq!(key, "renew_every");
        assert!(what.contains("5s"), "{what}");
    }

    #[test]
    fn retry_budget_is_the_larger_of_floor_and_share() {
        let config = WorkerConfig::default();
        assert_eq!(config.retry_budget(10), 1_000);
        assert_eq!(config.retry_budget(1_000_000), 100_000);
    }
}
