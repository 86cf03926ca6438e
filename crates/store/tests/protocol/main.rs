//! Model check of the lease and commit protocol: every reachable state of a small
//! installation is visited, breadth first, and what was promised is looked at in each.
//!
//! Workers, finalizers, the sweep, cancel and re-opening take turns in every order, with
//! stale views of each other. Objects and rows are apart: a process can die between the
//! two writes, and a commit can happen whose answer is lost. Faults (a crash, a lost
//! answer, a lease that runs out under a process that lives) come at any moment, a
//! bounded number of them. A pause is no move of its own: nobody has to move.
//!
//! The store's own search (store-sqlite, `search.rs`) replays the rows' part against a
//! real database; here is what lies around it. Each guard is taken out in turn, and then
//! the search must find a broken promise, else it would prove nothing. The store guards
//! some things twice (a commit is refused as well for an item that is done; the end of a
//! job compares its counts); those second belts are left out, so that each guard stands alone.

mod model;
mod moves;
mod search;
mod step;

use model::{Setup, Without};
use search::{Explored, search};

/// Two workers on two shards, and a finalizer that can be restarted.
const WORKERS: Setup = Setup { workers: 2, items: [2, 2], finalizers: 1, faults: 3, ..Setup::NOBODY };
/// Three workers that want the same shard.
const CROWD: Setup = Setup { workers: 3, items: [2, 1], finalizers: 1, faults: 3, ..Setup::NOBODY };
/// Cancel while workers write and two finalizers race.
const CANCEL: Setup = Setup { workers: 2, items: [2, 1], finalizers: 2, cancel: true, faults: 2, ..Setup::NOBODY };
/// The sweep beside workers and the end of the job.
const SWEEP: Setup =
    Setup { workers: 2, items: [2, 0], finalizers: 1, sweep: true, cancel: true, faults: 2, ..Setup::NOBODY };
/// A second round, whole or of a selection, with late writers and finalizers of the first.
const ROUNDS: Setup =
    Setup { workers: 1, items: [2, 0], finalizers: 2, cancel: true, reopen: true, faults: 2, ..Setup::NOBODY };
/// Re-opening beside the sweep.
const REOPEN_AND_SWEEP: Setup = Setup {
    workers: 1,
    items: [2, 0],
    finalizers: 1,
    sweep: true,
    cancel: true,
    reopen: true,
    faults: 1,
    ..Setup::NOBODY
};

#[track_caller]
fn holds(setup: &Setup, states_min: usize) {
    let Explored { states, ended, .. } = search(setup, Without::Nothing).unwrap_or_else(|broken| panic!("{broken}"));
    eprintln!("{states} states, {ended} of them ended: every promise holds in {setup:?}");
    assert!(states >= states_min, "the search is exhaustive, not stuck: {states} states");
    assert!(ended > 10, "{ended} ends");
}

#[test]
fn two_workers_keep_the_promise_through_crashes_and_lost_answers() {
    holds(&WORKERS, 20_000);
}

#[test]
fn three_workers_on_one_shard_keep_the_promise() {
    holds(&CROWD, 5_000);
}

#[test]
fn cancel_and_two_finalizers_keep_the_promise() {
    holds(&CANCEL, 20_000);
}

#[test]
fn sweep_beside_workers_keeps_the_promise() {
    holds(&SWEEP, 20_000);
}

#[test]
fn second_round_with_late_writers_keeps_the_promise() {
    holds(&ROUNDS, 20_000);
}

#[test]
fn reopening_beside_the_sweep_keeps_the_promise() {
    holds(&REOPEN_AND_SWEEP, 20_000);
}

/// The negative controls: with this guard out, a promise must be found broken, this one.
#[track_caller]
fn breaks(setup: &Setup, without: Without, promise: &str) {
    let broken = search(setup, without).expect_err("the negative control must fail");
    eprintln!("without {without:?}: {broken}");
    assert!(broken.why.contains(promise), "{broken}");
}

#[test]
fn without_the_epoch_a_late_commit_is_found() {
    breaks(&CROWD, Without::Epoch, "a lease that was over");
}

/// The same guard, judged by nothing but what is stored.
#[test]
fn without_the_epoch_a_row_without_its_object_is_found() {
    breaks(&Setup { judges_leases: false, ..SWEEP }, Without::Epoch, "object is gone");
}

#[test]
fn without_the_sequence_number_a_doubled_outcome_is_found() {
    breaks(&WORKERS, Without::Sequence, "2 outcomes");
}

#[test]
fn without_a_new_epoch_per_claim_a_late_commit_is_found() {
    breaks(&CROWD, Without::NewEpochPerClaim, "a lease that was over");
}

#[test]
fn without_expiry_a_job_that_cannot_end_is_found() {
    breaks(&WORKERS, Without::Expiry, "nothing leads from here to an end");
}

#[test]
fn with_the_row_before_the_object_a_row_without_its_object_is_found() {
    breaks(&WORKERS, Without::ObjectFirst, "object is gone");
}

#[test]
fn without_the_epoch_in_the_sweep_a_row_without_its_object_is_found() {
    breaks(&SWEEP, Without::EpochInSweep, "object is gone");
}

#[test]
fn without_the_age_in_the_sweep_a_row_without_its_object_is_found() {
    breaks(&REOPEN_AND_SWEEP, Without::AgeInSweep, "object is gone");
}

/// Decision 0012: an old object of a try that died, named by a later one while the sweep deletes it.
#[test]
fn with_one_name_for_all_tries_of_a_reopening_a_row_without_its_object_is_found() {
    breaks(&REOPEN_AND_SWEEP, Without::OwnNames, "object is gone");
}

#[test]
fn with_the_names_read_before_the_shard_a_row_without_its_object_is_found() {
    breaks(&SWEEP, Without::RowBeforeNames, "object is gone");
}

#[test]
fn without_the_fence_an_outcome_that_is_not_published_is_found() {
    breaks(&CANCEL, Without::Fence, "other lines");
}

#[test]
fn without_the_last_look_a_changed_file_is_found() {
    breaks(&ROUNDS, Without::LastLook, "other lines");
}

#[test]
fn without_the_steps_epoch_an_end_without_its_file_is_found() {
    breaks(&ROUNDS, Without::EpochOfStep, "other lines");
}
