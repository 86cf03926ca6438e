//! Completions through the local mapper: whole, streamed, and left in the middle.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http_body_util::BodyExt;
use overnight_testing::service::MODEL;
use overnight_testing::{ScriptedGenerate, wait};
use serde_json::{Value, json};

use crate::server::{Server, json_request};
use crate::words::{Words, mapper};

async fn server(words: &Words) -> Server {
    let words = Arc::new(words.clone());
    Server::with(ScriptedGenerate::echo(), |state| {
        state.generate = Some(words);
        state.mapper = Arc::new(OnceLock::from(mapper()));
    })
    .await
}

fn chat(change: Value) -> String {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10});
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    body.to_string()
}

/// The payloads of the `data:` lines.
fn payloads(text: &str) -> Vec<&str> {
    text.split("\n\n").filter(|event| !event.is_empty()).map(|event| event.strip_prefix("data: ").unwrap()).collect()
}

#[tokio::test]
async fn streamed_chat_says_what_the_whole_says_and_ends_with_done() {
    let server = server(&Words::default()).await;
    let whole = server.send(json_request("/v1/chat/completions", chat(json!({})))).await.ok();
    assert_eq!(whole["choices"][0]["message"]["content"], "w0 w1 w2 ");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let streamed = server.send(json_request("/v1/chat/completions", chat(json!({"stream": true})))).await;
    assert_eq!(streamed.status, 200);
    assert_eq!(streamed.header("content-type"), "text/event-stream; charset=utf-8");
    let text = streamed.text();
    let payloads = payloads(&text);
    assert_eq!(payloads.last(), Some(&"[DONE]"));
    let chunks: Vec<Value> =
        payloads[..payloads.len() - 1].iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect();
    let said: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, "w0 w1 w2 ");
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"]));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
    // The answer's id is that of the HTTP request.
    let request = streamed.header("x-request-id").trim_start_matches("req_");
    assert_eq!(chunks[0]["id"], format!("chatcmpl-{request}"));
}

#[tokio::test]
async fn completion_is_whole_or_streamed() {
    let server = server(&Words::default()).await;
    let body = json!({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2});
    let whole = server.post("/v1/completions", body).await.ok();
    assert_eq!(whole["object"], "text_completion");
    let texts: Vec<&str> =
        whole["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["w0 w1 ", "w0 w1 "]);
    let body = json!({"model": MODEL, "prompt": "a", "max_tokens": 2, "stream": true});
    let text = server.post("/v1/completions", body).await.text();
    assert_eq!(payloads(&text).last(), Some(&"[DONE]"));
}

#[tokio::test]
async fn refused_stream_is_an_ordinary_error_answer() {
    let server = server(&Words::default()).await;
    let cases = [
        (json!({"stream": true, "temperature": -1}), 400, json!("temperature")),
        (json!({"stream": true, "max_tokens": 0}), 400, json!("max_tokens")),
        (json!({"stream": true, "model": "other"}), 404, json!("model")),
    ];
    for (change, status, param) in cases {
        let (_, given, _, message) =
            server.send(json_request("/v1/chat/completions", chat(change))).await.error(status);
        assert_eq!(given, param, "{message}");
    }
}

#[tokio::test]
async fn client_that_leaves_in_mid_stream_cancels_its_request() {
    let words = Words::stalling();
    let server = server(&words).await;
    let request = json_request("/v1/chat/completions", chat(json!({"stream": true})));
    let response = tower::ServiceExt::oneshot(server.router.clone(), request).await.unwrap();
    let mut body = response.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.starts_with(b"data: {"), "{first:?}");
    assert_eq!(words.num_cancelled(), 0);
    drop(body);
    wait::until("the cancel to come", || async {
        if words.num_cancelled() == 1 { Ok(()) } else { Err("nothing".to_owned()) }
    })
    .await;
}

#[tokio::test]
async fn stream_that_stalls_ends_with_an_error_event() {
    let words = Words::stalling();
    let with_limit = Arc::new(words.clone());
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.generate = Some(with_limit);
        state.mapper = Arc::new(OnceLock::from(mapper()));
        state.config.online_timeout = Duration::from_millis(100);
    })
    .await;
    let text = server.send(json_request("/v1/chat/completions", chat(json!({"stream": true})))).await.text();
    let last: Value = serde_json::from_str(payloads(&text).last().unwrap()).unwrap();
    assert_eq!((&last["error"]["code"], &last["error"]["type"]), (&json!("request_timeout"), &json!("server_error")));
    assert_eq!(words.num_cancelled(), 1);
}

#[tokio::test]
async fn trouble_in_mid_stream_tells_a_code_and_the_request_id_and_no_cause() {
    let server = server(&Words::breaking()).await;
    let answer = server.send(json_request("/v1/chat/completions", chat(json!({"stream": true})))).await;
    let text = answer.text();
    assert!(text.contains("w0 "), "what was said stays: {text}");
    let last: Value = serde_json::from_str(payloads(&text).last().unwrap()).unwrap();
    assert_eq!(last["error"]["type"], "server_error", "{text}");
    assert!(last["error"]["code"].is_string(), "{text}");
    assert!(last["error"]["message"].as_str().unwrap().contains(answer.header("x-request-id")), "{text}");
    assert!(!text.contains("panicked") && !text.contains("/secret"), "{text}");
}

#[tokio::test]
async fn tokens_of_a_text_and_back() {
    let server = server(&Words::default()).await;
    let tokens = server.post("/tokenize", json!({"prompt": "the hand", "add_special_tokens": false})).await.ok();
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    assert_eq!((&tokens["max_model_len"], &tokens["token_strs"]), (&json!(512), &Value::Null));
    let text = server.post("/detokenize", json!({"tokens": tokens["tokens"], "model": MODEL})).await.ok();
    assert_eq!(text, json!({"prompt": "the hand"}));
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "return_token_strs": true});
    let chat = server.post("/tokenize", chat).await.ok();
    assert_eq!(chat["token_strs"].as_array().unwrap().len(), chat["tokens"].as_array().unwrap().len());
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": "x", "messages": []}), "prompt"),
        ("/tokenize", json!({"prompt": "x", "surprise": 1}), "surprise"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": ["x"]}), "tokens"),
        ("/detokenize", json!({"tokens": [1_000_000]}), "tokens"),
    ] {
        let refused = server.post(path, body).await;
        assert_eq!(refused.status, 400, "{path} {param}: {refused:?}");
        assert_eq!(refused.header("content-type"), "application/problem+json");
    }
    let other = server.post("/tokenize", json!({"model": "other", "prompt": "x"})).await;
    assert_eq!((other.status.as_u16(), &other.json()["code"]), (404, &json!("model_not_found")));
}
