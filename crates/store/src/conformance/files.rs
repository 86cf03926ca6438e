//! What files promise.

use std::time::Duration;

use overnight_types::{FileId, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{Error, FileOrder, FilePurpose, FileQuery, NewFile, Store};

/// A file reads back as it was recorded; its id is used once.
pub async fn file_reads_back_as_recorded(store: &dyn Store, _clock: &dyn TestClock) {
    let new = NewFile { expires_after_s: Some(3600), filename: "naïve.jsonl".into(), ..new_file(FilePurpose::Batch) };
    let file = store.insert_file(new.clone()).await.unwrap();
    assert_eq!(store.find_file(new.id).await.unwrap(), Some(file.clone()));
    assert_eq!((&file.filename, file.purpose, file.bytes, file.sha256), (&new.filename, new.purpose, 1_000, [7; 32]));
    assert_eq!(file.expires_at, Some(file.created_at.plus(Duration::from_secs(3600))));
    let twice = store.insert_file(new).await;
    assert!(matches!(twice, Err(Error::Refused { .. })), "{twice:?}");
    assert_eq!(store.find_file(FileId::new()).await.unwrap(), None);
}

/// A deleted file is gone at once, and a second delete is told so.
pub async fn deleted_file_is_hidden_at_once(store: &dyn Store, _clock: &dyn TestClock) {
    let id = input(store).await;
    applied(store.delete_file_if_present(id).await.unwrap());
    assert_eq!(store.find_file(id).await.unwrap(), None);
    assert!(!store.delete_file_if_present(id).await.unwrap().is_applied());
    assert!(store.list_files(FileQuery { limit: 9, ..FileQuery::default() }).await.unwrap().rows.is_empty());
    assert_eq!(store.known_files(&[id, FileId::new()]).await.unwrap(), [id], "its object is still claimed");
}

/// A file is hidden from the moment at which it expires, by the database's clock.
pub async fn expired_file_is_hidden(store: &dyn Store, clock: &dyn TestClock) {
    let new = NewFile { expires_after_s: Some(3600), ..new_file(FilePurpose::Batch) };
    store.insert_file(new.clone()).await.unwrap();
    clock.advance(Duration::from_secs(3599)).await;
    assert!(store.find_file(new.id).await.unwrap().is_some());
    assert_eq!(store.list_removable_files(9).await.unwrap(), []);
    clock.advance(Duration::from_secs(2)).await;
    assert_eq!(store.find_file(new.id).await.unwrap(), None);
    assert!(!store.delete_file_if_present(new.id).await.unwrap().is_applied());
    // A create that found it in time may be under way; none takes so long.
    clock.advance(Duration::from_secs(60)).await;
    assert_eq!(store.list_removable_files(9).await.unwrap(), [new.id]);
}

/// Files are listed by creation, either way, by keyset and purpose.
pub async fn files_are_listed_by_keyset(store: &dyn Store, _clock: &dyn TestClock) {
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(input(store).await);
    }
    let other = new_file(FilePurpose::UserData);
    store.insert_file(other.clone()).await.unwrap();
    let query = |order, after, limit| FileQuery { after, limit, order, purpose: Some(FilePurpose::Batch) };
    let listed = |page: &crate::Page<crate::File>| page.rows.iter().map(|file| file.id).collect::<Vec<_>>();
    let up = store.list_files(query(FileOrder::Asc, None, 3)).await.unwrap();
    assert_eq!((listed(&up), up.has_more), (ids[..3].to_vec(), true));
    let rest = store.list_files(query(FileOrder::Asc, Some(ids[2]), 3)).await.unwrap();
    assert_eq!((listed(&rest), rest.has_more), (ids[3..].to_vec(), false));
    let down = store.list_files(query(FileOrder::Desc, Some(ids[2]), 9)).await.unwrap();
    assert_eq!(listed(&down), [ids[1], ids[0]]);
    let unknown = store.list_files(query(FileOrder::Desc, Some(FileId::new()), 9)).await;
    assert!(matches!(unknown, Err(Error::Missing { .. })), "{unknown:?}");
    let all = store.list_files(FileQuery { limit: 9, ..FileQuery::default() }).await.unwrap();
    assert_eq!((all.rows.len(), all.rows[0].id), (5, other.id), "newest first unless asked otherwise");
}

/// The bytes of a deleted input stay, and may be read by workers, until every job
/// that was accepted before is at its end.
pub async fn input_bytes_stay_until_the_job_is_terminal(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    let input = job.input_file_id;
    applied(store.delete_file_if_present(input).await.unwrap());
    assert_eq!(store.list_removable_files(9).await.unwrap(), []);
    run_all(store).await;
    assert_eq!(store.list_removable_files(9).await.unwrap(), [], "finalize reads it still");
    finalize(store, job.id).await;
    assert_eq!(store.list_removable_files(9).await.unwrap(), [input]);
    store.forget_file(input).await.unwrap();
    assert_eq!(store.list_removable_files(9).await.unwrap(), []);
    assert_eq!(store.known_files(&[input]).await.unwrap(), []);
    assert!(store.find_job(job.id).await.unwrap().is_some(), "an ended job outlives its input");
}

/// Removable files come oldest first, in bounded pieces.
pub async fn removable_files_come_oldest_first(store: &dyn Store, clock: &dyn TestClock) {
    let mut ids = Vec::new();
    for _ in 0..3 {
        let id = input(store).await;
        applied(store.delete_file_if_present(id).await.unwrap());
        clock.advance(Duration::from_secs(1)).await;
        ids.push(id);
    }
    assert_eq!(store.list_removable_files(2).await.unwrap(), ids[..2]);
}

/// A live worker is one that reported within a minute; its models are as last told.
pub async fn live_workers_reported_within_a_minute(store: &dyn Store, clock: &dyn TestClock) {
    let worker = |id, models: &[&str]| crate::NewWorker {
        id,
        host: "here".into(),
        pid: 7,
        models: models.iter().map(|model| (*model).to_owned()).collect(),
        may_load: models.iter().skip(1).map(|model| (*model).to_owned()).collect(),
    };
    let (quiet, live) = (WorkerId::new(), WorkerId::new());
    store.report_worker(&worker(quiet, &["a"])).await.unwrap();
    clock.advance(Duration::from_secs(50)).await;
    store.report_worker(&worker(live, &["a"])).await.unwrap();
    assert_eq!(store.list_live_workers().await.unwrap().len(), 2);
    clock.advance(Duration::from_secs(20)).await;
    store.report_worker(&worker(live, &["a", "b"])).await.unwrap();
    let found = store.list_live_workers().await.unwrap();
    assert_eq!((found.len(), &found[0].worker), (1, &worker(live, &["a", "b"])));
    assert!(found[0].seen_at > found[0].started_at);
    assert_eq!(store.list_workers_on_host("here").await.unwrap().len(), 2, "live or not: its lock file tells");
    assert_eq!(store.list_workers_on_host("there").await.unwrap(), []);
    store.remove_worker(live).await.unwrap();
    assert_eq!(store.list_live_workers().await.unwrap(), []);
}

/// A worker that never came back leaves the list in the end.
pub async fn silent_worker_is_forgotten_after_a_day(store: &dyn Store, clock: &dyn TestClock) {
    let worker = |id| crate::NewWorker { id, host: "here".into(), pid: 7, models: vec![], may_load: vec![] };
    store.report_worker(&worker(WorkerId::new())).await.unwrap();
    clock.advance(Duration::from_secs(86_401)).await;
    let live = WorkerId::new();
    store.report_worker(&worker(live)).await.unwrap();
    assert_eq!(store.list_workers_on_host("here").await.unwrap(), [worker(live)]);
}

/// Attempts go a week after their job's end, in bounded pieces, and not before.
pub async fn attempts_go_a_week_after_the_end(store: &dyn Store, clock: &dyn TestClock) {
    let ended = completed_job(store, &[1, 1, 1], &[]).await;
    let running = running_job(store, &[1]).await;
    let held = lease(store, WorkerId::new()).await;
    clock.advance(Duration::from_secs(6 * 86_400)).await;
    assert_eq!(store.prune_attempts(9).await.unwrap(), 0);
    clock.advance(Duration::from_secs(2 * 86_400)).await;
    assert_eq!(store.prune_attempts(2).await.unwrap(), 2);
    assert_eq!(store.prune_attempts(2).await.unwrap(), 1);
    assert_eq!(store.prune_attempts(2).await.unwrap(), 0);
    assert_eq!(store.list_attempts(ended.id, overnight_types::ShardIndex(0), 9).await.unwrap(), []);
    assert_eq!(store.list_attempts(running.id, held.shard.cut.shard, 9).await.unwrap().len(), 1);
}

/// A shard is found by any of its items, and by none past its end.
pub async fn shard_is_found_by_item(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[2, 3]).await;
    for (item, shard) in [(0, Some(0)), (1, Some(0)), (2, Some(1)), (4, Some(1)), (5, None)] {
        let found = store.find_shard_of_item(job.id, overnight_types::ItemIndex(item)).await.unwrap();
        assert_eq!(found.map(|found| found.cut.shard.0), shard, "item {item}");
    }
    let listed = store.list_shards(job.id, overnight_types::ShardIndex(1), 9).await.unwrap();
    assert_eq!(listed.iter().map(|shard| shard.cut.first_item.0).collect::<Vec<_>>(), [2]);
}

/// A waiting loop is woken by what makes work due: a create, the end of intake, a
/// release, a resume.
pub async fn waiting_loop_is_woken_by_due_work(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let job = woken_by(store, insert(store, new_job(input))).await;
    let step = claim_step_of(store, job.id).await;
    woken_by(store, run_intake(store, &step, &[1])).await;
    let held = lease(store, WorkerId::new()).await;
    woken_by(store, release(store, &held)).await;
    applied(store.pause_job_if_active(job.id).await.unwrap());
    woken_by(store, async { applied(store.unpause_job_if_active(job.id).await.unwrap()) }).await;
}

/// A wait that was asked for before a look finds the wake that came during the look.
pub async fn wake_that_comes_before_the_wait_is_not_missed(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let woken = store.woken();
    insert(store, new_job(input)).await;
    tokio::time::timeout(Duration::from_secs(20), woken).await.expect("woken before it waited");
}

/// Waits first, then acts; fails when the act wakes nobody.
async fn woken_by<T>(store: &dyn Store, act: impl Future<Output = T>) -> T {
    let wake = async { tokio::time::timeout(Duration::from_secs(20), store.woken()).await.expect("woken") };
    let ((), value) = tokio::join!(biased; wake, act);
    value
}

/// Every moment is by the database's clock.
pub async fn every_moment_is_by_the_databases_clock(store: &dyn Store, clock: &dyn TestClock) {
    let before = store.now().await.unwrap();
    clock.advance(Duration::from_secs(3600)).await;
    let now = store.now().await.unwrap();
    assert!(now >= before.plus(Duration::from_secs(3600)));
    let job = validating_job(store).await;
    assert!(job.created_at >= now && job.created_at <= store.now().await.unwrap());
    let events = store.list_events(job.id, 0, 9).await.unwrap();
    assert_eq!(events[0].at, job.created_at, "one transaction has one moment");
    assert!(["sqlite", "postgres"].contains(&store.backend()), "{}", store.backend());
}

/// The size on disk is that of what is stored.
pub async fn size_is_that_of_what_is_stored(store: &dyn Store, _clock: &dyn TestClock) {
    completed_job(store, &[100; 10], &[]).await;
    let bytes = store.size_bytes().await.unwrap();
    assert!((10_000..5_000_000).contains(&bytes), "{bytes}");
}
