//! The durable path of one shard, from top to bottom: lease, read, generate, write
//! the segment, commit, release. [`run_shard`] owns all the branching; what it
//! calls is straight-line.
//!
//! Invariant: whatever ends it, and wherever, the items without a committed
//! outcome run again under the next lease, and nobody else's do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_blobs::ObjectName;
use overnight_store::{AttemptEnd, Guarded, ShardLease};
use overnight_types::chain;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::claim::Troubles;
use crate::feed::{KnownFault, OpenLease, OpenLeaseParts, PREPARED_BYTES_MAX, Stop};
use crate::outcome::Ended;
use crate::planner::Sitter;
use crate::prepare::{self, InputLine, Piece, Recipe};
use crate::renewal::Order;
use crate::shard_claim::ShardWork;
use crate::worker::Shared;

/// An item that was running alone when this many leases died is not tried again.
const PROBE_DEATHS_MAX: u32 = 3;
/// Longest sleep between looks at the lease.
const TICK: Duration = Duration::from_secs(1);

/// How a lease ended in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The last item's outcome is committed; the shard has ended.
    Done,
    /// What is left waits for a retry for so long.
    Waiting(Duration),
    /// Given back on request.
    Released,
}

/// Runs a leased shard until it is done, given back, or lost.
pub(crate) async fn run_shard(shared: Arc<Shared>, work: ShardWork) {
    fail::fail_point!("worker::shard_claimed");
    let (mut shard, faults) = open_lease(&shared, work);
    let (is_suspect, probe) = shard.suspicion;
    let end = match shard.read_input().await {
        Err(stop) => Err(stop),
        Ok(Err(gone)) => shard.end_all(&Ended::input_unavailable(&gone)).await,
        Ok(Ok(lines)) => {
            shard.load(lines, faults);
            if is_suspect { run_alone(&mut shard, probe).await } else { run_together(&mut shard).await }
        }
    };
    shard.close(end).await;
}

/// Runs all items that may run.
async fn run_together(shard: &mut OpenLease) -> Result<End, Stop> {
    let bits = shard.runnable();
    shard.enqueue(bits);
    run_queue(shard, Retries::Due).await?;
    rest(shard)
}

/// Runs the undone items one at a time, each named in the shard's row before it
/// runs, with nothing else at the engine: leases of this shard died again and again.
async fn run_alone(shard: &mut OpenLease, probe: Option<(u32, u32)>) -> Result<End, Stop> {
    tracing::warn!(job.id = %shard.key.job, shard.index = shard.key.shard.0, "running a shard's items one at a time");
    wait_until_alone(shard).await?;
    let mut bits = shard.runnable();
    if let Some((suspect, _)) = probe {
        bits.sort_by_key(|bit| *bit != suspect);
    }
    for bit in bits {
        if let Some(stop) = Stop::of(shard.guard.order()) {
            return Err(stop);
        }
        // Whatever stalls the engine, it is not the item that has not run yet.
        let status = shard.shared.generate.as_ref().map(|generate| generate.status());
        if status.is_some_and(|status| shard.shared.engine_watch.is_stalled(&status)) {
            return Err(Stop::stalled());
        }
        if probe.is_some_and(|(suspect, deaths)| suspect == bit && deaths >= PROBE_DEATHS_MAX) {
            tracing::error!(job.id = %shard.key.job, item.index = shard.item(bit).0, "gave an item up: its workers died");
            shard.end_unrun(bit, &Ended::worker_lost());
        } else {
            fail::fail_point!("worker::probe_before_set");
            let item = Some(shard.item(bit));
            match shard.shared.store.set_probe_if_leased(shard.key, item).await {
                Ok(Guarded::Applied(())) => {}
                Ok(Guarded::Lost { .. }) => return Err(Stop::Lost),
                Err(err) => return Err(Stop::trouble("name the item that runs alone", &err)),
            }
            fail::fail_point!("worker::probe_after_set");
            shard.enqueue([bit]);
            // Whatever came up beside it would be blamed on it.
            run_queue(shard, Retries::Later).await?;
        }
        // Each outcome by itself: a later item's death must not take it along.
        shard.checkpoint().await?;
    }
    rest(shard)
}

async fn wait_until_alone(shard: &mut OpenLease) -> Result<(), Stop> {
    loop {
        let changed = shard.seat.changed();
        if shard.seat.try_alone() {
            return Ok(());
        }
        if let Some(stop) = Stop::of(shard.guard.order()) {
            return Err(stop);
        }
        tokio::select! {
            () = changed => {}
            _ = shard.guard.order.changed() => {}
        }
    }
}

/// What becomes of items whose retry falls due in the meantime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Retries {
    /// They run too.
    Due,
    /// The next lease runs them.
    Later,
}

/// Prepares, feeds, collects and checkpoints until nothing is queued or at the
/// engine and everything finished is committed.
async fn run_queue(shard: &mut OpenLease, retries: Retries) -> Result<(), Stop> {
    let (items_max, bytes_max) = (shard.shared.config.checkpoint_items_max, shard.shared.config.checkpoint_bytes_max);
    let every = shard.shared.checkpoint_every();
    let mut preparing: Option<JoinHandle<Piece>> = None;
    loop {
        let order = shard.guard.order();
        match order {
            Order::Lost => return Err(Stop::Lost),
            Order::HandBack => return Err(Stop::HandBack),
            Order::Stalled => return Err(Stop::stalled()),
            Order::Drain if shard.drain() => return Err(Stop::HandBack),
            Order::Drain | Order::Run => {}
        }
        let window_changed = shard.seat.changed();
        if order == Order::Run {
            if retries == Retries::Due {
                shard.requeue_due();
            }
            shard.feed();
            if preparing.is_none() {
                preparing = shard.start_preparing();
            }
        }
        let is_over = preparing.is_none() && shard.is_drained();
        if shard.unwritten.is_due(items_max, bytes_max, every) || is_over && !shard.unwritten.is_empty() {
            shard.checkpoint().await?;
        }
        if is_over {
            return Ok(());
        }
        let wake_at = shard.next_wake(every, retries);
        tokio::select! {
            biased;
            deliveries = shard.seat.deliveries.recv() => {
                shard.collect(deliveries.expect("a seat is served until its shard leaves"))?;
                shard.collect_more()?;
            }
            Some(prepared) = finished(&mut preparing) => {
                preparing = None;
                fail::fail_point!("worker::items_prepared");
                shard.take_prepared(prepared);
            }
            _ = shard.guard.order.changed() => {}
            () = window_changed, if order == Order::Run && shard.has_ready() => {}
            () = tokio::time::sleep_until(wake_at.into()) => {}
        }
    }
}

/// What is left once the queue has run dry.
fn rest(shard: &OpenLease) -> Result<End, Stop> {
    match shard.next_retry_at() {
        _ if shard.done.is_full() => Ok(End::Done),
        Some(at) => Ok(End::Waiting(at.saturating_duration_since(Instant::now()))),
        None => Err(Stop::HandBack),
    }
}

/// The result of the preparation under way; never without one. A panic in it is
/// the shard's own.
async fn finished(preparing: &mut Option<JoinHandle<Piece>>) -> Option<Piece> {
    match preparing.as_mut()?.await {
        Ok(prepared) => Some(prepared),
        Err(err) if err.is_panic() => std::panic::resume_unwind(err.into_panic()),
        // The runtime shuts down; this task ends with it.
        Err(_) => std::future::pending().await,
    }
}

pub(crate) fn open_lease(shared: &Arc<Shared>, work: ShardWork) -> (OpenLease, Vec<KnownFault>) {
    let ShardWork { lease, guard, open } = work;
    let ShardLease { job, shard, faults, .. } = lease;
    // By the database's clock: the claim set the lease's end.
    let now = shard.lease_until.map(|until| until.micros() - shared.config.lease_ttl.as_micros() as i64);
    let first_item = shard.cut.first_item.0;
    let faults = faults.iter().filter_map(|fault| {
        let bit = u32::try_from(fault.item.0.checked_sub(first_item)?).ok()?;
        let wait = fault.not_before.micros().saturating_sub(now?).max(0);
        let wait = Duration::from_micros(wait.unsigned_abs());
        Some(KnownFault { bit, wait, attempts: fault.attempts, tries: fault.tries() })
    });
    let faults = faults.collect();
    let recipe = Recipe {
        mapper: shared.mapper.clone().expect("start checks that an engine comes with a mapper"),
        endpoint: job.endpoint,
        job: job.id,
        first_item,
        round: job.round,
        lease: Uuid::now_v7(),
    };
    let desk = shared.desk.as_ref().expect("shards are claimed only with an engine");
    let parts = OpenLeaseParts {
        shared: shared.clone(),
        seat: desk.seat(Sitter { job: job.id, priority: job.priority, first_item }),
        guard,
        open,
        recipe: Arc::new(recipe),
        retry_budget: shared.config.retry_budget(job.num_items),
        input: job.input_file_id,
        crashes_max: shared.config.crashes_max,
        shard,
    };
    (OpenLease::new(parts), faults)
}

impl OpenLease {
    /// Reads the lines of undone items; the inner error says why the input is not
    /// what it was.
    async fn read_input(&mut self) -> Result<Result<Vec<InputLine>, String>, Stop> {
        let (cut, done) = (self.cut, self.done.clone());
        let range = cut.byte_offset..cut.byte_offset + cut.byte_len;
        let bytes = match self.shared.blobs.read_range(&ObjectName::file(self.input), range).await {
            Ok(bytes) => bytes,
            Err(err @ (overnight_blobs::Error::Missing { .. } | overnight_blobs::Error::Damaged { .. })) => {
                return Ok(Err(chain(&err)));
            }
            Err(err) => return Err(Stop::trouble("read the input", &err)),
        };
        fail::fail_point!("worker::input_read");
        let split = tokio::task::spawn_blocking(move || prepare::split(&bytes, &cut, &done)).await;
        split.map_err(|err| Stop::trouble("split the input into lines", &err))
    }

    fn start_preparing(&mut self) -> Option<JoinHandle<Piece>> {
        let piece = self.next_piece();
        let recipe = self.recipe.clone();
        (!piece.is_empty()).then(|| tokio::task::spawn_blocking(move || recipe.prepare(&piece, PREPARED_BYTES_MAX)))
    }

    /// Takes what has come in the meantime too, up to a checkpoint's worth.
    fn collect_more(&mut self) -> Result<(), Stop> {
        for _ in 0..self.shared.config.checkpoint_items_max {
            let Ok(deliveries) = self.seat.deliveries.try_recv() else { break };
            self.collect(deliveries)?;
        }
        Ok(())
    }

    fn next_wake(&self, checkpoint_every: Duration, retries: Retries) -> Instant {
        let checkpoint = self.unwritten.due_at(checkpoint_every);
        let sometime = Instant::now() + TICK;
        let retry = self.next_retry_at().filter(|_| retries == Retries::Due);
        [checkpoint, retry].into_iter().flatten().fold(sometime, Instant::min)
    }

    /// Gives every undone item the same outcome.
    async fn end_all(&mut self, ended: &Ended) -> Result<End, Stop> {
        let bits: Vec<u32> = self.done.zeros().collect();
        for piece in bits.chunks(self.shared.config.checkpoint_items_max as usize) {
            piece.iter().for_each(|bit| self.end_unrun(*bit, ended));
            self.checkpoint().await?;
        }
        Ok(End::Done)
    }

    /// Ends the lease: stops what runs, commits what is finished, gives the shard back.
    pub(crate) async fn close(mut self, end: Result<End, Stop>) {
        if !matches!(end, Err(Stop::Lost)) {
            // Answers that came in the meantime count; trouble among them is why this ends.
            let _ = self.collect_more();
        }
        self.seat.leave();
        let job = self.key.job;
        let (delay, why) = match end {
            Ok(End::Done) => return self.forget_job(),
            Ok(End::Waiting(delay)) => (delay, AttemptEnd::Waiting),
            Ok(End::Released) | Err(Stop::HandBack) => (Duration::ZERO, AttemptEnd::Released),
            Err(Stop::Trouble(what)) if self.has_engine_broken() => {
                // It may be an item of this shard that breaks the engine; claims wait until it is built anew.
                tracing::warn!(job.id = %job, shard.index = self.key.shard.0, "gave a shard back, the engine broke down: {what}");
                (Duration::ZERO, AttemptEnd::Lost)
            }
            Err(Stop::Trouble(what)) => {
                let delay = self.shared.troubles.next_delay();
                let delay_s = delay.as_secs_f32();
                tracing::warn!(job.id = %job, shard.index = self.key.shard.0, delay_s, "gave a shard back: {what}");
                (delay, AttemptEnd::Trouble)
            }
            Err(Stop::Lost) => {
                tracing::warn!(job.id = %job, shard.index = self.key.shard.0, "lost the lease of a shard");
                return self.forget_job();
            }
        };
        let done = match self.checkpoint().await {
            Ok(done) => done,
            Err(Stop::Lost) => return self.forget_job(),
            Err(Stop::HandBack) => false,
            Err(Stop::Trouble(what)) => {
                tracing::warn!(job.id = %job, "outcomes are computed again: {what}");
                false
            }
        };
        fail::fail_point!("worker::shard_before_release");
        if !done {
            self.release(delay, why).await;
        }
        fail::fail_point!("worker::shard_after_release");
        self.forget_job();
    }

    /// Tries for as long as the lease lasts; after that it runs out by itself.
    async fn release(&self, delay: Duration, why: AttemptEnd) {
        while self.guard.order() < Order::Lost {
            match self.shared.store.release_shard_if_leased(self.key, delay, why).await {
                Ok(_) => return,
                Err(err) => {
                    tracing::warn!(error = %chain(&err), "could not release a shard, trying again");
                    tokio::time::sleep(Troubles::FIRST_DELAY).await;
                }
            }
        }
    }

    fn forget_job(self) {
        let shared = self.shared.clone();
        drop(self);
        shared.retries.retain(&shared.leases.jobs());
    }
}
