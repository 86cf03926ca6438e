//! What a claim promises: which job, which shard, under which epoch.

use std::collections::HashMap;
use std::time::Duration;

use overnight_types::{Epoch, JobId, JobState, ShardIndex, ShardState, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{ClaimShard, IntakeEnd, IntakeProgress, Job, JobsAhead, NewJob, Store};

/// The whole life, with one failed item.
pub async fn a_job_runs_from_create_to_completed(store: &dyn Store, _clock: &dyn TestClock) {
    let job = completed_job(store, &[3, 4], &[1]).await;
    assert_eq!(job.state, JobState::Completed);
    let counts = job.final_counts.unwrap();
    assert_eq!((counts.completed, counts.failed), (6, 1));
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
}

/// A free shard is leased to the asker under epoch 1, and an attempt is recorded.
pub async fn claim_leases_the_first_ready_shard_under_a_new_epoch(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3, 4]).await;
    let worker = WorkerId::new();
    let before = store.now().await.unwrap();
    let lease = lease(store, worker).await;
    assert_eq!((lease.shard.cut.shard, lease.shard.epoch), (ShardIndex(0), Epoch(1)));
    assert_eq!((lease.shard.state, lease.shard.owner), (ShardState::Leased, Some(worker)));
    assert!(lease.shard.lease_until.unwrap() >= before.plus(TTL), "the lease lasts its time by the database's clock");
    assert_eq!(lease.job, job);
    let attempts = store.list_attempts(job.id, ShardIndex(0), 10).await.unwrap();
    assert_eq!(attempts.len(), 1);
    assert_eq!((attempts[0].worker, attempts[0].epoch, attempts[0].end), (worker, Epoch(1), None));
    assert_eq!(store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap(), lease.shard);
}

/// Two workers never hold one shard; when all are held, a claim gets nothing.
pub async fn shard_is_leased_to_one_worker_at_a_time(store: &dyn Store, _clock: &dyn TestClock) {
    running_job(store, &[1, 1]).await;
    let first = lease(store, WorkerId::new()).await;
    let second = lease(store, WorkerId::new()).await;
    assert_ne!(first.shard.cut.shard, second.shard.cut.shard);
    assert_eq!(try_lease(store, WorkerId::new()).await, None);
}

/// A shard given back with a delay is claimed when it is due, by the database's
/// clock, and one shard that waits hides no other.
pub async fn shard_is_not_claimed_before_its_time(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[1, 1]).await;
    let worker = WorkerId::new();
    let first = lease(store, worker).await;
    let why = crate::AttemptEnd::Waiting;
    applied(store.release_shard_if_leased(first.key(), Duration::from_secs(60), why).await.unwrap());
    assert_eq!(lease(store, worker).await.shard.cut.shard, ShardIndex(1));
    assert_eq!(try_lease(store, worker).await, None);
    clock.advance(Duration::from_secs(61)).await;
    let again = lease(store, worker).await;
    assert_eq!((again.shard.cut.shard, again.shard.epoch), (ShardIndex(0), Epoch(2)));
    assert_eq!(again.shard.crashes, 0, "a release is no crash");
}

/// A lease that is over is claimed by the next asker; the epoch rises, the crash is
/// counted, and the old attempt ends as lost.
pub async fn expired_lease_is_claimed_again(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    lease(store, WorkerId::new()).await;
    clock.advance(TTL + Duration::from_secs(1)).await;
    let worker = WorkerId::new();
    let lease = lease(store, worker).await;
    assert_eq!((lease.shard.epoch, lease.shard.crashes, lease.shard.owner), (Epoch(2), 1, Some(worker)));
    let attempts = store.list_attempts(job.id, ShardIndex(0), 10).await.unwrap();
    let ends: Vec<_> = attempts.iter().map(|attempt| (attempt.epoch, attempt.end)).collect();
    assert_eq!(ends, [(Epoch(2), None), (Epoch(1), Some(crate::AttemptEnd::Lost))]);
}

/// Priority first, lower before higher.
pub async fn claim_serves_by_priority(store: &dyn Store, _clock: &dyn TestClock) {
    let late = job_with(store, 5, WINDOW).await;
    let urgent = job_with(store, -1, WINDOW).await;
    assert_eq!(lease(store, WorkerId::new()).await.job.id, urgent.id);
    assert_eq!(lease(store, WorkerId::new()).await.job.id, late.id);
}

/// Among equals, the window that ends first.
pub async fn claim_serves_by_deadline_among_equal_priorities(store: &dyn Store, _clock: &dyn TestClock) {
    let long = job_with(store, 0, WINDOW * 2).await;
    let short = job_with(store, 0, WINDOW).await;
    assert_eq!(lease(store, WorkerId::new()).await.job.id, short.id);
    assert_eq!(lease(store, WorkerId::new()).await.job.id, long.id);
}

/// Among jobs of one kind, the older.
pub async fn claim_serves_the_older_of_two_like_jobs(store: &dyn Store, clock: &dyn TestClock) {
    let older = job_with(store, 0, WINDOW).await;
    clock.advance(Duration::from_secs(1)).await;
    let newer = job_with(store, 0, WINDOW).await;
    assert_eq!(lease(store, WorkerId::new()).await.job.id, older.id);
    assert_eq!(lease(store, WorkerId::new()).await.job.id, newer.id);
}

/// The fairness claim takes the oldest job whatever its priority.
pub async fn oldest_claim_starves_no_job(store: &dyn Store, clock: &dyn TestClock) {
    let oldest = job_with(store, 9, WINDOW * 3).await;
    clock.advance(Duration::from_secs(1)).await;
    let urgent = job_with(store, 0, WINDOW).await;
    let ask = |oldest| ClaimShard { oldest, ..claim(WorkerId::new()) };
    assert_eq!(store.claim_shard(&ask(false)).await.unwrap().unwrap().job.id, urgent.id);
    assert_eq!(store.claim_shard(&ask(true)).await.unwrap().unwrap().job.id, oldest.id);
}

/// A job whose shards are all held or waiting stands in nobody's way.
pub async fn claim_goes_past_a_job_with_nothing_to_lease(store: &dyn Store, _clock: &dyn TestClock) {
    let urgent = job_with(store, -5, WINDOW).await;
    let other = job_with(store, 0, WINDOW).await;
    assert_eq!(lease(store, WorkerId::new()).await.job.id, urgent.id);
    assert_eq!(lease(store, WorkerId::new()).await.job.id, other.id);
}

/// Progress tells how many jobs a claim serves first: in the claim's own order, of the
/// same model alone, and none of those that a claim goes past.
pub async fn progress_tells_the_jobs_ahead(store: &dyn Store, clock: &dyn TestClock) {
    let ahead = async |job: &Job| store.find_progress(job.id).await.unwrap().jobs_ahead;
    let input = input(store).await;
    let other_model = insert(store, NewJob { priority: -9, ..new_job(input) }).await;
    let intake = claim_step_of(store, other_model.id).await;
    let progress = IntakeProgress { offset: 10, notes: "{}".into() };
    applied(store.record_intake_if_leased(&intake, progress, cuts(&[1])).await.unwrap());
    let end = IntakeEnd::Valid { model: "another".into(), num_items: 1, num_shards: 1 };
    applied(store.finish_intake_if_leased(&intake, end).await.unwrap());
    let last = job_with(store, 1, WINDOW).await;
    let third = job_with(store, 0, WINDOW * 2).await;
    let second = job_with(store, 0, WINDOW).await;
    let first = job_with(store, -1, WINDOW * 2).await;
    let validating = validating_job(store).await;
    let places = [(&first, 0), (&second, 1), (&third, 2), (&last, 3), (&other_model, 0)];
    for (job, jobs) in places {
        assert_eq!(ahead(job).await, Some(jobs));
    }
    let ids: Vec<JobId> = places.iter().map(|(job, _)| job.id).collect();
    for (asked, is_told) in [(JobsAhead::Count, true), (JobsAhead::Skip, false)] {
        let many: HashMap<_, _> = store.find_progress_of(&ids, asked).await.unwrap().into_iter().collect();
        for (job, jobs) in places {
            assert_eq!(many[&job.id].jobs_ahead, is_told.then_some(jobs), "{asked:?}");
        }
    }
    assert_eq!(ahead(&validating).await, None);
    applied(store.pause_job_if_active(second.id).await.unwrap());
    assert_eq!((ahead(&second).await, ahead(&third).await), (None, Some(1)), "a paused job stands in nobody's way");
    let mut held = lease(store, WorkerId::new()).await;
    assert_eq!((held.job.id, ahead(&third).await), (first.id, Some(0)), "nor does one whose shards are all held");
    commit_rest(store, &mut held).await;
    assert_eq!(ahead(&first).await, None, "a job that is being finalized is not runnable");
    clock.advance(WINDOW + Duration::from_secs(1)).await;
    assert_eq!((ahead(&last).await, ahead(&third).await), (None, Some(0)), "past its window a job is not runnable");
}

/// Only jobs for a model at hand; a worker that serves any model takes any.
pub async fn claim_takes_only_jobs_for_models_at_hand(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    let other = ClaimShard { models: Some(vec!["another".into()]), ..claim(WorkerId::new()) };
    assert_eq!(store.claim_shard(&other).await.unwrap(), None);
    let none = ClaimShard { models: Some(vec![]), ..claim(WorkerId::new()) };
    assert_eq!(store.claim_shard(&none).await.unwrap(), None);
    let any = ClaimShard { models: None, ..claim(WorkerId::new()) };
    assert_eq!(store.claim_shard(&any).await.unwrap().unwrap().job.id, job.id);
}

/// Nothing of a paused job is claimed; resume lets it go on.
pub async fn paused_job_is_not_claimed(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    let paused = applied(store.pause_job_if_active(job.id).await.unwrap());
    assert!(paused.paused_at.is_some());
    assert_eq!(paused.state, JobState::InProgress, "paused is no state");
    assert_eq!(try_lease(store, WorkerId::new()).await, None);
    applied(store.unpause_job_if_active(job.id).await.unwrap());
    assert_eq!(lease(store, WorkerId::new()).await.job.id, job.id);
}

/// A job past its window is not claimed, before anybody has expired it.
pub async fn job_past_its_window_is_not_claimed(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[1]).await;
    clock.advance(WINDOW + Duration::from_secs(1)).await;
    assert_eq!(try_lease(store, WorkerId::new()).await, None);
}

/// Nothing is claimed of jobs in other states than `in_progress`.
pub async fn only_running_jobs_are_claimed(store: &dyn Store, _clock: &dyn TestClock) {
    validating_job(store).await;
    let cancelled = running_job(store, &[1]).await;
    applied(store.cancel_job_if_active(cancelled.id, crate::CancelMode::Now, Duration::ZERO).await.unwrap());
    assert_eq!(try_lease(store, WorkerId::new()).await, None);
}

/// A claim brings the shard's faults and the job's used retries.
pub async fn claim_brings_faults_and_used_retries(store: &dyn Store, _clock: &dyn TestClock) {
    running_job(store, &[3]).await;
    let first = lease(store, WorkerId::new()).await;
    let faults = [new_fault(0, 1, Duration::ZERO), new_fault(2, 1, Duration::from_secs(9))];
    applied(store.record_faults_if_leased(first.key(), &faults).await.unwrap());
    release(store, &first).await;
    let again = lease(store, WorkerId::new()).await;
    assert_eq!(again.faults.iter().map(|fault| fault.item.0).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(again.faults[1].code, "engine_timeout");
    assert_eq!(again.retries_used, 2);
}

async fn job_with(store: &dyn Store, priority: i32, window: Duration) -> Job {
    let input = input(store).await;
    run_new_job(store, crate::NewJob { priority, window, ..new_job(input) }, &[1]).await
}
