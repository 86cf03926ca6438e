//! The process ends at every listed place in turn; after a restart the files are
//! those of an undisturbed run.

use std::time::Duration;

use overnight_worker::failpoints;

use crate::harness::{Service, is_terminal};
use crate::kill::{FAST, input, published, tiny_model, undisturbed};

/// Places that this job does not pass: nothing of it waits for a retry, no shard is a
/// suspect or given back, its ids fit one run in memory, and nobody is told of its end. The worker's own tests die there.
const NOT_PASSED: &[&str] = &[
    "worker::probe_before_set",
    "worker::probe_after_set",
    "worker::faults_before_record",
    "worker::faults_after_record",
    "worker::shard_before_release",
    "worker::shard_after_release",
    "intake::after_run_object",
    "webhook::after_send",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_at_each_place_kills_no_item_and_doubles_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(200, 2), "/v1/completions").await;
    let mut unmet = Vec::new();
    for (round, place) in failpoints::all().enumerate() {
        let data_dir = folder.path().join(format!("place-{round}"));
        let crash = format!("{place}=1");
        let mut env = FAST.to_vec();
        env.push(("OVERNIGHT_TEST_CRASH_AT", &crash));
        let mut service = Service::start(&data_dir, &args, &env);
        service.wait_up(Duration::from_secs(60)).await;
        let file = service.upload("input.jsonl", input(200, 2)).await;
        let id = service.create_or_crash(&file, "/v1/completions").await;
        if !service.wait_end_of(id.as_deref(), Duration::from_secs(120)).await {
            unmet.push(place);
        }
        service.kill();
        let mut service = Service::start(&data_dir, &args, FAST);
        service.wait_up(Duration::from_secs(60)).await;
        let id = service.newest_batch().await.expect("the batch is recorded before anything crashes");
        let batch = service.wait_batch(&id, Duration::from_secs(120), is_terminal).await;
        assert_eq!(batch["status"], "completed", "after a crash at {place}: {batch}");
        let got = published(&service, &batch).await;
        assert!(got == whole, "files after a crash at {place} differ from those of an undisturbed run");
    }
    assert_eq!(unmet, NOT_PASSED, "places that this job did not pass");
}
