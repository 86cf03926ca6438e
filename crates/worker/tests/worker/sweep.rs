//! The sweep: what no row names goes, what a row names or a writer may still name stays.

use std::time::Duration;

use bytes::Bytes;
use overnight_blobs::{ObjectName, SegmentHead, SegmentWriter};
use overnight_store::{ClaimShard, Files, Jobs, Shards};
use overnight_testing::service::numbered_lines;
use overnight_testing::{Failing, ScriptedGenerate, TestService};
use overnight_types::{Epoch, FileId, ItemIndex, JobId, JobState, ShardIndex, WorkerId};
use overnight_worker::failpoints;
use overnight_worker::lifecycle::sweep::{SweepAges, Swept, SweptJobs, sweep, sweep_again};
use uuid::Uuid;

/// An ended and deleted job whose rows are still there.
async fn deleted_job(service: &TestService) -> JobId {
    deleted_job_and_input(service).await.0
}

async fn deleted_job_and_input(service: &TestService) -> (JobId, FileId) {
    let job = service.submit(&numbered_lines(4)).await;
    let input = service.job(job).await.input_file_id;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_state(job, JobState::Completed).await;
    worker.shutdown(Duration::from_secs(5)).await;
    assert!(service.store.delete_job_if_terminal(job).await.unwrap().is_applied());
    (job, input)
}

const NOW: SweepAges = SweepAges { orphans: Duration::ZERO, unclaimed: Duration::ZERO, jobs: None };

/// The same with a time for ended jobs that none has reached.
const NOW_AND_ENDED: SweepAges = SweepAges { jobs: Some(Duration::from_secs(86_400)), ..NOW };

/// Writes a segment object that no row names.
async fn orphan(service: &TestService, job: JobId, shard: u32, epoch: u64) -> ObjectName {
    let head = SegmentHead { job, shard: ShardIndex(shard), epoch: Epoch(epoch), seq: 0, producer: "test".to_owned() };
    let (bytes, parts) = SegmentWriter::new(head, ItemIndex(0), 4).finish();
    service.blobs.put(&parts.name, bytes).await.unwrap();
    parts.name
}

async fn exists(service: &TestService, name: &ObjectName) -> bool {
    service.blobs.size(name).await.unwrap().is_some()
}

#[tokio::test]
async fn orphan_goes_only_when_no_writer_can_name_it_any_more() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(8), 4).await;
    let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_secs(60), models: None, oldest: false };
    let lease = service.store.claim_shard(&claim).await.unwrap().unwrap();
    assert_eq!((lease.shard.cut.shard, lease.shard.epoch), (ShardIndex(0), Epoch(1)));
    let (old, under_way) = (orphan(&service, job, 0, 0).await, orphan(&service, job, 0, 1).await);
    let of_unknown_job = orphan(&service, JobId::new(), 0, 1).await;
    let swept = sweep(&service.store, &service.blobs, &SweepAges::default()).await.unwrap();
    assert_eq!(swept.orphans, 0, "too young");
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!(swept.orphans, 2);
    assert!(!exists(&service, &old).await && !exists(&service, &of_unknown_job).await);
    assert!(exists(&service, &under_way).await, "the holder of epoch 1 may be about to name it");
    service.store.release_leases_of_dead(&[claim.worker]).await.unwrap();
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_outcomes(job, 8).await;
    worker.shutdown(Duration::from_secs(5)).await;
    sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert!(!exists(&service, &under_way).await);
    assert_eq!(service.outcomes(job).await.len(), 8, "recorded segments stay");
}

#[tokio::test]
async fn crash_between_object_and_commit_leaves_an_orphan_that_is_swept() {
    let mut service = TestService::new().await;
    service.config.lease_ttl = Duration::from_millis(400);
    service.config.renew_every = Duration::from_millis(80);
    let job = service.submit_cut(&numbered_lines(4), 4).await;
    service.store.fail("commit_segment_if_leased", 0, 1, Failing::HangBefore);
    let dead = service.start(&ScriptedGenerate::echo()).await;
    service.store.hangs().await;
    drop(dead);
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_outcomes(job, 4).await;
    worker.shutdown(Duration::from_secs(5)).await;
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!(swept.orphans, 1);
    service.drop_checks(job).await;
}

#[tokio::test]
async fn unclaimed_uploads_and_leftovers_of_killed_writes_and_probes_go() {
    let service = TestService::new().await;
    let claimed = service.upload("{}\n").await;
    let unclaimed = FileId::new();
    service.blobs.put(&ObjectName::file(unclaimed), Bytes::from_static(b"cut off")).await.unwrap();
    // What a killed write of the driver leaves: no listing shows it.
    let leftover = service.objects_dir().join("files").join(format!("{}#1", FileId::new()));
    std::fs::write(&leftover, b"half").unwrap();
    // And a start that died in the middle of its probe.
    let probe = ObjectName::Probe(Uuid::now_v7());
    service.blobs.put(&probe, Bytes::from_static(b"over")).await.unwrap();
    let swept = sweep(&service.store, &service.blobs, &SweepAges::default()).await.unwrap();
    assert_eq!((swept.unclaimed, swept.leftovers), (0, 0), "too young");
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!((swept.unclaimed, swept.leftovers), (1, 2));
    assert!(!exists(&service, &probe).await);
    assert!(exists(&service, &ObjectName::file(claimed)).await);
    assert!(!exists(&service, &ObjectName::file(unclaimed)).await && !leftover.exists());
}

/// Jobs are kept for good by default: a sweep must not cost what all of them hold.
#[tokio::test]
async fn ended_job_that_was_swept_whole_is_asked_about_no_more() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(8), 2).await;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_state(job, JobState::Completed).await;
    worker.shutdown(Duration::from_secs(5)).await;
    let left = orphan(&service, job, 0, 0).await;
    let known = SweptJobs::default();
    let asked = || service.store.calls("list_segments_of_shard");
    let sweep_with = |ages| sweep_again(&service.store, &service.blobs, ages, &known);
    let long = SweepAges::default();
    sweep_with(&long).await.unwrap();
    assert_eq!(asked(), 0, "all too young");
    assert_eq!(sweep_with(&NOW).await.unwrap().orphans, 1, "and so not taken for seen");
    assert!(!exists(&service, &left).await);
    let first = asked();
    assert!(first >= 4, "a look at each shard: {first}");
    assert_eq!(sweep_with(&NOW).await.unwrap().orphans, 0);
    assert_eq!(asked(), first);
    // Another process, or a new round, looks for itself.
    let later = orphan(&service, job, 0, 0).await;
    assert_eq!(sweep(&service.store, &service.blobs, &NOW).await.unwrap().orphans, 1);
    assert!(!exists(&service, &later).await);
}

/// A worker whose clock has jumped ahead must not take what others are about to name.
#[tokio::test]
async fn a_clock_that_runs_ahead_makes_nothing_old() {
    let service = TestService::new().await;
    let (unclaimed, probe) = (ObjectName::file(FileId::new()), ObjectName::Probe(Uuid::now_v7()));
    let of_unknown_job = orphan(&service, JobId::new(), 0, 1).await;
    for name in [&unclaimed, &probe] {
        service.blobs.put(name, Bytes::from_static(b"just published")).await.unwrap();
    }
    let leftover = service.objects_dir().join("files").join(format!("{}#1", FileId::new()));
    std::fs::write(&leftover, b"half").unwrap();
    service.store.set_clock_behind(Duration::from_secs(60));
    let second = Duration::from_secs(1);
    let ages = SweepAges { orphans: second, unclaimed: second, jobs: None };
    let swept = sweep(&service.store, &service.blobs, &ages).await.unwrap();
    assert_eq!(swept, Swept::default(), "a minute ahead, and none of these is a second old");
    for name in [&unclaimed, &probe, &of_unknown_job] {
        assert!(exists(&service, name).await, "{name}");
    }
    service.store.set_clock_behind(Duration::ZERO);
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!((swept.unclaimed, swept.leftovers, swept.orphans), (1, 2, 1));
}

#[tokio::test]
async fn deleted_file_goes_once_no_unfinished_job_reads_it() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(3), 3).await;
    let input = service.job(job).await.input_file_id;
    assert!(service.store.delete_file_if_present(input).await.unwrap().is_applied());
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!(swept.files, 0, "a job that was accepted before still reads it");
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_state(job, JobState::Completed).await;
    assert!(exists(&service, &ObjectName::file(input)).await);
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!(swept.files, 1);
    assert!(!exists(&service, &ObjectName::file(input)).await);
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn deleted_job_leaves_neither_object_nor_folder() {
    let service = TestService::new().await;
    let job = deleted_job(&service).await;
    let folder = service.objects_dir().join("jobs").join(job.to_string());
    assert!(folder.join("segments").is_dir() && exists(&service, &ObjectName::index(job)).await);
    // What a killed write of the driver leaves goes with its job.
    std::fs::write(folder.join("items.idx#1"), b"half").unwrap();
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!((swept.jobs, swept.orphans), (1, 0));
    assert!(!folder.exists());
}

#[tokio::test]
async fn ended_job_whose_time_is_over_goes_with_every_object_and_a_running_one_stays() {
    let service = TestService::new().await;
    let job = service.submit(&numbered_lines(4)).await;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    let ended = service.until_state(job, JobState::Completed).await;
    worker.shutdown(Duration::from_secs(5)).await;
    let running = service.submit_cut(&numbered_lines(4), 4).await;
    let sweep_kept_for = |kept| {
        let ages = SweepAges { jobs: kept, ..NOW };
        let (store, blobs) = (service.store.clone(), service.blobs.clone());
        async move { sweep(&store, &blobs, &ages).await.unwrap() }
    };
    for kept in [None, Some(Duration::from_secs(86_400))] {
        let swept = sweep_kept_for(kept).await;
        assert_eq!((swept.ended, swept.jobs, swept.files), (0, 0, 0), "kept for {kept:?}");
    }
    let files = [ended.input_file_id, ended.output_file_id.unwrap()];
    let folder = service.objects_dir().join("jobs").join(job.to_string());
    assert!(folder.join("segments").is_dir());
    let swept = sweep_kept_for(Some(Duration::ZERO)).await;
    assert_eq!((swept.ended, swept.jobs, swept.files), (1, 1, 2));
    assert!(!folder.exists());
    for file in files {
        assert!(!exists(&service, &ObjectName::file(file)).await);
    }
    assert_eq!(service.store.known_files(&files).await.unwrap(), []);
    assert_eq!(service.store.known_jobs(&[job, running]).await.unwrap(), [running]);
    assert!(exists(&service, &ObjectName::file(service.job(running).await.input_file_id)).await);
    let swept = sweep_kept_for(Some(Duration::ZERO)).await;
    assert_eq!(swept, Swept::default(), "nothing is left for another sweep");
}

// Its rows are gone, so nothing but the listing tells of its objects.
#[tokio::test]
async fn purge_that_dies_before_the_objects_is_made_good_by_the_next_sweep() {
    let service = TestService::new().await;
    let job = deleted_job(&service).await;
    // As far as it came.
    while service.store.purge_deleted_jobs(100).await.unwrap().has_more {}
    assert_eq!(service.store.known_jobs(&[job]).await.unwrap(), []);
    let [index, manifest] = [ObjectName::index(job), ObjectName::manifest(job, 1)];
    let swept = sweep(&service.store, &service.blobs, &SweepAges::default()).await.unwrap();
    assert_eq!(swept.orphans, 0, "too young");
    assert!(exists(&service, &index).await && exists(&service, &manifest).await);
    let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
    assert_eq!((swept.jobs, swept.orphans > 2), (0, true), "{swept:?}");
    assert!(!exists(&service, &index).await && !exists(&service, &manifest).await);
    assert!(!service.objects_dir().join("jobs").join(job.to_string()).exists());
}

// Whatever a sweep had come to when it died, the next one comes to the same end.
#[tokio::test]
async fn sweep_killed_at_each_crash_point_is_made_good_by_the_next_one() {
    for &point in failpoints::SWEEP {
        let service = TestService::new().await;
        let (job, input) = deleted_job_and_input(&service).await;
        assert!(service.store.delete_file_if_present(input).await.unwrap().is_applied());
        let unclaimed = [FileId::new(), FileId::new()];
        for id in unclaimed {
            service.blobs.put(&ObjectName::file(id), Bytes::from_static(b"cut off")).await.unwrap();
        }
        let kept = service.submit_cut(&numbered_lines(8), 4).await;
        let orphans = [orphan(&service, kept, 0, 0).await, orphan(&service, kept, 1, 0).await];
        let claim = ClaimShard { worker: WorkerId::new(), ttl: Duration::from_secs(60), models: None, oldest: false };
        for _ in 0..2 {
            service.store.claim_shard(&claim).await.unwrap().expect("a shard is ready");
        }

        fail::cfg(point, "1*panic->off").unwrap();
        let (store, blobs) = (service.store.clone(), service.blobs.clone());
        let died = tokio::spawn(async move { sweep(&store, &blobs, &NOW_AND_ENDED).await }).await;
        fail::remove(point);
        assert!(died.is_err_and(|err| err.is_panic()), "{point} was never passed");

        sweep(&service.store, &service.blobs, &NOW).await.unwrap();
        for name in orphans.iter().cloned().chain([input].into_iter().chain(unclaimed).map(ObjectName::file)) {
            assert!(!exists(&service, &name).await, "{point}: {name} is left");
        }
        assert_eq!(service.store.known_files(&[input]).await.unwrap(), [], "{point}");
        assert_eq!(service.store.known_jobs(&[job, kept]).await.unwrap(), [kept], "{point}");
        assert!(!service.objects_dir().join("jobs").join(job.to_string()).exists(), "{point}");
        let again = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
        assert_eq!(again, Swept::default(), "{point}: something was left for a third sweep");
        let read = service.blobs.size(&ObjectName::file(service.job(kept).await.input_file_id)).await.unwrap();
        assert!(read.is_some(), "{point}: what a job reads stays");
    }
}
