//! What holding, renewing, losing and giving back a lease promise.

use std::time::Duration;

use overnight_types::{Epoch, ItemIndex, ShardIndex, ShardState, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{AttemptEnd, NewWorker, ShardKey, ShardLease, Store};

const SECOND: Duration = Duration::from_secs(1);

/// A shard that takes ten times the lease is run once if it is renewed.
pub async fn renewed_lease_is_held_for_any_length_of_work(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    let worker = WorkerId::new();
    let mut held = lease(store, worker).await;
    for _ in 0..40 {
        clock.advance(TTL / 4).await;
        assert_eq!(store.extend_shards(worker, &[held.key()], TTL).await.unwrap(), []);
        assert_eq!(try_lease(store, WorkerId::new()).await, None);
        assert_eq!(store.release_expired_leases(100).await.unwrap(), 0);
    }
    assert!(commit_rest(store, &mut held).await.shard_done);
    let attempts = store.list_attempts(job.id, ShardIndex(0), 10).await.unwrap();
    assert_eq!(attempts.iter().map(|attempt| attempt.end).collect::<Vec<_>>(), [Some(AttemptEnd::Done)]);
}

/// A renewal names the leases that are lost and keeps the others.
pub async fn renewal_tells_lost_leases(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[1, 1, 1]).await;
    let worker = WorkerId::new();
    let (first, second, third) = (lease(store, worker).await, lease(store, worker).await, lease(store, worker).await);
    release(store, &second).await;
    let stale = ShardKey { epoch: Epoch(9), ..third.key() };
    let lost = store.extend_shards(worker, &[first.key(), second.key(), stale], TTL * 10).await.unwrap();
    assert_eq!(lost, [second.key(), stale]);
    let others = store.extend_shards(WorkerId::new(), &[first.key()], TTL).await.unwrap();
    assert_eq!(others, [first.key()], "another worker renews nothing");
    clock.advance(TTL * 5).await;
    let taken: Vec<_> = [lease(store, WorkerId::new()).await, lease(store, WorkerId::new()).await]
        .iter()
        .map(|lease| lease.shard.cut.shard.0)
        .collect();
    assert_eq!(taken, [1, 2], "only the renewed lease is held still");
}

/// A lease that was lost and taken again by the same worker is told as lost, though
/// the shard is its own: what runs under the old epoch must stop.
pub async fn renewal_tells_the_lost_lease_of_a_shard_held_again(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[1]).await;
    let worker = WorkerId::new();
    let old = lease(store, worker).await.key();
    clock.advance(TTL + SECOND).await;
    let new = lease(store, worker).await.key();
    assert_eq!((old.shard, old.epoch.0 + 1), (new.shard, new.epoch.0));
    assert_eq!(store.extend_shards(worker, &[old, new], TTL).await.unwrap(), [old]);
    assert_eq!(store.extend_shards(worker, &[new], TTL).await.unwrap(), []);
}

/// A lease that ran out is taken back without any claim, and counted.
pub async fn expired_lease_does_not_stay_leased(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1, 1]).await;
    lease(store, WorkerId::new()).await;
    clock.advance(TTL / 2).await;
    lease(store, WorkerId::new()).await;
    clock.advance(TTL / 2 + SECOND).await;
    assert_eq!(store.release_expired_leases(100).await.unwrap(), 1);
    let states: Vec<_> = store.list_shards(job.id, ShardIndex(0), 10).await.unwrap();
    assert_eq!((states[0].state, states[0].crashes), (ShardState::Ready, 1));
    assert_eq!((states[1].state, states[1].crashes), (ShardState::Leased, 0));
    assert_eq!(states[0].owner, None);
}

/// Many expired leases are taken back in bounded pieces; none is passed over.
/// (river PR#1318: a page full of rows to skip starved the later ones.)
pub async fn expired_leases_are_taken_back_piece_by_piece(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1; 7]).await;
    for _ in 0..7 {
        lease(store, WorkerId::new()).await;
    }
    clock.advance(TTL + SECOND).await;
    assert_eq!(store.release_expired_leases(3).await.unwrap(), 3);
    assert_eq!(store.release_expired_leases(3).await.unwrap(), 3);
    assert_eq!(store.release_expired_leases(3).await.unwrap(), 1);
    assert_eq!(store.release_expired_leases(3).await.unwrap(), 0);
    assert_eq!(store.find_progress(job.id).await.unwrap().shards_ready, 7);
}

/// A released shard is ready at once, keeps its outcomes, and counts no crash.
pub async fn released_shard_keeps_its_outcomes(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    let mut held = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut held, &[1], &[]).await);
    release(store, &held).await;
    let again = lease(store, WorkerId::new()).await;
    assert_eq!(again.shard.done.ones().collect::<Vec<_>>(), [1]);
    assert_eq!((again.shard.crashes, again.shard.next_seq), (0, 1));
    let ends: Vec<_> =
        store.list_attempts(job.id, ShardIndex(0), 9).await.unwrap().iter().map(|attempt| attempt.end).collect();
    assert_eq!(ends, [None, Some(AttemptEnd::Released)]);
}

/// A lease given back because its engine died counts as one that ran out, also against
/// the item that ran alone; one that committed before counts against nobody.
pub async fn lease_given_back_as_lost_is_a_crash(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[3]).await;
    let give_up = async |held: &ShardLease| {
        let answer = store.release_shard_if_leased(held.key(), Duration::ZERO, AttemptEnd::Lost).await.unwrap();
        assert!(answer.is_applied());
        store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap()
    };
    let held = lease(store, WorkerId::new()).await;
    let shard = give_up(&held).await;
    assert_eq!((shard.state, shard.crashes, shard.probe_deaths), (ShardState::Ready, 1, 0));
    let held = lease(store, WorkerId::new()).await;
    assert!(store.set_probe_if_leased(held.key(), Some(ItemIndex(2))).await.unwrap().is_applied());
    let shard = give_up(&held).await;
    assert_eq!((shard.crashes, shard.probe_item, shard.probe_deaths), (2, Some(ItemIndex(2)), 1));
    let mut held = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut held, &[0], &[]).await);
    let shard = give_up(&held).await;
    assert_eq!((shard.crashes, shard.probe_item, shard.probe_deaths), (0, None, 0));
    let attempts = store.list_attempts(job.id, ShardIndex(0), 9).await.unwrap();
    assert!(attempts.iter().all(|attempt| attempt.end == Some(AttemptEnd::Lost)), "{attempts:?}");
}

/// A release under an old epoch, or of a shard that is not leased, is lost.
pub async fn stale_release_changes_nothing(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[1]).await;
    let stale = lease(store, WorkerId::new()).await;
    clock.advance(TTL + SECOND).await;
    let current = lease(store, WorkerId::new()).await;
    let answer = store.release_shard_if_leased(stale.key(), Duration::ZERO, AttemptEnd::Released).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Leased));
    release(store, &current).await;
    let answer = store.release_shard_if_leased(current.key(), Duration::ZERO, AttemptEnd::Released).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Ready));
    let nowhere = ShardKey { shard: ShardIndex(99), ..current.key() };
    let answer = store.release_shard_if_leased(nowhere, Duration::ZERO, AttemptEnd::Released).await.unwrap();
    assert_eq!(lost(answer), None);
}

/// Crashes count leases in a row that ran out without a commit; a commit sets them
/// back, and a lease that committed before it ran out is no crash.
pub async fn crashes_count_leases_without_a_commit(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[4]).await;
    for crashes in 0..3 {
        assert_eq!(lease(store, WorkerId::new()).await.shard.crashes, crashes);
        clock.advance(TTL + SECOND).await;
    }
    let mut held = lease(store, WorkerId::new()).await;
    assert_eq!(held.shard.crashes, 3);
    applied(commit(store, &mut held, &[0], &[]).await);
    clock.advance(TTL + SECOND).await;
    let after_commit = lease(store, WorkerId::new()).await;
    assert_eq!(after_commit.shard.crashes, 0);
    clock.advance(TTL + SECOND).await;
    assert_eq!(lease(store, WorkerId::new()).await.shard.crashes, 1);
}

/// Leases of workers that are known to be dead are free at once; of others, none.
pub async fn leases_of_dead_workers_are_free_at_once(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1, 1]).await;
    let (dead, alive) = (WorkerId::new(), WorkerId::new());
    let mut lost_lease = lease(store, dead).await;
    lease(store, alive).await;
    assert_eq!(store.release_leases_of_dead(&[dead]).await.unwrap(), 1);
    assert_eq!(store.release_leases_of_dead(&[dead]).await.unwrap(), 0);
    assert_eq!(lost(commit(store, &mut lost_lease, &[0], &[]).await), Some(ShardState::Ready));
    let again = lease(store, alive).await;
    assert_eq!((again.shard.cut.shard, again.shard.crashes), (ShardIndex(0), 1), "a death counts as expiry does");
    let attempts = store.list_attempts(job.id, ShardIndex(0), 9).await.unwrap();
    assert_eq!(attempts[1].end, Some(AttemptEnd::Lost));
}

/// A step lease of a dead worker is free at once too.
pub async fn step_of_a_dead_worker_is_free_at_once(store: &dyn Store, _clock: &dyn TestClock) {
    let job = validating_job(store).await;
    let dead = WorkerId::new();
    let stale = store.claim_step(dead, TTL).await.unwrap().unwrap();
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
    assert_eq!(store.release_leases_of_dead(&[dead]).await.unwrap(), 1);
    let again = store.claim_step(WorkerId::new(), TTL).await.unwrap().unwrap();
    assert_eq!((again.job.id, again.epoch > stale.epoch), (job.id, true));
    assert!(!store.extend_step_if_leased(&stale, TTL).await.unwrap().is_applied());
}

/// Resume of an interrupted job frees what no live worker holds, also when the
/// worker's row is gone already. (procrastinate#1518: with the row pruned first, a
/// join found nothing and the work stayed.)
pub async fn leases_without_a_live_worker_are_released_on_request(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1, 1, 1]).await;
    let (silent, removed, live) = (WorkerId::new(), WorkerId::new(), WorkerId::new());
    for id in [silent, removed] {
        store.report_worker(&worker(id)).await.unwrap();
        let held = lease(store, id).await;
        assert_eq!(store.extend_shards(id, &[held.key()], TTL * 100).await.unwrap(), []);
    }
    store.remove_worker(removed).await.unwrap();
    clock.advance(Duration::from_secs(61)).await;
    store.report_worker(&worker(live)).await.unwrap();
    lease(store, live).await;
    assert_eq!(store.release_lost_leases(job.id).await.unwrap(), 2);
    let progress = store.find_progress(job.id).await.unwrap();
    assert_eq!((progress.shards_ready, progress.shards_leased), (2, 1));
}

/// A probe's deaths are those of leases that ran out while the item was named under
/// them: three such, and not one that came before it was named again.
pub async fn worker_lost_needs_three_deaths_while_the_item_ran_alone(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[3]).await;
    let item = Some(ItemIndex(1));
    let mut held = lease(store, WorkerId::new()).await;
    for deaths in 0..3 {
        assert_eq!(held.shard.probe_deaths, deaths);
        applied(store.set_probe_if_leased(held.key(), item).await.unwrap());
        held = die(store, clock).await;
        assert_eq!((held.shard.probe_item, held.shard.probe_deaths), (item, deaths + 1));
        // A worker that dies before it names the item again says nothing about it.
        held = die(store, clock).await;
        assert_eq!((held.shard.probe_item, held.shard.probe_deaths), (item, deaths + 1));
    }
    applied(commit(store, &mut held, &[1], &[1]).await);
    let shard = store.find_shard(held.job.id, ShardIndex(0)).await.unwrap().unwrap();
    assert_eq!((shard.probe_item, shard.probe_deaths, shard.crashes), (None, 0, 0), "its outcome ends the probe");
}

/// Naming another item starts its deaths at none; a release keeps what is counted.
pub async fn probe_deaths_belong_to_one_item(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[3]).await;
    let held = lease(store, WorkerId::new()).await;
    applied(store.set_probe_if_leased(held.key(), Some(ItemIndex(1))).await.unwrap());
    let held = die(store, clock).await;
    applied(store.set_probe_if_leased(held.key(), Some(ItemIndex(1))).await.unwrap());
    release(store, &held).await;
    let held = lease(store, WorkerId::new()).await;
    assert_eq!((held.shard.probe_item, held.shard.probe_deaths), (Some(ItemIndex(1)), 1));
    applied(store.set_probe_if_leased(held.key(), Some(ItemIndex(2))).await.unwrap());
    let held = die(store, clock).await;
    assert_eq!((held.shard.probe_item, held.shard.probe_deaths), (Some(ItemIndex(2)), 1));
    applied(store.set_probe_if_leased(held.key(), None).await.unwrap());
    let held = die(store, clock).await;
    assert_eq!((held.shard.probe_item, held.shard.probe_deaths), (None, 0));
}

/// A stale worker names no probe.
pub async fn stale_probe_changes_nothing(store: &dyn Store, clock: &dyn TestClock) {
    running_job(store, &[3]).await;
    let stale = lease(store, WorkerId::new()).await;
    let current = die(store, clock).await;
    let answer = store.set_probe_if_leased(stale.key(), Some(ItemIndex(0))).await.unwrap();
    assert_eq!(lost(answer), Some(ShardState::Leased));
    assert_eq!(store.find_shard(current.job.id, ShardIndex(0)).await.unwrap().unwrap().probe_item, None);
}

/// A shard that kills its workers does not hold up the others of its job, nor other jobs.
/// (graphile/worker#254, trigger.dev#163: a queue stayed locked by one poisoned task.)
pub async fn poisoned_shard_blocks_nothing_else(store: &dyn Store, clock: &dyn TestClock) {
    let poisoned = running_job(store, &[1, 1]).await;
    let other = running_job(store, &[1]).await;
    for _ in 0..10 {
        assert_eq!(lease(store, WorkerId::new()).await.shard.cut.shard, ShardIndex(0));
        clock.advance(TTL + SECOND).await;
    }
    let held = lease(store, WorkerId::new()).await;
    assert_eq!((held.job.id, held.shard.crashes), (poisoned.id, 10), "the count is there for the worker's cap");
    let mut rest = [lease(store, WorkerId::new()).await, lease(store, WorkerId::new()).await];
    for lease in &mut rest {
        commit_rest(store, lease).await;
    }
    assert_eq!(store.find_job(other.id).await.unwrap().unwrap().state, overnight_types::JobState::Finalizing);
}

/// The lease runs out and the next worker has the shard.
async fn die(store: &dyn Store, clock: &dyn TestClock) -> ShardLease {
    clock.advance(TTL + SECOND).await;
    lease(store, WorkerId::new()).await
}

fn worker(id: WorkerId) -> NewWorker {
    NewWorker { id, host: "here".into(), pid: 1, models: vec![MODEL.into()], may_load: vec![] }
}
