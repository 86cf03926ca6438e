//! Webhooks against a receiver on loopback.

use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use overnight_store::{CancelMode, Events, Jobs, Outbox};
use overnight_store_sqlite::{ClockOffset, Options};
use overnight_testing::service::numbered_lines;
use overnight_testing::{ScriptedGenerate, TestService, wait};
use overnight_types::{JobId, JobState};
use overnight_worker::lifecycle::webhook::{HOLD, TRIES_MAX, Webhook, WebhookConfig};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

const OLD_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEW_SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

#[derive(Debug, Clone)]
struct Received {
    id: String,
    timestamp: i64,
    headers: Value,
    body: String,
}

/// Answers as the script says, then 200; keeps what came.
#[derive(Debug, Clone, Default)]
struct Receiver {
    script: Arc<Mutex<Vec<u16>>>,
    received: Arc<Mutex<Vec<Received>>>,
}

impl Receiver {
    async fn start(script: &[u16]) -> (Self, String) {
        let receiver = Self::default();
        *receiver.script.lock().unwrap() = script.iter().rev().copied().collect();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook?key=not-for-logs", listener.local_addr().unwrap());
        let app = Router::new().fallback(take).with_state(receiver.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        (receiver, url)
    }

    fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn until(&self, count: usize) -> Vec<Received> {
        wait::until(&format!("{count} deliveries"), || async {
            let received = self.received();
            if received.len() >= count { Ok(received) } else { Err(format!("{} came", received.len())) }
        })
        .await
    }
}

async fn take(State(receiver): State<Receiver>, headers: HeaderMap, body: Bytes) -> (StatusCode, HeaderMap) {
    let header = |name: &str| headers[name].to_str().unwrap().to_owned();
    let all = headers.iter().map(|(name, value)| (name.to_string(), json!(value.to_str().unwrap())));
    let received = Received {
        id: header("webhook-id"),
        timestamp: header("webhook-timestamp").parse().unwrap(),
        headers: Value::Object(all.collect()),
        body: String::from_utf8(body.to_vec()).unwrap(),
    };
    receiver.received.lock().unwrap().push(received);
    let status = receiver.script.lock().unwrap().pop().unwrap_or(204);
    let mut answer = HeaderMap::new();
    answer.insert("location", "/elsewhere".parse().unwrap());
    (StatusCode::from_u16(status).unwrap(), answer)
}

fn webhook(url: String) -> Webhook {
    let secrets = vec![OLD_SECRET.to_owned(), NEW_SECRET.to_owned()];
    let (retry_min, retry_max) = (Duration::from_millis(1), Duration::from_millis(40));
    Webhook::new(&WebhookConfig { url, secrets, retry_min, retry_max }).unwrap()
}

async fn service(url: String) -> (TestService, ClockOffset) {
    let clock = ClockOffset::default();
    let mut service = TestService::with_options(Options { clock_offset: clock.clone(), ..Options::default() }).await;
    service.webhook = Some(webhook(url));
    (service, clock)
}

async fn completed(service: &TestService) -> JobId {
    let job = service.submit(&numbered_lines(2)).await;
    service.until_state(job, JobState::Completed).await;
    job
}

/// Unwraps a delivery as the official client does; nothing where it is not installed.
async fn unwrap_officially(received: &Received, secret: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let python = root.join("target/venv/bin/python");
    if !python.exists() {
        eprintln!("not run: target/venv with the openai package is missing; tests/setup.sh installs it");
        return;
    }
    let script = "import json, sys, openai\n\
        given = json.load(sys.stdin)\n\
        client = openai.OpenAI(api_key='k')\n\
        event = client.webhooks.unwrap(given['body'], given['headers'], secret=given['secret'])\n\
        print(event.type, event.id, event.data.id)\n";
    let mut child = tokio::process::Command::new(python)
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let given = json!({"body": received.body, "headers": received.headers, "secret": secret}).to_string();
    child.stdin.take().unwrap().write_all(given.as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let body: Value = serde_json::from_str(&received.body).unwrap();
    let wanted = ["type", "id"].map(|key| body[key].as_str().unwrap().to_owned()).join(" ");
    let wanted = format!("{wanted} {}\n", body["data"]["id"].as_str().unwrap());
    assert_eq!(String::from_utf8_lossy(&output.stdout), wanted);
}

// openai-batch-api.md 9: anything but a 2xx is no acknowledgement; the id stays, the timestamp is the try's.
#[tokio::test]
async fn refused_event_is_tried_again_until_acknowledged_under_one_id() {
    let (receiver, url) = Receiver::start(&[500, 302, 404, 503]).await;
    let (service, clock) = service(url).await;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    let job = completed(&service).await;
    let received = receiver.until(5).await;
    worker.shutdown(Duration::from_secs(5)).await;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64;
    for one in &received {
        assert_eq!((&one.id, &one.body), (&received[0].id, &received[0].body));
        assert!((now - 60..=now).contains(&one.timestamp), "{}", one.timestamp);
    }
    let body: Value = serde_json::from_str(&received[0].body).unwrap();
    let ended_at = service.job(job).await.completed_at.unwrap().unix_seconds();
    let wanted = json!({"id": received[0].id, "object": "event", "type": "batch.completed", "created_at": ended_at,
        "data": {"id": job.to_string()}});
    assert_eq!(body, wanted);
    assert!(received[0].id.starts_with("evt_"), "{}", received[0].id);
    // Both secrets sign, so that a receiver may know either one.
    unwrap_officially(&received[4], OLD_SECRET).await;
    unwrap_officially(&received[4], NEW_SECRET).await;
    clock.advance(Duration::from_secs(86_400));
    assert_eq!(service.store.claim_event(HOLD).await.unwrap(), None, "an acknowledged event is not due again");
    assert_eq!(receiver.received().len(), 5);
}

/// Goal: a death between the answer and its record loses nothing. Method: the task dies there once.
#[tokio::test]
async fn death_between_send_and_acknowledge_leads_to_a_second_delivery_with_the_same_id() {
    let (receiver, url) = Receiver::start(&[]).await;
    let (service, clock) = service(url).await;
    fail::cfg("webhook::after_send", "1*panic(a test kills the delivery)->off").unwrap();
    let worker = service.start(&ScriptedGenerate::echo()).await;
    completed(&service).await;
    receiver.until(1).await;
    clock.advance(HOLD + Duration::from_secs(1));
    let received = receiver.until(2).await;
    assert_eq!((&received[0].id, &received[0].body), (&received[1].id, &received[1].body));
    worker.shutdown(Duration::from_secs(5)).await;
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(service.store.claim_event(HOLD).await.unwrap(), None);
}

#[tokio::test]
async fn event_that_nobody_takes_is_given_up_and_the_batch_says_why() {
    let (receiver, url) = Receiver::start(&[500; 2 * TRIES_MAX as usize]).await;
    let (service, _clock) = service(url).await;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    let job = completed(&service).await;
    let note = wait::until("the event to be given up", || async {
        let events = service.store.list_events(job, 0, 100).await.unwrap();
        let given_up = events.into_iter().find(|event| event.what == "webhook_given_up");
        given_up.map(|event| event.note).ok_or_else(|| format!("{} tries", receiver.received().len()))
    })
    .await;
    assert_eq!(note, "after 10 tries: the receiver answered 500");
    assert_eq!(receiver.received().len(), TRIES_MAX as usize);
    worker.shutdown(Duration::from_secs(5)).await;
}

// openai-batch-api.md 12: there are four webhook events, not two.
#[tokio::test]
async fn every_way_to_end_is_told() {
    let (receiver, url) = Receiver::start(&[]).await;
    let (service, clock) = service(url).await;
    let worker = service.start(&ScriptedGenerate::new(|_| overnight_testing::Reply::Hold("later".to_owned()))).await;
    let failed = service.submit(&["not a line".to_owned()]).await;
    let cancelled = service.submit(&numbered_lines(2)).await;
    service.until_state(cancelled, JobState::InProgress).await;
    let cancel = service.store.cancel_job_if_active(cancelled, CancelMode::Now, Duration::ZERO).await.unwrap();
    assert!(cancel.is_applied());
    receiver.until(2).await;
    let expired = service.submit(&numbered_lines(2)).await;
    service.until_state(expired, JobState::InProgress).await;
    clock.advance(Duration::from_secs(2 * 3_600));
    let received = receiver.until(3).await;
    worker.shutdown(Duration::from_secs(5)).await;
    let mut told: Vec<(String, String)> = received
        .iter()
        .map(|one| serde_json::from_str::<Value>(&one.body).unwrap())
        .map(|body| (body["type"].as_str().unwrap().to_owned(), body["data"]["id"].as_str().unwrap().to_owned()))
        .collect();
    told.sort();
    let mut wanted = [("batch.failed", failed), ("batch.cancelled", cancelled), ("batch.expired", expired)]
        .map(|(kind, job)| (kind.to_owned(), job.to_string()));
    wanted.sort();
    assert_eq!(told, wanted);
}

/// A receiver that was set up late is not told of what is long over.
#[tokio::test]
async fn event_from_a_time_without_receiver_is_left_after_three_days() {
    let (receiver, url) = Receiver::start(&[]).await;
    let (mut service, clock) = service(url).await;
    let receives = service.webhook.take();
    let worker = service.start(&ScriptedGenerate::echo()).await;
    let old = completed(&service).await;
    clock.advance(Duration::from_secs(4 * 86_400));
    let new = completed(&service).await;
    worker.shutdown(Duration::from_secs(5)).await;
    service.webhook = receives;
    let worker = service.start(&ScriptedGenerate::echo()).await;
    let received = receiver.until(1).await;
    worker.shutdown(Duration::from_secs(5)).await;
    assert!(received[0].body.contains(&new.to_string()), "{}", received[0].body);
    let events = service.store.list_events(old, 0, 100).await.unwrap();
    assert_eq!(events.last().unwrap().what, "webhook_given_up");
    assert_eq!(receiver.received().len(), 1);
}
