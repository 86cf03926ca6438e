//! What a re-opening promises.

use std::time::Duration;

use overnight_types::{Bitmap, FileId, ItemIndex, JobId, JobState, ShardIndex, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{CancelMode, Error, Job, NewSegment, Reopen, ReopenItems, SegmentCursor, SegmentSelection, Store};

/// Failed and unfinished items run again, completed ones are kept and not run.
pub async fn reopened_job_runs_what_did_not_complete(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[3, 2, 2]).await;
    let worker = WorkerId::new();
    let (mut first, mut second) = (lease(store, worker).await, lease(store, worker).await);
    applied(commit(store, &mut first, &[0, 1, 2], &[1]).await);
    applied(commit(store, &mut second, &[0, 1], &[]).await);
    let cancelled = cancelled_job(store, job.id).await;
    clock.advance(Duration::from_secs(5)).await;
    let reopened = applied(store.reopen_job_if_ended(job.id, everything()).await.unwrap());
    assert_eq!((reopened.num_kept, reopened.num_failed_again, reopened.num_unfinished), (4, 1, 2));
    let Job { state, round, ending, output_file_id, cancelled_at, cancelling_at, final_counts, .. } = reopened.job;
    assert_eq!((state, round, ending, output_file_id), (JobState::InProgress, 2, None, None));
    assert_eq!((cancelled_at, cancelling_at, final_counts), (None, None, None));
    assert_eq!(
        (reopened.job.created_at, reopened.job.in_progress_at),
        (cancelled.created_at, cancelled.in_progress_at)
    );
    assert!(reopened.job.expires_at > cancelled.expires_at, "the window starts anew");
    let counts = store.find_progress(job.id).await.unwrap().counts;
    assert_eq!((counts.completed, counts.failed, counts.unfinished()), (4, 0, 3));
    let mut undone = Vec::new();
    while let Some(mut held) = try_lease(store, worker).await {
        undone.extend(held.shard.done.zeros().map(|bit| held.shard.cut.first_item.0 + u64::from(bit)));
        commit_rest(store, &mut held).await;
    }
    assert_eq!(undone, [1, 5, 6], "a shard with nothing to run is not leased");
    let usage = store.find_progress(job.id).await.unwrap().usage;
    assert_eq!((usage.input_tokens, usage.output_tokens), (70, 7), "an item that ran in two rounds counts once");
    let ended = finalize(store, job.id).await;
    assert_eq!((ended.state, ended.final_counts.unwrap().completed), (JobState::Completed, 7));
    assert_ne!(ended.output_file_id, cancelled.output_file_id, "a new round publishes under new ids");
}

/// A write that belongs to an earlier round is refused.
pub async fn earlier_round_writes_nothing(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    let mut stale = lease(store, WorkerId::new()).await;
    cancelled_job(store, job.id).await;
    applied(store.reopen_job_if_ended(job.id, everything()).await.unwrap());
    assert!(lost(commit(store, &mut stale, &[0], &[]).await).is_some());
    let mut current = lease(store, WorkerId::new()).await;
    assert!(current.shard.epoch.0 >= stale.shard.epoch.0 + 2);
    assert!(lost(commit(store, &mut stale, &[0], &[]).await).is_some());
    applied(commit(store, &mut current, &[0], &[]).await);
}

/// A later round's segments carry its number, and a reader can ask for them alone.
pub async fn segments_carry_their_round(store: &dyn Store, _clock: &dyn TestClock) {
    let job = completed_job(store, &[2], &[1]).await;
    applied(store.reopen_job_if_ended(job.id, everything()).await.unwrap());
    run_all(store).await;
    let rounds = |round| SegmentSelection { job: job.id, round, after: SegmentCursor::default(), limit: 9 };
    let all = store.list_segments_committed(rounds(None)).await.unwrap();
    assert_eq!(all.iter().map(|segment| (segment.round, segment.new.seq)).collect::<Vec<_>>(), [(1, 0), (2, 1)]);
    assert_eq!(store.list_segments_committed(rounds(Some(2))).await.unwrap(), all[1..]);
}

/// Only ended jobs re-open, and only when something would run.
pub async fn reopening_is_lost_in_any_other_state(store: &dyn Store, _clock: &dyn TestClock) {
    let answer = |id| async move { lost(store.reopen_job_if_ended(id, everything()).await.unwrap()) };
    let validating = validating_job(store).await;
    assert_eq!(answer(validating.id).await, Some(JobState::Validating));
    cancelled_job(store, validating.id).await;
    let running = running_job(store, &[1]).await;
    assert_eq!(answer(running.id).await, Some(JobState::InProgress));
    applied(store.cancel_job_if_active(running.id, CancelMode::Now, TTL).await.unwrap());
    assert_eq!(answer(running.id).await, Some(JobState::Cancelling));
    let whole = completed_job(store, &[2], &[]).await;
    assert_eq!(answer(whole.id).await, Some(JobState::Completed), "nothing to resume");
    let selected = Reopen { items: ReopenItems::Selected(vec![ItemIndex(0)]), ..everything() };
    let nothing = store.reopen_job_if_ended(whole.id, selected).await.unwrap();
    assert_eq!(lost(nothing), Some(JobState::Completed), "a completed item is never run again");
    assert_eq!(answer(JobId::new()).await, None);
}

/// A re-opening whose input is deleted is lost: its bytes may go at any moment.
pub async fn reopening_needs_the_input(store: &dyn Store, _clock: &dyn TestClock) {
    let job = completed_job(store, &[2], &[1]).await;
    applied(store.delete_file_if_present(job.input_file_id).await.unwrap());
    let answer = store.reopen_job_if_ended(job.id, everything()).await.unwrap();
    assert_eq!(lost(answer), Some(JobState::Completed));
}

/// A job that was cancelled before intake ended goes back to validating and on from
/// where intake was.
pub async fn reopened_validation_goes_on(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let intake = claim_step_of(store, job.id).await;
    let progress = crate::IntakeProgress { offset: 20, notes: "{}".into() };
    applied(store.record_intake_if_leased(&intake, progress, cuts(&[2])).await.unwrap());
    cancelled_job(store, job.id).await;
    let reopened = applied(store.reopen_job_if_ended(job.id, everything()).await.unwrap());
    assert_eq!((reopened.job.state, reopened.job.round), (JobState::Validating, 2));
    let intake = claim_step_of(store, job.id).await;
    assert_eq!(intake.job.intake_offset, 20);
    let end = crate::IntakeEnd::Valid { model: MODEL.into(), num_items: 2, num_shards: 1 };
    applied(store.finish_intake_if_leased(&intake, end).await.unwrap());
    run_all(store).await;
    assert_eq!(finalize(store, job.id).await.final_counts.unwrap().completed, 2);
}

/// A selective retry runs the chosen items; undone ones that it leaves out are
/// settled by leftover segments and count as what the job ended as.
pub async fn selective_retry_settles_what_it_leaves_out(store: &dyn Store, _clock: &dyn TestClock) {
    let job = partly_run_job(store).await;
    cancelled_job(store, job.id).await;
    let shards = store.list_shards(job.id, ShardIndex(0), 9).await.unwrap();
    let reopen = Reopen {
        items: ReopenItems::Selected(vec![ItemIndex(1), ItemIndex(3)]),
        leftover_segments: vec![leftover(&shards[0], &[2]), leftover(&shards[1], &[1])],
        window: Some(("1h".into(), Duration::from_secs(3600))),
    };
    let reopened = applied(store.reopen_job_if_ended(job.id, reopen).await.unwrap());
    assert_eq!((reopened.num_kept, reopened.num_failed_again, reopened.num_unfinished), (3, 1, 1));
    assert_eq!((reopened.job.completion_window.as_str(), reopened.job.window.as_secs()), ("1h", 3600));
    let counts = store.find_progress(job.id).await.unwrap().counts;
    assert_eq!((counts.completed, counts.cancelled, counts.failed, counts.unfinished()), (1, 2, 0, 2));
    run_all(store).await;
    let ended = finalize(store, job.id).await;
    let counts = ended.final_counts.unwrap();
    assert_eq!((ended.state, counts.completed, counts.cancelled), (JobState::Completed, 3, 2));
    // What a retry left out runs after all when everything is resumed.
    let reopened = applied(store.reopen_job_if_ended(job.id, everything()).await.unwrap());
    assert_eq!((reopened.num_kept, reopened.num_failed_again, reopened.num_unfinished), (3, 0, 2));
    run_all(store).await;
    assert_eq!(finalize(store, job.id).await.final_counts.unwrap().completed, 5);
}

/// Items left out of retries keep the ending they were left with, round by round.
pub async fn left_out_items_keep_their_own_ending(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    cancelled_job(store, job.id).await;
    let shard = store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap();
    let selected = |items: &[u64]| ReopenItems::Selected(items.iter().copied().map(ItemIndex).collect());
    let first = Reopen { items: selected(&[1, 2]), leftover_segments: vec![leftover(&shard, &[0])], window: None };
    applied(store.reopen_job_if_ended(job.id, first).await.unwrap());
    clock.advance(WINDOW + Duration::from_secs(1)).await;
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), [job.id]);
    finalize(store, job.id).await;
    let shard = store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap();
    let second = Reopen { items: selected(&[2]), leftover_segments: vec![leftover(&shard, &[1])], window: None };
    applied(store.reopen_job_if_ended(job.id, second).await.unwrap());
    run_all(store).await;
    let counts = finalize(store, job.id).await.final_counts.unwrap();
    assert_eq!((counts.completed, counts.cancelled, counts.expired), (1, 1, 1));
}

/// Leftovers for a shard that has moved on lose; such as do not settle exactly what
/// is left out are refused; either way nothing changes.
pub async fn wrong_leftovers_reopen_nothing(store: &dyn Store, _clock: &dyn TestClock) {
    let job = partly_run_job(store).await;
    let before = cancelled_job(store, job.id).await;
    let shards = store.list_shards(job.id, ShardIndex(0), 9).await.unwrap();
    let good = [leftover(&shards[0], &[2]), leftover(&shards[1], &[1])];
    let with = |leftover_segments: Vec<NewSegment>| Reopen {
        items: ReopenItems::Selected(vec![ItemIndex(1), ItemIndex(3)]),
        leftover_segments,
        window: None,
    };
    let stale = NewSegment { seq: good[0].seq + 1, ..good[0].clone() };
    let answer = store.reopen_job_if_ended(job.id, with(vec![stale, good[1].clone()])).await.unwrap();
    assert_eq!(lost(answer), Some(JobState::Cancelled));
    let settled_as_good = NewSegment { failed: Bitmap::new(2), ..good[1].clone() };
    for bad in [
        vec![],
        vec![good[0].clone()],
        vec![leftover(&shards[0], &[1, 2]), good[1].clone()],
        vec![good[0].clone(), settled_as_good],
        vec![good[0].clone(), good[1].clone(), good[1].clone()],
        vec![good[0].clone(), good[1].clone(), NewSegment { shard: ShardIndex(8), ..good[1].clone() }],
    ] {
        let answer = store.reopen_job_if_ended(job.id, with(bad)).await;
        assert!(matches!(answer, Err(Error::Refused { .. })), "{answer:?}");
    }
    assert_eq!(store.find_job(job.id).await.unwrap(), Some(before));
    assert_eq!(store.list_shards(job.id, ShardIndex(0), 9).await.unwrap(), shards);
}

/// The retry budget starts anew with each round.
pub async fn retry_budget_starts_anew(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    let held = lease(store, WorkerId::new()).await;
    applied(store.record_faults_if_leased(held.key(), &[new_fault(0, 1, TTL)]).await.unwrap());
    release(store, &held).await;
    cancelled_job(store, job.id).await;
    applied(store.reopen_job_if_ended(job.id, everything()).await.unwrap());
    let again = lease(store, WorkerId::new()).await;
    assert_eq!((again.retries_used, again.faults), (0, vec![]));
}

/// Files of an earlier round stay readable under their old ids.
pub async fn files_of_earlier_rounds_stay(store: &dyn Store, _clock: &dyn TestClock) {
    let job = completed_job(store, &[2], &[1]).await;
    applied(store.reopen_job_if_ended(job.id, everything()).await.unwrap());
    run_all(store).await;
    let ended = finalize(store, job.id).await;
    let files: Vec<FileId> =
        [job.output_file_id, job.error_file_id, ended.output_file_id].into_iter().flatten().collect();
    assert_eq!(files.len(), 3);
    for file in files {
        assert!(store.find_file(file).await.unwrap().is_some());
    }
}

fn everything() -> Reopen {
    Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: vec![] }
}

/// Shards of 3 and 2: item 0 completed, item 1 failed, the others undone.
async fn partly_run_job(store: &dyn Store) -> Job {
    let job = running_job(store, &[3, 2]).await;
    let mut held = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut held, &[0, 1], &[1]).await);
    release(store, &held).await;
    job
}

fn leftover(shard: &crate::Shard, items: &[u32]) -> NewSegment {
    segment_of(shard, items, items)
}
