//! Lifecycle steps: work on whole jobs that the tables say is due. Closing windows
//! and taking dead leases back is a timer of its own, which no long step holds up.
//!
//! Invariants: a step runs under a lease of its job that is renewed beside it; a
//! step is repeatable, so that it may be dropped at any await and run again.
//! Start with `run_work`; the steps themselves are plain functions in the
//! modules, which know nothing about pools.

pub mod expire;
pub mod finalize;
pub mod intake;
pub mod shard_lines;
pub mod sweep;
pub mod undone;
pub mod webhook;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use overnight_blobs::Blobs;
use overnight_store::{Guarded, OutboxEvent, StepKind, StepLease, Store};
use overnight_types::{Class, JobId, Limits, chain};
use rand::Rng;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::AbortOnDropHandle;
use webhook::Webhook;

use crate::Error;
use crate::claim::Idle;
use crate::pool::Source;
use crate::worker::Shared;

/// A step that failed is tried again after this, doubled with each failure in a row.
const STEP_RETRY: Duration = Duration::from_secs(2);
/// The same for one that failed in a way that will not heal by itself.
const DAMAGED_RETRY: Duration = Duration::from_secs(60);
/// A step that goes on failing is tried again this rarely.
const STEP_RETRY_MAX: Duration = Duration::from_secs(15 * 60);
/// Webhook events told before others may take the place; a stopping worker waits for one at most.
const TOLD_IN_A_ROW_MAX: u32 = 64;
/// How often due expiries and dead leases are looked for.
const EXPIRE_EVERY: Duration = Duration::from_secs(5);

/// What a step works with.
#[derive(Debug, Clone)]
pub struct StepContext {
    /// The truth.
    pub store: Arc<dyn Store>,
    /// Objects.
    pub blobs: Blobs,
    /// Models configured here; those of live workers are read from the store.
    pub known_models: Vec<String>,
    /// Engine, version and model digest, in words.
    pub producer: String,
    /// What intake accepts and how it cuts shards.
    pub limits: Limits,
    /// How long a step's lease lasts without renewal.
    pub lease_ttl: Duration,
}

/// One piece of lifecycle work.
#[derive(Debug)]
pub(crate) enum LifecycleWork {
    /// A leased step of a job.
    Step(Box<StepLease>),
    /// Remove what nothing needs any more.
    Sweep,
    /// Tell an end of a job, then what else is due.
    Webhook(Box<OutboxEvent>, Webhook, OwnedSemaphorePermit),
}

/// Failures in a row of the steps that this worker tried, by job.
#[derive(Debug, Default)]
pub(crate) struct StepFailures {
    in_a_row: Mutex<HashMap<JobId, u32>>,
}

impl StepFailures {
    /// How long a step waits that has just failed once more. What is tried again may
    /// be hours of reading and writing, so a full disk must not see it at once.
    fn next_delay(&self, job: JobId, class: Class) -> Duration {
        let first = if class == Class::Permanent { DAMAGED_RETRY } else { STEP_RETRY };
        let mut in_a_row = self.lock();
        let failures = in_a_row.entry(job).or_default();
        let delay = first.saturating_mul(1 << (*failures).min(16)).min(STEP_RETRY_MAX);
        *failures += 1;
        // Steps that failed together must not come back together.
        delay.mul_f64(rand::rng().random_range(0.75..=1.0))
    }

    /// The job's step went on, or is not this worker's any more.
    fn over(&self, job: JobId) {
        self.lock().remove(&job);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, u32>> {
        // One map operation per section, whole across a panic.
        self.in_a_row.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Claims steps that are due.
#[derive(Debug)]
pub(crate) struct StepSource {
    shared: Arc<Shared>,
    /// When to sweep next.
    sweep_at: Mutex<Instant>,
}

impl StepSource {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        // Processes that start together do not sweep together.
        let share = 0.5 + f64::from(shared.id.uuid().as_bytes()[15]) / 512.0;
        let sweep_at = Mutex::new(Instant::now() + shared.config.sweep_every.mul_f64(share));
        Self { shared, sweep_at }
    }

    fn take_due(&self) -> Option<LifecycleWork> {
        let now = Instant::now();
        let mut sweep_at = self.sweep_at.lock().unwrap_or_else(PoisonError::into_inner);
        if *sweep_at <= now {
            *sweep_at = now + self.shared.config.sweep_every;
            return Some(LifecycleWork::Sweep);
        }
        None
    }

    /// An event that is due, when there is a receiver and nothing else is told to it now.
    async fn claim_webhook(&self) -> Option<LifecycleWork> {
        let webhook = self.shared.webhook.as_ref()?;
        let place = webhook.place.clone().try_acquire_owned().ok()?;
        let event = claim_event(&self.shared).await?;
        Some(LifecycleWork::Webhook(Box::new(event), webhook.clone(), place))
    }

    async fn claim(self: Arc<Self>) -> Option<LifecycleWork> {
        let shared = &self.shared;
        let mut idle = Idle::new(shared.clone());
        loop {
            if shared.stop_claiming.is_cancelled() {
                return None;
            }
            if let Some(work) = self.take_due() {
                return Some(work);
            }
            if let Some(work) = self.claim_webhook().await {
                return Some(work);
            }
            let woken = idle.woken();
            let claim = shared.store.claim_step(shared.id, shared.config.lease_ttl);
            match tokio::time::timeout(shared.config.lease_ttl, claim).await {
                Ok(Ok(Some(lease))) => return Some(LifecycleWork::Step(Box::new(lease))),
                Ok(Ok(None)) => idle.wait_for(woken).await?,
                Ok(Err(err)) => idle.wait_after_error("lease a step", &chain(&err)).await?,
                Err(_) => idle.wait_after_error("lease a step", "the database did not answer in time").await?,
            }
        }
    }
}

impl Source for StepSource {
    type Work = LifecycleWork;

    fn next(self: Arc<Self>) -> BoxFuture<'static, Option<LifecycleWork>> {
        Box::pin(self.claim())
    }

    fn hand_back(self: Arc<Self>, work: LifecycleWork) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            match work {
                LifecycleWork::Step(lease) => release(&self.shared, &lease, Duration::ZERO).await,
                // An event that was not tried is due again once its hold is over.
                LifecycleWork::Webhook(..) | LifecycleWork::Sweep => {}
            }
        })
    }
}

/// Runs one piece of work to its end, or until the worker stops.
pub(crate) async fn run_work(shared: Arc<Shared>, work: LifecycleWork) {
    let (store, blobs) = (shared.store.as_ref(), &shared.blobs);
    let stop = shared.stop_steps.clone();
    match work {
        LifecycleWork::Step(lease) => run_step(&shared, *lease).await,
        LifecycleWork::Sweep => match stop
            .run_until_cancelled(sweep::sweep_again(store, blobs, &shared.sweep_ages, &shared.swept_jobs))
            .await
        {
            Some(Ok(swept)) => tracing::info!(?swept, "swept"),
            Some(Err(err)) => tracing::warn!(error = %chain(&err), "could not sweep, trying again later"),
            None => {}
        },
        LifecycleWork::Webhook(event, webhook, _place) => {
            stop.run_until_cancelled(tell(&shared, *event, &webhook)).await;
        }
    }
}

/// Tells this event and those that are due after it.
async fn tell(shared: &Shared, first: OutboxEvent, webhook: &Webhook) {
    let mut next = Some(first);
    for _ in 0..TOLD_IN_A_ROW_MAX {
        let Some(event) = next.take() else { break };
        if let Err(err) = webhook::deliver(shared.store.as_ref(), webhook, &event).await {
            return tracing::warn!(error = %chain(&err), "a webhook event is tried again once its hold is over");
        }
        next = claim_event(shared).await;
    }
}

async fn claim_event(shared: &Shared) -> Option<OutboxEvent> {
    match tokio::time::timeout(shared.config.lease_ttl, shared.store.claim_event(webhook::HOLD)).await {
        Ok(Ok(event)) => event,
        Ok(Err(err)) => {
            tracing::warn!(error = %chain(&err), "could not look for webhook events, trying again later");
            None
        }
        Err(_) => {
            tracing::warn!("the database did not answer in time for webhook events, trying again later");
            None
        }
    }
}

/// Closes windows and takes back leases that ran out, again and again until the
/// worker stops. Beside the pool: a job must expire, and a dead worker's shard come
/// free, also while every place of the pool is taken by an hour-long intake.
pub(crate) async fn expire_on_time(shared: Arc<Shared>) {
    let every = EXPIRE_EVERY.min(shared.config.poll_every * 5);
    loop {
        match shared.stop_claiming.run_until_cancelled(expire::expire(shared.store.as_ref())).await {
            Some(Ok(())) => {}
            Some(Err(err)) => tracing::warn!(error = %chain(&err), "could not expire jobs, trying again later"),
            None => return,
        }
        if shared.stop_claiming.run_until_cancelled(tokio::time::sleep(every)).await.is_none() {
            return;
        }
    }
}

/// Runs a step in its own task, with its lease renewed beside it.
async fn run_step(shared: &Arc<Shared>, lease: StepLease) {
    let context = StepContext {
        store: shared.store.clone(),
        blobs: shared.blobs.clone(),
        known_models: shared.known_models.clone(),
        producer: shared.producer.clone(),
        limits: shared.limits.clone(),
        lease_ttl: shared.config.lease_ttl,
    };
    let started_at = Instant::now();
    let leased = lease.clone();
    // Its own task: a step that computes for long must not hold its renewal up.
    let mut step = AbortOnDropHandle::new(tokio::spawn(async move { step(&context, &leased).await }));
    let ended = tokio::select! {
        ended = &mut step => ended,
        () = renew_until_lost(shared, &lease) => {
            shared.step_failures.over(lease.job.id);
            return tracing::warn!(job.id = %lease.job.id, kind = ?lease.kind, "lost the lease of a step");
        }
        () = shared.stop_steps.cancelled() => {
            step.abort();
            return release(shared, &lease, Duration::ZERO).await;
        }
    };
    let took_s = crate::seconds(started_at.elapsed());
    match ended {
        Ok(Ok(())) => {
            shared.step_failures.over(lease.job.id);
            tracing::info!(job.id = %lease.job.id, kind = ?lease.kind, took_s, "step ended");
            if lease.kind == StepKind::Finalize {
                sweep_after(shared, lease.job.id).await;
            }
        }
        Ok(Err(err)) if err.class() == Class::Cancelled => {
            tracing::info!(job.id = %lease.job.id, kind = ?lease.kind, reason = %err, "step gave way");
            release(shared, &lease, Duration::ZERO).await;
        }
        Ok(Err(err)) => {
            let delay = shared.step_failures.next_delay(lease.job.id, err.class());
            let delay_s = delay.as_secs_f32();
            tracing::error!(job.id = %lease.job.id, kind = ?lease.kind, delay_s, error = %chain(&err), "step failed, trying again");
            release(shared, &lease, delay).await;
        }
        Err(err) if err.is_panic() => std::panic::resume_unwind(err.into_panic()),
        Err(_) => {}
    }
}

async fn sweep_after(shared: &Shared, job: JobId) {
    let swept = sweep::sweep_job(shared.store.as_ref(), &shared.blobs, job, &shared.sweep_ages).await;
    if let Err(err) = swept {
        tracing::warn!(error = %chain(&err), "could not sweep after a job's end, trying again later");
    }
}

async fn step(context: &StepContext, lease: &StepLease) -> Result<(), Error> {
    match lease.kind {
        StepKind::Intake => intake::run(context, lease).await,
        StepKind::Finalize => finalize::run(context, lease).await,
    }
}

/// Renews until the lease is lost or its local deadline is over.
async fn renew_until_lost(shared: &Shared, lease: &StepLease) {
    let ttl = shared.config.lease_ttl;
    let mut deadline = Instant::now() + ttl * 9 / 10;
    loop {
        tokio::time::sleep(shared.config.renew_every).await;
        let asked_at = Instant::now();
        let extended = shared.store.extend_step_if_leased(lease, ttl);
        match tokio::time::timeout(deadline.saturating_duration_since(asked_at), extended).await {
            Ok(Ok(Guarded::Applied(()))) => deadline = asked_at + ttl * 9 / 10,
            Ok(Ok(Guarded::Lost { .. })) | Err(_) => return,
            Ok(Err(err)) => tracing::warn!(error = %chain(&err), "could not renew a step's lease, trying again"),
        }
    }
}

async fn release(shared: &Shared, lease: &StepLease, delay: Duration) {
    let released = shared.store.release_step_if_leased(lease, delay);
    match tokio::time::timeout(shared.config.lease_ttl, released).await {
        Ok(Ok(_)) => {}
        Ok(Err(err)) => tracing::warn!(error = %chain(&err), "could not release a step; its lease runs out"),
        Err(_) => tracing::warn!("the database did not answer the release of a step; its lease runs out"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_that_goes_on_failing_is_tried_ever_more_rarely() {
        let failures = StepFailures::default();
        let (job, other) = (JobId::new(), JobId::new());
        let delays: Vec<f32> = (0..12).map(|_| failures.next_delay(job, Class::Transient).as_secs_f32()).collect();
        assert!(delays[0] <= 2.0 && delays[3] >= 12.0 && delays[3] <= 16.0, "{delays:?}");
        assert!(delays.iter().all(|delay| *delay <= 900.0), "{delays:?}");
        assert!(delays[10..].iter().all(|delay| *delay >= 675.0), "{delays:?}");
        assert!(failures.next_delay(other, Class::Transient) <= STEP_RETRY, "jobs do not wait for one another");
        assert!(failures.next_delay(JobId::new(), Class::Permanent) >= DAMAGED_RETRY.mul_f64(0.75));
        failures.over(job);
        assert!(failures.next_delay(job, Class::Transient) <= STEP_RETRY, "a success starts anew");
    }
}
