//! Online requests through the same mapper and engine as jobs.

use std::time::Duration;

use axum::http::Request;
use overnight_testing::service::body_saying;
use overnight_testing::{Reply, ScriptedGenerate, wait};
use overnight_worker::generate::{EngineState, Failure};
use serde_json::{Value, json};

use crate::server::{Server, json_request};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn chat_answer_is_the_engines() {
    let server = Server::new().await;
    let answer = server.send(json_request(CHAT, body_saying("hello"))).await;
    let body = answer.ok();
    assert!(body["choices"][0]["message"]["content"].is_string(), "{body}");
    assert_eq!(answer.header("content-type"), "application/json");
}

#[tokio::test]
async fn refusal_of_the_engine_passes_and_its_trouble_does_not() {
    let server = Server::with(
        ScriptedGenerate::new(|ask| match ask.text() {
            text if text.contains("refused") => Reply::Response(400, r#"{"error":{"message":"too long","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}"#.to_owned(), None),
            text if text.contains("trouble") => Reply::Failed(Failure::EngineTrouble { message: "secret of the device".to_owned() }),
            text if text.contains("inside") => Reply::Response(500, r#"{"error":{"message":"secret stack trace"}}"#.to_owned(), None),
            _ => Reply::Failed(Failure::Timeout),
        }),
        |_| {},
    )
    .await;
    let refused = server.send(json_request(CHAT, body_saying("refused"))).await;
    refused.refused(400, "messages", "context_length_exceeded");
    let trouble = server.send(json_request(CHAT, body_saying("trouble"))).await;
    assert_eq!(trouble.error(503).2, "engine_unavailable");
    assert_eq!(trouble.header("retry-after"), "5");
    let inside = server.send(json_request(CHAT, body_saying("inside"))).await;
    assert!(!trouble.text().contains("secret") && !inside.text().contains("secret"), "{inside:?}");
    inside.error(500);
    assert_eq!(server.send(json_request(CHAT, body_saying("late"))).await.error(504).2, "request_timeout");
}

#[tokio::test]
async fn client_that_leaves_cancels_its_request() {
    let server = Server::with(ScriptedGenerate::new(|_| Reply::Silence), |_| {}).await;
    let router = server.router.clone();
    let waiting = tokio::spawn(tower::ServiceExt::oneshot(router, json_request(CHAT, body_saying("x"))));
    wait::until("the request to be at the engine", || async {
        if server.engine.num_asked() == 1 { Ok(()) } else { Err("nothing".to_owned()) }
    })
    .await;
    waiting.abort();
    wait::until("the cancel to come", || async {
        if server.engine.num_cancelled() == 1 { Ok(()) } else { Err("nothing".to_owned()) }
    })
    .await;
}

#[tokio::test]
async fn silent_engine_ends_in_504_and_a_cancel() {
    let server = Server::with(ScriptedGenerate::new(|_| Reply::Silence), |state| {
        state.config.online_timeout = Duration::from_millis(50);
    })
    .await;
    assert_eq!(server.send(json_request(CHAT, body_saying("x"))).await.error(504).2, "request_timeout");
    assert_eq!(server.engine.num_cancelled(), 1);
}

#[tokio::test]
async fn more_online_requests_than_allowed_are_429_with_retry_after() {
    let server = Server::with(ScriptedGenerate::new(|_| Reply::Hold("x".to_owned())), |state| {
        state.config.online_requests_max = 2
    })
    .await;
    let ask = || tokio::spawn(tower::ServiceExt::oneshot(server.router.clone(), json_request(CHAT, body_saying("x"))));
    let running = [ask(), ask()];
    wait::until("two to be at the engine", || async {
        let held = server.engine.num_held();
        if held == 2 { Ok(()) } else { Err(held.to_string()) }
    })
    .await;
    let third = server.send(json_request(CHAT, body_saying("x"))).await;
    let message = third.refused(429, Value::Null, "rate_limit_exceeded");
    assert!(message.contains("api.online_requests_max"), "{message}");
    assert_eq!((third.error(429).0.as_str(), third.header("retry-after")), ("rate_limit_error", "5"));
    server.engine.release_all();
    for answer in running {
        assert_eq!(answer.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test]
async fn engine_that_starts_or_is_poisoned_is_503() {
    let server = Server::new().await;
    for (state, code) in [
        (EngineState::Starting("loading".to_owned()), "engine_starting"),
        (EngineState::Poisoned("lost".to_owned()), "engine_poisoned"),
        (EngineState::Stalled("hung".to_owned()), "engine_stalled"),
    ] {
        server.engine.set_state(state);
        assert_eq!(server.send(json_request(CHAT, body_saying("x"))).await.error(503).2, code);
    }
}

#[tokio::test]
async fn bad_bodies_are_400() {
    let server = Server::new().await;
    for body in ["{", "[]", "{}", r#"{"model":1}"#] {
        assert_eq!(server.send(json_request(CHAT, body)).await.error(400).0, "invalid_request_error", "{body}");
    }
    let plain = Request::builder().method("POST").uri(CHAT).body(axum::body::Body::from("{}")).unwrap();
    server.send(plain).await.refused(400, Value::Null, "invalid_content_type");
}

#[tokio::test]
async fn models_are_those_that_something_answers_to() {
    let server = Server::with(ScriptedGenerate::echo().serving(&["b/with-slash", "a"], 4), |_| {}).await;
    let page = server.get("/v1/models").await.ok();
    let ids: Vec<&str> = page["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "b/with-slash", "m"]);
    assert_eq!(page["data"][0]["object"], "model");
    assert_eq!(server.get("/v1/models/b/with-slash").await.ok()["id"], "b/with-slash");
    let message = server.get("/v1/models/c").await.refused(404, "model", "model_not_found");
    assert!(message.contains("a, b/with-slash, m"), "{message}");
}

#[tokio::test]
async fn tokenizer_of_a_remote_engine_is_not_here() {
    let server = Server::new().await;
    for (path, body) in [("/tokenize", json!({"prompt": "x"})), ("/detokenize", json!({"tokens": [1]}))] {
        assert_eq!(server.post(path, body).await.json()["code"], "no_engine");
    }
}

// Decision 0041.
#[tokio::test]
async fn stream_of_a_remote_engine_is_refused_by_name() {
    let server = Server::new().await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true});
    let message = server.post("/v1/chat/completions", body).await.refused(400, "stream", "stream_not_supported");
    assert!(message.contains("leave stream out"), "{message}");
    assert_eq!(server.engine.num_asked(), 0);
}
