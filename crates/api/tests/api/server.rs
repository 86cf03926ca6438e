//! A server in this process, asked without a socket; and with one where a test needs it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use bytes::Bytes;
use http_body_util::BodyExt;
use overnight_api::{ApiConfig, ApiState, router};
use overnight_blobs::{ObjectName, Prefix};
use overnight_testing::service::MODEL;
use overnight_testing::{ScriptedGenerate, TestService, wait};
use overnight_worker::generate::Generate;
use overnight_worker::mapper::Mapper;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// A service with its router.
pub(crate) struct Server {
    pub(crate) service: TestService,
    pub(crate) engine: ScriptedGenerate,
    pub(crate) draining: CancellationToken,
    pub(crate) router: Router,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no header {name}: {self:?}")).to_str().unwrap()
    }

    /// Asserts 200 and gives the body.
    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{self:?}");
        self.json()
    }

    /// Asserts the four-key error of a `/v1` route and gives `(type, param, code, message)`.
    #[track_caller]
    pub(crate) fn error(&self, status: u16) -> (String, Value, Value, String) {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        assert!(self.header("x-request-id").starts_with("req_"));
        let body = self.json();
        let error = body["error"].as_object().unwrap_or_else(|| panic!("no error object: {self:?}"));
        assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        assert_eq!(body.as_object().unwrap().len(), 1);
        let text = |key: &str| error[key].as_str().unwrap().to_owned();
        (text("type"), error["param"].clone(), error["code"].clone(), text("message"))
    }

    /// Asserts the error's status, param and code.
    #[track_caller]
    pub(crate) fn refused(&self, status: u16, param: impl Into<Value>, code: &str) -> String {
        let (_, given_param, given_code, message) = self.error(status);
        assert_eq!((given_param, given_code), (param.into(), Value::from(code)), "{message}");
        message
    }
}

impl Server {
    /// With default settings, no keys, and an engine that echoes.
    pub(crate) async fn new() -> Self {
        Self::with(ScriptedGenerate::echo(), |_| {}).await
    }

    /// With this engine and the state changed before the start.
    pub(crate) async fn with(engine: ScriptedGenerate, change: impl FnOnce(&mut ApiState)) -> Self {
        let service = TestService::new().await;
        let draining = CancellationToken::new();
        let generate: Arc<dyn Generate> = Arc::new(engine.clone());
        let mut state = ApiState {
            store: Arc::new(service.store.clone()),
            blobs: service.blobs.clone(),
            generate: Some(generate),
            mapper: Arc::new(OnceLock::from(Mapper::remote(None))),
            checks_bodies: false,
            config: ApiConfig { events_poll_every: Duration::from_millis(10), ..ApiConfig::default() },
            limits: service.limits.clone(),
            cancel_drain: Duration::from_secs(600),
            models: vec![MODEL.to_owned()],
            version: "1.2.3".to_owned(),
            draining: draining.clone(),
            free_disk: None,
            measure: None,
            extra: Router::new(),
        };
        change(&mut state);
        Self { service, engine, draining, router: router(state).expect("the settings are valid") }
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.expect("the router does not fail");
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("the body comes whole").to_bytes();
        assert!(parts.headers.contains_key("x-request-id"), "every answer carries X-Request-Id");
        Answer { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(request(Method::GET, path, Body::empty())).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        self.send(request(Method::DELETE, path, Body::empty())).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(json_request(path, body.to_string())).await
    }

    /// POST without a body.
    pub(crate) async fn poke(&self, path: &str) -> Answer {
        self.send(request(Method::POST, path, Body::empty())).await
    }

    pub(crate) async fn post_form(&self, parts: &[(&str, Option<&str>, &[u8])]) -> Answer {
        self.send(form_request(form(parts))).await
    }

    /// Uploads a batch input and gives its id.
    pub(crate) async fn upload(&self, content: impl AsRef<[u8]>) -> String {
        let parts = [("purpose", None, b"batch".as_slice()), ("file", Some("in.jsonl"), content.as_ref())];
        self.post_form(&parts).await.ok()["id"].as_str().unwrap().to_owned()
    }

    /// Uploads these lines, creates a batch of them and gives its id.
    pub(crate) async fn submit(&self, lines: &[String]) -> String {
        let input = self.upload(lines.iter().map(|line| format!("{line}\n")).collect::<String>()).await;
        self.create(&input).await.ok()["id"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn create(&self, input: &str) -> Answer {
        self.post("/v1/batches", create_body(input)).await
    }

    /// Waits until the batch has this status.
    pub(crate) async fn until(&self, id: &str, status: &str) -> Value {
        wait::until(&format!("{id} to be {status}"), || async {
            let batch = self.get(&format!("/v1/batches/{id}")).await.ok();
            if batch["status"] == status { Ok(batch) } else { Err(batch.to_string()) }
        })
        .await
    }

    /// Asserts that no file has a row, an object, or a leftover on disk.
    pub(crate) async fn assert_no_file(&self) {
        assert_eq!(self.get("/v1/files").await.ok()["data"], json!([]));
        let mut objects = self.service.blobs.list(Prefix::All);
        while let Some(object) = futures::StreamExt::next(&mut objects).await {
            let object = object.expect("the listing works");
            assert!(!matches!(object.name, ObjectName::File(_)), "an object is left: {object:?}");
        }
        assert_eq!(files_under(&self.service.objects_dir()), Vec::<std::path::PathBuf>::new());
    }

    /// Serves on a free port of this machine until the test ends.
    pub(crate) async fn listen(&self) -> std::net::SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("a bound socket has an address");
        let router = self.router.clone();
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }
}

/// Every plain file below a folder.
pub(crate) fn files_under(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten() {
            let entry = entry.unwrap();
            match entry.file_type().unwrap().is_dir() {
                true => folders.push(entry.path()),
                false if entry.file_name() == ".overnight-objects" => {}
                false => found.push(entry.path()),
            }
        }
    }
    found
}

pub(crate) fn request(method: Method, path: &str, body: Body) -> Request<Body> {
    Request::builder().method(method).uri(path).body(body).unwrap()
}

pub(crate) fn json_request(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::builder()
        .method(Method::POST)
        .uri(path)
        .header("content-type", "application/json")
        .body(body.into())
        .unwrap()
}

pub(crate) const BOUNDARY: &str = "----boundary-of-the-test";

pub(crate) fn form_request(body: impl Into<Body>) -> Request<Body> {
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    Request::builder()
        .method(Method::POST)
        .uri("/v1/files")
        .header("content-type", content_type)
        .body(body.into())
        .unwrap()
}

/// A form of (name, file name, content).
pub(crate) fn form(parts: &[(&str, Option<&str>, &[u8])]) -> Vec<u8> {
    let mut form = Vec::new();
    for (name, filename, content) in parts {
        form.extend_from_slice(format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"").as_bytes());
        if let Some(filename) = filename {
            form.extend_from_slice(format!("; filename=\"{filename}\"").as_bytes());
        }
        form.extend_from_slice(b"\r\n\r\n");
        form.extend_from_slice(content);
        form.extend_from_slice(b"\r\n");
    }
    form.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    form
}

pub(crate) fn create_body(input: &str) -> Value {
    json!({"input_file_id": input, "endpoint": "/v1/chat/completions", "completion_window": "24h"})
}
