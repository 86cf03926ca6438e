//! What is Postgres's own: claimers side by side, sessions that are cut, a server that is
//! restarted, limits of a session, wake-ups between processes, other servers' numbers.

use std::sync::Arc;
use std::time::Duration;

use overnight_store::conformance::builders::*;
use overnight_store::{
    AttemptEnd, CancelMode, Error, Files, Guarded, Jobs, SegmentCursor, SegmentSelection, Segments, Shards, Store, Wake,
};
use overnight_store_postgres::{Options, PostgresStore, Url};
use overnight_testing::postgres::{Database, Server};
use overnight_types::{Class, ItemIndex, JobState, ShardIndex, ShardState, WorkerId};
use sqlx::Connection;

/// A pause for a server that comes back; everything that waits has a bound.
const STEP: Duration = Duration::from_millis(50);

/// Tries until the call succeeds; every failure before must be one that says to try again.
async fn patiently<T>(mut call: impl AsyncFnMut() -> Result<T, Error>) -> T {
    for _ in 0..600 {
        match call().await {
            Ok(value) => return value,
            Err(err) => {
                assert_eq!(err.class(), Class::Transient, "{}", overnight_types::chain(&err));
                tokio::time::sleep(STEP).await;
            }
        }
    }
    panic!("the server did not come back");
}

/// Eight stores, as many processes would have them, lease and commit one job without an
/// error, and no shard is leased twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claimers_side_by_side_never_share_a_shard() {
    let Some(database) = Database::create() else { return };
    let first = database.open(Options::default()).await;
    let job = running_job(&first, &[4; 96]).await;
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let url = database.store_url();
            tokio::spawn(async move {
                let options = Options { connections: 2, listen: false, ..Options::default() };
                let store = PostgresStore::open(&url, options).await.unwrap();
                let worker = WorkerId::new();
                let (mut shards, mut misses) = (Vec::new(), 0);
                // A claim may pass over what others hold this moment.
                while misses < 3 {
                    let Some(mut lease) = store.claim_shard(&claim(worker)).await.unwrap() else {
                        misses += 1;
                        continue;
                    };
                    shards.push(lease.shard.cut.shard);
                    assert_eq!(lease.shard.epoch.0, 1, "a shard was leased a second time");
                    for item in 0..4 {
                        applied(commit(&store, &mut lease, &[item], &[]).await);
                    }
                }
                store.close().await;
                shards
            })
        })
        .collect();
    let mut leased = Vec::new();
    for worker in workers {
        leased.extend(worker.await.unwrap());
    }
    leased.sort_unstable();
    assert_eq!(leased, (0..96).map(ShardIndex).collect::<Vec<_>>(), "each shard was leased once");
    assert_eq!(first.find_job(job.id).await.unwrap().unwrap().state, JobState::Finalizing, "the last one ended it");
    assert_eq!(finalize(&first, job.id).await.final_counts.unwrap().completed, 4 * 96);
}

/// Moves of the job and its shards from all sides at once: no deadlock is told, nothing is
/// left over, and the accounting is closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn moves_from_all_sides_meet_without_an_error() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options { connections: 6, ..Options::default() }).await;
    for round in 0..6 {
        let job = running_job(&store, &[3; 24]).await;
        let mut tasks = Vec::new();
        for number in 0..4u64 {
            let store = store.clone();
            tasks.push(tokio::spawn(async move {
                let worker = WorkerId::new();
                while let Some(mut lease) = store.claim_shard(&claim(worker)).await.unwrap() {
                    let fault = new_fault(lease.shard.cut.first_item.0, 1, Duration::ZERO);
                    let _ = store.record_faults_if_leased(lease.key(), &[fault]).await.unwrap();
                    let _ = store.extend_shards(worker, &[lease.key()], TTL).await.unwrap();
                    let _ = commit(&store, &mut lease, &[0], &[]).await;
                    if lease.shard.epoch.0 < 3 && number % 2 == 0 {
                        let why = AttemptEnd::Waiting;
                        let _ = store.release_shard_if_leased(lease.key(), Duration::ZERO, why).await.unwrap();
                    } else {
                        let rest: Vec<u32> = lease.shard.done.zeros().collect();
                        let _ = commit(&store, &mut lease, &rest, &[]).await;
                    }
                }
            }));
        }
        let doors = store.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..10 {
                let _ = doors.pause_job_if_active(job.id).await.unwrap();
                let _ = doors.unpause_job_if_active(job.id).await.unwrap();
                doors.find_progress(job.id).await.unwrap();
            }
            if round % 2 == 0 {
                let _ = doors.cancel_job_if_active(job.id, CancelMode::Drain, Duration::ZERO).await.unwrap();
            }
        }));
        for task in tasks {
            task.await.unwrap();
        }
        // A pause may have sent the workers away.
        run_all(&store).await;
        let ended = finalize(&store, job.id).await;
        assert_eq!(ended.final_counts.unwrap().unfinished(), 0);
    }
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
}

/// Sessions are cut again and again while workers commit. A commit whose answer was lost may
/// have been carried out: whoever makes it again is told `Lost`, drops the shard, and the
/// next lease goes on from its bits. Every item ends with one outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cut_sessions_double_no_outcome() {
    let Some(database) = Database::create() else { return };
    let (store, clock) = database.open_with_clock().await;
    let job = running_job(&store, &[8; 40]).await;
    let database = Arc::new(database);
    let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let cutter = {
        let (database, is_over) = (database.clone(), is_over.clone());
        std::thread::spawn(move || {
            let mut cut = 0;
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                let count = database.sql(
                    "select count(pg_terminate_backend(pid)) from pg_stat_activity
                    where datname = current_database() and pid <> pg_backend_pid()",
                );
                cut += count.parse::<u32>().unwrap();
            }
            cut
        })
    };
    let worker = WorkerId::new();
    loop {
        let lease = patiently(async || store.claim_shard(&claim(worker)).await).await;
        let Some(mut lease) = lease else {
            let progress = patiently(async || store.find_progress(job.id).await).await;
            if progress.shards_done == 40 {
                break;
            }
            // Leases whose answer was lost run out.
            clock.advance(TTL + Duration::from_secs(1));
            continue;
        };
        for item in lease.shard.done.zeros().collect::<Vec<_>>() {
            let segment = segment_of(&lease.shard, &[item], &[]);
            let key = lease.key();
            let answer = patiently(async || store.commit_segment_if_leased(key, &segment).await).await;
            if !answer.is_applied() {
                break;
            }
            lease.shard.next_seq += 1;
            lease.shard.done.union(&segment.items);
        }
    }
    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    let cut = cutter.join().unwrap();
    assert!(cut > 5, "{cut} sessions were cut");
    // Whoever ended the last shard may have been cut off before it could say so.
    patiently(async || store.expire_due_jobs(9).await).await;
    assert_eq!(patiently(async || store.check().await).await, Vec::<String>::new());
    let ended = finalize(&store, job.id).await;
    assert_eq!(ended.final_counts.unwrap().completed, 8 * 40);
    let segments = store.list_segments(job.id, ShardIndex(0), 999).await.unwrap();
    let outcomes: u32 = segments.iter().map(|segment| segment.new.items.count_ones()).sum();
    assert_eq!(outcomes, 8 * 40, "no item has two outcomes");
}

/// The server is stopped as by a crash and started again in mid-work: calls fail as
/// transient, and the same store goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_lives_through_a_restart_of_the_server() {
    let Some(server) = Server::start() else { return };
    let database = server.database();
    let (store, clock) = database.open_with_clock().await;
    let job = running_job(&store, &[2, 2]).await;
    let mut held = lease(&store, WorkerId::new()).await;
    applied(commit(&store, &mut held, &[0], &[]).await);
    for mode in ["immediate", "fast"] {
        server.stop(mode);
        let down = store.find_job(job.id).await.expect_err("the server is down");
        assert_eq!(down.class(), Class::Transient, "{}", overnight_types::chain(&down));
        let down = store.claim_shard(&claim(WorkerId::new())).await.expect_err("the server is down");
        assert_eq!(down.class(), Class::Transient, "{}", overnight_types::chain(&down));
        server.start_again();
        let found = patiently(async || store.find_job(job.id).await).await;
        assert_eq!(found.unwrap().state, JobState::InProgress);
        let shard = store.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap();
        assert_eq!((shard.done.get(0), shard.state), (true, ShardState::Leased), "what was told durable is there");
    }
    applied(commit(&store, &mut held, &[1], &[]).await);
    clock.advance(TTL);
    run_all(&store).await;
    assert_eq!(finalize(&store, job.id).await.final_counts.unwrap().completed, 4);
    until(|| store.is_listening()).await;
}

async fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..600 {
        if holds() {
            return;
        }
        tokio::time::sleep(STEP).await;
    }
    panic!("it did not come to hold within half a minute");
}

/// Work that one process makes due wakes another one; so it does after the connection that
/// listens was cut.
#[tokio::test]
async fn other_processes_are_woken_also_after_a_cut() {
    let Some(database) = Database::create() else { return };
    let (here, there) = (database.open(Options::default()).await, database.open(Options::default()).await);
    for is_cut in [false, true] {
        until(|| there.is_listening()).await;
        if is_cut {
            database.sql(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity
                where datname = current_database() and query ilike 'listen%'",
            );
            until(|| !there.is_listening()).await;
            until(|| there.is_listening()).await;
        }
        let woken = there.woken();
        let file = patiently(async || here.insert_file(new_file(overnight_store::FilePurpose::Batch)).await).await;
        insert(&here, new_job(file.id)).await;
        tokio::time::timeout(Duration::from_secs(20), woken).await.expect("another process is woken");
    }
}

/// Each session has its limits, from its first statement on.
#[tokio::test]
async fn limits_hold_in_every_session() {
    let Some(database) = Database::create() else { return };
    let options = Options {
        statement_timeout: Duration::from_millis(12_345),
        lock_timeout: Duration::from_millis(1_234),
        idle_in_transaction_timeout: Duration::from_millis(2_345),
        ..Options::default()
    };
    let store = database.open(options).await;
    let job = running_job(&store, &[1]).await;
    // The sessions themselves are asked, by what they do: a row that another one holds.
    let mut other = sqlx::PgConnection::connect(database.url()).await.unwrap();
    sqlx::query("begin").execute(&mut other).await.unwrap();
    sqlx::query("select 1 from jobs for update").execute(&mut other).await.unwrap();
    let started = std::time::Instant::now();
    let refused = store.pause_job_if_active(job.id).await.expect_err("its row is locked");
    assert_eq!(refused.class(), Class::Transient, "{}", overnight_types::chain(&refused));
    assert!(started.elapsed() < Duration::from_secs(8), "it waited {:?}", started.elapsed());
    assert!(store.find_progress(job.id).await.is_ok(), "readers go on");
    sqlx::query("commit").execute(&mut other).await.unwrap();
    applied(store.pause_job_if_active(job.id).await.unwrap());
}

/// A job whose row another session holds keeps nobody from the other jobs.
#[tokio::test]
async fn locked_job_keeps_nobody_from_the_others() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options::default()).await;
    let first = running_job(&store, &[1]).await;
    let second = running_job(&store, &[1]).await;
    let mut other = sqlx::PgConnection::connect(database.url()).await.unwrap();
    sqlx::query("begin").execute(&mut other).await.unwrap();
    sqlx::query("select 1 from jobs where job_id = $1 for update")
        .bind(first.id.uuid())
        .execute(&mut other)
        .await
        .unwrap();
    assert_eq!(lease(&store, WorkerId::new()).await.job.id, second.id);
    assert_eq!(try_lease(&store, WorkerId::new()).await, None, "the other one's row is held");
    sqlx::query("rollback").execute(&mut other).await.unwrap();
    assert_eq!(lease(&store, WorkerId::new()).await.job.id, first.id);
}

/// A segment that is committed late under a low number is not passed by a reader.
#[tokio::test]
async fn reader_waits_for_a_lower_number_that_is_still_open() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options::default()).await;
    let job = running_job(&store, &[1, 1]).await;
    let mut late = lease(&store, WorkerId::new()).await;
    let mut early = lease(&store, WorkerId::new()).await;
    let selection = SegmentSelection { job: job.id, round: None, after: SegmentCursor::default(), limit: 9 };
    // As a commit would that has its number and is not done yet.
    let mut open = sqlx::PgConnection::connect(database.url()).await.unwrap();
    sqlx::query("begin").execute(&mut open).await.unwrap();
    sqlx::query("delete from segments where job_id = '018f0000-0000-7000-8000-000000000009'")
        .execute(&mut open)
        .await
        .unwrap();
    sqlx::query("select pg_current_xact_id()::text").execute(&mut open).await.unwrap();
    applied(commit(&store, &mut early, &[0], &[]).await);
    assert_eq!(store.list_segments_committed(selection).await.unwrap(), []);
    sqlx::query("commit").execute(&mut open).await.unwrap();
    applied(commit(&store, &mut late, &[0], &[]).await);
    let seen = store.list_segments_committed(selection).await.unwrap();
    assert_eq!(
        seen.iter().map(|segment| segment.new.shard).collect::<Vec<_>>(),
        [early.shard.cut.shard, late.shard.cut.shard]
    );
    // A writer in another table holds nobody up.
    sqlx::query("begin").execute(&mut open).await.unwrap();
    sqlx::query("create temporary table other (id bigint)").execute(&mut open).await.unwrap();
    sqlx::query("select pg_current_xact_id()::text").execute(&mut open).await.unwrap();
    assert_eq!(store.list_segments_committed(selection).await.unwrap().len(), 2);
}

/// Rows of a server whose transaction numbers were higher, as after a restore: the order
/// of commits goes on behind them.
#[tokio::test]
async fn commit_order_goes_on_after_a_restore() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options::default()).await;
    let job = running_job(&store, &[1, 1]).await;
    let mut held = lease(&store, WorkerId::new()).await;
    applied(commit(&store, &mut held, &[0], &[]).await);
    store.close().await;
    database.sql("update segments set committed = committed + 1000000000");
    let store = database.open(Options::default()).await;
    let selection = SegmentSelection { job: job.id, round: None, after: SegmentCursor::default(), limit: 9 };
    let old = store.list_segments_committed(selection).await.unwrap();
    assert_eq!(old.len(), 1);
    let mut next = lease(&store, WorkerId::new()).await;
    applied(commit(&store, &mut next, &[0], &[]).await);
    let cursor = SegmentCursor { committed: old[0].committed, shard: old[0].new.shard.0 };
    let new = store.list_segments_committed(SegmentSelection { after: cursor, ..selection }).await.unwrap();
    assert_eq!(new.iter().map(|segment| segment.new.shard).collect::<Vec<_>>(), [next.shard.cut.shard]);
}

/// A process that died after the last commit and before the job's move leaves it to the
/// next look for due jobs.
#[tokio::test]
async fn job_whose_last_commit_was_not_followed_up_is_moved_on() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options::default()).await;
    let job = running_job(&store, &[1]).await;
    database.sql("update shards set state = 'done', num_done = 1, done = b'1'");
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), []);
    let moved = store.find_job(job.id).await.unwrap().unwrap();
    assert_eq!(moved.state, JobState::Finalizing);
    assert_eq!(claim_step_of(&store, job.id).await.kind, overnight_store::StepKind::Finalize);
}

/// A commit that was carried out although its answer was lost: made again it is lost, and the
/// job is moved on all the same.
#[tokio::test]
async fn commit_made_again_after_a_lost_answer_ends_the_job() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options::default()).await;
    let job = running_job(&store, &[1]).await;
    let held = lease(&store, WorkerId::new()).await;
    let segment = segment_of(&held.shard, &[0], &[]);
    applied(store.commit_segment_if_leased(held.key(), &segment).await.unwrap());
    // As if it had been cut off right after the statement.
    database.sql(
        "update jobs set state = 'in_progress', ending = null, finalizing_at = null, output_file_id = null,
            error_file_id = null, step_due_at = null",
    );
    let again = store.commit_segment_if_leased(held.key(), &segment).await.unwrap();
    assert_eq!(again, Guarded::Lost { now: Some(ShardState::Done) });
    assert_eq!(store.find_job(job.id).await.unwrap().unwrap().state, JobState::Finalizing);
}

/// Text that no Postgres text can hold is kept in a form that one can.
#[tokio::test]
async fn nul_in_a_message_fails_nothing() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options::default()).await;
    let job = running_job(&store, &[1]).await;
    let held = lease(&store, WorkerId::new()).await;
    let fault = overnight_store::NewFault { message: "a\0b".into(), ..new_fault(0, 1, Duration::ZERO) };
    applied(store.record_faults_if_leased(held.key(), &[fault]).await.unwrap());
    let faults = store.list_faults(job.id, ItemIndex(0), ItemIndex(1), 9).await.unwrap();
    assert_eq!(faults[0].message, "a\u{fffd}b");
}

/// A wrong password, a database that is not there, a server that is down: each is told, as
/// what it is, and without the password.
#[tokio::test]
async fn start_that_cannot_be_says_why_and_no_password() {
    let Some(database) = Database::create() else { return };
    let brief = || Options { acquire_timeout: Duration::from_secs(2), ..Options::default() };
    let refused = |url: String| async move {
        let url = Url::parse(&url).unwrap();
        let err = PostgresStore::open(&url, brief()).await.expect_err("it cannot be opened");
        let told = format!("{} {err:?} {url}", overnight_types::chain(&err));
        assert!(!told.contains("secret"), "{told}");
        (err.class(), told)
    };
    let (class, told) = refused(database.url().replace("test-secret", "wrong-secret")).await;
    assert!(class == Class::Permanent && told.contains("password"), "{told}");
    let (class, told) = refused(format!("{}_not", database.url())).await;
    assert!(class == Class::Permanent && told.contains("does not exist"), "{told}");
    let (class, told) = refused("postgres://me:secret@127.0.0.1:9/x".to_owned()).await;
    assert!(class == Class::Transient, "{told}");
}

/// Eight million items in 7,813 shards, four checkpoints each, would do; a tenth of it shows
/// the size per item.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_of_a_million_items_stays_small() {
    let Some(database) = Database::create() else { return };
    let store = database.open(Options::default()).await;
    let job = running_job(&store, &[1_024; 976]).await;
    let started = std::time::Instant::now();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let worker = WorkerId::new();
                let mut commits = 0;
                while let Some(mut lease) = store.claim_shard(&claim(worker)).await.unwrap() {
                    for part in (0..1_024).collect::<Vec<u32>>().chunks(256) {
                        applied(commit(&store, &mut lease, part, &[]).await);
                        commits += 1;
                    }
                }
                commits
            })
        })
        .collect();
    let mut commits = 0;
    for worker in workers {
        commits += worker.await.unwrap();
    }
    let spent = started.elapsed();
    eprintln!("{commits} commits in {spent:?}: {:.0}/s", f64::from(commits) / spent.as_secs_f64());
    store.vacuum().await.unwrap();
    let bytes = store.size_bytes().await.unwrap();
    eprintln!("{bytes} bytes");
    assert_eq!(finalize(&store, job.id).await.final_counts.unwrap().completed, 976 * 1_024);
    assert!(bytes <= 8 << 20, "{bytes} bytes for a million items; eighty megabytes for ten would be the limit");
}
