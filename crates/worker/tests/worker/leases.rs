//! Leases: renewed while work goes on, lost by the dead, never held by two.

use std::time::{Duration, Instant};

use overnight_store::{AttemptEnd, Attempts, ClaimShard, Shards, Workers};
use overnight_testing::scripted::echo_of;
use overnight_testing::service::{is_own_echo, numbered_lines};
use overnight_testing::{Failing, Reply, ScriptedGenerate, TestService, wait};
use overnight_types::{JobId, ShardIndex, ShardState, WorkerId};

async fn all_held(engine: &ScriptedGenerate, count: usize) {
    wait::until("requests at the engine", || async {
        if engine.num_held() == count { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
}

fn holding() -> ScriptedGenerate {
    ScriptedGenerate::new(|ask| Reply::Hold(echo_of(ask.text())))
}

// apalis#530 and its storages on 1.0.0 (A1): two healthy workers, tasks longer than the
// lease; celery#5935, #2599, #3270, faktory#453: a shard of many leases' length runs once.
#[tokio::test]
async fn shards_longer_than_the_lease_run_once_each_on_healthy_workers() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(600);
    service.config.renew_every = Duration::from_millis(100);
    let job = service.submit_cut(&numbered_lines(6), 1).await;
    let engine = holding();
    let (a, b) = (service.start(&engine).await, service.start(&engine).await);
    all_held(&engine, 6).await;
    let renewals = service.store.calls("extend_shards");
    wait::until("several lease times of renewals", || async {
        let calls = service.store.calls("extend_shards") - renewals;
        if calls >= 36 { Ok(()) } else { Err(format!("{calls} renewals")) }
    })
    .await;
    assert_eq!(engine.num_asked(), 6, "six starts for six shards");
    engine.release_all();
    service.until_outcomes(job, 6).await;
    assert!(service.shards(job).await.iter().all(|shard| shard.epoch.0 == 1 && shard.crashes == 0));
    a.shutdown(Duration::from_secs(5)).await;
    b.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// apalis 1.0.0 (A3, A4); doublewordai/fusillade#136, #322 (service 22); deltallm#174, #178 (service 23);
// rails/solid_queue#422, #159; procrastinate#307: a worker dies and its work goes on elsewhere.
#[tokio::test]
async fn dead_workers_shards_go_on_elsewhere_and_its_late_write_is_refused() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(500);
    service.config.renew_every = Duration::from_millis(100);
    let job = service.submit_cut(&numbered_lines(4), 4).await;
    let dying = ScriptedGenerate::new(|_| Reply::Hold("too late".to_owned()));
    let late = service.start(&dying).await;
    all_held(&dying, 4).await;
    let before = service.shards(job).await.remove(0);
    // It stands between its last look at the lease and its commit, for longer than the lease.
    let pause = service.store.pause("commit_segment_if_leased");
    dying.release_all();
    pause.reached().await;
    // As in a process that is stopped, its next claim and its renewals stand too.
    service.store.fail("claim_shard", 0, 1, Failing::HangBefore);
    service.store.hangs().await;
    service.store.fail("extend_shards", 0, u32::MAX, Failing::HangBefore);
    let heirs = holding();
    let heir = service.start(&heirs).await;
    all_held(&heirs, 4).await;
    service.store.heal();
    // The shard is leased again and has no segment yet: nothing but the epoch tells the two apart.
    let shard = service.shards(job).await.remove(0);
    assert_eq!((shard.state, shard.epoch.0), (ShardState::Leased, before.epoch.0 + 1));
    pause.go_on();
    wait::until("the late write to be refused", || async {
        let refused = late.metrics().counts().leases_lost;
        if refused == 1 {
            Ok(())
        } else {
            Err(format!("{refused} refused, {} recorded", service.segments(job).await.len()))
        }
    })
    .await;
    assert_eq!(service.store.calls("commit_segment_if_leased"), 1, "it was really tried, once");
    assert_eq!(service.segments(job).await, []);
    heirs.release_all();
    service.until_outcomes(job, 4).await;
    let segments = service.segments(job).await;
    assert!(segments.iter().all(|segment| segment.new.epoch.0 > before.epoch.0), "{segments:?}");
    let outcomes = service.outcomes(job).await;
    assert!(outcomes.iter().all(|(item, record)| is_own_echo(record, &format!("item-{item}"))));
    late.shutdown(Duration::ZERO).await;
    heir.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// SIGSTOP longer than the lease, in one process: the worker's renewals hang, its lease
// runs out, another takes the shard, then the first one's answers come.
#[tokio::test]
async fn worker_stopped_past_its_lease_writes_nothing() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(500);
    service.config.renew_every = Duration::from_millis(100);
    let job = service.submit_cut(&numbered_lines(4), 4).await;
    service.store.fail("extend_shards", 0, u32::MAX, Failing::HangBefore);
    let stopped_engine = holding();
    let stopped = service.start(&stopped_engine).await;
    all_held(&stopped_engine, 4).await;
    wait::until("the local deadline", || async {
        let cancelled = stopped_engine.num_cancelled();
        if cancelled == 4 { Ok(()) } else { Err(format!("{cancelled} cancelled")) }
    })
    .await;
    assert_eq!(service.store.calls("commit_segment_if_leased"), 0, "and nothing was written until then");
    // contribsys/faktory#453: work stopped by the local clock while the lease still stood or just
    // ended. The worker may lease again, under a new epoch, before anybody else does.
    service.store.heal();
    stopped_engine.release_all();
    let heir = service.start(&ScriptedGenerate::echo()).await;
    wait::until("all outcomes", || async {
        stopped_engine.release_all();
        let done = service.outcomes(job).await.len();
        if done == 4 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    let segments = service.segments(job).await;
    assert!(segments.iter().all(|segment| segment.new.epoch.0 > 1), "all under a later lease: {segments:?}");
    stopped.shutdown(Duration::from_secs(5)).await;
    heir.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

/// Short leases, and an engine that counts as stalled after a fifth of a second.
async fn stalling_service() -> TestService {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(600);
    service.config.renew_every = Duration::from_millis(50);
    service.config.engine_stall_max = Duration::from_millis(200);
    service
}

/// Waits until the lease of the first shard was given back as trouble, then for
/// several lease times more. Asserts that nothing is leased meanwhile.
async fn given_back_and_left_alone(service: &TestService, job: JobId) {
    wait::until("the lease to be given back", || async {
        let shard = service.shards(job).await.remove(0);
        if shard.state == ShardState::Ready { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    let claims = service.store.calls("claim_shard");
    let polls = service.store.calls("claim_step");
    wait::until("several lease times", || async {
        let polls = service.store.calls("claim_step") - polls;
        if polls >= 60 { Ok(()) } else { Err(format!("{polls} polls")) }
    })
    .await;
    assert_eq!(service.store.calls("claim_shard"), claims, "nothing is claimed while the engine stalls");
    let shard = service.shards(job).await.remove(0);
    assert_eq!(shard.state, ShardState::Ready, "{}", service.seen(job).await);
    let attempts = service.store.list_attempts(job, ShardIndex(0), 1).await.unwrap();
    assert_eq!(attempts[0].end, Some(AttemptEnd::Trouble));
}

// One hung step of a single server: its items wait, and none of them pays for it.
#[tokio::test]
async fn stalled_engine_gives_its_shards_back_and_gets_none() {
    let service = stalling_service().await;
    let job = service.submit_cut(&numbered_lines(2), 2).await;
    let engine = holding();
    engine.hang();
    let worker = service.start(&engine).await;
    all_held(&engine, 2).await;
    given_back_and_left_alone(&service, job).await;
    assert_eq!(service.shards(job).await[0].crashes, 0);
    engine.recover();
    wait::until("all outcomes", || async {
        engine.release_all();
        let done = service.outcomes(job).await.len();
        if done == 2 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    assert!(service.outcomes(job).await.iter().all(|(item, record)| is_own_echo(record, &format!("item-{item}"))));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// The item that runs alone while the engine hangs has killed nobody.
#[tokio::test]
async fn stalled_engine_is_no_death_of_the_item_that_runs_alone() {
    let service = stalling_service().await;
    let job = service.submit_cut(&numbered_lines(2), 2).await;
    for _ in 0..3 {
        let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_secs(60), models: None, oldest: false };
        service.store.claim_shard(&claim).await.unwrap().expect("a shard is ready");
        service.store.release_leases_of_dead(&[claim.worker]).await.unwrap();
    }
    let engine = holding();
    engine.hang();
    let worker = service.start(&engine).await;
    all_held(&engine, 1).await;
    given_back_and_left_alone(&service, job).await;
    let shard = service.shards(job).await.remove(0);
    assert_eq!((shard.probe_item.map(|item| item.0), shard.probe_deaths, shard.crashes), (Some(0), 0, 3));
    assert_eq!(service.store.calls("set_probe_if_leased"), 1, "nobody is put to the proof at a hung engine");
    engine.recover();
    wait::until("all outcomes", || async {
        engine.release_all();
        let done = service.outcomes(job).await.len();
        if done == 2 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    assert!(service.outcomes(job).await.iter().all(|(item, record)| is_own_echo(record, &format!("item-{item}"))));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn engine_that_was_idle_for_long_is_not_taken_for_stalled() {
    let mut service = TestService::new().await;
    service.config.engine_stall_max = Duration::from_millis(500);
    service.config.renew_every = Duration::from_millis(50);
    let engine = holding();
    // Its last step ended long ago, because it had nothing to do.
    engine.stall_since(Instant::now().checked_sub(Duration::from_secs(60)).unwrap_or_else(Instant::now));
    let job = service.submit_cut(&numbered_lines(1), 1).await;
    let worker = service.start(&engine).await;
    all_held(&engine, 1).await;
    let before = service.store.calls("extend_shards");
    wait::until("a renewal", || async {
        let calls = service.store.calls("extend_shards");
        if calls > before { Ok(()) } else { Err(format!("{calls} renewals")) }
    })
    .await;
    engine.release_all();
    service.until_outcomes(job, 1).await;
    worker.shutdown(Duration::from_secs(5)).await;
}

// apalis 1.0.0 (A6), apalis-sqlite#58, fusillade#325, #327, #363 (service 65), #26: a database
// that fails for a while ends no worker and loses no item.
#[tokio::test]
async fn database_that_fails_for_a_while_only_delays() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(40), 4).await;
    let engine = ScriptedGenerate::echo();
    for method in ["claim_shard", "commit_segment_if_leased", "claim_step", "extend_shards", "find_job_signals"] {
        service.store.fail(method, 1, 6, Failing::Before);
    }
    service.store.fail("release_shard_if_leased", 0, 2, Failing::Before);
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 40).await;
    assert_eq!(service.outcomes(job).await.len(), 40);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// PrintStash#181, FoundationDB's commit_unknown_result: a commit whose answer is lost happened once.
#[tokio::test]
async fn commit_whose_answer_is_lost_counts_once() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(600);
    service.config.renew_every = Duration::from_millis(100);
    service.config.checkpoint_items_max = 2;
    let job = service.submit_cut(&numbered_lines(8), 8).await;
    service.store.fail("commit_segment_if_leased", 1, 1, Failing::After);
    let engine = ScriptedGenerate::echo();
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 8).await;
    assert_eq!(service.outcomes(job).await.len(), 8);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn restart_on_the_same_host_waits_for_no_lease() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_secs(600);
    service.config.renew_every = Duration::from_secs(1);
    let job = service.submit_cut(&numbered_lines(3), 3).await;
    let engine = holding();
    let dead = service.start(&engine).await;
    let dead_id = dead.id();
    all_held(&engine, 3).await;
    // A process that dies leaves its file behind and its lock free.
    let lock_file = service.data_dir().join("workers").join(dead_id.to_string());
    drop(dead);
    std::fs::write(&lock_file, b"").unwrap();
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_outcomes(job, 3).await;
    assert!(!lock_file.exists());
    let workers = service.store.list_workers_on_host("test-host").await.unwrap();
    assert_eq!(workers.iter().map(|worker| worker.id).collect::<Vec<_>>(), [worker.id()]);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

#[tokio::test]
async fn live_workers_leases_are_left_alone_by_a_start_on_its_host() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(2), 2).await;
    let engine = holding();
    let first = service.start(&engine).await;
    all_held(&engine, 2).await;
    let second = service.start(&ScriptedGenerate::echo()).await;
    assert_eq!(service.shards(job).await[0].owner, Some(first.id()));
    engine.release_all();
    service.until_outcomes(job, 2).await;
    assert_eq!(service.shards(job).await[0].epoch.0, 1);
    first.shutdown(Duration::from_secs(5)).await;
    second.shutdown(Duration::from_secs(5)).await;
}

// riverqueue/river#1258: no shard stays leased for long after its lease, claimed or not.
#[tokio::test]
async fn lease_that_ran_out_is_taken_back_even_when_nobody_claims() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(2), 2).await;
    let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_millis(50), models: None, oldest: false };
    service.store.claim_shard(&claim).await.unwrap().expect("a shard is ready");
    // Lifecycle only: it never claims a shard.
    let front = service.start_parts(None).await;
    wait::until("the shard to be ready again", || async {
        let shard = service.shards(job).await.remove(0);
        if shard.state == ShardState::Ready && shard.crashes == 1 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    front.shutdown(Duration::from_secs(5)).await;
}

// However long the steps under way take, and though they take every place of the pool.
#[tokio::test]
async fn dead_lease_is_taken_back_while_every_place_for_steps_is_taken() {
    let mut service = TestService::new().await;
    service.config.lifecycle_steps_max = 1;
    let job = service.submit_cut(&numbered_lines(2), 2).await;
    service.submit(&numbered_lines(1)).await;
    service.store.fail("record_intake_if_leased", 0, 1, Failing::HangBefore);
    let front = service.start_parts(None).await;
    service.store.hangs().await;
    let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_millis(1), models: None, oldest: false };
    service.store.claim_shard(&claim).await.unwrap().expect("a shard is ready");
    wait::until("the shard to be ready again", || async {
        let shard = service.shards(job).await.remove(0);
        if shard.state == ShardState::Ready && shard.crashes == 1 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    front.shutdown(Duration::ZERO).await;
}

#[tokio::test]
async fn no_lease_is_taken_before_the_engine_is_ready() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(1), 1).await;
    let engine = ScriptedGenerate::echo();
    engine.set_state(overnight_worker::generate::EngineState::Starting("loading".to_owned()));
    let worker = service.start(&engine).await;
    // Lifecycle runs meanwhile, so the pools are up.
    wait::until("the pools", || async {
        let calls = service.store.calls("claim_step");
        if calls > 3 { Ok(()) } else { Err(format!("{calls} claims of steps")) }
    })
    .await;
    assert_eq!(service.store.calls("claim_shard"), 0);
    engine.set_state(overnight_worker::generate::EngineState::Ready);
    service.until_outcomes(job, 1).await;
    let attempts = service.store.list_attempts(job, ShardIndex(0), 10).await.unwrap();
    assert_eq!(attempts.iter().map(|attempt| attempt.end).collect::<Vec<_>>(), [Some(AttemptEnd::Done)]);
    worker.shutdown(Duration::from_secs(5)).await;
}
