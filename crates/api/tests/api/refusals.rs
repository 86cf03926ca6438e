//! Error forms: OpenAI's under `/v1`, problem JSON elsewhere; 404, 405, 5xx, draining.

use axum::body::Body;
use axum::http::Method;
use overnight_testing::{Failing, ScriptedGenerate};
use overnight_worker::generate::EngineState;
use serde_json::Value;

use crate::server::{Server, json_request, request};

#[tokio::test]
async fn unknown_route_and_wrong_method_have_the_form_of_their_place() {
    let server = Server::new().await;
    server.get("/v1/nowhere").await.refused(404, Value::Null, "unknown_route");
    server.get("/v1").await.refused(404, Value::Null, "unknown_route");
    let answer = server.send(request(Method::PUT, "/v1/batches", Body::empty())).await;
    answer.refused(405, Value::Null, "method_not_allowed");
    assert!(answer.header("allow").contains("POST"), "{}", answer.header("allow"));
    for (answer, status, code) in [
        (server.get("/nowhere").await, 404, "unknown_route"),
        (server.poke("/version").await, 405, "method_not_allowed"),
    ] {
        assert_eq!(answer.status.as_u16(), status);
        assert_eq!(answer.header("content-type"), "application/problem+json");
        let problem = answer.json();
        assert_eq!((&problem["status"], &problem["code"]), (&status.into(), &code.into()));
        assert_eq!(problem["request_id"], answer.header("x-request-id"));
    }
}

#[tokio::test]
async fn unknown_ids_are_404_on_every_route() {
    let server = Server::new().await;
    for id in [
        format!("batch_{}", "0".repeat(32)),
        "batch_short".to_owned(),
        format!("file-{}", "0".repeat(32)),
        "%ff".to_owned(),
    ] {
        let path = format!("/v1/batches/{id}");
        assert_eq!(
            server.get(&path).await.error(if id == "%ff" { 400 } else { 404 }).0,
            "invalid_request_error",
            "{id}"
        );
        if id != "%ff" {
            server.delete(&path).await.refused(404, "id", "not_found");
            for verb in ["cancel", "pause", "resume"] {
                server.poke(&format!("{path}/{verb}")).await.refused(404, "id", "not_found");
            }
            server.get(&format!("{path}/events")).await.refused(404, "id", "not_found");
        }
    }
}

#[tokio::test]
async fn verbs_refuse_what_they_do_not_know() {
    let server = Server::new().await;
    let id = server.submit(&overnight_testing::service::numbered_lines(1)).await;
    let path = format!("/v1/batches/{id}");
    server.send(json_request(&format!("{path}/cancel"), r#"{"mode":"later"}"#)).await.refused(
        400,
        "mode",
        "invalid_value",
    );
    server.send(json_request(&format!("{path}/cancel"), r#"{"modus":"now"}"#)).await.refused(
        400,
        "modus",
        "unknown_parameter",
    );
    server.send(json_request(&format!("{path}/pause"), r#"{"x":1}"#)).await.refused(400, "x", "unknown_parameter");
    let resume = server.send(json_request(&format!("{path}/resume"), r#"{"completion_window":"1s"}"#)).await;
    resume.refused(400, "completion_window", "invalid_value");
    server.delete(&path).await.refused(409, Value::Null, "batch_not_ended");
}

#[tokio::test]
async fn trouble_of_the_database_is_503_without_a_word_of_the_inside() {
    let server = Server::new().await;
    server.service.store.fail("list_jobs", 0, 1, Failing::Before);
    let answer = server.get("/v1/batches").await;
    let (kind, _, code, message) = answer.error(503);
    assert_eq!((kind.as_str(), code.as_str()), ("server_error", Some("database_unavailable")));
    assert_eq!(message, "the server's database does not answer; try again");
    assert!(answer.header("retry-after").parse::<u32>().unwrap() >= 1);
    server.get("/v1/batches").await.ok();
}

// Field report 65: a database that hangs must not hang the client.
#[tokio::test]
async fn database_that_never_answers_ends_in_503_within_the_limit() {
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.request_timeout = std::time::Duration::from_secs(1);
    })
    .await;
    server.service.store.fail("list_jobs", 0, 1, Failing::HangBefore);
    assert_eq!(server.get("/v1/batches").await.error(503).2, "request_timeout");
}

#[tokio::test]
async fn oversized_and_unfinished_json_bodies_are_refused() {
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.body_bytes_max = 1_024;
        state.config.body_timeout = std::time::Duration::from_secs(1);
    })
    .await;
    let message =
        server.send(json_request("/v1/batches", "x".repeat(1_025))).await.refused(413, Value::Null, "too_large");
    assert!(message.contains("1024") && message.contains("api.body_bytes_max"), "{message}");
    let silent = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
    server.send(json_request("/v1/batches", silent)).await.refused(408, Value::Null, "body_timeout");
}

#[tokio::test]
async fn draining_server_takes_nothing_new_and_still_answers() {
    let server = Server::new().await;
    let id = server.submit(&overnight_testing::service::numbered_lines(1)).await;
    server.draining.cancel();
    for answer in [server.create("x").await, server.poke(&format!("/v1/batches/{id}/cancel")).await] {
        let (_, _, code, message) = answer.error(503);
        assert_eq!(code, "draining");
        assert!(message.contains("stopping") && message.contains("try again"), "{message}");
        assert_eq!(answer.header("retry-after"), "5");
    }
    server.get(&format!("/v1/batches/{id}")).await.ok();
    assert_eq!(server.get("/health").await.status, 503);
}

#[tokio::test]
async fn health_is_green_only_when_the_engine_can_answer() {
    let server = Server::new().await;
    let health = server.get("/health").await.ok();
    assert_eq!((&health["engine"], &health["database"]), (&"ready".into(), &"sqlite".into()));
    for (state, code) in [
        (EngineState::Starting("loading weights".to_owned()), "engine_starting"),
        (EngineState::Poisoned("device lost".to_owned()), "engine_poisoned"),
        (EngineState::Stalled("no step has ended for 2 min".to_owned()), "engine_stalled"),
    ] {
        server.engine.set_state(state);
        for path in ["/health", "/ping"] {
            let answer = server.get(path).await;
            assert_eq!((answer.status.as_u16(), answer.json()["code"].as_str()), (503, Some(code)));
        }
    }
    server.engine.set_state(EngineState::Ready);
    server.get("/health").await.ok();
    assert_eq!(server.get("/version").await.ok(), serde_json::json!({"version": "1.2.3"}));
}

#[tokio::test]
async fn role_without_engine_says_so_and_is_healthy() {
    let server = Server::with(ScriptedGenerate::echo(), |state| state.generate = None).await;
    assert_eq!(server.get("/health").await.ok()["engine"], "none");
    let chat = server.send(json_request("/v1/chat/completions", "{}")).await;
    chat.refused(404, Value::Null, "no_engine");
}

#[tokio::test]
async fn routes_that_are_not_built_say_so() {
    let server = Server::new().await;
    for path in ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses"] {
        let message = server.send(json_request(path, "{}")).await.refused(404, Value::Null, "not_built");
        assert!(message.contains(path), "{message}");
    }
    assert_eq!(server.send(json_request("/rerank", "{}")).await.json()["code"], "not_built");
}

#[tokio::test]
async fn document_of_the_routes_is_served() {
    let server = Server::new().await;
    let document = server.get("/openapi.json").await.ok();
    assert_eq!(document["openapi"], "3.1.0");
    let id = server.submit(&overnight_testing::service::numbered_lines(1)).await;
    let batch = server.get(&format!("/v1/batches/{id}")).await.ok();
    let described = document["components"]["schemas"]["Batch"]["properties"].as_object().unwrap();
    assert_eq!(described.keys().collect::<Vec<_>>(), batch.as_object().unwrap().keys().collect::<Vec<_>>());
}

#[tokio::test]
async fn panic_of_a_handler_is_500_and_the_server_goes_on() {
    async fn boom() -> &'static str {
        panic!("secret of the inside")
    }
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.extra = axum::Router::new().route("/v1/boom", axum::routing::get(boom));
    })
    .await;
    let answer = server.get("/v1/boom").await;
    assert_eq!(answer.error(500).2, "internal_error");
    assert!(!answer.text().contains("secret"), "{answer:?}");
    server.get("/v1/batches").await.ok();
}
