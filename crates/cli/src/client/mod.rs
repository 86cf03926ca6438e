//! The REST client: one retry layer with a bound, errors in the CLI's form.
//!
//! A call is tried again only when the server says that it did nothing (429, 503),
//! when a gateway failed (502, 504), or when the connection broke on a call that
//! may be repeated. A server that refuses the connection is reported at once, but for
//! [`Client::wait_for_start`].

pub(crate) mod download;
pub(crate) mod ids;
pub(crate) mod wait;

use std::path::Path;
use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::Value;

use crate::args::Globals;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::{App, environment};

/// Tries of one call, the first included.
const TRIES_MAX: u32 = 4;
/// Longest pause between tries, whatever `Retry-After` says.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(20);
/// A server that is there answers its connection within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// No byte for this long means that the connection is dead.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

/// Longest that a look at the server's health may take.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// A server of this machine that refuses the connection may be starting: whoever waits for
/// a batch anyway waits this long for it.
const START_MAX: Duration = Duration::from_secs(10);
const START_LOOK_EVERY: Duration = Duration::from_millis(200);

/// A server and how to talk to it.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    key: Option<String>,
}

impl Client {
    /// From `--server`, else the address of `[api]`; the key from file or environment.
    pub(crate) fn new(globals: &Globals) -> Result<Self> {
        let base = match &globals.server {
            Some(url) => url.trim_end_matches('/').to_owned(),
            None => crate::config::server_address(globals)?,
        };
        let base = if base.contains("://") { base } else { format!("http://{base}") };
        if !reqwest::Url::parse(&base).is_ok_and(|url| matches!(url.scheme(), "http" | "https")) {
            return Err(Failure::usage(format!("not an address of a server: {base}"))
                .hint("give --server or BATCH_SERVER as http://HOST:PORT"));
        }
        Self::at(base, api_key(globals)?)
    }

    /// A client of a known address.
    pub(crate) fn at(base: String, key: Option<String>) -> Result<Self> {
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .user_agent(concat!("batch/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|err| Failure::from_error("set up the HTTP client", &err))?;
        Ok(Self { http, base, key })
    }

    /// The server's address.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Waits for a server of this machine that was started a moment ago (`batch serve &`) and
    /// does not listen yet. Any answer will do, and a server elsewhere is not waited for.
    pub(crate) async fn wait_for_start(&self, app: &App) -> Result {
        let host = reqwest::Url::parse(&self.base).ok().and_then(|url| url.host_str().map(str::to_owned));
        let local = host.is_some_and(|host| matches!(host.as_str(), "localhost" | "127.0.0.1" | "[::1]"));
        let limit = app.globals.timeout.map_or(START_MAX, |limit| limit.min(START_MAX));
        let start = tokio::time::Instant::now();
        loop {
            let sent = self.request(Method::GET, "/ping").timeout(LOOK_TIMEOUT).send().await;
            match sent {
                Err(err) if local && err.is_connect() && start.elapsed() < limit => {}
                _ => return Ok(()),
            }
            if start.elapsed() < START_LOOK_EVERY {
                app.ui.say(format!("waiting for a server at {}, for up to {}", self.base, human::duration(limit)));
            }
            tokio::time::sleep(START_LOOK_EVERY).await;
        }
    }

    /// `GET path` as JSON.
    pub(crate) async fn get(&self, path: &str, query: &[(&str, String)]) -> Result<Value> {
        let response = self.send(true, || self.request(Method::GET, path).query(query)).await?;
        self.json(response).await
    }

    /// How full the KV cache of the server's engine is, 0 to 1; `None` where it has none
    /// or does not say. One look, because what hangs on it is an ornament.
    pub(crate) async fn kv_cache_usage(&self) -> Option<f64> {
        let sent = self.request(Method::GET, "/health").timeout(LOOK_TIMEOUT).send().await.ok()?;
        let health: Value = serde_json::from_slice(&sent.bytes().await.ok()?).ok()?;
        health["kv_cache_usage"].as_f64()
    }

    /// `POST path` with a JSON body. With an idempotency key it may be repeated.
    pub(crate) async fn post(&self, path: &str, body: &Value, idempotency_key: Option<&str>) -> Result<Value> {
        let build = || {
            let request = self.request(Method::POST, path).json(body);
            match idempotency_key {
                Some(key) => request.header("Idempotency-Key", key),
                None => request,
            }
        };
        let response = self.send(idempotency_key.is_some(), build).await?;
        self.json(response).await
    }

    /// `DELETE path`.
    pub(crate) async fn delete(&self, path: &str) -> Result<Value> {
        let response = self.send(true, || self.request(Method::DELETE, path)).await?;
        self.json(response).await
    }

    /// `GET path` as a stream of bytes.
    pub(crate) async fn stream(&self, path: &str, query: &[(&str, String)], from_byte: u64) -> Result<Response> {
        let build = || {
            let request = self.request(Method::GET, path).query(query);
            if from_byte > 0 { request.header("Range", format!("bytes={from_byte}-")) } else { request }
        };
        self.send(true, build).await
    }

    /// Uploads a file, streamed from disk; a broken connection starts it over.
    pub(crate) async fn upload(&self, path: &Path, filename: &str, purpose: &str) -> Result<Value> {
        let mut tries = 0;
        loop {
            tries += 1;
            let file = tokio::fs::File::open(path)
                .await
                .map_err(|err| Failure::new(Exit::NotFound, format!("could not read {}: {err}", path.display())))?;
            let size = file.metadata().await?.len();
            let part = reqwest::multipart::Part::stream_with_length(reqwest::Body::from(file), size)
                .file_name(filename.to_owned());
            let form = reqwest::multipart::Form::new().text("purpose", purpose.to_owned()).part("file", part);
            let sent = self.request(Method::POST, "/v1/files").multipart(form).send().await;
            match self.judge(sent, true, tries).await? {
                Verdict::Answer(response) => return self.json(response).await,
                Verdict::Again(pause) => tokio::time::sleep(pause).await,
            }
        }
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn send(&self, may_repeat: bool, build: impl Fn() -> RequestBuilder) -> Result<Response> {
        let mut tries = 0;
        loop {
            tries += 1;
            let sent = build().send().await;
            match self.judge(sent, may_repeat, tries).await? {
                Verdict::Answer(response) => return Ok(response),
                Verdict::Again(pause) => tokio::time::sleep(pause).await,
            }
        }
    }

    /// Takes an answer, asks for another try, or fails.
    async fn judge(&self, sent: reqwest::Result<Response>, may_repeat: bool, tries: u32) -> Result<Verdict> {
        let pause = Duration::from_millis(250) * 2u32.pow(tries.min(6));
        match sent {
            Ok(response) if response.status().is_success() => Ok(Verdict::Answer(response)),
            Ok(response) => {
                let did_nothing =
                    matches!(response.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
                let gateway = matches!(response.status(), StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT);
                if tries < TRIES_MAX && (did_nothing || gateway && may_repeat) {
                    let asked = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
                    let asked = asked.and_then(|text| text.parse().ok()).map(Duration::from_secs);
                    return Ok(Verdict::Again(asked.unwrap_or(pause).min(RETRY_PAUSE_MAX)));
                }
                Err(refusal(response).await)
            }
            Err(err) if err.is_connect() || !may_repeat || tries >= TRIES_MAX || err.is_builder() => {
                Err(self.unreachable(&err))
            }
            Err(_) => Ok(Verdict::Again(pause)),
        }
    }

    async fn json(&self, response: Response) -> Result<Value> {
        let request_id = header(&response, "x-request-id");
        let bytes = response.bytes().await.map_err(|err| self.unreachable(&err))?;
        serde_json::from_slice(&bytes).map_err(|_| {
            Failure::new(Exit::Failure, format!("{} answered something that is not JSON", self.base))
                .request_id(request_id)
                .hint("is it an overnight server? look at --server and BATCH_SERVER")
        })
    }

    fn unreachable(&self, err: &reqwest::Error) -> Failure {
        let mut cause: &dyn std::error::Error = err;
        while let Some(source) = cause.source() {
            cause = source;
        }
        Failure::new(Exit::Unreachable, format!("server not reachable at {}: {cause}", self.base))
            .hint("start one with `batch serve --model M`, or run a file without a server: `batch run IN.jsonl -o OUT.jsonl --model M`")
    }
}

enum Verdict {
    Answer(Response),
    Again(Duration),
}

fn header(response: &Response, name: &str) -> Option<String> {
    response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Turns a non-2xx answer into a failure with the matching exit code.
async fn refusal(response: Response) -> Failure {
    let status = response.status();
    let (request_id, retry_after) = (header(&response, "x-request-id"), header(&response, "retry-after"));
    let body = response.bytes().await.unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let error = &body["error"];
    let message = error["message"].as_str().or_else(|| body["detail"].as_str()).unwrap_or("no reason was given");
    // It stands on a line of its own.
    let message = match &request_id {
        Some(id) => message.strip_suffix(&format!("; request id: {id}")).unwrap_or(message),
        None => message,
    };
    let exit = match status.as_u16() {
        401 | 403 => Exit::Auth,
        404 => Exit::NotFound,
        400 | 413 | 415 | 422 => Exit::InvalidInput,
        _ => Exit::Failure,
    };
    let code = error["code"].as_str().or_else(|| body["code"].as_str());
    let in_words = code.map_or(String::new(), |code| format!(" {code}"));
    let mut failure = Failure::new(exit, format!("the server answered {}{in_words}: {message}", status.as_u16()))
        .request_id(request_id);
    if let Some(code) = code {
        failure = failure.code(code);
    }
    if let Some(param) = error["param"].as_str() {
        failure = failure.note(format!("= parameter: {param}"));
    }
    let did_nothing = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    if status.is_client_error() || did_nothing {
        failure = failure.refusal();
    }
    match exit {
        Exit::Auth => failure.hint("give the key with --api-key-file PATH or BATCH_API_KEY"),
        _ if did_nothing => {
            let when = retry_after.and_then(|text| text.parse().ok()).map(Duration::from_secs);
            let when = when.map_or("later".to_owned(), |after| format!("in {}", human::duration(after)));
            failure.hint(format!("it passes, and nothing was done: the same command may succeed {when}"))
        }
        _ => failure,
    }
}

fn api_key(globals: &Globals) -> Result<Option<String>> {
    let Some(path) = &globals.api_key_file else {
        return Ok(environment::text("BATCH_API_KEY"));
    };
    let text = std::fs::read_to_string(path)
        .map_err(|err| Failure::usage(format!("could not read the API key from {}: {err}", path.display())))?;
    match text.lines().map(str::trim).find(|line| !line.is_empty()) {
        Some(key) => Ok(Some(key.to_owned())),
        None => Err(Failure::usage(format!("no API key in {}", path.display()))),
    }
}
