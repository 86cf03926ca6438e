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
pub mod commits;
pub mod files;
pub mod jobs;
pub mod leases;
pub mod outbox;
pub mod races;
pub mod reopen;
pub mod reports;
pub mod retention;
pub mod search;
pub mod steps;
pub mod transitions;

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

/// Whether a store keeps the guard of its commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpochGuard {
    /// As in life.
    Held,
    /// A negative control, which must be caught.
    TakenOut,
}

/// Makes one test of each promise, and of the two models. `$open` is an async function of
/// an [`EpochGuard`] that returns a [`Fixture`]; or an option of one, `None` where the
/// service that it needs is not there and is not required.
#[macro_export]
macro_rules! store_conformance {
    ($open:path) => {
        $crate::store_conformance! { @tests $open;
            files::file_reads_back_as_recorded,
            files::deleted_file_is_hidden_at_once,
            files::expired_file_is_hidden,
            files::files_are_listed_by_keyset,
            files::input_bytes_stay_until_the_job_is_terminal,
            files::removable_files_come_oldest_first,
            files::live_workers_reported_within_a_minute,
            files::silent_worker_is_forgotten_after_a_day,
            files::attempts_go_a_week_after_the_end,
            files::shard_is_found_by_item,
            files::waiting_loop_is_woken_by_due_work,
            files::wake_that_comes_before_the_wait_is_not_missed,
            files::every_moment_is_by_the_databases_clock,
            files::size_is_that_of_what_is_stored,
            jobs::job_reads_back_as_given,
            jobs::job_needs_a_present_input,
            jobs::idempotency_key_returns_the_first_job,
            jobs::two_creates_with_one_key_make_one_job,
            jobs::key_of_a_deleted_job_is_free,
            jobs::jobs_are_listed_by_keyset,
            jobs::pause_is_idempotent_and_refused_after_the_end,
            jobs::paused_job_finishes_what_runs,
            jobs::signals_tell_state_pause_cancel_and_round,
            jobs::cancel_drains_what_is_leased,
            jobs::cancel_is_idempotent,
            jobs::window_end_expires_running_jobs,
            jobs::window_end_changes_no_drawn_ending,
            jobs::deleted_job_is_hidden_and_purged_piece_by_piece,
            jobs::hidden_job_is_known_until_its_last_row_is_gone,
            jobs::events_tell_every_move_in_order,
            jobs::progress_of_many_jobs_is_that_of_each,
            steps::intake_is_due_at_once_and_leased_once,
            steps::killed_intake_goes_on_from_its_record,
            steps::restarted_intake_begins_with_nothing,
            steps::intake_that_does_not_add_up_is_refused,
            steps::progress_is_zero_before_intake_ends,
            steps::faulty_input_fails_the_job,
            steps::job_past_its_window_expires_after_intake,
            steps::paused_intake_is_not_started,
            steps::step_is_renewed_and_given_back,
            steps::step_that_kills_its_worker_lets_others_by,
            steps::ending_is_published_in_one_commit,
            steps::job_does_not_end_with_open_accounting,
            steps::stale_finalizer_ends_nothing,
            steps::step_lease_serves_its_own_step_only,
            steps::job_without_items_is_finalized_at_once,
            steps::faults_are_gone_after_the_end,
            steps::cancel_fences_intake,
            claims::a_job_runs_from_create_to_completed,
            claims::claim_leases_the_first_ready_shard_under_a_new_epoch,
            claims::shard_is_leased_to_one_worker_at_a_time,
            claims::shard_is_not_claimed_before_its_time,
            claims::expired_lease_is_claimed_again,
            claims::claim_serves_by_priority,
            claims::claim_serves_by_deadline_among_equal_priorities,
            claims::claim_serves_the_older_of_two_like_jobs,
            claims::oldest_claim_starves_no_job,
            claims::claim_goes_past_a_job_with_nothing_to_lease,
            claims::progress_tells_the_jobs_ahead,
            claims::claim_takes_only_jobs_for_models_at_hand,
            claims::paused_job_is_not_claimed,
            claims::job_past_its_window_is_not_claimed,
            claims::only_running_jobs_are_claimed,
            claims::claim_brings_faults_and_used_retries,
            leases::renewed_lease_is_held_for_any_length_of_work,
            leases::renewal_tells_lost_leases,
            leases::renewal_tells_the_lost_lease_of_a_shard_held_again,
            leases::expired_lease_does_not_stay_leased,
            leases::expired_leases_are_taken_back_piece_by_piece,
            leases::released_shard_keeps_its_outcomes,
            leases::lease_given_back_as_lost_is_a_crash,
            leases::stale_release_changes_nothing,
            leases::crashes_count_leases_without_a_commit,
            leases::leases_of_dead_workers_are_free_at_once,
            leases::step_of_a_dead_worker_is_free_at_once,
            leases::leases_without_a_live_worker_are_released_on_request,
            leases::worker_lost_needs_three_deaths_while_the_item_ran_alone,
            leases::probe_deaths_belong_to_one_item,
            leases::stale_probe_changes_nothing,
            leases::poisoned_shard_blocks_nothing_else,
            commits::commit_sets_bits_counts_and_row_together,
            commits::last_commit_ends_shard_and_job,
            commits::stale_epoch_cannot_commit,
            commits::lease_that_was_taken_back_cannot_commit,
            commits::reap_after_commit_overwrites_nothing,
            commits::wrong_next_seq_cannot_commit,
            commits::item_is_never_done_twice,
            commits::repeated_commit_is_lost,
            commits::commit_to_nowhere_is_lost,
            commits::malformed_segment_is_refused,
            commits::outcome_takes_the_fault_away,
            commits::faults_replace_each_other_and_use_the_budget,
            commits::stale_faults_are_lost,
            commits::draining_job_takes_outcomes_until_it_is_fenced,
            commits::segments_are_listed_by_whole_shards,
            commits::commit_order_neither_repeats_nor_skips,
            outbox::every_end_of_a_job_is_told_once,
            outbox::event_is_tried_by_one_at_a_time,
            outbox::event_is_tried_again_until_given_up,
            outbox::event_due_for_longest_comes_first,
            reopen::reopened_job_runs_what_did_not_complete,
            reopen::earlier_round_writes_nothing,
            reopen::segments_carry_their_round,
            reopen::reopening_is_lost_in_any_other_state,
            reopen::reopening_needs_the_input,
            reopen::reopened_validation_goes_on,
            reopen::selective_retry_settles_what_it_leaves_out,
            reopen::left_out_items_keep_their_own_ending,
            reopen::wrong_leftovers_reopen_nothing,
            reopen::retry_budget_starts_anew,
            reopen::files_of_earlier_rounds_stay,
            retention::ended_job_goes_with_its_files_after_its_time,
            retention::longest_ended_jobs_go_first,
            retention::job_that_has_not_ended_never_goes,
            retention::reopened_job_is_kept_from_its_last_end,
            retention::files_of_every_round_go_with_their_job,
            retention::input_stays_while_another_job_names_it,
            retention::file_with_an_expiry_of_its_own_stays_until_then,
            retention::job_whose_event_is_being_tried_stays,
            races::moves_that_race_inside_the_window_end_a_job_once,
            races::moves_that_race_past_the_window_end_a_job_once,
            reports::leases_end_by_the_databases_clock_alone,
            reports::the_first_objects_id_is_kept_until_it_is_forgotten,
            reports::refused_create_leaves_nothing,
            reports::late_acknowledgement_overwrites_no_successor,
            reports::reused_worker_identity_completes_nothing_stale,
            reports::retryable_failure_is_not_stranded,
            reports::two_healthy_workers_start_six_long_shards_six_times,
            reports::eight_workers_meet_without_an_error,
            reports::no_shard_is_leased_longer_than_its_time,
            reports::reads_and_lost_moves_wake_nobody,
        }
    };
    (@tests $open:path; $($module:ident::$promise:ident),+ $(,)?) => {
        $(
            #[tokio::test]
            async fn $promise() {
                let fixture: Option<$crate::conformance::Fixture> =
                    $open($crate::conformance::EpochGuard::Held).await.into();
                let Some(fixture) = fixture else { return };
                $crate::conformance::$module::$promise(&*fixture.store, &*fixture.clock).await;
                let findings = fixture.store.check().await.expect("the database answers");
                assert!(findings.is_empty(), "the promise left the database unsound: {findings:?}");
            }
        )+

        #[test]
        fn every_answer_is_the_models_and_every_end_is_closed() {
            $crate::conformance::transitions::every_answer_is_the_models_and_every_end_is_closed($open);
        }

        #[test]
        fn model_catches_a_store_without_its_guard() {
            $crate::conformance::transitions::model_catches_a_store_without_its_guard($open);
        }

        #[tokio::test]
        async fn store_answers_as_the_model_on_every_short_path() {
            $crate::conformance::search::store_answers_as_the_model_on_every_short_path($open).await;
        }

        #[tokio::test]
        async fn store_without_its_guard_is_caught_by_the_model() {
            $crate::conformance::search::store_without_its_guard_is_caught_by_the_model($open).await;
        }
    };
}

#[cfg(test)]
mod tests {
    /// Every promise of every module, by the form of its signature.
    const SOURCES: &[(&str, &str)] = &[
        ("files", include_str!("files.rs")),
        ("jobs", include_str!("jobs.rs")),
        ("steps", include_str!("steps.rs")),
        ("claims", include_str!("claims.rs")),
        ("leases", include_str!("leases.rs")),
        ("commits", include_str!("commits.rs")),
        ("outbox", include_str!("outbox.rs")),
        ("reopen", include_str!("reopen.rs")),
        ("retention", include_str!("retention.rs")),
        ("races", include_str!("races.rs")),
        ("reports", include_str!("reports.rs")),
    ];

    #[test]
    fn every_promise_is_listed_for_every_backend() {
        let list = include_str!("mod.rs");
        let mut num_promises = 0;
        for (module, source) in SOURCES {
            for line in source.lines() {
                let Some(rest) = line.strip_prefix("pub async fn ") else { continue };
                let name = rest.split('(').next().unwrap_or_default();
                let entry = format!("            {module}::{name},\n");
                assert!(list.contains(&entry), "{module}::{name} is not listed in store_conformance!");
                num_promises += 1;
            }
        }
        let listed =
            list.lines().filter(|line| line.starts_with("            ") && line.ends_with(',') && line.contains("::"));
        assert_eq!(listed.count(), num_promises, "a listed promise is in no module of SOURCES");
    }
}
