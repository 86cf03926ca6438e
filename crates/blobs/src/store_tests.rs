//! Storage promises, on every storage that is there.

use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::ObjectStoreExt;
use overnight_types::{FileId, JobId};

use crate::sha::Sha256;
use crate::test_stores::{self, TestStore};
use crate::{Blobs, Error, ObjectName, Options, Prefix};

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 / 7) as u8).collect()
}

#[tokio::test]
async fn written_bytes_read_back_at_every_piece_edge() {
    for TestStore { name: store, blobs, .. } in test_stores::all().await {
        let piece = if blobs.is_local() { 1 << 20 } else { 5 << 20 };
        for len in [0, 1, piece - 1, piece, piece + 1, 3 * piece + 5] {
            let name = ObjectName::file(FileId::new());
            let bytes = pattern(len);
            let mut writer = blobs.writer(&name).await.unwrap();
            for chunk in bytes.chunks(700_001) {
                writer.append(chunk).await.unwrap();
            }
            assert_eq!(blobs.size(&name).await.unwrap(), None, "{store}: nothing is visible before the end");
            let written = writer.finish().await.unwrap();
            assert_eq!((written.bytes, written.sha256), (len as u64, Sha256::of(&bytes)));
            assert_eq!(blobs.size(&name).await.unwrap(), Some(len as u64));
            assert!(blobs.read(&name).await.unwrap() == bytes, "{store}: {len} bytes");
            let streamed: Vec<Bytes> = blobs.stream(&name, 0..len as u64).try_collect().await.unwrap();
            assert!(streamed.concat() == bytes, "{store}: {len} bytes in pieces");
        }
    }
}

#[tokio::test]
async fn short_and_missing_objects_are_told_apart() {
    for TestStore { name: store, blobs, .. } in test_stores::all().await {
        let name = ObjectName::file(FileId::new());
        assert!(matches!(blobs.read(&name).await, Err(Error::Missing { .. })));
        assert!(matches!(blobs.read_range(&name, 0..5).await, Err(Error::Missing { .. })));
        blobs.put(&name, Bytes::from_static(b"0123456789")).await.unwrap();
        assert_eq!(blobs.read_range(&name, 3..6).await.unwrap(), "345");
        assert_eq!(blobs.read_range(&name, 3..3).await.unwrap(), "");
        for range in [5..11, 10..12, 50..60] {
            let read = blobs.read_range(&name, range.clone()).await;
            assert!(matches!(read, Err(Error::Damaged { .. })), "{store}: {range:?}: {read:?}");
        }
        assert!(blobs.stream(&name, 0..20).try_collect::<Vec<_>>().await.is_err());
        blobs.delete(&name).await.unwrap();
        blobs.delete(&name).await.unwrap();
        assert_eq!(blobs.size(&name).await.unwrap(), None);
    }
}

#[tokio::test]
async fn listing_tells_our_objects_only() {
    let job = JobId::new();
    for TestStore { name: store, blobs, .. } in test_stores::all().await {
        let names = [ObjectName::index(job), ObjectName::intake_run(job, 0), ObjectName::file(FileId::new())];
        for name in &names {
            blobs.put(name, Bytes::from_static(b"x")).await.unwrap();
        }
        if let Some(root) = blobs.root() {
            std::fs::write(root.join("files/notes.txt"), "of somebody else").unwrap();
        } else {
            let path = match blobs.remote() {
                Some(remote) => remote.path("files/notes.txt"),
                None => "files/notes.txt".into(),
            };
            blobs.driver().put(&path, "of somebody else".into()).await.unwrap();
        }
        let mut all: Vec<_> = blobs.list(Prefix::All).map_ok(|listed| listed.name).try_collect().await.unwrap();
        let mut wanted = names.to_vec();
        all.sort();
        wanted.sort();
        assert_eq!(all, wanted, "{store}");
        let runs: Vec<_> = blobs.list(Prefix::IntakeRuns(job)).try_collect().await.unwrap();
        assert_eq!(runs.iter().map(|listed| (listed.name, listed.bytes)).collect::<Vec<_>>(), [(names[1], 1)]);
    }
}

// A killed upload leaves `name#N`, which no listing shows.
#[tokio::test]
async fn leftovers_of_killed_uploads_are_swept_and_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = Blobs::local(dir.path()).unwrap();
    let (killed, kept) = (ObjectName::file(FileId::new()), ObjectName::file(FileId::new()));
    blobs.put(&kept, Bytes::from_static(b"kept")).await.unwrap();
    let mut writer = blobs.writer(&killed).await.unwrap();
    writer.append(&pattern(2 << 20)).await.unwrap();
    // As kill -9 would: the writer's own cleanup never runs.
    std::mem::forget(writer);
    std::fs::write(dir.path().join("files/other#a"), "of somebody else").unwrap();
    let num_files = || std::fs::read_dir(dir.path().join("files")).unwrap().count();
    assert_eq!(num_files(), 3);
    assert_eq!(
        blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::from_secs(3_600)).await.unwrap(),
        0,
        "a young one may be in use"
    );
    assert_eq!(blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::ZERO).await.unwrap(), 1);
    assert_eq!(num_files(), 2);
    assert_eq!(blobs.read(&kept).await.unwrap(), "kept");
}

#[tokio::test]
async fn aborted_write_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = Blobs::local(dir.path()).unwrap();
    let mut writer = blobs.writer(&ObjectName::file(FileId::new())).await.unwrap();
    writer.append(&pattern(2 << 20)).await.unwrap();
    writer.abort().await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("files")).unwrap().count(), 0);
}

// An unmounted folder is trouble of the storage, not a lost object.
#[tokio::test]
async fn vanished_folder_is_not_a_missing_object() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = Blobs::local(&dir.path().join("objects")).unwrap();
    let name = ObjectName::file(FileId::new());
    blobs.put(&name, Bytes::from_static(b"x")).await.unwrap();
    std::fs::rename(dir.path().join("objects"), dir.path().join("elsewhere")).unwrap();
    assert!(matches!(blobs.read(&name).await, Err(Error::Unavailable { .. })));
    std::fs::rename(dir.path().join("elsewhere"), dir.path().join("objects")).unwrap();
    assert_eq!(blobs.read(&name).await.unwrap(), "x");
}

// Its mount point stays: an empty folder, or one with another disk's objects.
#[tokio::test]
async fn bare_mount_point_loses_no_object_and_takes_none() {
    let dir = tempfile::tempdir().unwrap();
    let [objects, elsewhere] = ["objects", "elsewhere"].map(|name| dir.path().join(name));
    let blobs = Blobs::local(&objects).unwrap();
    let (name, other) = (ObjectName::file(FileId::new()), ObjectName::file(FileId::new()));
    blobs.put(&name, Bytes::from_static(b"x")).await.unwrap();
    std::fs::rename(&objects, &elsewhere).unwrap();
    for other_disk in [false, true] {
        std::fs::create_dir(&objects).unwrap();
        if other_disk {
            assert_ne!(Blobs::local(&objects).unwrap().id(), blobs.id());
        }
        let before = std::fs::read_dir(&objects).unwrap().count();
        let outcomes = [
            blobs.read(&name).await.map(drop),
            blobs.read_range(&name, 0..1).await.map(drop),
            blobs.size(&name).await.map(drop),
            blobs.delete(&name).await,
            blobs.put(&other, Bytes::from_static(b"y")).await,
            blobs.writer(&other).await.map(drop),
        ];
        for outcome in outcomes {
            let err = outcome.unwrap_err();
            assert!(matches!(err, Error::Unavailable { .. }), "{err}");
            let why = overnight_types::chain(&err);
            assert!(why.contains("mounted"), "{why}");
        }
        assert_eq!(std::fs::read_dir(&objects).unwrap().count(), before, "nothing is written to it");
        std::fs::remove_dir_all(&objects).unwrap();
    }
    std::fs::rename(&elsewhere, &objects).unwrap();
    assert_eq!(blobs.read(&name).await.unwrap(), "x");
    blobs.put(&other, Bytes::from_static(b"y")).await.unwrap();
    assert_eq!(Blobs::local(&objects).unwrap().id(), blobs.id(), "the mark stays");
}

#[tokio::test]
async fn call_that_hangs_is_cut_at_its_limit() {
    let driver = object_store::throttle::ThrottledStore::new(
        object_store::memory::InMemory::new(),
        object_store::throttle::ThrottleConfig { wait_put_per_call: Duration::from_secs(3_600), ..Default::default() },
    );
    let blobs = Blobs::with_driver(std::sync::Arc::new(driver), Duration::from_millis(20));
    let put = blobs.put(&ObjectName::file(FileId::new()), Bytes::from_static(b"x")).await;
    assert!(matches!(put, Err(Error::TimedOut { .. })));
    assert_eq!(put.unwrap_err().class(), overnight_types::Class::Transient);
}

#[tokio::test]
async fn probe_leaves_nothing_and_tells_what_holds() {
    for TestStore { name: store, blobs, .. } in test_stores::all().await {
        let found = blobs.probe().await.unwrap_or_else(|err| panic!("{store}: {}", overnight_types::chain(&err)));
        assert_eq!(found.conditional_create, store != "garage", "{store}");
        assert_eq!(found.synced, blobs.root().is_some());
        assert!(blobs.list(Prefix::All).try_collect::<Vec<_>>().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn storage_that_is_not_served_is_refused_by_name() {
    for url in ["ftp://x", "http://host/bucket", "file://relative", "/tmp/x", "file:///"] {
        let message = Blobs::open(url, &Options::default()).await.unwrap_err().to_string();
        assert!(message.contains(url), "{message}");
    }
}

#[tokio::test]
async fn deleted_job_leaves_no_object_and_others_stay() {
    let (job, other) = (JobId::new(), JobId::new());
    for TestStore { name: store, blobs, .. } in test_stores::all().await {
        let kept = ObjectName::index(other);
        let gone: Vec<_> = (0..40).map(|run| ObjectName::intake_run(job, run)).collect();
        for name in gone.iter().chain([&kept]) {
            blobs.put(name, Bytes::from_static(b"x")).await.unwrap();
        }
        // One that is not there any more does not keep the rest.
        blobs.delete(&gone[3]).await.unwrap();
        blobs.delete_all(&gone[..10]).await.unwrap_or_else(|err| panic!("{store}: {}", overnight_types::chain(&err)));
        assert_eq!(blobs.list(Prefix::Job(job)).try_collect::<Vec<_>>().await.unwrap().len(), 30, "{store}");
        blobs.remove_job(job).await.unwrap();
        let left: Vec<_> = blobs.list(Prefix::All).map_ok(|listed| listed.name).try_collect().await.unwrap();
        assert_eq!(left, [kept], "{store}");
    }
}
