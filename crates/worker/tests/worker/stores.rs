//! The worker on remote object stores: the same jobs, sweeps and troubles as on a
//! folder, on every store that is there.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use overnight_blobs::{Blobs, ObjectName, Options, Prefix, SegmentHead, SegmentWriter};
use overnight_store::{Files, Jobs, Segments};
use overnight_testing::objects::{remote_stores, servers};
use overnight_testing::service::numbered_lines;
use overnight_testing::{Reply, ScriptedGenerate, TestService};
use overnight_types::{Epoch, FileId, ItemIndex, JobId, JobState, ShardIndex};
use overnight_worker::lifecycle::shard_lines::ShardLines;
use overnight_worker::lifecycle::sweep::{SweepAges, sweep};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const NOW: SweepAges = SweepAges { orphans: Duration::ZERO, unclaimed: Duration::ZERO, jobs: None };

async fn service_over(blobs: &Blobs) -> TestService {
    let mut service = TestService::new().await;
    service.blobs = blobs.clone();
    service.config.checkpoint_every_remote = Duration::from_millis(20);
    service
}

#[tokio::test]
async fn job_on_a_remote_store_is_published_and_everything_goes_with_it() {
    for (store, blobs) in remote_stores().await {
        let service = service_over(&blobs).await;
        let job = service.submit(&numbered_lines(60)).await;
        let engine = ScriptedGenerate::new(|ask| match ask.text().contains("7\"") {
            true => Reply::Response(400, r#"{"error":{"message":"no","code":"bad_thing"}}"#.to_owned(), None),
            false => Reply::Text(ask.text().to_owned()),
        });
        let worker = service.start(&engine).await;
        let ended = service.until_state(job, JobState::Completed).await;
        let (output, error) = (service.lines(ended.output_file_id).await, service.lines(ended.error_file_id).await);
        assert_eq!((output.len(), error.len()), (54, 6), "{store}");
        worker.shutdown(Duration::from_secs(5)).await;
        service.drop_checks(job).await;
        // Deleted with its files, it leaves nothing.
        for file in [Some(ended.input_file_id), ended.output_file_id, ended.error_file_id].into_iter().flatten() {
            assert!(service.store.delete_file_if_present(file).await.unwrap().is_applied());
        }
        assert!(service.store.delete_job_if_terminal(job).await.unwrap().is_applied());
        sweep(&service.store, &service.blobs, &NOW).await.unwrap();
        let left: Vec<_> = blobs.list(Prefix::All).try_collect().await.unwrap();
        assert_eq!(left, [], "{store}");
    }
}

#[tokio::test]
async fn sweep_of_a_remote_store_takes_what_no_row_names_and_nothing_else() {
    for (store, blobs) in remote_stores().await {
        let service = service_over(&blobs).await;
        let job = service.submit_cut(&numbered_lines(8), 4).await;
        let segment = |job, shard, epoch| {
            let producer = "test".to_owned();
            let head = SegmentHead { job, shard: ShardIndex(shard), epoch: Epoch(epoch), seq: 0, producer };
            SegmentWriter::new(head, ItemIndex(0), 4).finish()
        };
        let worker = service.start(&ScriptedGenerate::echo()).await;
        let ended = service.until_state(job, JobState::Completed).await;
        worker.shutdown(Duration::from_secs(5)).await;
        let mut before: Vec<_> = blobs.list(Prefix::All).map_ok(|listed| listed.name).try_collect().await.unwrap();
        // More than one piece of deletions.
        for epoch in 0..250 {
            let (bytes, parts) = segment(job, 0, epoch);
            blobs.put(&parts.name, bytes).await.unwrap();
        }
        let (bytes, parts) = segment(JobId::new(), 0, 1);
        blobs.put(&parts.name, bytes).await.unwrap();
        blobs.put(&ObjectName::file(FileId::new()), Bytes::from_static(b"cut off")).await.unwrap();
        let young = sweep(&service.store, &service.blobs, &SweepAges::default()).await.unwrap();
        assert_eq!((young.orphans, young.unclaimed), (0, 0), "{store}: too young");
        let swept = sweep(&service.store, &service.blobs, &NOW).await.unwrap();
        assert_eq!((swept.orphans, swept.unclaimed), (251, 1), "{store}");
        let mut left: Vec<_> = blobs.list(Prefix::All).map_ok(|listed| listed.name).try_collect().await.unwrap();
        before.sort();
        left.sort();
        assert_eq!(left, before, "{store}");
        assert_eq!(service.lines(ended.output_file_id).await.len(), 8, "{store}");
    }
}

/// A plain request to moto, which checks no signature. Gives the answer's body.
async fn ask(endpoint: &str, request: &str, body: &[u8]) -> String {
    let host = endpoint.strip_prefix("http://").unwrap();
    let mut connection = tokio::net::TcpStream::connect(host).await.unwrap();
    // It only wants to see one.
    let signed = "Authorization: AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, \
        SignedHeaders=host, Signature=x";
    let head = format!(
        "{request} HTTP/1.1\r\nHost: {host}\r\n{signed}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(body).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 20"), "{answer}");
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

// As a bucket that was emptied or made anew by mistake: nobody's item fails for it.
#[tokio::test]
async fn store_that_loses_everything_in_mid_job_fails_no_item_and_counts_no_attempt() {
    let Some(server) = servers().into_iter().find(|server| server.name == "moto") else { return };
    let blobs = server.open().await;
    let service = service_over(&blobs).await;
    let job = service.submit_cut(&numbered_lines(6), 3).await;
    let name = ObjectName::file(service.job(job).await.input_file_id);
    let input = blobs.read(&name).await.unwrap();
    blobs.delete(&name).await.unwrap();
    let endpoint = &server.environment[0].1;
    let mark =
        format!("/{}/.overnight-marks/{}", server.url.strip_prefix("s3://").unwrap(), blobs.id().unwrap().simple());
    let bytes = ask(endpoint, &format!("GET {mark}"), b"").await;
    ask(endpoint, &format!("DELETE {mark}"), b"").await;
    let engine = ScriptedGenerate::echo();
    let worker = service.start(&engine).await;
    overnight_testing::wait::until("both shards to have been tried and given back", || async {
        let shards = service.shards(job).await;
        let tried = shards.iter().filter(|shard| shard.epoch.0 >= 2).count();
        if tried == 2 { Ok(()) } else { Err(service.seen(job).await) }
    })
    .await;
    assert_eq!((engine.num_asked(), service.outcomes(job).await.len()), (0, 0));
    // The mark last: from then on what is not there is missing.
    blobs.put(&name, input).await.unwrap();
    ask(endpoint, &format!("PUT {mark}"), bytes.as_bytes()).await;
    service.until_state(job, JobState::Completed).await;
    let outcomes = service.outcomes(job).await;
    let attempts: BTreeMap<u64, u32> = outcomes.iter().map(|(item, record)| (*item, record.attempts)).collect();
    assert!(attempts.len() == 6 && attempts.values().all(|attempts| *attempts == 1), "{attempts:?}");
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// Its lines do not fit into memory, and a call per line would take hours.
#[tokio::test]
async fn large_shard_of_a_remote_store_is_read_once() {
    let blobs = Blobs::remote_memory(&Options::default()).await.unwrap();
    let service = service_over(&blobs).await;
    let job = service.submit_cut(&numbered_lines(40), 20).await;
    let engine = ScriptedGenerate::new(|ask| match ask.text().contains("item-3") {
        true => Reply::Hold("later".to_owned()),
        false => Reply::Text(format!("{:>5000}", ask.text())),
    });
    let worker = service.start(&engine).await;
    // Some outcomes in a segment of their own.
    service.until_outcomes(job, 20).await;
    engine.release_all();
    service.until_state(job, JobState::Completed).await;
    worker.shutdown(Duration::from_secs(5)).await;
    let row = service.job(job).await;
    for shard in service.shards(job).await {
        let segments = service.store.list_segments_of_shard(job, shard.cut.shard).await.unwrap();
        let whole = ShardLines::load(&blobs, &row, &shard, &segments).await.unwrap();
        let large = ShardLines::load_with(&blobs, &row, &shard, &segments, 1_000).await.unwrap();
        for bit in 0..shard.cut.num_items {
            let line = whole.outcome(&blobs, bit).await.unwrap();
            // Nothing is read from the storage any more.
            assert_eq!(large.outcome(&Blobs::memory(), bit).await.unwrap(), line);
        }
    }
}
