//! `POST /v1/files/{id}/validate`: what a batch would say, and what its requests would.

use std::sync::{Arc, OnceLock};

use overnight_testing::ScriptedGenerate;
use overnight_testing::service::{line, numbered_lines};
use serde_json::json;

use crate::server::Server;

#[tokio::test]
async fn valid_file_validates_without_making_a_batch() {
    let server = Server::new().await;
    let input = server.upload(numbered_lines(3).join("\n")).await;
    let path = format!("/v1/files/{input}/validate");
    let report = server.post(&path, json!({"endpoint": "/v1/chat/completions"})).await.ok();
    assert_eq!(
        (&report["valid"], &report["requests"], &report["errors"]["data"]),
        (&json!(true), &json!(3), &json!([]))
    );
    assert_eq!(server.get("/v1/batches").await.ok()["data"], json!([]));
    let other = server.post(&path, json!({"endpoint": "/v1/completions"})).await.ok();
    assert_eq!((&other["valid"], &other["errors"]["counts"]["url_mismatch"]), (&json!(false), &json!(3)));
    server.post(&path, json!({})).await.refused(400, "endpoint", "missing_required_parameter");
}

// Decision 0008: a misspelt parameter is seen before anything runs.
#[tokio::test]
async fn bodies_that_would_be_refused_are_told_by_validate() {
    let faulty = line("b").replace("\"messages\"", "\"temperture\":1,\"messages\"");
    let lines = [line("a"), String::new(), faulty].join("\n");
    // Without a model: what every model would refuse.
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.mapper = Arc::new(OnceLock::new());
        state.checks_bodies = true;
    })
    .await;
    let path = format!("/v1/files/{}/validate", server.upload(&lines).await);
    let report = server.post(&path, json!({"endpoint": "/v1/chat/completions"})).await.ok();
    assert_eq!((&report["valid"], &report["errors"]["total"]), (&json!(false), &json!(0)), "{report}");
    let found = &report["body_errors"]["data"][0];
    assert_eq!(
        (&found["line"], &found["code"], &found["param"]),
        (&json!(3), &json!("unknown_parameter"), &json!("temperture"))
    );
    assert_eq!(report["body_errors"]["total"], 1);
    assert!(report["unchecked"].as_str().unwrap().contains("no model is loaded"), "{report}");
    // A remote engine takes bodies as they are.
    let server = Server::new().await;
    let path = format!("/v1/files/{}/validate", server.upload(&lines).await);
    let report = server.post(&path, json!({"endpoint": "/v1/chat/completions"})).await.ok();
    assert_eq!((&report["valid"], &report["body_errors"]["total"]), (&json!(true), &json!(0)), "{report}");
    assert!(report["unchecked"].as_str().unwrap().contains("another server"), "{report}");
}
