//! Switches for tests alone, in builds with the feature `failpoints`.
//!
//! `OVERNIGHT_TEST_CRASH_AT=place=n` ends the process, as `kill -9` would, at the
//! n-th pass of a place that `worker::failpoints` lists; `OVERNIGHT_TEST_STOP_AT=place=n`
//! stops it there, as SIGSTOP does, until somebody sends SIGCONT; woken before the
//! file `OVERNIGHT_TEST_STOP_UNTIL` exists it stops again, so that a test can wait for
//! a stop in which no other thread holds the database's lock.
//! `OVERNIGHT_TEST_WITHOUT_EPOCH_GUARD=1` takes the fence out of commits, so that a
//! test can show that it would notice.

use std::time::Duration;

use overnight_worker::failpoints;
use rustix::process::{Signal, getpid, kill_process};

use crate::environment;

/// Long enough for another thread to end its transaction.
const AWAKE_BETWEEN_STOPS: Duration = Duration::from_millis(20);

/// Sets the places that the environment names. Panics on one that does not exist.
pub(crate) fn arm() -> fail::FailScenario<'static> {
    let scenario = fail::FailScenario::setup();
    act_at("OVERNIGHT_TEST_CRASH_AT", || std::process::abort());
    let until = environment::path("OVERNIGHT_TEST_STOP_UNTIL");
    act_at("OVERNIGHT_TEST_STOP_AT", move || {
        // Elsewhere, so that tasks which this thread would run next can end their transactions.
        tokio::task::block_in_place(|| {
            loop {
                kill_process(getpid(), Signal::STOP).expect("a process may stop itself");
                // Any thread may be the first to stop; this one does so in its sleep at the latest.
                std::thread::sleep(AWAKE_BETWEEN_STOPS);
                if until.as_ref().is_none_or(|path| path.exists()) {
                    break;
                }
            }
        });
    });
    scenario
}

fn act_at(name: &'static str, act: impl Fn() + Send + Sync + 'static) {
    let Some(wanted) = environment::text(name) else { return };
    let (place, pass) = wanted.split_once('=').unwrap_or((&wanted, "1"));
    let pass = pass.parse().unwrap_or_else(|_| panic!("{name} is place=number, not {wanted}"));
    failpoints::act_at(place, pass, act).unwrap_or_else(|why| panic!("{name}: {why}"));
}

/// Whether commits go without their fence.
pub(crate) fn is_epoch_guard_out() -> bool {
    environment::text("OVERNIGHT_TEST_WITHOUT_EPOCH_GUARD").is_some()
}
