//! What retention promises: ended jobs go after their time, and nothing that is named goes.

use std::time::Duration;

use overnight_types::{FileId, JobState, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{FilePurpose, Guarded, Job, NewFile, NewJob, Reopen, ReopenItems, Store};

const HOUR: Duration = Duration::from_secs(3600);
/// How long jobs stay here.
const KEPT: Duration = HOUR;

async fn is_there(store: &dyn Store, job: &Job) -> bool {
    store.find_job(job.id).await.unwrap().is_some()
}

async fn has_file(store: &dyn Store, file: FileId) -> bool {
    store.find_file(file).await.unwrap().is_some()
}

fn published(job: &Job) -> [FileId; 2] {
    [job.output_file_id.unwrap(), job.error_file_id.unwrap()]
}

/// An ended job goes once its time is over, not before; its published files and its
/// input go with it, and after that every row.
pub async fn ended_job_goes_with_its_files_after_its_time(store: &dyn Store, clock: &dyn TestClock) {
    let job = completed_job(store, &[2, 2], &[1]).await;
    let [output, error] = published(&job);
    clock.advance(KEPT - Duration::from_secs(60)).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 0);
    for file in [job.input_file_id, output, error] {
        assert!(has_file(store, file).await);
    }
    clock.advance(Duration::from_secs(61)).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 1);
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 0, "once");
    assert!(!is_there(store, &job).await);
    let mut removable = store.list_removable_files(9).await.unwrap();
    removable.sort_by_key(FileId::uuid);
    let mut all = [job.input_file_id, output, error];
    all.sort_by_key(FileId::uuid);
    assert_eq!(removable, all);
    for file in removable {
        store.forget_file(file).await.unwrap();
    }
    while store.purge_deleted_jobs(100).await.unwrap().has_more {}
    assert_eq!(store.known_jobs(&[job.id]).await.unwrap(), []);
}

/// Those that ended first go first, in bounded pieces, however they ended.
pub async fn longest_ended_jobs_go_first(store: &dyn Store, clock: &dyn TestClock) {
    let first = completed_job(store, &[1], &[]).await;
    clock.advance(Duration::from_secs(10)).await;
    let running = running_job(store, &[1]).await;
    let second = cancelled_job(store, running.id).await;
    clock.advance(Duration::from_secs(10)).await;
    let third = completed_job(store, &[1], &[]).await;
    clock.advance(KEPT).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 2).await.unwrap(), 2);
    assert_eq!(
        [is_there(store, &first).await, is_there(store, &second).await, is_there(store, &third).await],
        [false, false, true]
    );
    assert_eq!(store.delete_jobs_ended_for(KEPT, 2).await.unwrap(), 1);
}

/// A job in any state but an end stays, however old, and so does its input.
pub async fn job_that_has_not_ended_never_goes(store: &dyn Store, clock: &dyn TestClock) {
    let window = HOUR * 24 * 1_000;
    let validating = validating_job(store).await;
    let file = input(store).await;
    let running = run_new_job(store, NewJob { window, ..new_job(file) }, &[1]).await;
    let file = input(store).await;
    let finalizing = run_new_job(store, NewJob { window, priority: -1, ..new_job(file) }, &[1]).await;
    let mut held = lease(store, WorkerId::new()).await;
    assert_eq!(held.shard.job, finalizing.id);
    commit_rest(store, &mut held).await;
    clock.advance(HOUR * 24 * 365).await;
    assert_eq!(store.delete_jobs_ended_for(Duration::ZERO, 9).await.unwrap(), 0);
    for (job, state) in
        [(&validating, JobState::Validating), (&running, JobState::InProgress), (&finalizing, JobState::Finalizing)]
    {
        assert_eq!(store.find_job(job.id).await.unwrap().map(|job| job.state), Some(state));
        assert!(has_file(store, job.input_file_id).await, "the input of a job that is {state}");
    }
}

/// The time of a job that runs again counts from its last end.
pub async fn reopened_job_is_kept_from_its_last_end(store: &dyn Store, clock: &dyn TestClock) {
    let job = completed_job(store, &[2], &[0]).await;
    clock.advance(KEPT).await;
    reopen(store, &job).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 0, "it runs");
    run_all(store).await;
    let job = finalize(store, job.id).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 0, "it has just ended");
    clock.advance(KEPT).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 1);
    assert!(!is_there(store, &job).await);
}

async fn reopen(store: &dyn Store, job: &Job) {
    let reopen = Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: Vec::new() };
    let answer = store.reopen_job_if_ended(job.id, reopen).await.unwrap();
    assert!(matches!(answer, Guarded::Applied(_)), "{answer:?}");
}

/// Files that a job published before it was re-opened are its own, too.
pub async fn files_of_every_round_go_with_their_job(store: &dyn Store, clock: &dyn TestClock) {
    let first = completed_job(store, &[2], &[0]).await;
    reopen(store, &first).await;
    run_all(store).await;
    let second = finalize(store, first.id).await;
    assert_ne!(second.output_file_id, first.output_file_id);
    let files = [published(&first)[0], published(&first)[1], second.output_file_id.unwrap()];
    for file in files {
        assert!(has_file(store, file).await, "files of earlier rounds stay with their job");
    }
    clock.advance(KEPT).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 1);
    for file in files {
        assert!(!has_file(store, file).await);
    }
}

/// An input stays while any job that is not hidden names it, ended ones included:
/// they may run again. Jobs that go together do not hold it for each other.
pub async fn input_stays_while_another_job_names_it(store: &dyn Store, clock: &dyn TestClock) {
    let file = input(store).await;
    let mut jobs = Vec::new();
    for _ in 0..3 {
        let job = run_new_job(store, new_job(file), &[1]).await;
        run_all(store).await;
        jobs.push(finalize(store, job.id).await);
        clock.advance(Duration::from_secs(60)).await;
    }
    clock.advance(KEPT - Duration::from_secs(150)).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 1, "the first");
    assert!(!is_there(store, &jobs[0]).await && is_there(store, &jobs[1]).await);
    assert!(has_file(store, file).await);
    clock.advance(KEPT).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 2, "both others at once");
    assert!(!has_file(store, file).await);
}

/// Who gave a file an expiry decided how long it stays.
pub async fn file_with_an_expiry_of_its_own_stays_until_then(store: &dyn Store, clock: &dyn TestClock) {
    let new = NewFile { expires_after_s: Some(48 * 3600), ..new_file(FilePurpose::Batch) };
    store.insert_file(new.clone()).await.unwrap();
    let job = NewJob { output_expires_after: Some(HOUR * 48), ..new_job(new.id) };
    let job = run_new_job(store, job, &[1]).await;
    run_all(store).await;
    let job = finalize(store, job.id).await;
    let output = job.output_file_id.unwrap();
    clock.advance(KEPT).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 1);
    assert!(has_file(store, new.id).await && has_file(store, output).await);
    assert_eq!(store.list_removable_files(9).await.unwrap(), []);
    clock.advance(HOUR * 48).await;
    assert_eq!(store.list_removable_files(9).await.unwrap().len(), 2);
}

/// A job stays while its end is being told to a receiver; where there is none, its event
/// is never tried and holds nothing.
pub async fn job_whose_event_is_being_tried_stays(store: &dyn Store, clock: &dyn TestClock) {
    let told = completed_job(store, &[1], &[]).await;
    let event = store.claim_event(Duration::from_secs(60)).await.unwrap().expect("the end is to be told");
    assert_eq!(event.job, told.id);
    applied(store.retry_event_if_claimed(&event, HOUR * 24).await.unwrap());
    let untold = completed_job(store, &[1], &[]).await;
    clock.advance(KEPT).await;
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 1);
    assert!(is_there(store, &told).await && !is_there(store, &untold).await);
    applied(store.deliver_event_if_undelivered(event.id).await.unwrap());
    assert_eq!(store.delete_jobs_ended_for(KEPT, 9).await.unwrap(), 1);
}
