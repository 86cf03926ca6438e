//! The event stream of a batch.

use axum::body::Body;
use axum::http::Request;
use overnight_testing::service::numbered_lines;
use overnight_testing::{Reply, ScriptedGenerate};
use serde_json::Value;

use crate::server::{Answer, Server};

async fn events(server: &Server, id: &str, last: Option<&str>) -> Answer {
    let mut request = Request::builder().uri(format!("/v1/batches/{id}/events"));
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

/// (id, event, data) of every event.
fn parse(text: &str) -> Vec<(Option<u64>, String, Value)> {
    let blocks = text.split("\n\n").filter(|block| block.contains("data: "));
    blocks
        .map(|block| {
            let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
            let data = serde_json::from_str(&field("data: ").unwrap()).unwrap();
            (field("id: ").map(|id| id.parse().unwrap()), field("event: ").unwrap(), data)
        })
        .collect()
}

#[tokio::test]
async fn stream_tells_the_life_of_a_batch_and_ends_with_it() {
    let server = Server::new().await;
    let id = server.submit(&numbered_lines(3)).await;
    let worker = server.service.start(&server.engine).await;
    let answer = events(&server, &id, None).await;
    assert_eq!(answer.header("content-type"), "text/event-stream; charset=utf-8");
    let events = parse(&answer.text());
    let ids: Vec<u64> = events.iter().filter_map(|event| event.0).collect();
    assert!(!ids.is_empty() && ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
    let (_, name, last) = events.last().unwrap();
    assert_eq!(name, "counts");
    assert_eq!(last["status"], "completed");
    assert_eq!(last["request_counts"], serde_json::json!({"total": 3, "completed": 3, "failed": 0}));
    let completed = events
        .iter()
        .filter(|(_, name, _)| name == "counts")
        .map(|(_, _, batch)| &batch["request_counts"]["completed"]);
    let completed: Vec<u64> = completed.map(|count| count.as_u64().unwrap()).collect();
    assert!(completed.windows(2).all(|pair| pair[0] <= pair[1]), "a count never goes down: {completed:?}");
    worker.shutdown(std::time::Duration::from_secs(5)).await;
}

#[tokio::test]
async fn last_event_id_goes_on_after_it_and_an_ended_stream_is_204() {
    let server = Server::new().await;
    let id = server.submit(&numbered_lines(3)).await;
    let worker = server.service.start(&server.engine).await;
    let all: Vec<u64> = parse(&events(&server, &id, None).await.text()).iter().filter_map(|event| event.0).collect();
    let first = all[0].to_string();
    let rest: Vec<u64> =
        parse(&events(&server, &id, Some(&first)).await.text()).iter().filter_map(|event| event.0).collect();
    assert_eq!(rest, all[1..]);
    let over = events(&server, &id, Some(&all.last().unwrap().to_string())).await;
    assert_eq!((over.status.as_u16(), over.body.len()), (204, 0));
    events(&server, &id, Some("x")).await.refused(400, "Last-Event-ID", "invalid_value");
    worker.shutdown(std::time::Duration::from_secs(5)).await;
}

#[tokio::test]
async fn streams_are_bounded_and_end_when_the_server_drains() {
    let held = ScriptedGenerate::new(|_| Reply::Hold("x".to_owned()));
    let server = Server::with(held, |state| state.config.event_streams_max = 1).await;
    let id = server.submit(&numbered_lines(1)).await;
    let path = format!("/v1/batches/{id}/events");
    let open = Request::builder().uri(&path).body(Body::empty()).unwrap();
    let open = tower::ServiceExt::oneshot(server.router.clone(), open).await.unwrap();
    server.get(&path).await.refused(429, Value::Null, "rate_limit_exceeded");
    server.draining.cancel();
    let text = http_body_util::BodyExt::collect(open.into_body()).await.unwrap().to_bytes();
    assert!(text.starts_with(b"retry: "), "{text:?}");
    let again = events(&server, &id, None).await;
    assert_eq!(again.status, 200, "its place is free again");
}
