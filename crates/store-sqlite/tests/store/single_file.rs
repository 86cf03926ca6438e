//! What is SQLite's own: writers side by side, size, backup, damage.

use std::time::Duration;

use overnight_store::conformance::builders::*;
use overnight_store::{
    AttemptEnd, CancelMode, Error, Files, Guarded, InsertJob, Jobs, Segments, Shards, Steps, Store, Wake,
};
use overnight_store_sqlite::{ClockOffset, Options, SqliteStore};
use overnight_types::{Class, JobId, JobState, ShardIndex, ShardState, WorkerId};

async fn open(options: Options) -> (SqliteStore, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("overnight.db"), options).await.unwrap();
    (store, folder)
}

// profilarr PR#519, modrinth/code PR#7628: a deferred transaction that upgrades gets
// an immediate BUSY in spite of its timeout; 8 deferred writers gave 65,756 errors in 4 s.
/// Eight processes' worth of stores write one file with no error at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn eight_writers_meet_without_an_error() {
    let (first, folder) = open(Options::default()).await;
    let job = running_job(&first, &[4; 96]).await;
    let path = folder.path().join("overnight.db");
    let writers: Vec<_> = (0..8)
        .map(|_| {
            let path = path.clone();
            tokio::spawn(async move {
                let store = SqliteStore::open(&path, Options { readers: 1, ..Options::default() }).await.unwrap();
                let worker = WorkerId::new();
                let mut commits = 0;
                while let Some(mut lease) = store.claim_shard(&claim(worker)).await.unwrap() {
                    for item in 0..4 {
                        applied(commit(&store, &mut lease, &[item], &[]).await);
                        commits += 1;
                    }
                }
                store.close().await;
                commits
            })
        })
        .collect();
    let mut commits = 0;
    for writer in writers {
        commits += writer.await.unwrap();
    }
    assert_eq!(commits, 4 * 96, "every commit was made once");
    assert_eq!(finalize(&first, job.id).await.final_counts.unwrap().completed, 4 * 96);
}

// MailFathom#1989, mlflow PR#25199, occurrent PR#664: leases by the worker's clock let
// skew steal or delay work.
/// No call takes a moment from its caller, so only the database's clock ends a lease:
/// a store whose clock is five minutes behind or ahead is the one that decides.
#[tokio::test]
async fn leases_end_by_the_databases_clock_alone() {
    let clock = ClockOffset::default();
    let (store, _folder) = open(Options { clock_offset: clock.clone(), ..Options::default() }).await;
    running_job(&store, &[1]).await;
    let mut held = lease(&store, WorkerId::new()).await;
    let by_worker = overnight_types::Timestamp::now();
    clock.advance(TTL - Duration::from_secs(5));
    assert_eq!(try_lease(&store, WorkerId::new()).await, None);
    clock.advance(Duration::from_secs(300));
    let taken = lease(&store, WorkerId::new()).await;
    assert!(overnight_types::Timestamp::now().since(by_worker) < TTL, "by the worker's clock the lease still runs");
    assert!(!commit(&store, &mut held, &[0], &[]).await.is_applied());
    assert_eq!(taken.shard.epoch.0, 2);
}

// PrintStash#181, the five checks of a queue that it qualified: enqueue with the
// caller's transaction, no acknowledgement of a successor's work, no reuse of a
// worker's identity, retryable failures are not stranded, a busy database is waited for.
/// 1: a job and its idempotency key are recorded together or not at all.
#[tokio::test]
async fn refused_create_leaves_nothing() {
    let (store, _folder) = open(Options::default()).await;
    let input = input(&store).await;
    let job = insert(&store, new_job(input)).await;
    let key = overnight_store::IdempotencyKey { key: "k".into(), params_sha256: [1; 32] };
    let twice = overnight_store::NewJob { id: job.id, ..new_job(input) };
    let refused = store.insert_job(twice, Some(key.clone())).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert!(matches!(store.insert_job(new_job(input), Some(key)).await.unwrap(), InsertJob::Created(_)));
}

/// 2: an acknowledgement that comes late, of the same shard in a later lease, is lost.
#[tokio::test]
async fn late_acknowledgement_overwrites_no_successor() {
    let clock = ClockOffset::default();
    let (store, _folder) = open(Options { clock_offset: clock.clone(), ..Options::default() }).await;
    let job = running_job(&store, &[2]).await;
    let mut stale = lease(&store, WorkerId::new()).await;
    clock.advance(TTL + Duration::from_secs(1));
    let mut successor = lease(&store, WorkerId::new()).await;
    applied(commit(&store, &mut successor, &[0], &[0]).await);
    assert!(!commit(&store, &mut stale, &[0, 1], &[]).await.is_applied());
    let answer = store.release_shard_if_leased(stale.key(), Duration::ZERO, AttemptEnd::Trouble).await.unwrap();
    assert_eq!(answer, Guarded::Lost { now: Some(ShardState::Leased) });
    assert_eq!(store.find_progress(job.id).await.unwrap().counts.failed, 1);
}

/// 3: a worker that comes back under an old name completes nothing of its old lease.
#[tokio::test]
async fn reused_worker_identity_completes_nothing_stale() {
    let clock = ClockOffset::default();
    let (store, _folder) = open(Options { clock_offset: clock.clone(), ..Options::default() }).await;
    running_job(&store, &[1, 1]).await;
    let worker = WorkerId::new();
    let mut stale = lease(&store, worker).await;
    clock.advance(TTL + Duration::from_secs(1));
    let again = lease(&store, worker).await;
    assert_eq!(again.shard.cut.shard, stale.shard.cut.shard);
    assert!(!commit(&store, &mut stale, &[0], &[]).await.is_applied());
    assert_eq!(store.extend_shards(worker, &[stale.key()], TTL).await.unwrap(), [stale.key()]);
}

/// 4: a shard whose items failed for now is claimed again once they are due.
#[tokio::test]
async fn retryable_failure_is_not_stranded() {
    let clock = ClockOffset::default();
    let (store, _folder) = open(Options { clock_offset: clock.clone(), ..Options::default() }).await;
    let job = running_job(&store, &[1]).await;
    for attempts in 1..=5 {
        let lease = lease(&store, WorkerId::new()).await;
        let wait = Duration::from_secs(60);
        applied(store.record_faults_if_leased(lease.key(), &[new_fault(0, attempts, wait)]).await.unwrap());
        applied(store.release_shard_if_leased(lease.key(), wait, AttemptEnd::Waiting).await.unwrap());
        assert_eq!(try_lease(&store, WorkerId::new()).await, None);
        clock.advance(wait + Duration::from_secs(1));
    }
    run_all(&store).await;
    assert_eq!(finalize(&store, job.id).await.state, JobState::Completed);
}

/// 5: a writer that holds the lock delays others and fails none of them; past the
/// busy timeout the error is one that says to try again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_database_is_waited_for() {
    let (store, folder) = open(Options::default()).await;
    let path = folder.path().join("overnight.db");
    let brief = Options { busy_timeout: Duration::from_millis(20), ..Options::default() };
    let impatient = SqliteStore::open(&path, brief).await.unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
    let mut holder = <sqlx::SqliteConnection as sqlx::Connection>::connect_with(&options).await.unwrap();
    sqlx::query("begin immediate").execute(&mut holder).await.unwrap();
    let refused = impatient.insert_file(new_file(overnight_store::FilePurpose::Batch)).await.expect_err("it is locked");
    assert_eq!(refused.class(), Class::Transient, "{refused}");
    assert!(store.list_jobs(Default::default()).await.is_ok(), "readers go on");
    let patient = tokio::spawn({
        let store = store.clone();
        async move { store.insert_file(new_file(overnight_store::FilePurpose::Batch)).await }
    });
    tokio::task::yield_now().await;
    sqlx::query("commit").execute(&mut holder).await.unwrap();
    patient.await.unwrap().unwrap();
}

// apalis#530 and its reproduction: two healthy workers, six tasks longer than the
// renewal interval, 12 and 20 starts.
/// Six shards longer than the renewal interval are started six times.
#[tokio::test]
async fn two_healthy_workers_start_six_long_shards_six_times() {
    let clock = ClockOffset::default();
    let (store, _folder) = open(Options { clock_offset: clock.clone(), ..Options::default() }).await;
    let job = running_job(&store, &[1; 6]).await;
    let workers = [WorkerId::new(), WorkerId::new()];
    let mut starts = 0;
    loop {
        let mut held = Vec::new();
        for worker in workers {
            if let Some(lease) = try_lease(&store, worker).await {
                starts += 1;
                held.push((worker, lease));
            }
        }
        if held.is_empty() {
            break;
        }
        for _ in 0..12 {
            clock.advance(TTL / 4);
            for (worker, lease) in &held {
                assert_eq!(store.extend_shards(*worker, &[lease.key()], TTL).await.unwrap(), []);
            }
            assert_eq!(store.release_expired_leases(9).await.unwrap(), 0);
        }
        for (_, lease) in &mut held {
            commit_rest(&store, lease).await;
        }
    }
    assert_eq!(starts, 6);
    assert_eq!(finalize(&store, job.id).await.final_counts.unwrap().completed, 6);
}

// riverqueue/river#1258: 5,133 jobs stuck running for up to 91 days.
/// After a sweep no shard is leased longer than its time.
#[tokio::test]
async fn no_shard_is_leased_longer_than_its_time() {
    let clock = ClockOffset::default();
    let (store, _folder) = open(Options { clock_offset: clock.clone(), ..Options::default() }).await;
    let job = running_job(&store, &[1; 30]).await;
    for _ in 0..30 {
        lease(&store, WorkerId::new()).await;
        clock.advance(Duration::from_secs(1));
    }
    while store.release_expired_leases(4).await.unwrap() > 0 {}
    let now = store.now().await.unwrap();
    let shards = store.list_shards(job.id, ShardIndex(0), 99).await.unwrap();
    assert!(shards.iter().all(|shard| shard.lease_until.is_none_or(|until| until > now)));
    assert!(shards.iter().any(|shard| shard.state == ShardState::Leased), "live leases are left alone");
    assert!(shards.iter().any(|shard| shard.crashes == 1));
}

/// A job of a million items (977 shards, four checkpoints each) leaves a database of
/// at most two megabytes, its log included.
#[tokio::test]
async fn database_of_a_million_items_stays_small() {
    let (store, _folder) = open(Options::default()).await;
    let mut sizes = vec![1_024; 976];
    sizes.push(576);
    let job = running_job(&store, &sizes).await;
    let worker = WorkerId::new();
    let mut largest = 0;
    while let Some(mut lease) = try_lease(&store, worker).await {
        let all: Vec<u32> = (0..lease.shard.cut.num_items).collect();
        for part in all.chunks(256) {
            applied(commit(&store, &mut lease, part, &[]).await);
        }
        if lease.shard.cut.shard.0 % 50 == 0 {
            largest = largest.max(store.size_bytes().await.unwrap());
        }
    }
    let ended = finalize(&store, job.id).await;
    assert_eq!(ended.final_counts.unwrap().completed, 1_000_000);
    let after = store.size_bytes().await.unwrap();
    assert!(after <= 2 << 20, "{after} bytes");
    assert!(largest <= 4 << 20, "{largest} bytes while it ran");
}

/// A purge gives the room back to the file system.
#[tokio::test]
async fn purge_gives_room_back() {
    let (store, _folder) = open(Options::default()).await;
    let job = completed_job(&store, &[512; 400], &[]).await;
    let before = store.size_bytes().await.unwrap();
    applied(store.delete_job_if_terminal(job.id).await.unwrap());
    while store.purge_deleted_jobs(500).await.unwrap().has_more {}
    store.close().await;
    let after = store.size_bytes().await.unwrap();
    assert!(after < before / 2, "{before} bytes before, {after} after");
}

/// What a purge leaves behind, as where the disk was full in mid-way, a vacuum takes.
#[tokio::test]
async fn vacuum_leaves_no_free_page_and_every_row() {
    let (store, folder) = open(Options::default()).await;
    let kept = completed_job(&store, &[2, 2], &[1]).await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.path().join("overnight.db"));
    let mut other = <sqlx::SqliteConnection as sqlx::Connection>::connect_with(&options).await.unwrap();
    for statement in
        ["create table filler (bytes blob)", "insert into filler values (zeroblob(2000000))", "drop table filler"]
    {
        sqlx::query(statement).execute(&mut other).await.unwrap();
    }
    let before = store.size_bytes().await.unwrap();
    store.vacuum().await.unwrap();
    let after = store.size_bytes().await.unwrap();
    assert!(before > 2_000_000 && after < 1_000_000, "{before} bytes before, {after} after");
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
    assert_eq!(store.find_job(kept.id).await.unwrap(), Some(kept));
}

/// A backup taken while work goes on is whole and holds what was committed.
#[tokio::test]
async fn backup_is_a_whole_copy() {
    let (store, folder) = open(Options::default()).await;
    let job = running_job(&store, &[2, 2]).await;
    let mut held = lease(&store, WorkerId::new()).await;
    commit_rest(&store, &mut held).await;
    let copy = folder.path().join("copy.db");
    store.backup(&copy).await.unwrap();
    assert!(store.backup(&copy).await.is_err(), "an existing file is not overwritten");
    run_all(&store).await;
    let copied = SqliteStore::open(&copy, Options { migrate: false, ..Options::default() }).await.unwrap();
    assert_eq!(copied.check().await.unwrap(), Vec::<String>::new());
    assert_eq!(copied.find_progress(job.id).await.unwrap().counts.completed, 2);
    assert_eq!(copied.list_segments(job.id, ShardIndex(0), 9).await.unwrap().len(), 1);
}

/// A file that is no database, or a folder that is not there, is an error in words.
#[tokio::test]
async fn file_that_is_no_database_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    std::fs::write(&path, "not a database, and long enough to be looked at: ".repeat(100)).unwrap();
    let refused = SqliteStore::open(&path, Options::default()).await.expect_err("it is no database");
    assert_eq!(refused.class(), Class::Permanent, "{}", overnight_types::chain(&refused));
    let nowhere = SqliteStore::open(folder.path().join("no/such/folder.db"), Options::default()).await;
    assert_eq!(nowhere.expect_err("there is no folder").class(), Class::Transient);
}

/// What is committed is there after a close and a new start.
#[tokio::test]
async fn committed_work_is_there_after_a_restart() {
    let (store, folder) = open(Options::default()).await;
    let job = running_job(&store, &[2, 1]).await;
    let mut held = lease(&store, WorkerId::new()).await;
    applied(commit(&store, &mut held, &[1], &[1]).await);
    // No close: as after a kill, the log is not folded in.
    let again = SqliteStore::open(folder.path().join("overnight.db"), Options::default()).await.unwrap();
    let shard = again.find_shard(job.id, ShardIndex(0)).await.unwrap().unwrap();
    assert_eq!((shard.done.ones().collect::<Vec<_>>(), shard.state), (vec![1], ShardState::Leased));
    assert_eq!(again.release_leases_of_dead(&[shard.owner.unwrap()]).await.unwrap(), 1);
    run_all(&again).await;
    let counts = finalize(&again, job.id).await.final_counts.unwrap();
    assert_eq!((counts.completed, counts.failed), (2, 1));
}

/// The negative control does what it says: without the guard a stale commit is taken.
#[tokio::test]
async fn stale_commit_is_taken_without_the_guard() {
    let clock = ClockOffset::default();
    let options = Options { clock_offset: clock.clone(), unsafe_without_epoch_guard: true, ..Options::default() };
    let (store, _folder) = open(options).await;
    running_job(&store, &[2]).await;
    let mut stale = lease(&store, WorkerId::new()).await;
    clock.advance(TTL + Duration::from_secs(1));
    let mut current = lease(&store, WorkerId::new()).await;
    applied(commit(&store, &mut current, &[0], &[]).await);
    applied(commit(&store, &mut stale, &[0, 1], &[]).await);
}

/// A cancel of a job that is not there, and a wait that nobody ends, change nothing.
#[tokio::test]
async fn reads_and_lost_moves_wake_nobody() {
    let (store, _folder) = open(Options::default()).await;
    let moves = async {
        assert_eq!(
            store.cancel_job_if_active(JobId::new(), CancelMode::Now, TTL).await.unwrap(),
            Guarded::Lost { now: None }
        );
        assert_eq!(store.find_job(JobId::new()).await.unwrap(), None);
        assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
    };
    tokio::select! {
        biased;
        () = store.woken() => panic!("nothing is due, so nobody is woken"),
        () = moves => {}
    }
}
