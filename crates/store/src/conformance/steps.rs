//! What intake and finalize promise.

use std::time::Duration;

use overnight_types::{Ending, ItemIndex, JobState, OutcomeCounts, ShardIndex, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{CancelMode, Error, IntakeEnd, IntakeProgress, NewFile, NewJob, StepKind, StepLease, Store};

const SECOND: Duration = Duration::from_secs(1);

/// A new job's intake is due at once, to one worker at a time.
pub async fn intake_is_due_at_once_and_leased_once(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    assert_eq!((job.state, job.round, job.num_items), (JobState::Validating, 1, 0));
    let lease = store.claim_step(WorkerId::new(), TTL).await.unwrap().unwrap();
    assert_eq!((lease.kind, lease.job.id), (StepKind::Intake, job.id));
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
}

/// Progress and shards are recorded in one transaction, and a killed intake goes on
/// from there under a new epoch.
pub async fn killed_intake_goes_on_from_its_record(store: &dyn Store, clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let first = claim_step_of(store, job.id).await;
    let cuts = cuts(&[2, 3]);
    let progress = IntakeProgress { offset: 20, notes: "{\"lines\":2}".into() };
    applied(store.record_intake_if_leased(&first, progress.clone(), vec![cuts[0]]).await.unwrap());
    clock.advance(TTL + SECOND).await;
    let second = claim_step_of(store, job.id).await;
    assert!(second.epoch > first.epoch);
    assert_eq!((second.job.intake_offset, second.job.intake_notes.as_deref()), (20, Some("{\"lines\":2}")));
    let stale = store.record_intake_if_leased(&first, progress.clone(), vec![cuts[1]]).await.unwrap();
    assert_eq!(lost(stale), Some(JobState::Validating));
    applied(
        store.record_intake_if_leased(&second, IntakeProgress { offset: 50, ..progress }, vec![cuts[1]]).await.unwrap(),
    );
    let end = IntakeEnd::Valid { model: MODEL.into(), num_items: 5, num_shards: 2 };
    assert_eq!(lost(store.finish_intake_if_leased(&first, end.clone()).await.unwrap()), Some(JobState::Validating));
    let running = applied(store.finish_intake_if_leased(&second, end).await.unwrap());
    assert_eq!((running.state, running.num_items, running.num_shards), (JobState::InProgress, 5, 2));
    assert_eq!(running.model.as_deref(), Some(MODEL));
    assert!(running.in_progress_at.is_some());
    let shards = store.list_shards(job.id, ShardIndex(0), 9).await.unwrap();
    assert_eq!(shards.iter().map(|shard| shard.cut).collect::<Vec<_>>(), cuts);
}

/// An intake that starts over begins as a new one does; only its own lease may.
pub async fn restarted_intake_begins_with_nothing(store: &dyn Store, clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let stale = claim_step_of(store, job.id).await;
    let progress = IntakeProgress { offset: 20, notes: "of another version".into() };
    applied(store.record_intake_if_leased(&stale, progress.clone(), vec![cuts(&[2])[0]]).await.unwrap());
    clock.advance(TTL + SECOND).await;
    let held = claim_step_of(store, job.id).await;
    assert_eq!(lost(store.restart_intake_if_leased(&stale).await.unwrap()), Some(JobState::Validating));
    let job = applied(store.restart_intake_if_leased(&held).await.unwrap());
    assert_eq!((job.intake_offset, job.intake_notes), (0, None));
    assert_eq!(store.list_shards(job.id, ShardIndex(0), 9).await.unwrap(), []);
    assert_eq!(run_intake(store, &held, &[2, 3]).await.num_items, 5);
    assert_eq!(lost(store.restart_intake_if_leased(&held).await.unwrap()), Some(JobState::InProgress));
}

/// Progress that goes back, a shard recorded twice, or totals that are not those of
/// the shards are refused: the items of a job are counted once.
pub async fn intake_that_does_not_add_up_is_refused(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let lease = claim_step_of(store, job.id).await;
    let at = |offset| IntakeProgress { offset, notes: "{}".into() };
    applied(store.record_intake_if_leased(&lease, at(20), vec![cuts(&[2])[0]]).await.unwrap());
    let back = store.record_intake_if_leased(&lease, at(10), vec![]).await;
    assert!(matches!(back, Err(Error::Refused { .. })), "{back:?}");
    let twice = store.record_intake_if_leased(&lease, at(40), vec![cuts(&[2])[0]]).await;
    assert!(matches!(twice, Err(Error::Refused { .. })), "{twice:?}");
    assert_eq!(store.find_job(job.id).await.unwrap().unwrap().intake_offset, 20, "nothing of a refusal stays");
    for (num_items, num_shards) in [(3, 1), (2, 2), (0, 0)] {
        let end = IntakeEnd::Valid { model: MODEL.into(), num_items, num_shards };
        let answer = store.finish_intake_if_leased(&lease, end).await;
        assert!(matches!(answer, Err(Error::Refused { .. })), "{answer:?}");
    }
}

/// Progress is zero before intake ends, whatever is cut already.
pub async fn progress_is_zero_before_intake_ends(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let lease = claim_step_of(store, job.id).await;
    let progress = IntakeProgress { offset: 20, notes: "{}".into() };
    applied(store.record_intake_if_leased(&lease, progress, cuts(&[2])).await.unwrap());
    assert_eq!(store.find_progress(job.id).await.unwrap(), crate::Progress::default());
}

/// A faulty input ends the job as failed: nothing ran, no shard stays, no file.
pub async fn faulty_input_fails_the_job(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let lease = claim_step_of(store, job.id).await;
    let progress = IntakeProgress { offset: 20, notes: "{}".into() };
    applied(store.record_intake_if_leased(&lease, progress, cuts(&[2])).await.unwrap());
    let end = IntakeEnd::Invalid { errors: "{\"data\":[]}".into() };
    let failed = applied(store.finish_intake_if_leased(&lease, end).await.unwrap());
    assert_eq!((failed.state, failed.errors.as_deref()), (JobState::Failed, Some("{\"data\":[]}")));
    assert!(failed.failed_at.is_some() && failed.output_file_id.is_none() && failed.final_counts.is_none());
    assert_eq!(store.list_shards(job.id, ShardIndex(0), 9).await.unwrap(), []);
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None, "a failed job has no step");
}

/// Expiry never cuts intake: the job ends as expired right after it, each item with
/// its line.
pub async fn job_past_its_window_expires_after_intake(store: &dyn Store, clock: &dyn TestClock) {
    let job = validating_job(store).await;
    clock.advance(WINDOW + SECOND).await;
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), []);
    let lease = claim_step_of(store, job.id).await;
    let late = run_intake(store, &lease, &[2, 1]).await;
    assert_eq!((late.state, late.ending), (JobState::Finalizing, Some(Ending::Expired)));
    let ended = finalize(store, job.id).await;
    assert_eq!(ended.state, JobState::Expired);
    assert_eq!(ended.final_counts.unwrap().expired, 3);
}

/// A paused job's intake is not started.
pub async fn paused_intake_is_not_started(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    applied(store.pause_job_if_active(job.id).await.unwrap());
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
    applied(store.unpause_job_if_active(job.id).await.unwrap());
    assert_eq!(claim_step_of(store, job.id).await.kind, StepKind::Intake);
}

/// A step is renewed, given back with a delay, and due again by the database's clock.
pub async fn step_is_renewed_and_given_back(store: &dyn Store, clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let lease = claim_step_of(store, job.id).await;
    clock.advance(TTL - SECOND).await;
    applied(store.extend_step_if_leased(&lease, TTL).await.unwrap());
    clock.advance(TTL - SECOND).await;
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
    applied(store.release_step_if_leased(&lease, Duration::from_secs(30)).await.unwrap());
    assert_eq!(lost(store.extend_step_if_leased(&lease, TTL).await.unwrap()), Some(JobState::Validating));
    assert_eq!(lost(store.release_step_if_leased(&lease, TTL).await.unwrap()), Some(JobState::Validating));
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None, "not before its delay");
    clock.advance(Duration::from_secs(31)).await;
    assert!(store.claim_step(WorkerId::new(), TTL).await.unwrap().is_some());
}

/// The most overdue step first; one whose worker dies again and again lets others by.
pub async fn step_that_kills_its_worker_lets_others_by(store: &dyn Store, clock: &dyn TestClock) {
    let deadly = validating_job(store).await;
    clock.advance(SECOND).await;
    let other = validating_job(store).await;
    clock.advance(SECOND).await;
    let first = store.claim_step(WorkerId::new(), TTL).await.unwrap().unwrap();
    assert_eq!(first.job.id, deadly.id, "the most overdue");
    clock.advance(TTL + SECOND).await;
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap().unwrap().job.id, other.id);
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap().unwrap().job.id, deadly.id);
}

/// State, timestamp, counts, usage and files become visible in one commit.
pub async fn ending_is_published_in_one_commit(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let keep = Duration::from_secs(3600);
    let job = run_new_job(store, NewJob { output_expires_after: Some(keep), ..new_job(input) }, &[2]).await;
    let mut held = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut held, &[0, 1], &[1]).await);
    let before = store.find_job(job.id).await.unwrap().unwrap();
    let (output, error) = (before.output_file_id.unwrap(), before.error_file_id.unwrap());
    let mut drawn = [output, error];
    drawn.sort_by_key(overnight_types::FileId::uuid);
    assert_eq!(store.known_files(&drawn).await.unwrap(), drawn, "drawn: an object of that name is claimed");
    let ended = finalize(store, job.id).await;
    assert_eq!((ended.state, ended.ending), (JobState::Completed, Some(Ending::Completed)));
    assert_eq!((ended.output_file_id, ended.error_file_id), (Some(output), Some(error)));
    assert!(ended.completed_at.is_some());
    assert_eq!(ended.final_usage.unwrap().input_tokens, 10);
    let file = store.find_file(output).await.unwrap().unwrap();
    assert_eq!(file.expires_at, Some(file.created_at.plus(keep)));
    assert!(store.find_file(error).await.unwrap().is_some());
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
}

/// Counts that are not those of the shards, or files that were not drawn, do not end
/// a job: the accounting is closed or the job goes on.
pub async fn job_does_not_end_with_open_accounting(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    let mut held = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut held, &[0, 1, 2], &[2]).await);
    let step = claim_step_of(store, job.id).await;
    let good = publication(store, &step.job).await;
    let counts = good.counts;
    for bad in [
        OutcomeCounts { completed: counts.completed - 1, ..counts },
        OutcomeCounts { completed: counts.completed - 1, failed: counts.failed + 1, ..counts },
        OutcomeCounts { total: counts.total + 1, completed: counts.completed + 1, ..counts },
        OutcomeCounts { completed: counts.completed - 1, expired: 1, ..counts },
    ] {
        let answer = store.finish_job_if_leased(&step, crate::Published { counts: bad, ..good.clone() }).await;
        assert!(matches!(answer, Err(Error::Refused { .. })), "{bad:?} gave {answer:?}");
    }
    let stranger = NewFile { id: overnight_types::FileId::new(), ..good.output.clone().unwrap() };
    let answer = store.finish_job_if_leased(&step, crate::Published { output: Some(stranger), ..good.clone() }).await;
    assert!(matches!(answer, Err(Error::Refused { .. })), "{answer:?}");
    assert_eq!(store.find_job(job.id).await.unwrap().unwrap().state, JobState::Finalizing);
    applied(store.finish_job_if_leased(&step, good).await.unwrap());
}

/// Two finalizers: the later lease ends the job, the earlier one changes nothing.
pub async fn stale_finalizer_ends_nothing(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    run_all(store).await;
    let stale = claim_step_of(store, job.id).await;
    clock.advance(TTL + SECOND).await;
    let current = claim_step_of(store, job.id).await;
    let published = publication(store, &current.job).await;
    assert_eq!(lost(store.finish_job_if_leased(&stale, published.clone()).await.unwrap()), Some(JobState::Finalizing));
    assert_eq!(lost(store.fence_shards_if_leased(&stale).await.unwrap()), Some(JobState::Finalizing));
    applied(store.finish_job_if_leased(&current, published.clone()).await.unwrap());
    // Its own repetition after an unknown answer is lost as well, and harmless.
    assert_eq!(lost(store.finish_job_if_leased(&current, published).await.unwrap()), Some(JobState::Completed));
}

/// An intake lease does nothing that belongs to finalize, and the other way round.
pub async fn step_lease_serves_its_own_step_only(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    run_all(store).await;
    let finalize = claim_step_of(store, job.id).await;
    let progress = IntakeProgress { offset: 10, notes: "{}".into() };
    let answer = store.record_intake_if_leased(&finalize, progress, vec![]).await.unwrap();
    assert_eq!(lost(answer), Some(JobState::Finalizing));
    let forged = StepLease { kind: StepKind::Intake, ..finalize };
    let end = IntakeEnd::Invalid { errors: "{}".into() };
    assert_eq!(lost(store.finish_intake_if_leased(&forged, end).await.unwrap()), Some(JobState::Finalizing));
}

/// An empty job has nothing to run and is finalized at once.
pub async fn job_without_items_is_finalized_at_once(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[]).await;
    assert_eq!(job.state, JobState::Finalizing);
    assert_eq!(finalize(store, job.id).await.state, JobState::Completed);
}

/// Faults that are left when a job ends are gone after it.
pub async fn faults_are_gone_after_the_end(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    let held = lease(store, WorkerId::new()).await;
    applied(store.record_faults_if_leased(held.key(), &[new_fault(1, 1, WINDOW)]).await.unwrap());
    release(store, &held).await;
    let ended = cancelled_job(store, job.id).await;
    assert_eq!(ended.final_counts.unwrap().cancelled, 2);
    assert_eq!(store.list_faults(job.id, ItemIndex(0), ItemIndex(9), 9).await.unwrap(), []);
}

/// A cancel takes a running intake's lease: it records nothing more.
pub async fn cancel_fences_intake(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let intake = claim_step_of(store, job.id).await;
    applied(store.cancel_job_if_active(job.id, CancelMode::Drain, TTL).await.unwrap());
    let progress = IntakeProgress { offset: 20, notes: "{}".into() };
    let answer = store.record_intake_if_leased(&intake, progress, cuts(&[2])).await.unwrap();
    assert_eq!(lost(answer), Some(JobState::Cancelling));
    let end = IntakeEnd::Valid { model: MODEL.into(), num_items: 0, num_shards: 0 };
    assert_eq!(lost(store.finish_intake_if_leased(&intake, end).await.unwrap()), Some(JobState::Cancelling));
    let ended = finalize(store, job.id).await;
    assert_eq!((ended.state, ended.final_counts), (JobState::Cancelled, Some(OutcomeCounts::default())));
}
