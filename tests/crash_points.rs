//! The process ends at every listed place in turn; after a restart the files are
//! those of an undisturbed run.
//!
//! One job does not pass every place: those of retries, of suspects, of webhooks and of
//! the sweep have a setting of their own.

use std::path::Path;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use overnight_blobs::{Blobs, ObjectName};
use overnight_types::{FileId, JobId};
use overnight_worker::failpoints;
use serde_json::{Value, json};

use crate::backend::{self, Backend};
use crate::harness::{Service, is_terminal};
use crate::kill::{FAST, input, published, tiny_model, undisturbed};
use crate::peer::{Answer, Peer};

const PATIENCE: Duration = Duration::from_secs(120);

/// Passed by a shard that is a suspect, after three deaths of its leases.
const SUSPECT: &[&str] = &["worker::probe_before_set", "worker::probe_after_set"];
/// Passed where items wait for a retry: their faults are recorded, their shard is given back.
const RETRY: &[&str] = &[
    "worker::faults_before_record",
    "worker::faults_after_record",
    "worker::shard_before_release",
    "worker::shard_after_release",
];
/// Passed with an input whose custom ids do not fit one run, a million: too long for a
/// process that is started anew. The steps of intake die there in the worker's own tests.
const NOT_IN_A_PROCESS: &[&str] = &["intake::after_run_object"];

fn has_setting_of_its_own(place: &str) -> bool {
    [SUSPECT, RETRY, failpoints::WEBHOOK, failpoints::SWEEP, NOT_IN_A_PROCESS].concat().contains(&place)
}

/// A job on `batch serve` that crashes at the first pass of a place. True when it did.
/// The server is started again without the crash, and must end the job as `whole`.
async fn crash_at(
    place: &str,
    data_dir: &Path,
    args: &[&str],
    env: &[(&str, &str)],
    file: &[u8],
    whole: &(Vec<Value>, Vec<Value>),
) -> bool {
    let crash = format!("{place}=1");
    let crashing = [env, &[("OVERNIGHT_TEST_CRASH_AT", crash.as_str())]].concat();
    let mut service = Service::start(data_dir, args, &crashing);
    service.wait_up(PATIENCE).await;
    let file = service.upload("input.jsonl", file.to_vec()).await;
    let id = service.create_or_crash(&file, "/v1/completions").await;
    let has_crashed = service.wait_end_of(id.as_deref(), PATIENCE).await;
    drop(service);
    ends_as(whole, place, data_dir, args, env).await;
    has_crashed
}

/// Starts the server again, which ends its newest batch.
async fn ends_as(
    whole: &(Vec<Value>, Vec<Value>),
    place: &str,
    data_dir: &Path,
    args: &[&str],
    env: &[(&str, &str)],
) -> Service {
    let mut service = Service::start(data_dir, args, env);
    service.wait_up(PATIENCE).await;
    let id = service.newest_batch().await.expect("the batch is recorded before anything crashes");
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "after a crash at {place}: {batch}");
    let got = published(&service, &batch).await;
    assert!(got == *whole, "files after a crash at {place} differ from those of an undisturbed run");
    service
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_at_each_place_kills_no_item_and_doubles_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(200, 2), "/v1/completions").await;
    for (round, place) in failpoints::all().filter(|place| !has_setting_of_its_own(place)).enumerate() {
        let data_dir = folder.path().join(format!("place-{round}"));
        let has_crashed = crash_at(place, &data_dir, &args, FAST, &input(200, 2), &whole).await;
        assert!(has_crashed, "this job does not pass {place}");
    }
}

/// A remote engine that answers each request only at the second time.
fn busy_once(body: &str, num_before: usize) -> Answer {
    if num_before == 0 {
        return (503, r#"{"error":{"message":"busy"}}"#.to_owned());
    }
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    let text = format!("echo {}", body["prompt"]);
    let choice = json!({"index": 0, "text": text, "finish_reason": "stop", "logprobs": null});
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5});
    (
        200,
        json!({"id": "x", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice],
        "usage": usage})
        .to_string(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_while_items_wait_for_a_retry_kills_none_and_doubles_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let remote = Peer::start(|body, _| busy_once(body, 1)).await;
    let urls = format!("engine.base_urls=[\"{}\"]", remote.url);
    let args = ["--set", "engine.kind=openai", "--set", &urls];
    let file = lines(40);
    let whole = undisturbed(folder.path(), &args, file.clone(), "/v1/completions").await;
    // Long enough that a shard of which nothing else is left is given back first.
    let env = [FAST, &[("OVERNIGHT_WORKER__BACKOFF_MIN", "500ms")]].concat();
    for (round, place) in RETRY.iter().enumerate() {
        let remote = Peer::start(busy_once).await;
        let urls = format!("engine.base_urls=[\"{}\"]", remote.url);
        let args = ["--set", "engine.kind=openai", "--set", &urls];
        let data_dir = folder.path().join(format!("retry-{round}"));
        let has_crashed = crash_at(place, &data_dir, &args, &env, &file, &whole).await;
        assert!(has_crashed, "this job does not pass {place}");
    }
}

/// Completions that differ, so that none of them is another's twin.
fn lines(num_items: usize) -> Vec<u8> {
    let line = |index: usize| {
        json!({
            "custom_id": format!("item-{index:02}"), "method": "POST", "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": format!("review {index} says"), "max_tokens": 2, "temperature": 0,
                "ignore_eos": true},
        })
    };
    (0..num_items).map(|index| format!("{}\n", line(index))).collect::<String>().into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_around_an_item_that_runs_alone_kills_none_and_doubles_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, lines(20), "/v1/completions").await;
    for (round, place) in SUSPECT.iter().enumerate() {
        let data_dir = folder.path().join(format!("suspect-{round}"));
        // Three deaths of its lease make the shard a suspect.
        for (death, at) in ["worker::items_prepared=1"; 3].into_iter().chain([&*format!("{place}=1")]).enumerate() {
            let mut service = Service::start(&data_dir, &args, &[FAST, &[("OVERNIGHT_TEST_CRASH_AT", at)]].concat());
            if death == 0 {
                service.wait_up(PATIENCE).await;
                let file = service.upload("input.jsonl", lines(20)).await;
                service.create_or_crash(&file, "/v1/completions").await;
            }
            let status = service.wait_exit(PATIENCE).await;
            assert!(!status.success(), "it crashes at {at}");
        }
        ends_as(&whole, place, &data_dir, &args, FAST).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_after_a_webhook_was_sent_tells_of_the_end_once_more() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, lines(20), "/v1/completions").await;
    for (round, place) in failpoints::WEBHOOK.iter().enumerate() {
        let receiver = Peer::start(|_, _| (200, "{}".to_owned())).await;
        let url = format!("webhook.url={}", receiver.url);
        let hook = ["--set", &url, "--set", "webhook.secrets=[\"a secret of at least 24 bytes\"]"];
        let args = [&args[..], &hook].concat();
        let data_dir = folder.path().join(format!("webhook-{round}"));
        let crash = format!("{place}=1");
        let crashing = [FAST, &[("OVERNIGHT_TEST_CRASH_AT", crash.as_str())]].concat();
        let mut service = Service::start(&data_dir, &args, &crashing);
        service.wait_up(PATIENCE).await;
        let file = service.upload("input.jsonl", lines(20)).await;
        service.create_or_crash(&file, "/v1/completions").await;
        assert!(!service.wait_exit(PATIENCE).await.success(), "it crashes at {place}");
        assert_eq!(receiver.bodies().len(), 1, "the receiver was told");
        let _service = ends_as(&whole, place, &data_dir, &args, FAST).await;
        let end = std::time::Instant::now() + PATIENCE;
        while receiver.bodies().len() < 2 {
            assert!(std::time::Instant::now() < end, "nobody knows whether the receiver took it: it is told again");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Makes everything below a folder older than the sweep asks for.
fn make_old(folder: &Path) {
    let mut files = Vec::new();
    crate::sync_order::files_below(folder, &mut files);
    let old = SystemTime::now() - Duration::from_secs(48 * 3600);
    for path in files {
        let file = std::fs::File::options().write(true).open(path).expect("an object can be opened");
        file.set_modified(old).expect("an object's time can be set");
    }
}

/// A deleted job with its input, an unclaimed upload and an orphan of a job that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_in_the_sweep_leaves_nothing_behind_for_good() {
    if backend::is_without("ages of files in a folder", |backend| backend != Backend::PostgresS3) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let kept = ("OVERNIGHT_WORKER__JOBS_KEPT_FOR", "3650d");
    let often = [FAST, &[("OVERNIGHT_WORKER__SWEEP_EVERY", "200ms"), kept]].concat();
    for (round, place) in failpoints::SWEEP.iter().enumerate() {
        let data_dir = folder.path().join(format!("sweep-{round}"));
        let mut service = Service::start(&data_dir, &args, FAST);
        service.wait_up(PATIENCE).await;
        let mut jobs: Vec<JobId> = Vec::new();
        let mut inputs: Vec<FileId> = Vec::new();
        for _ in 0..2 {
            let file = service.upload("input.jsonl", lines(20)).await;
            let id = service.create(&file, "/v1/completions").await;
            service.wait_batch(&id, PATIENCE, is_terminal).await;
            jobs.push(id.parse().expect("a batch id"));
            inputs.push(file.parse().expect("a file id"));
        }
        for gone in [format!("/v1/batches/{}", jobs[0]), format!("/v1/files/{}", inputs[0])] {
            let (status, answer) = service.call("DELETE", &gone, None).await.expect("an answer");
            assert_eq!(status, 200, "{answer}");
        }
        service.kill();
        let objects = data_dir.join("objects");
        let blobs = Blobs::local(&objects).expect("the object folder opens");
        let (unclaimed, orphan) = (ObjectName::file(FileId::new()), ObjectName::intake_run(jobs[1], 7));
        for name in [&unclaimed, &orphan] {
            blobs.put(name, Bytes::from_static(b"left")).await.expect("it can be written");
        }
        make_old(&objects);

        let crash = format!("{place}=1");
        let crashing = [often.as_slice(), &[("OVERNIGHT_TEST_CRASH_AT", crash.as_str())]].concat();
        let mut service = Service::start(&data_dir, &args, &crashing);
        assert!(!service.wait_exit(PATIENCE).await.success(), "the sweep passes {place}");
        let mut service = Service::start(&data_dir, &args, &often);
        service.wait_up(PATIENCE).await;
        let deleted = objects.join("jobs").join(jobs[0].to_string());
        let end = std::time::Instant::now() + PATIENCE;
        loop {
            let mut left = vec![];
            for name in [&unclaimed, &orphan, &ObjectName::file(inputs[0])] {
                if blobs.size(name).await.expect("an object can be asked for").is_some() {
                    left.push(name.to_string());
                }
            }
            if left.is_empty() && !deleted.exists() {
                break;
            }
            assert!(std::time::Instant::now() < end, "after a crash at {place} there stay {left:?} {deleted:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let kept = service.batch(&jobs[1].to_string()).await.expect("the other batch stays");
        assert_eq!(published(&service, &kept).await.0.len(), 20, "with its files");
        assert_eq!(service.unsound(), None, "after a crash at {place}");
    }
}
