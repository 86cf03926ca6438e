//! Public failure reports about queues and leases that hold for every database.
//!
//! docs/field-reports.md lists them; each promise here stands below the report's name.

use std::time::Duration;

use overnight_types::{JobId, JobState, ShardIndex, ShardState, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{AttemptEnd, CancelMode, Error, Guarded, InsertJob, Store};

// MailFathom#1989, mlflow PR#25199, occurrent PR#664: leases by the worker's clock let
// skew steal or delay work.
/// No call takes a moment from its caller, so only the database's clock ends a lease:
/// a store whose clock is five minutes behind or ahead is the one that decides.
pub async fn leases_end_by_the_databases_clock_alone(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[1]).await;
    let mut held = lease(store, WorkerId::new()).await;
    let by_worker = overnight_types::Timestamp::now();
    clock.advance(TTL - Duration::from_secs(5)).await;
    assert_eq!(try_lease(store, WorkerId::new()).await, None);
    clock.advance(Duration::from_secs(300)).await;
    let taken = lease(store, WorkerId::new()).await;
    assert!(overnight_types::Timestamp::now().since(by_worker) < TTL, "by the worker's clock the lease still runs");
    assert!(!commit(store, &mut held, &[0], &[]).await.is_applied());
    assert_eq!(taken.shard.epoch.0, 2);
}

// PrintStash#181, the five checks of a queue that it qualified: enqueue with the
// caller's transaction, no acknowledgement of a successor's work, no reuse of a
// worker's identity, retryable failures are not stranded, a busy database is waited for.
/// 1: a job and its idempotency key are recorded together or not at all.
pub async fn refused_create_leaves_nothing(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let job = insert(store, new_job(input)).await;
    let key = crate::IdempotencyKey { key: "k".into(), params_sha256: [1; 32] };
    let twice = crate::NewJob { id: job.id, ..new_job(input) };
    let refused = store.insert_job(twice, Some(key.clone())).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert!(matches!(store.insert_job(new_job(input), Some(key)).await.unwrap(), InsertJob::Created(_)));
}

/// 2: an acknowledgement that comes late, of the same shard in a later lease, is lost.
pub async fn late_acknowledgement_overwrites_no_successor(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    let mut stale = lease(store, WorkerId::new()).await;
    clock.advance(TTL + Duration::from_secs(1)).await;
    let mut successor = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut successor, &[0], &[0]).await);
    assert!(!commit(store, &mut stale, &[0, 1], &[]).await.is_applied());
    let answer = store.release_shard_if_leased(stale.key(), Duration::ZERO, AttemptEnd::Trouble).await.unwrap();
    assert_eq!(answer, Guarded::Lost { now: Some(ShardState::Leased) });
    assert_eq!(store.find_progress(job.id).await.unwrap().counts.failed, 1);
}

/// 3: a worker that comes back under an old name completes nothing of its old lease.
pub async fn reused_worker_identity_completes_nothing_stale(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[1, 1]).await;
    let worker = WorkerId::new();
    let mut stale = lease(store, worker).await;
    clock.advance(TTL + Duration::from_secs(1)).await;
    let again = lease(store, worker).await;
    assert_eq!(again.shard.cut.shard, stale.shard.cut.shard);
    assert!(!commit(store, &mut stale, &[0], &[]).await.is_applied());
    assert_eq!(store.extend_shards(worker, &[stale.key()], TTL).await.unwrap(), [stale.key()]);
}

/// 4: a shard whose items failed for now is claimed again once they are due.
pub async fn retryable_failure_is_not_stranded(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    for attempts in 1..=5 {
        let lease = lease(store, WorkerId::new()).await;
        let wait = Duration::from_secs(60);
        applied(store.record_faults_if_leased(lease.key(), &[new_fault(0, attempts, wait)]).await.unwrap());
        applied(store.release_shard_if_leased(lease.key(), wait, AttemptEnd::Waiting).await.unwrap());
        assert_eq!(try_lease(store, WorkerId::new()).await, None);
        clock.advance(wait + Duration::from_secs(1)).await;
    }
    run_all(store).await;
    assert_eq!(finalize(store, job.id).await.state, JobState::Completed);
}

// apalis#530 and its reproduction: two healthy workers, six tasks longer than the
// renewal interval, 12 and 20 starts.
/// Six shards longer than the renewal interval are started six times.
pub async fn two_healthy_workers_start_six_long_shards_six_times(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1; 6]).await;
    let workers = [WorkerId::new(), WorkerId::new()];
    let mut starts = 0;
    loop {
        let mut held = Vec::new();
        for worker in workers {
            if let Some(lease) = try_lease(store, worker).await {
                starts += 1;
                held.push((worker, lease));
            }
        }
        if held.is_empty() {
            break;
        }
        // Ten times the lease.
        for _ in 0..40 {
            clock.advance(TTL / 4).await;
            for (worker, lease) in &held {
                assert_eq!(store.extend_shards(*worker, &[lease.key()], TTL).await.unwrap(), []);
            }
            assert_eq!(store.release_expired_leases(9).await.unwrap(), 0);
        }
        for (_, lease) in &mut held {
            commit_rest(store, lease).await;
        }
    }
    assert_eq!(starts, 6);
    assert_eq!(finalize(store, job.id).await.final_counts.unwrap().completed, 6);
}

// riverqueue/river#1258: 5,133 jobs stuck running for up to 91 days.
/// After a sweep no shard is leased longer than its time.
pub async fn no_shard_is_leased_longer_than_its_time(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1; 30]).await;
    for _ in 0..30 {
        lease(store, WorkerId::new()).await;
        clock.advance(Duration::from_secs(1)).await;
    }
    while store.release_expired_leases(4).await.unwrap() > 0 {}
    let now = store.now().await.unwrap();
    let shards = store.list_shards(job.id, ShardIndex(0), 99).await.unwrap();
    assert!(shards.iter().all(|shard| shard.lease_until.is_none_or(|until| until > now)));
    assert!(shards.iter().any(|shard| shard.state == ShardState::Leased), "live leases are left alone");
    assert!(shards.iter().any(|shard| shard.crashes == 1));
}

/// A cancel of a job that is not there, and a wait that nobody ends, change nothing.
pub async fn reads_and_lost_moves_wake_nobody(store: &dyn Store, _clock: &dyn TestClock) {
    let moves = async {
        assert_eq!(
            store.cancel_job_if_active(JobId::new(), CancelMode::Now, TTL).await.unwrap(),
            Guarded::Lost { now: None }
        );
        assert_eq!(store.find_job(JobId::new()).await.unwrap(), None);
        assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
    };
    tokio::select! {
        biased;
        () = store.woken() => panic!("nothing is due, so nobody is woken"),
        () = moves => {}
    }
}

// profilarr PR#519, modrinth/code PR#7628: a transaction that turned into a writer met an
// immediate BUSY in spite of its timeout.
/// Eight workers at once claim, renew, commit and give back with no error at all, and
/// every commit is made once.
pub async fn eight_workers_meet_without_an_error(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[4; 64]).await;
    let work = async || {
        let worker = WorkerId::new();
        let mut commits = 0;
        while let Some(mut lease) = try_lease(store, worker).await {
            assert_eq!(store.extend_shards(worker, &[lease.key()], TTL).await.unwrap(), []);
            for item in lease.shard.done.zeros().collect::<Vec<_>>() {
                applied(commit(store, &mut lease, &[item], &[]).await);
                commits += 1;
                // Half of the shards change hands in the middle.
                if item == 1 && lease.shard.cut.shard.0 % 2 == 0 {
                    let why = AttemptEnd::Released;
                    applied(store.release_shard_if_leased(lease.key(), Duration::ZERO, why).await.unwrap());
                    break;
                }
            }
        }
        commits
    };
    let (a, b, c, d, e, f, g, h) = tokio::join!(work(), work(), work(), work(), work(), work(), work(), work());
    assert_eq!(a + b + c + d + e + f + g + h, 4 * 64, "every commit was made once");
    assert_eq!(finalize(store, job.id).await.final_counts.unwrap().completed, 4 * 64);
}

/// Whoever meets the database with other objects is told whose they are.
pub async fn the_first_objects_id_is_kept_until_it_is_forgotten(store: &dyn Store, _clock: &dyn TestClock) {
    let [first, second, third] = std::array::from_fn(|_| uuid::Uuid::now_v7());
    assert!(!store.forget_objects_id().await.unwrap(), "none is kept");
    assert_eq!(store.keep_objects_id(first).await.unwrap(), first);
    assert_eq!(store.keep_objects_id(second).await.unwrap(), first);
    assert_eq!(store.keep_objects_id(first).await.unwrap(), first);
    assert!(store.forget_objects_id().await.unwrap());
    assert_eq!(store.keep_objects_id(third).await.unwrap(), third);
}
