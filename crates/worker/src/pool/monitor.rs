//! The two pools in one apalis `Monitor`: `shards` and `lifecycle`.

use std::sync::Arc;

use apalis::prelude::{Event, Monitor, WorkerBuilder, WorkerBuilderExt};
use overnight_types::chain;
use tokio_util::task::AbortOnDropHandle;

use super::backend::Claims;
use crate::lifecycle::{self, StepSource};
use crate::shard_claim::ShardSource;
use crate::shard_run;
use crate::worker::Shared;

/// Runs both pools until the worker stops and what it claimed has ended.
///
/// A pool ends only with the worker: its claims never fail, and a panic in a shard
/// or a step is caught, its lease left to run out.
pub(crate) async fn run(shared: Arc<Shared>) {
    let monitor = Monitor::new().should_restart(|pool, err| {
        // Only a fault in a layer gets here; what the pool ran then comes back by its leases.
        tracing::error!(pool = pool.name(), error = %chain(err), "a pool ended and is started again");
        !pool.is_shutting_down()
    });
    let mut monitor = monitor.on_event(|pool, event| {
        if let Event::Error(err) = event {
            tracing::error!(pool = pool.name(), error = %chain(err.as_ref().as_ref()), "a piece of work ended by a panic");
        }
    });
    if shared.generate.is_some() {
        let shared = shared.clone();
        monitor = monitor.register(move |_| {
            let shared = shared.clone();
            let source = Arc::new(ShardSource::new(shared.clone()));
            WorkerBuilder::new("shards")
                .backend(Claims::new(source))
                .concurrency(shared.config.open_shards_max as usize)
                .enable_tracing()
                .catch_panic()
                .build(move |work| in_own_task(shard_run::run_shard(shared.clone(), work)))
        });
    }
    let steps = shared.clone();
    monitor = monitor.register(move |_| {
        let shared = steps.clone();
        let source = Arc::new(StepSource::new(shared.clone()));
        WorkerBuilder::new("lifecycle")
            .backend(Claims::new(source))
            .concurrency(shared.config.lifecycle_steps_max as usize)
            .enable_tracing()
            .catch_panic()
            .build(move |work| in_own_task(lifecycle::run_work(shared.clone(), work)))
    });
    let pools = monitor.context();
    let stop = shared.stop_claiming.clone();
    let stopped = async move {
        stop.cancelled().await;
        // Wakes the pools, which then end once what they run has ended.
        let _ = pools.shutdown();
    };
    let (ended, ()) = tokio::join!(monitor.run(), stopped);
    if let Err(err) = ended {
        tracing::error!(error = %chain(&err), "the worker pool ended");
    }
}

/// A pool polls all its work in one task; this gives each piece its own, so that
/// pieces run on all cores. A panic goes on to the layer that catches it.
async fn in_own_task(work: impl Future<Output = ()> + Send + 'static) -> Result<(), std::convert::Infallible> {
    match AbortOnDropHandle::new(tokio::spawn(work)).await {
        Ok(()) => Ok(()),
        Err(err) if err.is_panic() => std::panic::resume_unwind(err.into_panic()),
        // Only a runtime that shuts down cancels it.
        Err(_) => Ok(()),
    }
}
