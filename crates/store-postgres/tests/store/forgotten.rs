//! What is left to do when a connection breaks between a change and what follows from it.

use std::time::Duration;

use overnight_store::conformance::builders::*;
use overnight_store::{AttemptEnd, CancelMode, Jobs, Shards, StepKind, Steps};
use overnight_testing::postgres::Database;
use overnight_types::WorkerId;

/// A worker gives the last shard of a cancelled job back, and hears no answer: the job was
/// not made due. Its next try does that, instead of leaving it until the drain is over.
#[tokio::test]
async fn repeated_release_makes_a_drained_cancel_due() {
    let Some(database) = Database::create() else { return };
    let (store, _clock) = database.open_with_clock().await;
    let job = running_job(&store, &[2]).await;
    let held = lease(&store, WorkerId::new()).await;
    applied(store.cancel_job_if_active(job.id, CancelMode::Drain, Duration::from_secs(600)).await.unwrap());
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None, "it drains");
    // The first statement of a release, carried out by a session that then broke.
    database.sql("update shards set state = 'ready', owner = null, lease_until = null");
    database.sql("update attempts set ended_at = started_at, \"end\" = 'released'");
    let again = store.release_shard_if_leased(held.key(), Duration::ZERO, AttemptEnd::Released).await.unwrap();
    assert!(!again.is_applied(), "{again:?}");
    let step = store.claim_step(WorkerId::new(), TTL).await.unwrap().expect("its end is due at once");
    assert_eq!((step.kind, step.job.id), (StepKind::Finalize, job.id));
}
