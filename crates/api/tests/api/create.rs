//! Create: every rule of its parameters, and idempotency.

use axum::http::Request;
use overnight_testing::service::numbered_lines;
use serde_json::{Value, json};

use crate::server::{Answer, Server, create_body, json_request};

async fn input(server: &Server) -> String {
    server.upload(numbered_lines(2).join("\n")).await
}

#[tokio::test]
async fn create_answers_200_at_once_in_validating_with_zero_counts() {
    // No worker runs, so nothing could have been validated.
    let server = Server::new().await;
    let mut body = create_body(&input(&server).await);
    body["metadata"] = json!({"b": "2", "a": "ü\u{0}"});
    body["name"] = json!("nightly");
    body["priority"] = json!(-3);
    let batch = server.post("/v1/batches", body).await.ok();
    assert_eq!(batch["status"], "validating");
    assert_eq!(batch["request_counts"], json!({"total": 0, "completed": 0, "failed": 0}));
    assert_eq!(batch["metadata"].to_string(), json!({"b": "2", "a": "ü\u{0}"}).to_string());
    assert_eq!((&batch["name"], &batch["priority"], &batch["round"]), (&json!("nightly"), &json!(-3), &json!(1)));
    assert_eq!(batch["expires_at"].as_i64().unwrap() - batch["created_at"].as_i64().unwrap(), 86_400);
    assert_eq!(batch["model"], Value::Null);
    assert!(batch["waiting_for"].as_str().unwrap().contains("no worker is alive"), "{}", batch["waiting_for"]);
}

#[tokio::test]
async fn every_rule_of_create_is_kept() {
    let server = Server::new().await;
    let input = input(&server).await;
    let other = server.post_form(&[("purpose", None, b"user_data"), ("file", Some("x.jsonl"), b"{}")]).await.ok();
    let unknown = format!("file-{}", "0".repeat(32));
    let many: serde_json::Map<String, Value> = (0..17).map(|n| (n.to_string(), json!("v"))).collect();
    let long = "k".repeat(65);
    let cases = [
        (json!({"input_file_id": null}), "input_file_id", "missing_required_parameter"),
        (json!({"input_file_id": 7}), "input_file_id", "invalid_type"),
        (json!({"input_file_id": unknown}), "input_file_id", "file_not_found"),
        (json!({"input_file_id": "nonsense"}), "input_file_id", "file_not_found"),
        (json!({"input_file_id": other["id"]}), "input_file_id", "invalid_purpose"),
        (json!({"endpoint": null}), "endpoint", "missing_required_parameter"),
        (json!({"endpoint": "/v1/embeddings"}), "endpoint", "invalid_value"),
        (json!({"endpoint": "/v1/chat/completions/"}), "endpoint", "invalid_value"),
        (json!({"completion_window": null}), "completion_window", "missing_required_parameter"),
        (json!({"completion_window": "299s"}), "completion_window", "invalid_value"),
        (json!({"completion_window": "4m"}), "completion_window", "invalid_value"),
        (json!({"completion_window": "721h"}), "completion_window", "invalid_value"),
        (json!({"metadata": []}), "metadata", "invalid_type"),
        (json!({"metadata": many}), "metadata", "invalid_value"),
        (json!({"metadata": {"k": 1}}), "metadata.k", "invalid_type"),
        (json!({"metadata": {"k": null}}), "metadata.k", "invalid_type"),
        (json!({"metadata": {"k": "v".repeat(513)}}), "metadata.k", "invalid_value"),
        (json!({"output_expires_after": 3600}), "output_expires_after", "invalid_type"),
        (json!({"output_expires_after": {"seconds": 3600}}), "output_expires_after.anchor", "invalid_type"),
        (
            json!({"output_expires_after": {"anchor": "now", "seconds": 3600}}),
            "output_expires_after.anchor",
            "invalid_value",
        ),
        (json!({"output_expires_after": {"anchor": "created_at"}}), "output_expires_after.seconds", "invalid_type"),
        (
            json!({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}),
            "output_expires_after.seconds",
            "invalid_value",
        ),
        (
            json!({"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}}),
            "output_expires_after.seconds",
            "invalid_value",
        ),
        (json!({"name": ""}), "name", "invalid_value"),
        (json!({"name": "a\u{0}b"}), "name", "invalid_value"),
        (json!({"priority": "high"}), "priority", "invalid_type"),
        (json!({"priority": 1_i64 << 40}), "priority", "invalid_type"),
        (json!({"surprise": 1}), "surprise", "unknown_parameter"),
    ];
    for (change, param, code) in cases {
        let mut body = create_body(&input);
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        server.post("/v1/batches", body).await.refused(400, param, code);
    }
    let mut body = create_body(&input);
    body["metadata"] = json!({long.clone(): "v"});
    server.post("/v1/batches", body).await.refused(400, format!("metadata.{}", &long[..64]), "invalid_value");
    assert_eq!(server.get("/v1/batches").await.ok()["data"], json!([]), "a refused create makes no batch");
}

#[tokio::test]
async fn limits_of_create_hold_at_n() {
    let server = Server::new().await;
    let mut body = create_body(&input(&server).await);
    let pairs = (0..16).map(|n| (format!("{n:0>64}"), json!("ü".repeat(512))));
    body["metadata"] = Value::Object(pairs.collect());
    body["name"] = json!("n".repeat(256));
    for window in ["5m", "30d", "24h"] {
        body["completion_window"] = json!(window);
        assert_eq!(server.post("/v1/batches", body.clone()).await.ok()["completion_window"], window);
    }
    for seconds in [3_600, 2_592_000] {
        body["output_expires_after"] = json!({"anchor": "created_at", "seconds": seconds});
        server.post("/v1/batches", body.clone()).await.ok();
    }
    body["output_expires_after"] = Value::Null;
    body["metadata"] = Value::Null;
    assert_eq!(server.post("/v1/batches", body).await.ok()["metadata"], Value::Null);
}

#[tokio::test]
async fn body_that_is_not_a_json_object_is_400() {
    let server = Server::new().await;
    for (body, code) in [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("[]", "invalid_json"),
        ("\"x\"", "invalid_json"),
        ("\u{0}", "invalid_json"),
    ] {
        server.send(json_request("/v1/batches", body)).await.refused(400, Value::Null, code);
    }
    let plain = Request::builder().method("POST").uri("/v1/batches").header("content-type", "text/plain");
    let plain = plain.body(axum::body::Body::from(create_body("x").to_string())).unwrap();
    server.send(plain).await.refused(400, Value::Null, "invalid_content_type");
}

async fn create_with_key(server: &Server, key: &str, body: &str) -> Answer {
    let mut request = json_request("/v1/batches", body.to_owned());
    request.headers_mut().insert("idempotency-key", key.parse().unwrap());
    server.send(request).await
}

#[tokio::test]
async fn one_key_and_one_set_of_parameters_make_one_batch() {
    let server = Server::new().await;
    let input = input(&server).await;
    let body = format!(
        r#"{{"input_file_id":"{input}","endpoint":"/v1/chat/completions","completion_window":"24h","metadata":{{"a":"1","b":"2"}}}}"#
    );
    let reordered = format!(
        r#"{{"metadata":{{"b":"2","a":"1"}}, "completion_window":"24h","name":null,"endpoint":"/v1/chat/completions","input_file_id":"{input}"}}"#
    );
    let first = create_with_key(&server, "key-1", &body).await.ok();
    assert_eq!(create_with_key(&server, "key-1", &reordered).await.ok()["id"], first["id"]);
    let other = body.replace("24h", "1h");
    create_with_key(&server, "key-1", &other).await.refused(409, Value::Null, "idempotency_key_reused");
    assert_ne!(create_with_key(&server, "key-2", &body).await.ok()["id"], first["id"]);
    // The first batch is found again although its input is gone by now.
    server.delete(&format!("/v1/files/{input}")).await.ok();
    assert_eq!(create_with_key(&server, "key-1", &body).await.ok()["id"], first["id"]);
    create_with_key(&server, "key-3", &body).await.refused(400, "input_file_id", "file_not_found");
}

#[tokio::test]
async fn two_creates_at_once_with_one_key_make_one_batch() {
    let server = Server::new().await;
    let body = create_body(&input(&server).await).to_string();
    let answers = futures::future::join_all((0..8).map(|_| create_with_key(&server, "same", &body))).await;
    let ids: std::collections::BTreeSet<String> =
        answers.iter().map(|answer| answer.ok()["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(server.get("/v1/batches").await.ok()["data"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn idempotency_key_has_1_to_255_characters() {
    let server = Server::new().await;
    let body = create_body(&input(&server).await).to_string();
    create_with_key(&server, &"k".repeat(255), &body).await.ok();
    create_with_key(&server, &"k".repeat(256), &body).await.refused(400, "Idempotency-Key", "invalid_value");
    create_with_key(&server, "", &body).await.refused(400, "Idempotency-Key", "invalid_value");
}
