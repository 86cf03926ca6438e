//! A death at each place of the durable path between claim and release: the next
//! lease goes on, and every item has exactly one outcome. Processes that are really
//! killed at the same places are in the system tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use overnight_store::{ClaimShard, Shards};
use overnight_testing::scripted::echo_of;
use overnight_testing::service::{body_saying, is_own_echo, numbered_lines};
use overnight_testing::{Reply, ScriptedGenerate, TestService};
use overnight_types::WorkerId;
use overnight_worker::failpoints;

/// A job that passes every place: its first shard is suspect and runs one item at a
/// time, an item of the second fails once and waits for its retry.
async fn run_with_death_at(point: &str, nth: u32) -> bool {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(300);
    service.config.renew_every = Duration::from_millis(60);
    service.config.checkpoint_items_max = 2;
    let job = service.submit_cut(&numbered_lines(9), 3).await;
    for _ in 0..3 {
        let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_secs(60), models: None, oldest: false };
        service.store.claim_shard(&claim).await.unwrap().expect("a shard is ready");
        service.store.release_leases_of_dead(&[claim.worker]).await.unwrap();
    }
    // Long enough that a shard of which nothing else is left is given back first, on a busy machine too.
    let retry_after = point.contains("release").then_some(Duration::from_secs(1));
    let engine = ScriptedGenerate::new(move |ask| match ask.text() == body_saying("item-5") && ask.tries == 0 {
        true => Reply::Response(503, r#"{"error":{"message":"busy"}}"#.to_owned(), retry_after),
        false => Reply::Text(echo_of(ask.text())),
    });
    let passes = Arc::new(AtomicU32::new(0));
    let counted = passes.clone();
    fail::cfg_callback(point, move || {
        if counted.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            panic!("death at a crash point");
        }
    })
    .unwrap();
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 9).await;
    fail::remove(point);
    let outcomes = service.outcomes(job).await;
    assert_eq!(outcomes.len(), 9, "{point}");
    for (item, record) in &outcomes {
        assert!(is_own_echo(record, &format!("item-{item}")), "{point} {item}: {record:?}");
    }
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
    passes.load(Ordering::SeqCst) >= nth
}

#[tokio::test]
async fn death_at_the_first_pass_of_each_crash_point_loses_nothing() {
    for point in failpoints::SHARD {
        assert!(run_with_death_at(point, 1).await, "{point} was never passed");
    }
}

#[tokio::test]
async fn death_at_a_later_pass_of_each_crash_point_loses_nothing() {
    let mut died = 0;
    for point in failpoints::SHARD {
        died += u32::from(run_with_death_at(point, 3).await);
    }
    assert!(died >= 8, "only {died} points were passed three times");
}
