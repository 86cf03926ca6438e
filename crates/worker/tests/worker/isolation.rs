//! Poison: a shard whose leases die again and again runs its items one at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{ClaimShard, Shards};
use overnight_testing::scripted::echo_of;
use overnight_testing::service::{body_saying, numbered_lines};
use overnight_testing::{Reply, ScriptedGenerate, TestService, wait};
use overnight_types::{ItemIndex, JobId, OutcomeKind, ShardIndex, WorkerId};
use overnight_worker::generate::{EngineStatus, Failure, Generate, NotAccepting, OutputSender, Request, RequestId};

/// Lets leases of the first shard run out without a commit.
async fn die(service: &TestService, job: JobId, times: u32) {
    for _ in 0..times {
        let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_secs(60), models: None, oldest: false };
        let lease = service.store.claim_shard(&claim).await.unwrap().expect("a shard is ready");
        assert_eq!((lease.shard.job, lease.shard.cut.shard), (job, ShardIndex(0)));
        service.store.release_leases_of_dead(&[claim.worker]).await.unwrap();
    }
}

// langwatch/langwatch#7037 (service 24), NexJob#143, apalis 1.0.0 (A2), graphile/worker#254: the item
// that kills its workers ends as worker_lost; its neighbours, and the job, do not suffer.
#[tokio::test]
async fn item_that_kills_its_workers_is_given_up_alone() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(400);
    service.config.renew_every = Duration::from_millis(80);
    let job = service.submit_cut(&numbered_lines(6), 6).await;
    // The item's death is a panic of everything under the lease, which then runs out.
    let engine = ScriptedGenerate::new(|ask| match ask.text() == body_saying("item-2") {
        true => Reply::Panic,
        false => Reply::Text(echo_of(ask.text())),
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 6).await;
    let outcomes = service.outcomes(job).await;
    let lost: Vec<u64> =
        outcomes.iter().filter(|(_, record)| record.outcome == OutcomeKind::Failed).map(|(item, _)| *item).collect();
    assert_eq!(lost, [2]);
    assert_eq!(outcomes[&2].error_code.as_deref(), Some("worker_lost"));
    let deaths = engine.asked().iter().filter(|body| *body == &body_saying("item-2")).count();
    assert_eq!(deaths, 6, "three with the others, three alone");
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

/// A scripted engine that breaks down on one body and is whole again at once, as one that
/// is built anew.
#[derive(Debug, Clone)]
struct Breaking {
    scripted: ScriptedGenerate,
    breakdowns: Arc<AtomicU32>,
}

#[async_trait]
impl Generate for Breaking {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        self.scripted.submit(requests, outputs).await
    }

    fn cancel(&self, ids: &[RequestId]) {
        self.scripted.cancel(ids);
    }

    fn status(&self) -> EngineStatus {
        self.scripted.status()
    }

    fn num_breakdowns(&self) -> u32 {
        self.breakdowns.load(Ordering::SeqCst)
    }
}

// design.md 4: a breakdown of the engine counts no attempt; an item that causes it again and again is
// found and given up like one that kills its worker.
#[tokio::test]
async fn item_that_breaks_the_engine_is_given_up_alone() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(6), 6).await;
    let breakdowns = Arc::new(AtomicU32::new(0));
    let counted = breakdowns.clone();
    let scripted = ScriptedGenerate::new(move |ask| match ask.text() == body_saying("item-2") {
        true => {
            counted.fetch_add(1, Ordering::SeqCst);
            Reply::Failed(Failure::EngineTrouble { message: "a step panicked".to_owned() })
        }
        false => Reply::Text(echo_of(ask.text())),
    });
    let worker = service.start(&Breaking { scripted, breakdowns: breakdowns.clone() }).await;
    service.until_outcomes(job, 6).await;
    let outcomes = service.outcomes(job).await;
    let failed: Vec<u64> =
        outcomes.iter().filter(|(_, record)| record.outcome == OutcomeKind::Failed).map(|(item, _)| *item).collect();
    assert_eq!(failed, [2]);
    assert_eq!(outcomes[&2].error_code.as_deref(), Some("worker_lost"));
    assert!(outcomes.values().all(|record| record.attempts <= 1), "no breakdown counts as an item's attempt");
    assert_eq!(breakdowns.load(Ordering::SeqCst), 7, "once beside answers that count, three times more, three alone");
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn innocent_items_of_a_suspect_shard_all_run() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(5), 5).await;
    die(&service, job, 3).await;
    let engine = ScriptedGenerate::new(|ask| Reply::Hold(echo_of(ask.text())));
    let worker = service.start(&engine).await;
    for done in 0..5 {
        wait::until("one item at the engine", || async {
            if engine.num_held() == 1 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
        })
        .await;
        let shard = service.store.find_shard(job, ShardIndex(0)).await.unwrap().unwrap();
        assert_eq!(shard.probe_item, Some(ItemIndex(done)), "named in the row while it runs alone");
        engine.release_all();
        service.until_outcomes(job, done + 1).await;
    }
    assert_eq!(engine.in_flight_max(), 1);
    assert!(service.outcomes(job).await.values().all(|record| record.outcome == OutcomeKind::Completed));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// A retry that falls due beside a named item would run with it, and its death would be the other's.
#[tokio::test]
async fn retry_that_falls_due_waits_until_nothing_runs_alone() {
    let mut service = TestService::new().await;
    (service.config.backoff_min, service.config.backoff_max) = (Duration::from_millis(20), Duration::from_millis(20));
    let job = service.submit_cut(&numbered_lines(3), 3).await;
    die(&service, job, 3).await;
    let engine = ScriptedGenerate::new(|ask| match ask.text() == body_saying("item-0") && ask.tries == 0 {
        true => Reply::Failed(Failure::Transient { code: "cut".to_owned(), message: "cut off".to_owned() }),
        false => Reply::Hold(echo_of(ask.text())),
    });
    let worker = service.start(&engine).await;
    wait::until("the second item at the engine", || async {
        if engine.num_held() == 1 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    // The planner has gone round often since the first one's delay was over: were it to
    // come, it would be here.
    let polls = service.store.calls("find_job_signals");
    wait::until("many rounds", || async {
        let rounds = service.store.calls("find_job_signals") - polls;
        if rounds >= 15 { Ok(()) } else { Err(format!("{rounds} rounds")) }
    })
    .await;
    assert_eq!(engine.num_held(), 1, "nothing runs beside the named item");
    wait::until("all outcomes", || async {
        engine.release_all();
        let done = service.outcomes(job).await.len();
        if done == 3 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    assert_eq!(engine.in_flight_max(), 1);
    assert!(service.outcomes(job).await.values().all(|record| record.outcome == OutcomeKind::Completed));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn suspect_shard_waits_until_the_window_is_empty() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(4), 2).await;
    die(&service, job, 3).await;
    // The second shard's lease comes first: the suspect one is held back for it.
    let held = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_secs(60), models: None, oldest: false };
    let suspect = service.store.claim_shard(&held).await.unwrap().expect("the suspect is ready");
    let engine = ScriptedGenerate::new(|ask| Reply::Hold(echo_of(ask.text())));
    let worker = service.start(&engine).await;
    wait::until("the second shard's items", || async {
        if engine.num_held() == 2 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    let why = overnight_store::AttemptEnd::Released;
    assert!(service.store.release_shard_if_leased(suspect.key(), Duration::ZERO, why).await.unwrap().is_applied());
    wait::until("both shards open", || async {
        let open = worker.status().window.open_shards;
        if open == 2 { Ok(()) } else { Err(format!("{open} open")) }
    })
    .await;
    assert_eq!(engine.num_held(), 2, "nothing joins the window");
    engine.release_all();
    wait::until("all outcomes", || async {
        engine.release_all();
        let done = service.outcomes(job).await.len();
        if done == 4 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    assert_eq!(engine.in_flight_max(), 2);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// llm-d-batch-gateway#199 (service 25): a panic anywhere leaves nothing stuck.
#[tokio::test]
async fn one_panic_delays_and_nothing_else() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(400);
    service.config.renew_every = Duration::from_millis(80);
    let job = service.submit_cut(&numbered_lines(9), 3).await;
    let engine = ScriptedGenerate::new(|ask| match ask.text() == body_saying("item-4") && ask.tries == 0 {
        true => Reply::Panic,
        false => Reply::Text(echo_of(ask.text())),
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 9).await;
    assert!(service.outcomes(job).await.values().all(|record| record.outcome == OutcomeKind::Completed));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}
