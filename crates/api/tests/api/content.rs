//! Stored bytes come back unchanged, whole or by range.

use axum::body::Body;
use axum::http::Request;

use crate::server::{Answer, Server};

async fn content_of(server: &Server, id: &str, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::builder().uri(format!("/v1/files/{id}/content"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn whole_content_names_its_file_its_hash_and_its_length() {
    let server = Server::new().await;
    let parts = [("purpose", None, b"batch".as_slice()), ("file", Some("Eingabe ü.jsonl"), b"0123456789".as_slice())];
    let file = server.post_form(&parts).await.ok();
    assert_eq!(file["filename"], "Eingabe ü.jsonl");
    let answer = content_of(&server, file["id"].as_str().unwrap(), &[]).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.body, "0123456789");
    assert_eq!(answer.header("content-type"), "application/octet-stream");
    assert_eq!(answer.header("content-length"), "10");
    assert_eq!(answer.header("accept-ranges"), "bytes");
    assert_eq!(answer.header("etag"), format!("\"{}\"", file["sha256"].as_str().unwrap()));
    let disposition = "attachment; filename=\"Eingabe _.jsonl\"; filename*=UTF-8''Eingabe%20%C3%BC.jsonl";
    assert_eq!(answer.header("content-disposition"), disposition);
}

#[tokio::test]
async fn range_gives_the_part_that_was_asked_for() {
    let server = Server::new().await;
    let id = server.upload(b"0123456789").await;
    for (range, status, body, content_range) in [
        ("bytes=0-3", 206, "0123", Some("bytes 0-3/10")),
        ("bytes=7-", 206, "789", Some("bytes 7-9/10")),
        ("bytes=-2", 206, "89", Some("bytes 8-9/10")),
        ("bytes=5-500", 206, "56789", Some("bytes 5-9/10")),
        ("bytes=0-1,4-5", 200, "0123456789", None),
        ("lines=0-1", 200, "0123456789", None),
    ] {
        let answer = content_of(&server, &id, &[("range", range)]).await;
        assert_eq!(answer.status.as_u16(), status, "{range}");
        assert_eq!(answer.body, body, "{range}");
        assert_eq!(answer.headers.get("content-range").map(|value| value.to_str().unwrap()), content_range, "{range}");
    }
    let outside = content_of(&server, &id, &[("range", "bytes=10-")]).await;
    outside.refused(416, serde_json::Value::Null, "range_not_satisfiable");
    assert_eq!(outside.header("content-range"), "bytes */10");
}

#[tokio::test]
async fn etag_saves_a_download_and_guards_a_range() {
    let server = Server::new().await;
    let id = server.upload(b"0123456789").await;
    let etag = content_of(&server, &id, &[]).await.header("etag").to_owned();
    let again = content_of(&server, &id, &[("if-none-match", &etag)]).await;
    assert_eq!((again.status.as_u16(), again.body.len()), (304, 0));
    let same = content_of(&server, &id, &[("range", "bytes=1-2"), ("if-range", &etag)]).await;
    assert_eq!((same.status.as_u16(), same.text().as_str()), (206, "12"));
    let other = content_of(&server, &id, &[("range", "bytes=1-2"), ("if-range", "\"other\"")]).await;
    assert_eq!((other.status.as_u16(), other.body.len()), (200, 10));
}

#[tokio::test]
async fn object_that_is_gone_is_500_and_says_nothing_of_the_inside() {
    let server = Server::new().await;
    let id = server.upload(b"0123456789").await;
    server.service.blobs.delete(&overnight_blobs::ObjectName::file(id.parse().unwrap())).await.unwrap();
    let answer = content_of(&server, &id, &[]).await;
    let (kind, _, code, message) = answer.error(500);
    assert_eq!((kind.as_str(), code.as_str()), ("server_error", Some("internal_error")));
    assert_eq!(message, format!("the server could not answer; request id: {}", answer.header("x-request-id")));
}

#[tokio::test]
async fn deleted_file_is_not_found_any_more() {
    let server = Server::new().await;
    let id = server.upload(b"0123456789").await;
    let gone = server.delete(&format!("/v1/files/{id}")).await.ok();
    assert_eq!(gone, serde_json::json!({"id": id, "object": "file", "deleted": true}));
    for path in [format!("/v1/files/{id}"), format!("/v1/files/{id}/content")] {
        server.get(&path).await.refused(404, "id", "not_found");
    }
    server.delete(&format!("/v1/files/{id}")).await.refused(404, "id", "not_found");
}
