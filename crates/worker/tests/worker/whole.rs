//! A job's whole life on one worker: intake, shards, finalize, published files.

use std::time::Duration;

use overnight_testing::TestService;
use overnight_testing::service::numbered_lines;
use overnight_types::JobState;
use overnight_worker::instant::InstantGenerate;
use overnight_worker::mapper::Mapper;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_on_an_instant_engine_is_published_in_input_order() {
    let mut service = TestService::new().await;
    // Whole shards, as a large job has them.
    service.limits.small_file_shards = 0;
    let job = service.submit(&numbered_lines(20_000)).await;
    let engine = std::sync::Arc::new(InstantGenerate::default());
    let worker = service.start_parts(Some((engine, Mapper::remote(None)))).await;
    let ended = service.until_state(job, JobState::Completed).await;
    let lines = service.lines(ended.output_file_id).await;
    assert_eq!(lines.len(), 20_000);
    for (index, line) in lines.iter().enumerate() {
        assert!(line.contains(&format!(r#""custom_id":"item-{index}","#)), "line {index} is {line}");
    }
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}
