//! Outcomes: one per item, its own, whatever the order of answers.

use std::sync::Mutex;
use std::time::Duration;

use overnight_testing::service::{body_saying, is_own_echo, line, line_saying, numbered_lines};
use overnight_testing::{Reply, ScriptedGenerate, TestService, wait};
use overnight_types::{JobState, OutcomeKind};
use overnight_worker::generate::Failure;

#[tokio::test]
async fn every_item_gets_its_own_answer() {
    let service = TestService::new().await;
    let lines = numbered_lines(1_000);
    let job = service.submit_cut(&lines, 300).await;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_outcomes(job, 1_000).await;
    let outcomes = service.outcomes(job).await;
    assert_eq!(outcomes.len(), 1_000);
    for (item, record) in &outcomes {
        assert!(is_own_echo(record, &format!("item-{item}")), "{item}: {record:?}");
        assert_eq!(record.attempts, 1);
    }
    worker.shutdown(service.config.shutdown_grace).await;
    service.drop_checks(job).await;
}

// lmdeploy#2395, vllm#394, python-genai#1909, curator#276, #289 (service 51): answers
// come back in another order than their requests.
#[tokio::test]
async fn answers_in_another_order_reach_their_own_items() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(64), 16).await;
    // Every other request is held, so that later ones overtake it.
    let engine = ScriptedGenerate::new(|ask| {
        let text = overnight_testing::scripted::echo_of(ask.text());
        if ask.order.is_multiple_of(2) { Reply::Hold(text) } else { Reply::Text(text) }
    });
    let worker = service.start(&engine).await;
    wait::until("all answers", || async {
        engine.release(3);
        let done = service.outcomes(job).await.len();
        if done == 64 { Ok(()) } else { Err(format!("{done} outcomes, {}", service.seen(job).await)) }
    })
    .await;
    for (item, record) in service.outcomes(job).await {
        assert!(is_own_echo(&record, &format!("item-{item}")), "{item}: {record:?}");
    }
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// NousResearch/hermes-agent#86523, #41857 (service 28): equal prompts are not one row.
#[tokio::test]
async fn equal_prompts_yield_a_line_each() {
    let service = TestService::new().await;
    let lines: Vec<String> = (0..100).map(|index| line_saying(&format!("item-{index}"), "the same")).collect();
    let job = service.submit_cut(&lines, 30).await;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_outcomes(job, 100).await;
    let outcomes = service.outcomes(job).await;
    let ids: std::collections::HashSet<String> =
        outcomes.values().map(|record| String::from_utf8_lossy(&record.line).into_owned()).collect();
    assert_eq!((outcomes.len(), ids.len()), (100, 100));
    worker.shutdown(Duration::from_secs(5)).await;
}

// huggingface/datatrove#450, #464, ray-project/ray#59522 (service 32, 33): one refused
// request ends neither the task nor its neighbours.
#[tokio::test]
async fn refused_item_fails_alone() {
    let service = TestService::new().await;
    let mut lines = numbered_lines(20);
    lines[3] = r#"{"custom_id":"no-model","method":"POST","url":"/v1/chat/completions","body":{"messages":[]}}"#.into();
    let job = service.submit_cut(&lines, 20).await;
    let refusal = r#"{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":"context_length_exceeded"}}"#;
    let engine = ScriptedGenerate::new(move |ask| match ask.text() == body_saying("item-7") {
        true => Reply::Response(400, refusal.to_owned(), None),
        false => Reply::Text("fine".to_owned()),
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 20).await;
    let outcomes = service.outcomes(job).await;
    let failed: Vec<u64> =
        outcomes.iter().filter(|(_, record)| record.outcome == OutcomeKind::Failed).map(|(item, _)| *item).collect();
    assert_eq!(failed, [3, 7]);
    assert_eq!((outcomes[&3].http_status, outcomes[&7].http_status), (Some(400), Some(400)));
    assert_eq!(outcomes[&7].error_code.as_deref(), Some("context_length_exceeded"));
    let refused = String::from_utf8_lossy(&outcomes[&3].line).into_owned();
    assert!(refused.contains(r#""custom_id":"no-model""#) && refused.contains(r#""status_code":400"#), "{refused}");
    assert!(String::from_utf8_lossy(&outcomes[&7].line).contains(refusal), "the engine's answer is kept byte for byte");
    worker.shutdown(Duration::from_secs(5)).await;
}

// doublewordai/control-layer#934, #1048, fusillade#196 (service 48): an error inside a 200.
#[tokio::test]
async fn error_inside_a_success_is_no_success() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(1), 1).await;
    let body = r#"{"error":{"message":"no","code":"bad_thing"}}"#;
    let engine = ScriptedGenerate::new(move |_| Reply::Response(200, body.to_owned(), None));
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 1).await;
    assert_eq!(service.outcomes(job).await[&0].outcome, OutcomeKind::Failed);
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn refusal_of_the_engine_is_an_answer_not_a_retry() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(1), 1).await;
    let engine = ScriptedGenerate::new(|_| {
        Reply::Failed(Failure::Refused {
            status: 400,
            code: "unsupported_parameter".to_owned(),
            param: Some("logit_bias".to_owned()),
            message: "not here".to_owned(),
        })
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 1).await;
    let record = &service.outcomes(job).await[&0];
    assert_eq!((record.http_status, engine.num_asked()), (Some(400), 1));
    worker.shutdown(Duration::from_secs(5)).await;
}

/// The bytes of one item change after validation, their number and the lines' does
/// not: each undone item of that shard says so, no other one does.
#[tokio::test]
async fn input_changed_in_place_is_noticed() {
    let service = TestService::new().await;
    let lines = numbered_lines(6);
    let job = service.submit_cut(&lines, 3).await;
    let file = overnight_blobs::ObjectName::file(service.job(job).await.input_file_id);
    let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let at = text.rfind("item-4").expect("the fifth line says its name");
    let mut changed = text.clone().into_bytes();
    changed[at + 5] = b'9';
    assert!(std::str::from_utf8(&changed).is_ok_and(|changed| changed.len() == text.len()));
    service.blobs.put(&file, changed.into()).await.unwrap();
    let engine = ScriptedGenerate::echo();
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 6).await;
    let outcomes = service.outcomes(job).await;
    let codes: Vec<Option<&str>> = outcomes.values().map(|record| record.error_code.as_deref()).collect();
    let changed = Some("input_unavailable");
    assert_eq!(codes, [None, None, None, changed, changed, changed]);
    assert!(outcomes.values().skip(3).all(|record| record.http_status == Some(500)));
    assert!(String::from_utf8_lossy(&outcomes[&3].line).contains("not those that were validated"));
    assert_eq!(engine.num_asked(), 3, "nothing of the changed shard was run");
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn input_that_is_gone_ends_each_undone_item_by_name() {
    let service = TestService::new().await;
    let lines = numbered_lines(6);
    let (gone, changed) = (service.submit_cut(&lines, 3).await, service.submit_cut(&lines, 3).await);
    let file = overnight_blobs::ObjectName::file(service.job(gone).await.input_file_id);
    service.blobs.delete(&file).await.unwrap();
    // The same length with one line fewer: what intake recorded no longer fits.
    let file = overnight_blobs::ObjectName::file(service.job(changed).await.input_file_id);
    let mut bytes = lines.iter().map(|line| format!("{line}\n")).collect::<String>().into_bytes();
    let newline = lines[0].len();
    bytes[newline] = b' ';
    service.blobs.put(&file, bytes.into()).await.unwrap();
    let worker = service.start(&ScriptedGenerate::echo()).await;
    for job in [gone, changed] {
        service.until_outcomes(job, 6).await;
    }
    let outcomes = service.outcomes(gone).await;
    assert!(outcomes.values().all(|record| record.error_code.as_deref() == Some("input_unavailable")));
    assert!(outcomes.values().all(|record| record.http_status == Some(500)));
    let outcomes = service.outcomes(changed).await;
    let codes: Vec<bool> = outcomes.values().map(|record| record.error_code.is_some()).collect();
    assert_eq!(codes, [true, true, true, false, false, false], "only the shard whose bytes changed");
    worker.shutdown(Duration::from_secs(5)).await;
}

// vllm#30268, #5774, #28703 (service 62): requests in flight are bounded by the window.
#[tokio::test]
async fn window_bounds_what_is_at_the_engine_and_claims_ahead_of_its_tail() {
    let mut service = TestService::new().await;
    service.config.window_items_max = Some(10);
    let job = service.submit_cut(&numbered_lines(60), 8).await;
    let engine = ScriptedGenerate::new(|ask| Reply::Hold(overnight_testing::scripted::echo_of(ask.text())));
    let worker = service.start(&engine).await;
    wait::until("a full window", || async {
        if engine.num_held() == 10 { Ok(()) } else { Err(format!("{} held", engine.num_held())) }
    })
    .await;
    assert_eq!(worker.status().window.open_shards, 2, "the second shard fills what the first leaves free");
    wait::until("the end", || async {
        engine.release(2);
        let done = service.outcomes(job).await.len();
        if done == 60 { Ok(()) } else { Err(format!("{done} outcomes")) }
    })
    .await;
    assert_eq!(engine.in_flight_max(), 10);
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}

// vllm#52505, hermes-agent#297 (service 35, 30): what is finished can be read at once.
#[tokio::test]
async fn finished_outcomes_are_committed_while_others_run() {
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(10), 10).await;
    let engine = ScriptedGenerate::new(|ask| match ask.order < 5 {
        true => Reply::Text("done".to_owned()),
        false => Reply::Hold("later".to_owned()),
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(job, 5).await;
    assert_eq!(service.job(job).await.state, JobState::InProgress);
    assert_eq!(service.outcomes(job).await.len(), 5);
    engine.release_all();
    service.until_outcomes(job, 10).await;
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn odd_custom_ids_come_back_as_they_were_written() {
    let service = TestService::new().await;
    let tokens = [r#""\ud800 alone""#, r#""line\nbreak""#, r#""🦀 crab""#, r#""caf\u00e9""#];
    let lines: Vec<String> = tokens.iter().map(|token| line("X").replacen(r#""X""#, token, 1)).collect();
    let job = service.submit_cut(&lines, 4).await;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    service.until_outcomes(job, 4).await;
    for (item, record) in service.outcomes(job).await {
        let line = String::from_utf8_lossy(&record.line).into_owned();
        assert!(line.contains(&format!(r#""custom_id":{}"#, tokens[item as usize])), "{line}");
    }
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn job_of_higher_urgency_goes_first_and_no_job_starves() {
    let mut service = TestService::new().await;
    service.config.window_items_max = Some(1);
    let old = service.submit_cut(&[line("old")], 1).await;
    let urgent: Vec<String> = (0..40).map(|index| line(&format!("urgent-{index}"))).collect();
    let urgent_job = service.submit_with(&urgent, |job| job.priority = -5).await;
    service.cut(urgent_job, &urgent, 1).await;
    let order: &'static Mutex<Vec<String>> = Box::leak(Box::default());
    let engine = ScriptedGenerate::new(|ask| {
        order.lock().unwrap().push(ask.text().to_owned());
        Reply::Text("ok".to_owned())
    });
    let worker = service.start(&engine).await;
    service.until_outcomes(urgent_job, 40).await;
    service.until_outcomes(old, 1).await;
    let at = order.lock().unwrap().iter().position(|body| *body == body_saying("old")).unwrap();
    assert_eq!(at, 7, "the eighth claim takes the oldest job");
    worker.shutdown(Duration::from_secs(5)).await;
}
