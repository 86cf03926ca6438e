//! Requests of a batch one by one, results while it runs, and selective retries.

use std::time::Duration;

use overnight_testing::service::{line, numbered_lines};
use overnight_testing::{Reply, ScriptedGenerate, wait};
use serde_json::{Value, json};

use crate::server::Server;

const GRACE: Duration = Duration::from_secs(5);

const KEYS: [&str; 13] = [
    "object",
    "id",
    "index",
    "line",
    "custom_id",
    "state",
    "attempts",
    "http_status",
    "error_code",
    "finish_reason",
    "usage",
    "started_at",
    "finished_at",
];

/// Refuses with its own code what says `bad` or `worse`, holds what says `slow`.
fn mixed() -> ScriptedGenerate {
    let error = |code: &str| {
        format!(r#"{{"error":{{"message":"no","type":"invalid_request_error","param":null,"code":"{code}"}}}}"#)
    };
    ScriptedGenerate::new(move |ask| match ask.text() {
        text if text.contains("worse") => Reply::Response(400, error("worse_code"), None),
        text if text.contains("bad") => Reply::Response(400, error("bad_code"), None),
        text if text.contains("slow") => Reply::Hold("late".to_owned()),
        _ => Reply::Text("fine".to_owned()),
    })
}

fn column(page: &Value, key: &str) -> Vec<Value> {
    page["data"].as_array().unwrap().iter().map(|item| item[key].clone()).collect()
}

#[tokio::test]
async fn items_are_listed_by_index_state_code_and_custom_id() {
    let server = Server::with(mixed(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let lines = [line("good 1"), String::new(), line("bad ü"), line("worse"), line("good 2")];
    let input = server.upload(lines.join("\n")).await;
    let id = server.create(&input).await.ok()["id"].as_str().unwrap().to_owned();
    server.until(&id, "completed").await;
    let path = format!("/v1/batches/{id}/items");
    let all = server.get(&path).await.ok();
    assert_eq!(column(&all, "index"), [json!(0), json!(1), json!(2), json!(3)]);
    assert_eq!(column(&all, "line"), [json!(1), json!(3), json!(4), json!(5)], "lines are physical");
    assert_eq!(column(&all, "state"), ["completed", "failed", "failed", "completed"].map(Value::from));
    assert_eq!(column(&all, "custom_id"), ["good 1", "bad ü", "worse", "good 2"].map(Value::from));
    for item in all["data"].as_array().unwrap() {
        assert_eq!(item.as_object().unwrap().keys().collect::<Vec<_>>(), KEYS);
        assert!(item["id"].as_str().unwrap().starts_with("batch_req_"));
        assert!(item["started_at"].is_i64() && item["finished_at"].is_i64(), "{item}");
    }
    let failed = server.get(&format!("{path}?state=failed")).await.ok();
    assert_eq!(column(&failed, "error_code"), [json!("bad_code"), json!("worse_code")]);
    assert_eq!(column(&failed, "http_status"), [json!(400), json!(400)]);
    assert_eq!(column(&server.get(&format!("{path}?code=worse_code")).await.ok(), "index"), [json!(2)]);
    assert_eq!(column(&server.get(&format!("{path}?custom_id=bad+%C3%BC")).await.ok(), "index"), [json!(1)]);
    assert_eq!(server.get(&format!("{path}?custom_id=none")).await.ok()["data"], json!([]));
    assert_eq!(server.get(&format!("{path}?state=pending")).await.ok()["data"], json!([]));
    let first = server.get(&format!("{path}?limit=3")).await.ok();
    assert_eq!((column(&first, "index").len(), &first["has_more"]), (3, &json!(true)));
    for after in ["2".to_owned(), first["last_id"].as_str().unwrap().to_owned()] {
        let rest = server.get(&format!("{path}?limit=3&after={after}")).await.ok();
        assert_eq!((column(&rest, "index"), &rest["has_more"]), (vec![json!(3)], &json!(false)));
    }
    for (query, param) in [("state=done", "state"), ("limit=0", "limit"), ("limit=1001", "limit"), ("after=x", "after")]
    {
        server.get(&format!("{path}?{query}")).await.refused(400, param, "invalid_value");
    }
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn single_item_has_its_input_output_and_attempts() {
    let server = Server::new().await;
    let worker = server.service.start(&server.engine).await;
    let odd = r#"{"custom_id":"a\ud800","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[],"big":9007199254740993}}"#;
    let id = server.submit(&[odd.to_owned()]).await;
    server.until(&id, "completed").await;
    let answer = server.get(&format!("/v1/batches/{id}/items/0")).await;
    let text = answer.text();
    // Field report 15: the surrogate and the number come back as they were.
    assert!(text.contains(&format!("\"input\":{odd}")), "{text}");
    assert!(text.contains(r#""custom_id":"a\ud800""#), "{text}");
    assert!(text.contains(r#""output":{"id":"batch_req_"#), "{text}");
    assert!(
        text.contains(r#""last_error":null,"failed_attempts":[],"attempt_log":[{"number":1,"worker":"worker_"#),
        "{text}"
    );
    for index in ["1", "x", "-1", "99999999999999999999"] {
        server.get(&format!("/v1/batches/{id}/items/{index}")).await.refused(404, "index", "not_found");
    }
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn each_failed_try_stays_with_its_error_after_the_outcome() {
    let tries = std::sync::atomic::AtomicU32::new(0);
    let engine = ScriptedGenerate::new(move |_| match tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
        0 => Reply::Response(503, r#"{"error":{"message":"first trouble","code":"busy"}}"#.to_owned(), None),
        1 => Reply::Response(500, r#"{"error":{"message":"second trouble","code":"broken"}}"#.to_owned(), None),
        _ => Reply::Text("fine".to_owned()),
    });
    let server = Server::with(engine, |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&[line("a")]).await;
    server.until(&id, "completed").await;
    let item = server.get(&format!("/v1/batches/{id}/items/0")).await.ok();
    assert_eq!((&item["state"], &item["attempts"]), (&json!("completed"), &json!(3)));
    let tried = item["failed_attempts"].as_array().unwrap();
    let codes: Vec<_> = tried.iter().map(|tried| (&tried["number"], &tried["code"], &tried["http_status"])).collect();
    let (one, two) = (json!(1), json!(2));
    assert_eq!(codes, [(&one, &json!("busy"), &json!(503)), (&two, &json!("broken"), &json!(500))], "{item}");
    assert!(tried[0]["message"].as_str().unwrap().contains("first trouble"), "{item}");
    worker.shutdown(GRACE).await;
}

// Field report 35: the finished part can be read at once.
#[tokio::test]
async fn results_are_read_while_running_without_repeat_or_gap() {
    let server = Server::with(ScriptedGenerate::new(|_| Reply::Hold("x".to_owned())), |_| {}).await;
    let id = server.submit(&numbered_lines(6)).await;
    let path = format!("/v1/batches/{id}/results");
    let empty = server.get(&path).await;
    assert_eq!((empty.status.as_u16(), empty.header("x-incomplete"), empty.body.len()), (200, "true", 0));
    let worker = server.service.start(&server.engine).await;
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    for done in 1..=6 {
        wait::until("a request at the engine", || async {
            if server.engine.num_held() > 0 { Ok(()) } else { Err("none".to_owned()) }
        })
        .await;
        server.engine.release(1);
        let page = wait::until("its line", || async {
            let page = server.get(&format!("{path}?after={cursor}")).await;
            if page.body.is_empty() { Err(format!("{page:?}")) } else { Ok(page) }
        })
        .await;
        assert_eq!(page.header("content-type"), "application/jsonl");
        seen.extend(
            page.text().lines().map(|text| serde_json::from_str::<Value>(text).unwrap()["custom_id"].to_string()),
        );
        cursor = page.header("x-next-cursor").to_owned();
        assert_eq!(seen.len(), done);
    }
    server.until(&id, "completed").await;
    let last = server.get(&format!("{path}?after={cursor}")).await;
    assert_eq!((last.header("x-incomplete"), last.body.len()), ("false", 0));
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 6);
    let ordered = server.get(&format!("{path}?order=input&limit=4")).await;
    let rest = server.get(&format!("{path}?order=input&after={}", ordered.header("x-next-cursor"))).await;
    let published = server.get(&format!("/v1/batches/{id}")).await.ok()["output_file_id"].as_str().unwrap().to_owned();
    let published = server.get(&format!("/v1/files/{published}/content")).await.text();
    assert_eq!(format!("{}{}", ordered.text(), rest.text()), published, "the bytes are those that are published");
    for (query, param) in [("after=nonsense", "after"), ("order=random", "order"), ("limit=0", "limit")] {
        server.get(&format!("{path}?{query}")).await.refused(400, param, "invalid_value");
    }
    worker.shutdown(GRACE).await;
}

/// A completed batch of one good, one bad and two worse requests.
async fn failed_batch(server: &Server) -> String {
    let id = server.submit(&["good", "bad", "worse 1", "worse 2"].map(line)).await;
    assert_eq!(server.until(&id, "completed").await["request_counts"]["failed"], 3);
    id
}

async fn until_round(server: &Server, id: &str, round: u32) -> Value {
    wait::until("the round to end", || async {
        let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
        if batch["status"] == "completed" && batch["round"] == round { Ok(batch) } else { Err(batch.to_string()) }
    })
    .await
}

#[tokio::test]
async fn retry_runs_only_what_matches() {
    let server = Server::with(mixed(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = failed_batch(&server).await;
    let path = format!("/v1/batches/{id}/retry");
    for (body, more) in [
        (json!({"error_codes": ["worse_code"]}), 2),
        (json!({"custom_ids": ["bad"]}), 1),
        (json!({"outcomes": ["errored"], "error_codes": ["worse_code"], "custom_ids": ["worse 2", "bad"]}), 1),
        (json!({"outcomes": ["errored"], "completion_window": "1h"}), 3),
    ] {
        let before = server.engine.num_asked();
        let round = server.post(&path, body.clone()).await.ok()["round"].as_u64().unwrap();
        let batch = until_round(&server, &id, u32::try_from(round).unwrap()).await;
        assert_eq!(server.engine.num_asked() - before, more, "{body}");
        assert_eq!(batch["request_counts"], json!({"total": 4, "completed": 1, "failed": 3}));
    }
    let asked = server.engine.num_asked();
    for (body, will_run) in [
        (json!({"dry_run": true, "error_codes": ["worse_code"]}), 2),
        (json!({"dry_run": true, "error_codes": ["worse_code"], "custom_ids": ["worse 2", "bad"]}), 1),
        (json!({"dry_run": true, "new_batch": true}), 3),
    ] {
        let plan = server.post(&path, body).await.ok();
        assert_eq!(plan, json!({"object": "batch.retry_plan", "batch_id": id, "will_run": will_run}));
    }
    let unknown = server.post(&path, json!({"dry_run": true, "custom_ids": ["nobody"]})).await;
    unknown.refused(400, "custom_ids", "not_found");
    assert_eq!(server.get(&format!("/v1/batches/{id}")).await.ok()["status"], "completed", "nothing was changed");
    assert_eq!(server.engine.num_asked(), asked);
    server.post(&path, json!({"error_codes": ["other"]})).await.refused(409, Value::Null, "nothing_to_resume");
    server.post(&path, json!({"outcomes": ["expired"]})).await.refused(409, Value::Null, "nothing_to_resume");
    server.post(&path, json!({"custom_ids": ["good"]})).await.refused(409, Value::Null, "nothing_to_resume");
    server.post(&path, json!({"custom_ids": ["nobody"]})).await.refused(400, "custom_ids", "not_found");
    server.post(&path, json!({"outcomes": ["succeeded"]})).await.refused(400, "outcomes", "invalid_value");
    server.post(&path, json!({"outcomes": "errored"})).await.refused(400, "outcomes", "invalid_type");
    server.post(&path, json!({"failed": true})).await.refused(400, "failed", "unknown_parameter");
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn retry_as_new_batch_copies_the_lines_and_leaves_the_old_one_alone() {
    let server = Server::with(mixed(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = failed_batch(&server).await;
    let before = server.get(&format!("/v1/batches/{id}")).await.ok();
    let body = json!({"error_codes": ["worse_code"], "new_batch": true, "completion_window": "2h"});
    let new = server.post(&format!("/v1/batches/{id}/retry"), body).await.ok();
    assert_ne!(new["id"], before["id"]);
    assert_eq!((&new["round"], &new["completion_window"]), (&json!(1), &json!("2h")));
    let input = server.get(&format!("/v1/files/{}/content", new["input_file_id"].as_str().unwrap())).await.text();
    assert_eq!(input, format!("{}\n{}\n", line("worse 1"), line("worse 2")));
    let done = server.until(new["id"].as_str().unwrap(), "completed").await;
    assert_eq!(done["request_counts"], json!({"total": 2, "completed": 0, "failed": 2}));
    assert_eq!(server.get(&format!("/v1/batches/{id}")).await.ok(), before);
    let one = json!({"custom_ids": ["bad", "good"], "new_batch": true});
    let one = server.post(&format!("/v1/batches/{id}/retry"), one).await.ok();
    let input = server.get(&format!("/v1/files/{}/content", one["input_file_id"].as_str().unwrap())).await.text();
    assert_eq!(input, format!("{}\n", line("bad")));
    worker.shutdown(GRACE).await;
}

#[tokio::test]
async fn retry_of_a_cancelled_batch_leaves_the_others_cancelled_for_good() {
    let server = Server::with(mixed(), |_| {}).await;
    let worker = server.service.start(&server.engine).await;
    let id = server.submit(&["good", "slow 1", "slow 2"].map(line)).await;
    wait::until("the slow ones at the engine and the good one done", || async {
        let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
        let ready = server.engine.num_held() == 2 && batch["request_counts"]["completed"] == 1;
        if ready { Ok(()) } else { Err(batch.to_string()) }
    })
    .await;
    let busy = server.poke(&format!("/v1/batches/{id}/retry")).await;
    busy.refused(409, Value::Null, "batch_busy");
    server.post(&format!("/v1/batches/{id}/cancel"), json!({"mode": "now"})).await.ok();
    server.until(&id, "cancelled").await;
    let round = server.post(&format!("/v1/batches/{id}/retry"), json!({"custom_ids": ["slow 2"]})).await.ok();
    assert_eq!(round["round"], 2);
    wait::until("the selected one at the engine", || async {
        server.engine.release_all();
        let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
        if batch["status"] == "completed" { Ok(()) } else { Err(batch.to_string()) }
    })
    .await;
    let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
    let counts = json!({"processing": 0, "succeeded": 2, "errored": 0, "canceled": 1, "expired": 0});
    assert_eq!(batch["outcome_counts"], counts);
    let errors = server.get(&format!("/v1/files/{}/content", batch["error_file_id"].as_str().unwrap())).await.text();
    assert!(errors.contains("slow 1") && errors.contains("batch_cancelled") && errors.lines().count() == 1, "{errors}");
    worker.shutdown(GRACE).await;
}
