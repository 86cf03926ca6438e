//! Keys guard everything but the probes.

use axum::body::Body;
use axum::http::{Method, Request};
use overnight_api::Secret;
use overnight_testing::ScriptedGenerate;
use serde_json::Value;

use crate::server::{Answer, Server};

async fn server() -> Server {
    Server::with(ScriptedGenerate::echo(), |state| {
        state.config.api_keys = vec![Secret::new("sk-one"), Secret::new("sk-two")];
        state.config.read_only_api_keys = vec![Secret::new("sk-read")];
        state.extra = axum::Router::new().route("/ui/", axum::routing::get(|| async { "page" }));
    })
    .await
}

async fn ask(server: &Server, method: Method, path: &str, authorization: Option<&str>) -> Answer {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(value) = authorization {
        request = request.header("authorization", value);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn every_route_but_the_probes_asks_for_a_key() {
    let server = server().await;
    for path in ["/v1/files", "/v1/batches", "/v1/models", "/v1/nowhere"] {
        for wrong in
            [None, Some("Bearer sk-on"), Some("Bearer sk-one1"), Some("Bearer "), Some("sk-one"), Some("Basic sk-one")]
        {
            let answer = ask(&server, Method::GET, path, wrong).await;
            let (kind, param, code, _) = answer.error(401);
            assert_eq!(
                (kind.as_str(), param, code.as_str()),
                ("authentication_error", Value::Null, Some("invalid_api_key"))
            );
            assert_eq!(answer.header("www-authenticate"), "Bearer");
        }
    }
    for path in ["/version", "/openapi.json", "/metrics", "/ui/", "/nowhere", "/tokenize"] {
        assert_eq!(ask(&server, Method::GET, path, None).await.status, 401, "{path}");
    }
    for path in ["/health", "/ping"] {
        assert_eq!(ask(&server, Method::GET, path, None).await.status, 200, "{path}");
    }
    for right in ["Bearer sk-one", "Bearer sk-two", "bearer sk-read", "Bearer  sk-one "] {
        assert_eq!(ask(&server, Method::GET, "/v1/batches", Some(right)).await.status, 200, "{right}");
    }
    assert_eq!(ask(&server, Method::GET, "/ui/", Some("Bearer sk-one")).await.text(), "page");
}

#[tokio::test]
async fn read_only_key_may_not_write() {
    let server = server().await;
    let read = Some("Bearer sk-read");
    let batch = format!("/v1/batches/batch_{}", "0".repeat(32));
    for (method, path) in [
        (Method::POST, "/v1/files".to_owned()),
        (Method::POST, "/v1/batches".to_owned()),
        (Method::POST, format!("{batch}/cancel")),
        (Method::POST, format!("{batch}/resume")),
        (Method::DELETE, batch.clone()),
        (Method::POST, "/v1/chat/completions".to_owned()),
    ] {
        let (kind, _, code, _) = ask(&server, method, &path, read).await.error(403);
        assert_eq!((kind.as_str(), code.as_str()), ("permission_error", Some("read_only_api_key")), "{path}");
    }
    assert_eq!(ask(&server, Method::GET, &batch, read).await.status, 404);
    let validate = format!("/v1/files/file-{}/validate", "0".repeat(32));
    assert_eq!(ask(&server, Method::POST, &validate, read).await.status, 400, "validating changes nothing");
}

#[tokio::test]
async fn without_configured_keys_any_or_no_key_is_taken() {
    let server = Server::new().await;
    for authorization in [None, Some("Bearer anything"), Some("nonsense")] {
        assert_eq!(ask(&server, Method::GET, "/v1/batches", authorization).await.status, 200);
    }
}

#[tokio::test]
async fn metrics_may_be_opened_to_scrapers_and_hold_no_text_of_users() {
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.api_keys = vec![Secret::new("sk-one")];
        state.config.open_metrics = true;
        let measure = |page: &mut overnight_api::MetricsPage| page.counter("ours_total", "Ours", &[("a", "b")], 3.0);
        state.measure = Some(std::sync::Arc::new(measure));
    })
    .await;
    assert_eq!(ask(&server, Method::GET, "/version", None).await.status, 401, "nothing else is open");
    ask(&server, Method::GET, "/v1/files/file-secret-name", Some("Bearer sk-one")).await;
    let answer = ask(&server, Method::GET, "/metrics", None).await;
    assert_eq!((answer.status.as_u16(), answer.header("content-type")), (200, "text/plain; version=0.0.4"));
    let text = answer.text();
    assert!(text.contains("ours_total{a=\"b\"} 3\n"), "{text}");
    assert!(text.contains("handler=\"/v1/files/{file_id}\",method=\"GET\""), "{text}");
    assert!(text.contains("http_requests_total{handler=\"/version\",method=\"GET\",status=\"401\"} 1"), "{text}");
    assert!(!text.contains("secret-name"), "paths are told by their pattern");
}
