//! Leases held by this worker: their renewal on a timer of its own, their local
//! deadlines, and the orders that reach the shard that runs under each.
//!
//! Invariants: a deadline is reckoned by the monotonic clock from before the
//! renewal was asked for, so work stops before the database counts the lease as
//! over; leases are renewed only while the engine is idle or makes progress; while
//! it stalls nothing is claimed and what is held is given back as trouble, so that
//! no item pays for it; an order only ever rises.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use overnight_store::{CancelMode, JobSignal, ShardKey, Store};
use overnight_types::{JobId, JobState, WorkerId, chain};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::WorkerConfig;
use crate::generate::{EngineStatus, Generate};

/// What the shard under a lease must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum Order {
    /// Go on.
    #[default]
    Run,
    /// Feed nothing new, let what runs finish, commit, give the lease back.
    Drain,
    /// Stop what runs, commit what is finished, give the lease back.
    HandBack,
    /// The same, and leave the shard alone for a while: the engine makes no progress.
    Stalled,
    /// The lease is gone, or its work is void: stop, write nothing.
    Lost,
}

#[derive(Debug)]
struct Held {
    round: u32,
    deadline: Instant,
    order: watch::Sender<Order>,
}

/// The leases of one worker. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases {
    held: Arc<Mutex<HashMap<ShardKey, Held>>>,
    /// The order that new leases start with.
    first_order: Arc<Mutex<Order>>,
}

/// Keeps one lease renewed until dropped.
#[derive(Debug)]
pub(crate) struct LeaseGuard {
    leases: Leases,
    key: ShardKey,
    /// Changes when an order comes.
    pub(crate) order: watch::Receiver<Order>,
}

impl LeaseGuard {
    /// What to do now; [`Order::Lost`] too once the local deadline is over.
    pub(crate) fn order(&self) -> Order {
        let order = *self.order.borrow();
        if order < Order::Lost && self.leases.is_overdue(self.key) { Order::Lost } else { order }
    }

    /// Waits for `call`, and once the lease is lost for `grace` more: a call that nobody
    /// answers, because the network swallowed it, must not hold up for long what its worker
    /// has lost. `None` then; whether it was carried out is for the next lease to see.
    pub(crate) async fn while_held<T>(&self, grace: Duration, call: impl Future<Output = T>) -> Option<T> {
        let mut order = self.order.clone();
        let given_up = async {
            // The sender goes with the lease itself.
            let _ = order.wait_for(|order| *order == Order::Lost).await;
            tokio::time::sleep(grace).await;
        };
        tokio::select! {
            answer = call => Some(answer),
            () = given_up => None,
        }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.leases.lock().remove(&self.key);
    }
}

impl Leases {
    /// Starts to renew a lease that was asked for at `asked_at`.
    pub(crate) fn hold(&self, key: ShardKey, round: u32, asked_at: Instant, ttl: Duration) -> LeaseGuard {
        let mut leases = self.lock();
        let first_order = *self.first_order.lock().unwrap_or_else(PoisonError::into_inner);
        let (sender, receiver) = watch::channel(first_order);
        leases.insert(key, Held { round, deadline: deadline(asked_at, ttl), order: sender });
        drop(leases);
        LeaseGuard { leases: self.clone(), key, order: receiver }
    }

    /// Raises the order of every lease, those to come included.
    pub(crate) fn order_all(&self, order: Order) {
        let leases = self.lock();
        let mut first_order = self.first_order.lock().unwrap_or_else(PoisonError::into_inner);
        *first_order = order.max(*first_order);
        leases.values().for_each(|held| raise(held, order));
    }

    /// Raises the order of the leases held now. Those to come start as ever.
    fn order_held(&self, order: Order) {
        self.lock().values().for_each(|held| raise(held, order));
    }

    /// How many leases are held.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// The jobs of the leases held, each once.
    pub(crate) fn jobs(&self) -> Vec<JobId> {
        let mut jobs: Vec<JobId> = self.lock().keys().map(|key| key.job).collect();
        jobs.sort_unstable();
        jobs.dedup();
        jobs
    }

    /// Passes the states of jobs on to the shards that run for them.
    pub(crate) fn signal(&self, asked: &[JobId], signals: &[JobSignal]) {
        let signals: HashMap<JobId, &JobSignal> = signals.iter().map(|signal| (signal.job, signal)).collect();
        for (key, held) in self.lock().iter().filter(|(key, _)| asked.contains(&key.job)) {
            raise(held, order_of(signals.get(&key.job).copied(), held.round));
        }
    }

    fn keys(&self) -> Vec<ShardKey> {
        self.lock().keys().copied().collect()
    }

    fn renewed(&self, keys: &[ShardKey], lost: &[ShardKey], asked_at: Instant, ttl: Duration) {
        let mut held = self.lock();
        for key in keys {
            let Some(held) = held.get_mut(key) else { continue };
            if lost.contains(key) {
                raise(held, Order::Lost);
            } else {
                held.deadline = deadline(asked_at, ttl);
            }
        }
    }

    fn is_overdue(&self, key: ShardKey) -> bool {
        self.lock().get(&key).is_none_or(|held| held.deadline <= Instant::now())
    }

    /// Ends what is past its deadline; returns the next deadline.
    fn end_overdue(&self, now: Instant) -> Option<Instant> {
        let held = self.lock();
        held.values().filter(|held| held.deadline <= now).for_each(|held| raise(held, Order::Lost));
        held.values().map(|held| held.deadline).filter(|deadline| *deadline > now).min()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ShardKey, Held>> {
        // Each critical section is one map operation, whole across a panic.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn raise(held: &Held, order: Order) {
    held.order.send_if_modified(|now| {
        let rises = order > *now;
        *now = order.max(*now);
        rises
    });
}

/// A tenth of the lease is left for what is under way when the deadline comes.
fn deadline(asked_at: Instant, ttl: Duration) -> Instant {
    asked_at + ttl * 9 / 10
}

fn order_of(signal: Option<&JobSignal>, round: u32) -> Order {
    let Some(signal) = signal.filter(|signal| signal.round == round) else { return Order::Lost };
    match signal.state {
        JobState::InProgress if signal.paused => Order::Drain,
        JobState::InProgress => Order::Run,
        JobState::Cancelling => match signal.cancel_mode {
            CancelMode::Drain => Order::Drain,
            CancelMode::Now => Order::HandBack,
        },
        _ => Order::Lost,
    }
}

/// Tells whether the engine earns its leases: those held, and any new one.
#[derive(Debug)]
pub(crate) struct EngineWatch {
    stall_max: Duration,
    idle_seen_at: Mutex<Instant>,
}

impl EngineWatch {
    pub(crate) fn new(stall_max: Duration) -> Self {
        Self { stall_max, idle_seen_at: Mutex::new(Instant::now()) }
    }

    /// Whether the engine has work and ended no step for too long. An engine that
    /// was idle is given the whole time anew; renewal looks often enough to see it.
    pub(crate) fn is_stalled(&self, status: &EngineStatus) -> bool {
        let mut idle_seen_at = self.idle_seen_at.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if status.is_idle() {
            *idle_seen_at = now;
            return false;
        }
        now.saturating_duration_since(status.last_progress.max(*idle_seen_at)) > self.stall_max
    }
}

/// Renews all leases until `stop`: each `renew_every`, or sooner after a failure.
pub(crate) async fn renew(
    store: Arc<dyn Store>,
    worker: WorkerId,
    leases: Leases,
    generate: Arc<dyn Generate>,
    watch: Arc<EngineWatch>,
    config: WorkerConfig,
    stop: CancellationToken,
) {
    let mut next_renewal = Instant::now() + config.renew_every;
    while !stop.is_cancelled() {
        let now = Instant::now();
        let next_deadline = leases.end_overdue(now).unwrap_or(next_renewal);
        if now < next_renewal {
            let until = next_renewal.min(next_deadline).max(now + Duration::from_millis(1));
            let _ = stop.run_until_cancelled(tokio::time::sleep_until(until.into())).await;
            continue;
        }
        next_renewal = now + config.renew_every;
        let keys = leases.keys();
        if watch.is_stalled(&generate.status()) {
            tracing::error!(
                leases = keys.len(),
                "the engine has work and makes no progress: its shards are given back and none is leased"
            );
            // Not left to run out: a lease that runs out counts against the shard and the
            // item that runs alone in it, and neither is to blame. Not renewed either, so
            // that whoever does not give back in time loses the lease.
            leases.order_held(Order::Stalled);
            continue;
        }
        if keys.is_empty() {
            continue;
        }
        let asked_at = Instant::now();
        // Bounded, so that a database that hangs cannot hold the deadlines up.
        let call = store.extend_shards(worker, &keys, config.lease_ttl);
        match tokio::time::timeout(config.renew_every, call).await {
            Ok(Ok(lost)) => leases.renewed(&keys, &lost, asked_at, config.lease_ttl),
            Ok(Err(err)) => {
                tracing::warn!(error = %chain(&err), "could not renew leases, trying again");
                next_renewal = Instant::now() + config.renew_every / 4;
            }
            Err(_) => tracing::warn!("the database did not answer a renewal of leases in time"),
        }
    }
}

/// Reads the states of running jobs each `signals_every` until `stop`.
pub(crate) async fn watch_jobs(store: Arc<dyn Store>, leases: Leases, config: WorkerConfig, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(config.signals_every)).await.is_some() {
        let jobs = leases.jobs();
        if jobs.is_empty() {
            continue;
        }
        match tokio::time::timeout(config.lease_ttl, store.find_job_signals(&jobs)).await {
            Ok(Ok(signals)) => leases.signal(&jobs, &signals),
            Ok(Err(err)) => tracing::warn!(error = %chain(&err), "could not read the states of running jobs"),
            Err(_) => tracing::warn!("the database did not answer for the states of running jobs in time"),
        }
    }
}

#[cfg(test)]
mod tests {
    use overnight_types::{Epoch, ShardIndex};

    use super::*;

    fn key(shard: u32) -> ShardKey {
        ShardKey { job: JobId::new(), shard: ShardIndex(shard), epoch: Epoch(1) }
    }

    #[test]
    fn lease_is_lost_locally_before_it_is_over_in_the_database() {
        let leases = Leases::default();
        let ttl = Duration::from_secs(10);
        let asked_at = Instant::now() - Duration::from_millis(9_500);
        let guard = leases.hold(key(0), 1, asked_at, ttl);
        assert_eq!(guard.order(), Order::Lost);
    }

    #[test]
    fn order_only_rises() {
        let leases = Leases::default();
        let guard = leases.hold(key(0), 1, Instant::now(), Duration::from_secs(10));
        leases.order_all(Order::HandBack);
        leases.order_all(Order::Drain);
        assert_eq!(guard.order(), Order::HandBack);
        drop(guard);
        assert_eq!(leases.len(), 0);
    }

    #[tokio::test]
    async fn call_that_nobody_answers_ends_with_the_lease() {
        let leases = Leases::default();
        let guard = leases.hold(key(0), 1, Instant::now(), Duration::from_secs(10));
        assert_eq!(guard.while_held(Duration::ZERO, async { 7 }).await, Some(7));
        leases.order_all(Order::Lost);
        assert_eq!(guard.while_held(Duration::ZERO, std::future::pending::<()>()).await, None);
    }

    #[test]
    fn signals_become_orders() {
        let job = JobId::new();
        let signal = |state, paused, cancel_mode, round| JobSignal { job, state, paused, cancel_mode, round };
        let running = signal(JobState::InProgress, false, CancelMode::Drain, 2);
        assert_eq!(order_of(Some(&running), 2), Order::Run);
        assert_eq!(order_of(Some(&running), 1), Order::Lost, "a new round voids the work of the old one");
        assert_eq!(order_of(None, 2), Order::Lost);
        assert_eq!(order_of(Some(&signal(JobState::InProgress, true, CancelMode::Drain, 2)), 2), Order::Drain);
        assert_eq!(order_of(Some(&signal(JobState::Cancelling, false, CancelMode::Drain, 2)), 2), Order::Drain);
        assert_eq!(order_of(Some(&signal(JobState::Cancelling, false, CancelMode::Now, 2)), 2), Order::HandBack);
        assert_eq!(order_of(Some(&signal(JobState::Finalizing, false, CancelMode::Drain, 2)), 2), Order::Lost);
    }
}
