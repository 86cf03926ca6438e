//! What a commit promises, and every way to lose it.

use std::time::Duration;

use overnight_types::{Bitmap, Epoch, ItemIndex, JobState, ShardIndex, ShardState, Usage, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{AttemptEnd, CancelMode, SegmentCursor, SegmentSelection, Store};

const SECOND: Duration = Duration::from_secs(1);

/// Bits, counts, usage and the segment's row move together.
pub async fn commit_sets_bits_counts_and_row_together(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[4, 1]).await;
    let mut held = lease(store, WorkerId::new()).await;
    let segment = segment_of(&held.shard, &[0, 2], &[2]);
    let committed = applied(commit(store, &mut held, &[0, 2], &[2]).await);
    assert_eq!((committed.shard_done, committed.job_state), (false, JobState::InProgress));
    let shard = store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap();
    assert_eq!(shard.done.ones().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(shard.failed.ones().collect::<Vec<_>>(), [2]);
    assert_eq!((shard.next_seq, shard.usage, shard.state), (1, segment.usage, ShardState::Leased));
    let rows = store.list_segments_of_shard(job.id, ShardIndex(0)).await.unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((&rows[0].new, rows[0].round, rows[0].job), (&segment, 1, job.id));
    let progress = store.find_progress(job.id).await.unwrap();
    assert_eq!((progress.counts.total, progress.counts.completed, progress.counts.failed), (5, 1, 1));
    assert_eq!(progress.usage, Usage { input_tokens: 10, output_tokens: 1, ..Usage::default() });
}

/// The last outcome of a shard ends it; the last of the job starts its finalize.
pub async fn last_commit_ends_shard_and_job(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1, 2]).await;
    let worker = WorkerId::new();
    let (mut first, mut second) = (lease(store, worker).await, lease(store, worker).await);
    let committed = commit_rest(store, &mut second).await;
    assert_eq!((committed.shard_done, committed.job_state), (true, JobState::InProgress));
    let committed = commit_rest(store, &mut first).await;
    assert_eq!((committed.shard_done, committed.job_state), (true, JobState::Finalizing));
    let after = store.find_job(job.id).await.unwrap().unwrap();
    assert_eq!((after.state, after.ending), (JobState::Finalizing, Some(overnight_types::Ending::Completed)));
    assert!(after.finalizing_at.is_some() && after.output_file_id.is_some() && after.error_file_id.is_some());
    let attempts = store.list_attempts(job.id, ShardIndex(1), 9).await.unwrap();
    assert_eq!(attempts[0].end, Some(AttemptEnd::Done));
    assert_eq!(store.find_shard(job.id, ShardIndex(1)).await.unwrap().unwrap().owner, None);
}

/// A lease that ran out and was claimed again commits nothing.
pub async fn stale_epoch_cannot_commit(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    let mut stale = lease(store, WorkerId::new()).await;
    clock.advance(TTL + SECOND).await;
    let mut current = lease(store, WorkerId::new()).await;
    assert_eq!(lost(commit(store, &mut stale, &[0], &[]).await), Some(ShardState::Leased));
    assert!(store.list_segments_of_shard(job.id, ShardIndex(0)).await.unwrap().is_empty());
    commit_rest(store, &mut current).await;
    assert_eq!(lost(commit(store, &mut stale, &[0], &[]).await), Some(ShardState::Done));
}

/// A lease that was taken back but not claimed again commits nothing either.
pub async fn lease_that_was_taken_back_cannot_commit(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[2]).await;
    let mut stale = lease(store, WorkerId::new()).await;
    clock.advance(TTL + SECOND).await;
    assert_eq!(store.release_expired_leases(10).await.unwrap(), 1);
    assert_eq!(lost(commit(store, &mut stale, &[0], &[]).await), Some(ShardState::Ready));
}

/// A reaper that read its list before the work was done overwrites nothing.
/// (river#1302: a rescuer overwrote a job that had completed after its snapshot.)
pub async fn reap_after_commit_overwrites_nothing(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    let worker = WorkerId::new();
    let mut held = lease(store, worker).await;
    clock.advance(TTL + SECOND).await;
    // Over by the clock but not taken back: the commit still holds its epoch.
    assert!(commit_rest(store, &mut held).await.shard_done);
    assert_eq!(store.release_expired_leases(10).await.unwrap(), 0);
    assert_eq!(store.release_leases_of_dead(&[worker]).await.unwrap(), 0);
    assert_eq!(store.release_lost_leases(job.id).await.unwrap(), 0);
    assert_eq!(try_lease(store, WorkerId::new()).await, None);
    let shard = store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap();
    assert_eq!((shard.state, shard.crashes), (ShardState::Done, 0));
}

/// A segment's number must be the next one.
pub async fn wrong_next_seq_cannot_commit(store: &dyn Store, _clock: &dyn TestClock) {
    running_job(store, &[3]).await;
    let mut held = lease(store, WorkerId::new()).await;
    let early = crate::NewSegment { seq: 1, ..segment_of(&held.shard, &[0], &[]) };
    let answer = store.commit_segment_if_leased(held.key(), &early).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Leased));
    applied(commit(store, &mut held, &[0], &[]).await);
    let again = crate::NewSegment { seq: 0, ..segment_of(&held.shard, &[1], &[]) };
    let answer = store.commit_segment_if_leased(held.key(), &again).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Leased));
}

/// An item has one outcome: a segment with an item that is done already is lost whole.
pub async fn item_is_never_done_twice(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    let mut held = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut held, &[1], &[]).await);
    assert_eq!(lost(commit(store, &mut held, &[1, 2], &[]).await), Some(ShardState::Leased));
    let shard = store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap();
    assert_eq!(shard.done.ones().collect::<Vec<_>>(), [1], "nothing of the lost segment was written");
}

/// A commit repeated after an unknown answer is lost, and does no harm.
pub async fn repeated_commit_is_lost(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    let held = lease(store, WorkerId::new()).await;
    let segment = segment_of(&held.shard, &[0], &[]);
    applied(store.commit_segment_if_leased(held.key(), &segment).await.unwrap());
    let answer = store.commit_segment_if_leased(held.key(), &segment).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Leased));
    assert_eq!(store.find_progress(job.id).await.unwrap().counts.completed, 1);
}

/// A commit for a job or shard that is not there is lost, with no state to tell.
pub async fn commit_to_nowhere_is_lost(store: &dyn Store, _clock: &dyn TestClock) {
    running_job(store, &[3]).await;
    let held = lease(store, WorkerId::new()).await;
    let mut elsewhere = held.clone();
    elsewhere.shard.job = overnight_types::JobId::new();
    assert_eq!(lost(commit(store, &mut elsewhere, &[0], &[]).await), None);
}

/// A segment that could never be right is refused, not lost.
pub async fn malformed_segment_is_refused(store: &dyn Store, _clock: &dyn TestClock) {
    running_job(store, &[3]).await;
    let held = lease(store, WorkerId::new()).await;
    let good = segment_of(&held.shard, &[0], &[]);
    let mut stray = Bitmap::new(3);
    stray.set(1);
    for bad in [
        crate::NewSegment { items: Bitmap::new(4), failed: Bitmap::new(4), ..good.clone() },
        crate::NewSegment { items: Bitmap::new(3), ..good.clone() },
        crate::NewSegment { failed: stray, ..good.clone() },
        crate::NewSegment { epoch: Epoch(7), ..good.clone() },
        crate::NewSegment { shard: ShardIndex(7), ..good.clone() },
    ] {
        let answer = store.commit_segment_if_leased(held.key(), &bad).await;
        assert!(matches!(answer, Err(crate::Error::Refused { .. })), "{bad:?} gave {answer:?}");
    }
    applied(store.commit_segment_if_leased(held.key(), &good).await.unwrap());
}

/// The outcome takes its item's fault away, and only its.
pub async fn outcome_takes_the_fault_away(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    let mut held = lease(store, WorkerId::new()).await;
    let faults = [new_fault(0, 1, Duration::from_secs(60)), new_fault(2, 1, Duration::from_secs(60))];
    applied(store.record_faults_if_leased(held.key(), &faults).await.unwrap());
    assert_eq!(store.find_progress(job.id).await.unwrap().items_waiting, 2);
    applied(commit(store, &mut held, &[0, 1], &[]).await);
    let left = store.list_faults(job.id, ItemIndex(0), ItemIndex(3), 9).await.unwrap();
    assert_eq!(left.iter().map(|fault| fault.item.0).collect::<Vec<_>>(), [2]);
}

/// A fault replaces the item's older one and counts on the job's budget each time.
pub async fn faults_replace_each_other_and_use_the_budget(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    let held = lease(store, WorkerId::new()).await;
    let before = store.now().await.unwrap();
    for attempts in 1..=3 {
        let fault = new_fault(1, attempts, Duration::from_secs(u64::from(attempts)));
        let used = applied(store.record_faults_if_leased(held.key(), &[fault]).await.unwrap());
        assert_eq!(used, u64::from(attempts), "of the whole job");
    }
    let faults = store.list_faults(job.id, ItemIndex(0), ItemIndex(3), 9).await.unwrap();
    assert_eq!(faults.len(), 1);
    assert_eq!((faults[0].attempts, faults[0].http_status), (3, Some(503)));
    let numbers = |fault: &crate::Fault| fault.tries().iter().map(|tried| tried.number).collect::<Vec<_>>();
    assert_eq!(numbers(&faults[0]), [1, 2, 3], "each try is kept with its error");
    let first = &faults[0].earlier[0];
    assert_eq!((first.http_status, first.code.as_str()), (Some(503), "engine_timeout"));
    assert_eq!(first.message, "the engine did not answer");
    assert!(faults[0].not_before >= before.plus(Duration::from_secs(3)), "the wait starts at the database's now");
    let progress = store.find_progress(job.id).await.unwrap();
    assert_eq!((progress.retries_used, progress.items_waiting), (3, 1));
    clock.advance(Duration::from_secs(10)).await;
    assert_eq!(store.find_progress(job.id).await.unwrap().items_waiting, 0, "due means not waiting");
    assert_eq!(store.list_faults(job.id, ItemIndex(2), ItemIndex(3), 9).await.unwrap(), []);
    for attempts in 4..=20 {
        let mut fault = new_fault(1, attempts, SECOND);
        fault.message = "ü".repeat(900);
        applied(store.record_faults_if_leased(held.key(), &[fault]).await.unwrap());
    }
    let faults = store.list_faults(job.id, ItemIndex(0), ItemIndex(3), 9).await.unwrap();
    assert_eq!(numbers(&faults[0]), [12, 13, 14, 15, 16, 17, 18, 19, 20], "the latest ones: a row stays small");
    assert_eq!(faults[0].earlier[0].message, "ü".repeat(overnight_types::FailedTry::MESSAGE_CHARS_MAX));
}

/// Faults of a stale lease, or of an item that has its outcome, are lost; of another
/// shard's item, refused.
pub async fn stale_faults_are_lost(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[2, 2]).await;
    let stale = lease(store, WorkerId::new()).await;
    clock.advance(TTL + SECOND).await;
    let mut current = lease(store, WorkerId::new()).await;
    let fault = new_fault(0, 1, SECOND);
    let answer = store.record_faults_if_leased(stale.key(), std::slice::from_ref(&fault)).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Leased));
    applied(commit(store, &mut current, &[0], &[]).await);
    let answer = store.record_faults_if_leased(current.key(), &[fault]).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Leased));
    let answer = store.record_faults_if_leased(current.key(), &[new_fault(3, 1, SECOND)]).await;
    assert!(matches!(answer, Err(crate::Error::Refused { .. })), "{answer:?}");
    assert_eq!(store.find_progress(job.id).await.unwrap().retries_used, 0);
}

/// A job that is draining still takes outcomes, until finalize has fenced it.
pub async fn draining_job_takes_outcomes_until_it_is_fenced(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[2, 1]).await;
    let worker = WorkerId::new();
    let (mut first, mut second) = (lease(store, worker).await, lease(store, worker).await);
    applied(store.cancel_job_if_active(job.id, CancelMode::Drain, TTL).await.unwrap());
    let committed = applied(commit(store, &mut first, &[0], &[]).await);
    assert_eq!(committed.job_state, JobState::Cancelling);
    applied(store.cancel_job_if_active(job.id, CancelMode::Now, TTL).await.unwrap());
    let step = claim_step_of(store, job.id).await;
    applied(store.fence_shards_if_leased(&step).await.unwrap());
    assert_eq!(lost(commit(store, &mut second, &[0], &[]).await), Some(ShardState::Ready));
    let attempts = store.list_attempts(job.id, ShardIndex(1), 9).await.unwrap();
    assert_eq!(attempts[0].end, Some(AttemptEnd::Fenced));
}

/// Segments come in input order, whole shards at a time.
pub async fn segments_are_listed_by_whole_shards(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3, 1, 2]).await;
    let worker = WorkerId::new();
    let mut held = [lease(store, worker).await, lease(store, worker).await, lease(store, worker).await];
    for (shard, item) in [(2, 0), (0, 2), (0, 0), (1, 0), (2, 1), (0, 1)] {
        applied(commit(store, &mut held[shard], &[item], &[]).await);
    }
    let names = |segments: Vec<crate::Segment>| -> Vec<(u32, u32)> {
        segments.iter().map(|segment| (segment.new.shard.0, segment.new.seq)).collect()
    };
    let all = names(store.list_segments(job.id, ShardIndex(0), 100).await.unwrap());
    assert_eq!(all, [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]);
    let first = names(store.list_segments(job.id, ShardIndex(0), 5).await.unwrap());
    assert_eq!(first, [(0, 0), (0, 1), (0, 2), (1, 0)], "the shard that does not fit waits whole");
    let large = names(store.list_segments(job.id, ShardIndex(0), 2).await.unwrap());
    assert_eq!(large, [(0, 0), (0, 1), (0, 2)], "at least one shard, however large");
    assert_eq!(names(store.list_segments(job.id, ShardIndex(2), 100).await.unwrap()), [(2, 0), (2, 1)]);
}

/// Reading on from a cursor neither repeats nor skips, while commits go on.
pub async fn commit_order_neither_repeats_nor_skips(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[6, 6]).await;
    let other = running_job(store, &[1]).await;
    let worker = WorkerId::new();
    let mut held = [lease(store, worker).await, lease(store, worker).await, lease(store, worker).await];
    assert_eq!(held[2].job.id, other.id);
    let mut seen = Vec::new();
    let mut after = SegmentCursor::default();
    for round in 0..6 {
        for shard in [1, 0] {
            applied(commit(store, &mut held[shard], &[round], &[]).await);
            if (round, shard) == (3, 0) {
                applied(commit(store, &mut held[2], &[0], &[]).await);
            }
        }
        let selection = SegmentSelection { job: job.id, round: Some(1), after, limit: 1 };
        for segment in store.list_segments_committed(selection).await.unwrap() {
            after = SegmentCursor { committed: segment.committed, shard: segment.new.shard.0 };
            seen.push((segment.new.shard.0, segment.new.seq));
        }
    }
    let rest = SegmentSelection { job: job.id, round: None, after, limit: 100 };
    seen.extend(store.list_segments_committed(rest).await.unwrap().iter().map(|s| (s.new.shard.0, s.new.seq)));
    let wanted: Vec<_> = (0..6).flat_map(|seq| [(1, seq), (0, seq)]).collect();
    assert_eq!(seen, wanted);
    let none = SegmentSelection { job: job.id, round: Some(2), after: SegmentCursor::default(), limit: 100 };
    assert_eq!(store.list_segments_committed(none).await.unwrap(), []);
}
