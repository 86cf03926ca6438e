//! Switches for tests alone, in builds with the feature `failpoints`.
//!
//! `OVERNIGHT_TEST_CRASH_AT=place=n` ends the process, as `kill -9` would, at the
//! n-th pass of a place that `worker::failpoints` lists; `OVERNIGHT_TEST_STOP_AT=place=n`
//! stops it there, as SIGSTOP does, until somebody sends SIGCONT; woken before the
//! file `OVERNIGHT_TEST_STOP_UNTIL` exists it stops again, so that a test can wait for
//! a stop in which no other thread holds the database's lock.
//! `OVERNIGHT_TEST_WITHOUT_EPOCH_GUARD=1` takes the fence out of commits, so that a
//! test can show that it would notice. `OVERNIGHT_TEST_BREAK_ENGINE_AT=5,40` breaks the
//! engine down in its fifth step and in its fortieth.

use std::sync::atomic::{AtomicU64, Ordering};
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
    if let Some(steps) = environment::text("OVERNIGHT_TEST_BREAK_ENGINE_AT") {
        break_engine_at(steps.split(',').map(|step| step.parse().expect("steps are numbers")).collect());
    }
    scenario
}

/// Steps are counted over all engines of the process.
fn break_engine_at(steps: Vec<u64>) {
    let passes = AtomicU64::new(0);
    let act = move || {
        let pass = passes.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(!steps.contains(&pass), "a test broke the engine in step {pass}");
    };
    fail::cfg_callback("engine::step", act).expect("the place takes a callback");
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
