//! The remote engine against a scripted server on loopback.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use overnight_engine::RequestId;
use overnight_engine::request::Class;
use overnight_testing::scripted::completion;
use overnight_testing::service::{body_saying, line, numbered_lines};
use overnight_testing::{TestService, wait};
use overnight_types::{Endpoint, OutcomeKind};
use overnight_worker::generate::{EngineState, Failure, Generate, Input, Output, Request};
use overnight_worker::mapper::Mapper;
use overnight_worker::remote::{RemoteConfig, RemoteGenerate};
use tokio::sync::{Notify, mpsc};

/// The next last outputs; that a request was sent is passed over.
async fn ended(outputs: &mut mpsc::UnboundedReceiver<Vec<Output>>) -> Vec<Output> {
    loop {
        let message = outputs.recv().await.expect("the remote engine lives");
        let ended: Vec<Output> = message.into_iter().filter(Output::is_last).collect();
        if !ended.is_empty() {
            return ended;
        }
    }
}

/// What the server does with one request.
#[derive(Debug, Clone)]
enum Act {
    Answer(u16, String, Vec<(&'static str, String)>),
    Hang,
    CutInMidAnswer,
}

#[derive(Debug, Default)]
struct Seen {
    requests: Vec<(String, HeaderMap, Bytes)>,
    acts: VecDeque<Act>,
    running: u32,
    running_max: u32,
}

/// A server that acts as scripted, then answers well.
#[derive(Debug, Clone, Default)]
struct Server {
    seen: Arc<Mutex<Seen>>,
    gate: Option<Arc<Notify>>,
}

impl Server {
    fn scripted(acts: impl IntoIterator<Item = Act>) -> Self {
        let seen = Seen { acts: acts.into_iter().collect(), ..Seen::default() };
        Self { seen: Arc::new(Mutex::new(seen)), gate: None }
    }

    async fn listen(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().fallback(answer).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        address
    }

    fn num_requests(&self) -> usize {
        self.seen.lock().unwrap().requests.len()
    }
}

async fn answer(State(server): State<Server>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let act = {
        let mut seen = server.seen.lock().unwrap();
        seen.requests.push((uri.path().to_owned(), headers, body));
        seen.running += 1;
        seen.running_max = seen.running_max.max(seen.running);
        seen.acts.pop_front()
    };
    if let Some(gate) = &server.gate {
        gate.notified().await;
    }
    server.seen.lock().unwrap().running -= 1;
    match act {
        None => (StatusCode::OK, completion("fine")).into_response(),
        Some(Act::Answer(status, body, headers)) => {
            let mut response = (StatusCode::from_u16(status).unwrap(), body).into_response();
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        }
        Some(Act::Hang) => std::future::pending().await,
        Some(Act::CutInMidAnswer) => {
            let pieces = [Ok(Bytes::from_static(b"{\"choi")), Err(std::io::Error::other("cut"))];
            axum::body::Body::from_stream(futures::stream::iter(pieces)).into_response()
        }
    }
}

fn config(urls: &[String]) -> RemoteConfig {
    RemoteConfig { urls: urls.to_vec(), retry_server_after: Duration::from_millis(50), ..RemoteConfig::default() }
}

fn request(body: &str) -> (RequestId, Request) {
    let id = RequestId::next();
    let json = Bytes::from(body.to_owned());
    (id, Request { id, class: Class::Job, input: Input::Body { endpoint: Endpoint::ChatCompletions, json } })
}

async fn ask(remote: &RemoteGenerate, body: &str) -> Output {
    let (sender, mut outputs) = mpsc::unbounded_channel();
    let (id, request) = request(body);
    remote.submit(vec![request], sender).await.unwrap();
    let output = ended(&mut outputs).await.remove(0);
    assert_eq!(output.id(), id);
    output
}

#[tokio::test]
async fn body_goes_out_byte_for_byte_with_the_key() {
    let server = Server::default();
    let url = format!("http://{}/v1/", server.listen().await);
    let remote = RemoteGenerate::new(RemoteConfig { api_key: Some("s3cret".to_owned()), ..config(&[url]) }).unwrap();
    let body = "{\"model\": \"m\",  \"seed\":9007199254740993,\"x\":1e999,\"s\":\"\\ud800\",\"s\":\"twice\"}";
    let Output::Response { status, body: answer, .. } = ask(&remote, body).await else { panic!("no answer") };
    assert_eq!((status, answer), (200, completion("fine")));
    let seen = server.seen.lock().unwrap();
    let (path, headers, sent) = &seen.requests[0];
    assert_eq!((path.as_str(), sent.as_ref()), ("/v1/chat/completions", body.as_bytes()));
    assert_eq!(headers["authorization"], "Bearer s3cret");
    assert_eq!(headers["content-type"], "application/json");
    assert!(!format!("{remote:?}").contains("s3cret"), "the key is never printed");
}

#[tokio::test]
async fn each_kind_of_failure_is_told_apart() {
    let refusal = r#"{"error":{"message":"no"}}"#.to_owned();
    let server = Server::scripted([
        Act::Answer(400, refusal.clone(), vec![]),
        Act::Answer(429, refusal.clone(), vec![("retry-after", "7".to_owned())]),
        Act::CutInMidAnswer,
        Act::Answer(401, refusal.clone(), vec![]),
        Act::Hang,
    ]);
    let url = format!("http://{}", server.listen().await);
    let limit = Duration::from_millis(300);
    let remote = RemoteGenerate::new(RemoteConfig { request_timeout: limit, ..config(&[url]) }).unwrap();
    let Output::Response { status: 400, body, .. } = ask(&remote, "{}").await else { panic!("not an answer") };
    assert_eq!(body, refusal);
    let Output::Response { status: 429, retry_after, .. } = ask(&remote, "{}").await else { panic!("not an answer") };
    assert_eq!(retry_after, Some(Duration::from_secs(7)));
    let output = ask(&remote, "{}").await;
    assert!(matches!(&output, Output::Failed { failure: Failure::Transient { .. }, .. }), "{output:?}");
    let output = ask(&remote, "{}").await;
    assert!(matches!(&output, Output::Failed { failure: Failure::EngineTrouble { .. }, .. }), "{output:?}");
    let output = ask(&remote, "{}").await;
    assert!(matches!(&output, Output::Failed { failure: Failure::Timeout, .. }), "{output:?}");
}

#[tokio::test]
async fn server_that_cannot_be_reached_is_trouble_and_left_alone_for_a_while() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let remote = RemoteGenerate::new(config(&[format!("http://{address}")])).unwrap();
    assert_eq!(remote.status().state, EngineState::Ready);
    let output = ask(&remote, "{}").await;
    assert!(matches!(&output, Output::Failed { failure: Failure::EngineTrouble { .. }, .. }), "{output:?}");
    assert!(matches!(remote.status().state, EngineState::Poisoned(_)));
    wait::until("the server to be asked again", || async {
        match remote.status().state {
            EngineState::Ready => Ok(()),
            state => Err(format!("{state:?}")),
        }
    })
    .await;
}

#[tokio::test]
async fn one_dead_server_of_two_costs_no_request() {
    let dead = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dead_url = format!("http://{}", dead.local_addr().unwrap());
    drop(dead);
    let server = Server::default();
    let remote = RemoteGenerate::new(config(&[dead_url, format!("http://{}", server.listen().await)])).unwrap();
    let (sender, mut outputs) = mpsc::unbounded_channel();
    let requests = (0..50).map(|_| request("{}").1).collect();
    remote.submit(requests, sender).await.unwrap();
    for _ in 0..50 {
        let output = ended(&mut outputs).await.remove(0);
        assert!(matches!(&output, Output::Response { status: 200, .. }), "{output:?}");
    }
    assert_eq!(server.num_requests(), 50);
    assert_eq!(remote.status().state, EngineState::Ready);
}

// vllm-project/aibrix#2547, #2452 (service 63): concurrency backs off and comes back.
#[tokio::test]
async fn overload_lowers_the_number_of_requests_at_once() {
    let busy = Act::Answer(503, "{}".to_owned(), vec![]);
    let server = Server::scripted(vec![busy; 16]);
    let url = format!("http://{}", server.listen().await);
    let remote = RemoteGenerate::new(RemoteConfig { concurrency_start: 16, ..config(&[url]) }).unwrap();
    assert_eq!(remote.status().max_num_seqs, 16);
    for _ in 0..16 {
        ask(&remote, "{}").await;
    }
    let low = remote.status().max_num_seqs;
    assert!(low <= 2, "{low} after failures in a row, each of a round of its own");
    let (sender, mut outputs) = mpsc::unbounded_channel();
    remote.submit((0..200).map(|_| request("{}").1).collect(), sender).await.unwrap();
    for _ in 0..200 {
        ended(&mut outputs).await;
    }
    assert!(remote.status().max_num_seqs > low, "{:?}", remote.status());
}

#[tokio::test]
async fn no_more_requests_are_sent_than_the_limit() {
    let gate = Arc::new(Notify::new());
    let server = Server { gate: Some(gate.clone()), ..Server::default() };
    let url = format!("http://{}", server.listen().await);
    let remote =
        RemoteGenerate::new(RemoteConfig { concurrency_start: 4, concurrency_max: 4, ..config(&[url]) }).unwrap();
    let (sender, mut outputs) = mpsc::unbounded_channel();
    let (online, mut last) = request("{\"online\":true}");
    last.class = Class::Online;
    let mut requests: Vec<Request> = (0..12).map(|_| request("{}").1).collect();
    remote.submit(std::mem::take(&mut requests), sender.clone()).await.unwrap();
    remote.submit(vec![last], sender).await.unwrap();
    let mut answered = Vec::new();
    while answered.len() < 13 {
        gate.notify_waiters();
        tokio::select! {
            ended = ended(&mut outputs) => answered.extend(ended.iter().map(Output::id)),
            () = tokio::task::yield_now() => {}
        }
    }
    assert_eq!(server.seen.lock().unwrap().running_max, 4);
    let place = answered.iter().position(|id| *id == online).unwrap();
    assert!(place < 8, "somebody waits for it, so it goes before queued job items: {place}");
}

#[tokio::test]
async fn cancelled_request_ends_queued_or_running() {
    let server = Server::scripted([Act::Hang]);
    let url = format!("http://{}", server.listen().await);
    let remote =
        RemoteGenerate::new(RemoteConfig { concurrency_start: 1, concurrency_max: 1, ..config(&[url]) }).unwrap();
    let (sender, mut outputs) = mpsc::unbounded_channel();
    let ((running, first), (queued, second)) = (request("{}"), request("{}"));
    remote.submit(vec![first, second], sender).await.unwrap();
    wait::until("the first at the server", || async {
        if server.num_requests() == 1 { Ok(()) } else { Err("none".to_owned()) }
    })
    .await;
    remote.cancel(&[queued, running]);
    let mut ids = Vec::new();
    while ids.len() < 2 {
        for output in ended(&mut outputs).await {
            assert!(matches!(&output, Output::Failed { failure: Failure::Cancelled, .. }), "{output:?}");
            ids.push(output.id());
        }
    }
    assert_eq!(ids, [queued, running]);
    assert!(remote.status().is_idle());
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    for (config, word) in [
        (config(&[]), "urls"),
        (config(&["ftp://x".to_owned()]), "http"),
        (config(&["nonsense".to_owned()]), "URL"),
        (RemoteConfig { api_key: Some("a\nb".to_owned()), ..config(&["http://x".to_owned()]) }, "API key"),
        (RemoteConfig { concurrency_start: 0, ..config(&["http://x".to_owned()]) }, "concurrency"),
    ] {
        let err = RemoteGenerate::new(config).unwrap_err().to_string();
        assert!(err.contains(word), "{err}");
    }
}

#[tokio::test]
async fn job_on_a_flaky_server_gets_every_answer() {
    let busy = Act::Answer(503, "{}".to_owned(), vec![]);
    let server = Server::scripted([busy.clone(), Act::CutInMidAnswer, busy]);
    let url = format!("http://{}", server.listen().await);
    let service = TestService::new().await;
    let job = service.submit_cut(&numbered_lines(30), 10).await;
    let remote = Arc::new(RemoteGenerate::new(config(&[url])).unwrap());
    let worker = service.start_parts(Some((remote, Mapper::remote(None)))).await;
    service.until_outcomes(job, 30).await;
    let outcomes = service.outcomes(job).await;
    assert!(outcomes.values().all(|record| record.outcome == OutcomeKind::Completed));
    assert_eq!(outcomes.values().map(|record| record.attempts).sum::<u32>(), 33);
    let sent =
        server.seen.lock().unwrap().requests.iter().filter(|(_, _, body)| *body == body_saying("item-7")).count();
    assert!(sent >= 1 && line("item-7").contains(&body_saying("item-7")));
    worker.shutdown(Duration::from_secs(5)).await;
    service.drop_checks(job).await;
}
