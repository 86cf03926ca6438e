//! Switches for tests alone, in builds with the feature `failpoints`.
//!
//! `OVERNIGHT_TEST_CRASH_AT=place=n` ends the process, as `kill -9` would, at the
//! n-th pass of a place that `worker::failpoints` lists. `OVERNIGHT_TEST_WITHOUT_EPOCH_GUARD=1`
//! takes the fence out of commits, so that a test can show that it would notice.

use crate::environment;

/// Sets the crash point that the environment names. Panics on one that does not exist.
pub(crate) fn arm() -> fail::FailScenario<'static> {
    let scenario = fail::FailScenario::setup();
    if let Some(wanted) = environment::text("OVERNIGHT_TEST_CRASH_AT") {
        let (place, pass) = wanted.split_once('=').unwrap_or((&wanted, "1"));
        let pass = pass.parse().expect("OVERNIGHT_TEST_CRASH_AT is place=number");
        overnight_worker::failpoints::abort_at(place, pass).expect("OVERNIGHT_TEST_CRASH_AT names a known place");
    }
    scenario
}

/// Whether commits go without their fence.
pub(crate) fn is_epoch_guard_out() -> bool {
    environment::text("OVERNIGHT_TEST_WITHOUT_EPOCH_GUARD").is_some()
}
