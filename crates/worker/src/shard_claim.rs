//! Leases shards while the window has room and the engine answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures::future::BoxFuture;
use overnight_store::{ClaimShard, ShardLease};
use overnight_types::chain;

use crate::claim::Idle;
use crate::generate::EngineState;
use crate::pool::Source;
use crate::renewal::LeaseGuard;
use crate::shard_run::{End, open_lease};
use crate::window::OpenShard;
use crate::worker::Shared;

/// Every so many claims the oldest job comes first.
const OLDEST_EVERY: u64 = 8;

/// A leased shard, renewed and accounted for from the claim on.
#[derive(Debug)]
pub(crate) struct ShardWork {
    pub(crate) lease: ShardLease,
    pub(crate) guard: LeaseGuard,
    pub(crate) open: OpenShard,
}

/// Claims shards while the window has room.
#[derive(Debug)]
pub(crate) struct ShardSource {
    shared: Arc<Shared>,
    claims: AtomicU64,
}

impl ShardSource {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, claims: AtomicU64::new(0) }
    }

    /// Waits for room in the window and for an engine that answers.
    async fn room(&self, idle: &mut Idle) -> Option<()> {
        let shared = &self.shared;
        let (generate, desk) = (shared.generate.as_ref()?, shared.desk.as_ref()?);
        loop {
            let changed = shared.window.changed();
            let status = generate.status();
            shared.window.set_items_max(desk.refresh(&status));
            match status.state {
                // A shard leased now would only be given back.
                EngineState::Ready if shared.engine_watch.is_stalled(&status) => idle.wait_poll().await?,
                EngineState::Ready if shared.window.has_room() && !desk.has_alone() => return Some(()),
                EngineState::Ready => idle.wait_for(changed).await?,
                EngineState::Starting(_) | EngineState::Poisoned(_) | EngineState::Stalled(_) => {
                    idle.wait_poll().await?;
                }
            }
        }
    }

    async fn claim(self: Arc<Self>) -> Option<ShardWork> {
        let shared = &self.shared;
        let mut idle = Idle::new(shared.clone());
        loop {
            self.room(&mut idle).await?;
            let claim = ClaimShard {
                worker: shared.id,
                ttl: shared.config.lease_ttl,
                models: shared.models(),
                oldest: self.claims.fetch_add(1, Ordering::Relaxed) % OLDEST_EVERY == OLDEST_EVERY - 1,
            };
            let asked_at = Instant::now();
            let woken = idle.woken();
            match tokio::time::timeout(shared.config.lease_ttl, shared.store.claim_shard(&claim)).await {
                Ok(Ok(Some(lease))) => return Some(self.open(lease, asked_at)),
                Ok(Ok(None)) => idle.wait_for(woken).await?,
                Ok(Err(err)) => idle.wait_after_error("lease a shard", &chain(&err)).await?,
                Err(_) => idle.wait_after_error("lease a shard", "the database did not answer in time").await?,
            }
        }
    }

    fn open(&self, lease: ShardLease, asked_at: Instant) -> ShardWork {
        let shared = &self.shared;
        let (cut, undone) = (&lease.shard.cut, lease.shard.done.num_bits() - lease.shard.done.count_ones());
        shared.metrics.leased(lease.shard.crashes > 0, undone);
        let open = shared.window.open(undone, cut.byte_len);
        let guard = shared.leases.hold(lease.key(), lease.job.round, asked_at, shared.config.lease_ttl);
        shared.retries.at_least(lease.shard.job, lease.retries_used);
        ShardWork { lease, guard, open }
    }
}

impl Source for ShardSource {
    type Work = ShardWork;

    fn next(self: Arc<Self>) -> BoxFuture<'static, Option<ShardWork>> {
        Box::pin(self.claim())
    }

    fn hand_back(self: Arc<Self>, work: ShardWork) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let shard = open_lease(&self.shared, work).0;
            shard.close(Ok(End::Released)).await;
        })
    }
}
