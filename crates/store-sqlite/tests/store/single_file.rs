//! What is SQLite's own: writers side by side, size, backup, damage.

use std::time::Duration;

use overnight_store::conformance::builders::*;
use overnight_store::{Files, Jobs, Segments, Shards, Store};
use overnight_store_sqlite::{ClockOffset, Options, SqliteStore};
use overnight_types::{Class, ShardIndex, ShardState, WorkerId};

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

// PrintStash#181, the last of its five checks; the others are promises of every database.
/// A writer that holds the lock delays others and fails none of them; past the
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
