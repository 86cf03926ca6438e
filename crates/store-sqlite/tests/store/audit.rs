//! What `check` finds: rows damaged by hand, each told in one sentence.

use std::time::Duration;

use overnight_store::conformance::builders;
use overnight_store::{Jobs, Reopen, ReopenItems, Shards, Store};
use overnight_store_sqlite::{ClockOffset, Options, SqliteStore};
use overnight_types::{ItemIndex, JobId, ShardIndex, WorkerId};
use sqlx::{Connection, SqliteConnection};

/// A finding of the check is told in words.
#[tokio::test]
async fn check_finds_a_row_that_names_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let store = SqliteStore::open(&path, Options::default()).await.unwrap();
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
    let mut connection = connect(&path).await;
    sqlx::query("pragma foreign_keys = off").execute(&mut connection).await.unwrap();
    sqlx::query("insert into events (job_id, at, what, note) values (x'00', 0, 'created', '')")
        .execute(&mut connection)
        .await
        .unwrap();
    let findings = store.check().await.unwrap();
    assert_eq!(findings, ["a row of events names a row of jobs that is not there"]);
}

/// So are counts that are not those of bits and segments.
#[tokio::test]
async fn check_finds_counts_that_are_not_those_of_the_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let store = SqliteStore::open(&path, Options::default()).await.unwrap();
    let job = builders::running_job(&store, &[4, 4, 4, 4]).await;
    let mut held = builders::lease(&store, WorkerId::new()).await;
    builders::applied(builders::commit(&store, &mut held, &[0, 1], &[1]).await);
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
    let mut connection = connect(&path).await;
    for damage in [
        "update shards set done = x'01' where shard_index = 0",
        "update shards set next_seq = 5 where shard_index = 1",
        "update shards set done = x'10' where shard_index = 2",
        "update jobs set num_items = 17",
    ] {
        sqlx::query(damage).execute(&mut connection).await.unwrap();
    }
    let findings = store.check().await.unwrap();
    let wanted = [
        format!("{} has 17 items in 4 shards, but its shards hold 16 in 4", job.id),
        format!("shard 0 of {}: 2 done and 1 failed by its counts, 1 and 1 by its bits", job.id),
        format!("shard 1 of {}: 5 segments were committed, 0 are there", job.id),
        format!("shard 2 of {}: a bit past its last item is set", job.id),
    ];
    assert_eq!(findings, wanted);
}

/// So are an item whose outcome is in no segment, and one that has two in a round;
/// an item that ran again in a later round is sound.
#[tokio::test]
async fn check_finds_outcomes_that_are_lost_or_doubled() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let store = SqliteStore::open(&path, Options::default()).await.unwrap();
    let job = builders::completed_job(&store, &[4, 4, 2], &[3, 8]).await;
    let reopen = Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: Vec::new() };
    builders::applied(store.reopen_job_if_ended(job.id, reopen).await.unwrap());
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new(), "what runs again has an old outcome only");
    builders::run_all(&store).await;
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new(), "two rounds, two outcomes");
    let mut connection = connect(&path).await;
    for damage in [
        "update segments set round = 1 where shard_index = 0",
        "update segments set items = x'05', num_items = 2 where shard_index = 1",
        "update segments set items = x'0f' where shard_index = 2 and round = 2",
    ] {
        sqlx::query(damage).execute(&mut connection).await.unwrap();
    }
    let findings = store.check().await.unwrap();
    let wanted = [
        format!("shard 0 of {}: an item has two outcomes in round 1", job.id),
        format!("shard 1 of {}: 2 items are done and no segment holds their outcome", job.id),
        format!("shard 2 of {}: a segment has a bit past the shard's last item", job.id),
    ];
    assert_eq!(findings, wanted);
}

/// A segment's count is that of its bits, and it marks as failed only what it holds.
#[tokio::test]
async fn check_finds_a_segment_whose_count_is_not_that_of_its_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let store = SqliteStore::open(&path, Options::default()).await.unwrap();
    let job = builders::running_job(&store, &[4, 4]).await;
    for _ in 0..2 {
        let mut held = builders::lease(&store, WorkerId::new()).await;
        builders::applied(builders::commit(&store, &mut held, &[0, 1], &[1]).await);
    }
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
    let mut connection = connect(&path).await;
    for damage in [
        "update segments set num_items = 3 where shard_index = 0",
        "update segments set failed = x'04' where shard_index = 1",
    ] {
        sqlx::query(damage).execute(&mut connection).await.unwrap();
    }
    let wanted = [
        format!("shard 0 of {}: a segment has 3 outcomes by its count, 2 by its bits", job.id),
        format!("shard 1 of {}: a segment marks an item failed that it does not hold", job.id),
    ];
    assert_eq!(store.check().await.unwrap(), wanted);
}

/// Items that a retry left out are cancelled or expired in bits and counts alike.
#[tokio::test]
async fn check_finds_left_out_items_that_do_not_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let clock = ClockOffset::default();
    let options = Options { clock_offset: clock.clone(), ..Options::default() };
    let store = SqliteStore::open(&path, options).await.unwrap();
    // Item 0 is left out of a retry of the cancelled job, item 1 of one of the expired job.
    let job = builders::running_job(&store, &[3]).await.id;
    builders::cancelled_job(&store, job).await;
    leave_out(&store, job, 0, &[1, 2]).await;
    clock.advance(Duration::from_secs(365 * 86_400));
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), [job]);
    builders::finalize(&store, job).await;
    leave_out(&store, job, 1, &[2]).await;
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
    let mut connection = connect(&path).await;
    for (damage, finding) in [
        ("update shards set cancelled = x'03'", "1 cancelled and 1 expired by its counts, 2 and 1 by its bits"),
        ("update shards set expired = x'06'", "1 cancelled and 1 expired by its counts, 1 and 2 by its bits"),
        ("update shards set cancelled = x'02'", "an item is cancelled and expired"),
        ("update shards set expired = x'04'", "an item is cancelled or expired and not failed"),
        ("update shards set expired = x'08'", "a bit past its last item is set"),
    ] {
        sqlx::query(damage).execute(&mut connection).await.unwrap();
        assert_eq!(store.check().await.unwrap(), [format!("shard 0 of {job}: {finding}")]);
        sqlx::query("update shards set cancelled = x'01', expired = x'02'").execute(&mut connection).await.unwrap();
        assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
    }
}

/// An ended job shows the counts of its shards, undone items by the kind of its end.
#[tokio::test]
async fn check_finds_final_counts_that_are_not_those_of_the_shards() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let store = SqliteStore::open(&path, Options::default()).await.unwrap();
    let completed = builders::completed_job(&store, &[4, 4], &[3]).await.id;
    let cancelled = builders::running_job(&store, &[2, 2]).await.id;
    let mut held = builders::lease(&store, WorkerId::new()).await;
    builders::applied(builders::commit(&store, &mut held, &[0, 1], &[1]).await);
    builders::cancelled_job(&store, cancelled).await;
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
    let mut connection = connect(&path).await;
    for damage in [
        "update jobs set final_completed = 6, final_failed = 2 where state = 'completed'",
        "update jobs set final_cancelled = 0, final_expired = 2 where state = 'cancelled'",
    ] {
        sqlx::query(damage).execute(&mut connection).await.unwrap();
    }
    let mut findings = store.check().await.unwrap();
    findings.sort();
    let mut wanted = [
        format!(
            "{completed} ended with 6 completed, 2 failed, 0 cancelled, 0 expired, \
             but its shards hold 7 completed, 1 failed, 0 cancelled, 0 expired"
        ),
        format!(
            "{cancelled} ended with 1 completed, 1 failed, 0 cancelled, 2 expired, \
             but its shards hold 1 completed, 1 failed, 2 cancelled, 0 expired"
        ),
    ];
    wanted.sort();
    assert_eq!(findings, wanted);
}

/// Re-opens an ended job of one shard for these items and settles the one that is left out.
async fn leave_out(store: &SqliteStore, job: JobId, left_out: u32, items: &[u64]) {
    let shard = store.find_shard(job, ShardIndex(0)).await.unwrap().unwrap();
    let reopen = Reopen {
        items: ReopenItems::Selected(items.iter().copied().map(ItemIndex).collect()),
        leftover_segments: vec![builders::segment_of(&shard, &[left_out], &[left_out])],
        window: None,
    };
    builders::applied(store.reopen_job_if_ended(job, reopen).await.unwrap());
}

async fn connect(path: &std::path::Path) -> SqliteConnection {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(path).create_if_missing(true);
    SqliteConnection::connect_with(&options).await.unwrap()
}
