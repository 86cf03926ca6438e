//! Every order of the moves that race at the end of a job's life: in each, the job
//! ends once, each item has one outcome, and the late mover is told.
//!
//! (river discussion#1603: a job cancelled during a rescue ran again;
//! rails/solid_queue#589: a job both finished and failed.)

use std::time::Duration;

use overnight_types::{JobState, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{CancelMode, Job, ShardLease, Store};

/// The moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    Commit,
    CancelDrain,
    CancelNow,
    Expire,
    Reap,
    Claim,
    Finish,
}

const MOVES: [Move; 7] =
    [Move::Commit, Move::CancelDrain, Move::CancelNow, Move::Expire, Move::Reap, Move::Claim, Move::Finish];

/// All ordered choices of three different moves, each on a job of its own whose one
/// shard is leased with one of two items done, past its lease.
pub async fn moves_that_race_inside_the_window_end_a_job_once(store: &dyn Store, clock: &dyn TestClock) {
    race(store, clock, TTL + Duration::from_secs(1)).await;
}

/// The same, past lease and window.
pub async fn moves_that_race_past_the_window_end_a_job_once(store: &dyn Store, clock: &dyn TestClock) {
    race(store, clock, WINDOW + Duration::from_secs(1)).await;
}

async fn race(store: &dyn Store, clock: &dyn TestClock, pass: Duration) {
    for order in orders() {
        let job = running_job(store, &[2]).await;
        let mut held = lease(store, WorkerId::new()).await;
        applied(commit(store, &mut held, &[0], &[]).await);
        clock.advance(pass).await;
        for step in order {
            make(store, step, &job, &mut held).await;
        }
        let ended = bring_to_end(store, clock, job.id).await;
        let counts = ended.final_counts.unwrap();
        assert!(counts.completed >= 1, "{order:?}: a committed outcome is never lost: {counts:?}");
        let late = commit(store, &mut held, &[1], &[]).await;
        assert!(!late.is_applied(), "{order:?}: nothing moves an ended job");
        assert_closed(store, &ended).await;
        applied(store.delete_job_if_terminal(job.id).await.unwrap());
        while store.purge_deleted_jobs(1_000).await.unwrap().has_more {}
    }
}

fn orders() -> Vec<[Move; 3]> {
    let mut orders = Vec::new();
    for a in MOVES {
        for b in MOVES {
            for c in MOVES {
                if a != b && b != c && a != c {
                    orders.push([a, b, c]);
                }
            }
        }
    }
    orders
}

/// Makes a move as its mover would, whatever the answer.
async fn make(store: &dyn Store, step: Move, job: &Job, held: &mut ShardLease) {
    match step {
        Move::Commit => {
            let _ = commit(store, held, &[1], &[]).await;
        }
        Move::CancelDrain => {
            let _ = store.cancel_job_if_active(job.id, CancelMode::Drain, TTL).await.unwrap();
        }
        Move::CancelNow => {
            let _ = store.cancel_job_if_active(job.id, CancelMode::Now, TTL).await.unwrap();
        }
        Move::Expire => {
            store.expire_due_jobs(9).await.unwrap();
        }
        Move::Reap => {
            store.release_expired_leases(9).await.unwrap();
        }
        Move::Claim => {
            try_lease(store, WorkerId::new()).await;
        }
        Move::Finish => {
            let Some(step) = store.claim_step(WorkerId::new(), TTL).await.unwrap() else { return };
            applied(store.fence_shards_if_leased(&step).await.unwrap());
            let published = publication(store, &step.job).await;
            let ended = applied(store.finish_job_if_leased(&step, published).await.unwrap());
            assert_closed(store, &ended).await;
        }
    }
}

/// Lets time and the lifecycle bring the job to its end.
async fn bring_to_end(store: &dyn Store, clock: &dyn TestClock, id: overnight_types::JobId) -> Job {
    clock.advance(WINDOW + TTL).await;
    store.release_expired_leases(9).await.unwrap();
    store.expire_due_jobs(9).await.unwrap();
    let job = store.find_job(id).await.unwrap().unwrap();
    if job.state.is_terminal() {
        return job;
    }
    assert!(matches!(job.state, JobState::Finalizing | JobState::Cancelling), "{}", job.state);
    finalize(store, id).await
}
