//! Moments, UTC, truncated to the microseconds that both databases keep.

use std::fmt;
use std::time::Duration;

use chrono::{DateTime, SubsecRound, Utc};
use serde::{Deserialize, Serialize};

/// A moment in UTC with microsecond precision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(DateTime<Utc>);

impl Timestamp {
    /// This machine's clock. For people and file names only: leases, expiry and
    /// schedules go by the database's clock.
    pub fn now() -> Self {
        Self(Utc::now().trunc_subsecs(6))
    }

    /// From microseconds since 1970; out-of-range values saturate.
    pub fn from_micros(micros: i64) -> Self {
        Self(DateTime::from_timestamp_micros(micros).unwrap_or(DateTime::<Utc>::MAX_UTC))
    }

    /// Microseconds since 1970.
    pub fn micros(&self) -> i64 {
        self.0.timestamp_micros()
    }

    /// Whole seconds since 1970, the wire's form.
    pub fn unix_seconds(&self) -> i64 {
        self.0.timestamp()
    }

    /// This moment moved forward.
    pub fn plus(&self, by: Duration) -> Self {
        Self::from_micros(self.micros().saturating_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX)))
    }

    /// Time from `earlier` to this moment; zero when the clock went back.
    pub fn since(&self, earlier: Timestamp) -> Duration {
        Duration::from_micros(u64::try_from(self.micros().saturating_sub(earlier.micros())).unwrap_or(0))
    }

    /// As chrono's type, for formatting.
    pub fn datetime(&self) -> DateTime<Utc> {
        self.0
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_rfc3339_opts(chrono::SecondsFormat::Micros, true))
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
