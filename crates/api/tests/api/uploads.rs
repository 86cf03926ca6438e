//! Uploads: any field order, every limit, and nothing left of what was refused.

use axum::body::Body;
use axum::http::Request;
use bytes::Bytes;
use overnight_testing::{Failing, ScriptedGenerate, wait};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::server::{BOUNDARY, Server, form, form_request, request};

const LINE: &[u8] = b"{\"custom_id\":\"a\"}\n";

#[tokio::test]
async fn file_object_has_every_key_in_order() {
    let server = Server::new().await;
    let file = server.post_form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), LINE)]).await.ok();
    let keys: Vec<&str> = file.as_object().unwrap().keys().map(String::as_str).collect();
    let wanted = [
        "id",
        "object",
        "bytes",
        "created_at",
        "expires_at",
        "filename",
        "purpose",
        "status",
        "status_details",
        "sha256",
    ];
    assert_eq!(keys, wanted);
    assert!(file["id"].as_str().unwrap().starts_with("file-"));
    assert_eq!(file["bytes"], LINE.len());
    assert_eq!(file["expires_at"].as_i64().unwrap() - file["created_at"].as_i64().unwrap(), 30 * 86_400);
    assert_eq!((&file["status"], &file["status_details"]), (&json!("processed"), &Value::Null));
    assert_eq!(server.get(&format!("/v1/files/{}", file["id"].as_str().unwrap())).await.ok(), file);
}

#[tokio::test]
async fn fields_may_come_in_any_order() {
    let server = Server::new().await;
    let purpose = ("purpose", None, b"user_data".as_slice());
    let file = ("file", Some("notes.txt"), LINE);
    let anchor = ("expires_after[anchor]", None, b"created_at".as_slice());
    let seconds = ("expires_after[seconds]", None, b"3600".as_slice());
    for parts in [[purpose, file, anchor, seconds], [file, seconds, purpose, anchor], [anchor, file, seconds, purpose]]
    {
        let made = server.post_form(&parts).await.ok();
        assert_eq!(made["expires_at"].as_i64().unwrap() - made["created_at"].as_i64().unwrap(), 3_600);
    }
    let kept = server.post_form(&[purpose, file]).await.ok();
    assert_eq!(kept["expires_at"], Value::Null, "other purposes do not expire");
}

// Field report 2: a batch file with a BOM is rejected at upload. Field report 19: bad content is not judged here.
#[tokio::test]
async fn content_is_stored_as_it_is_and_not_judged() {
    let server = Server::new().await;
    let odd: [&[u8]; 4] =
        [b"\xef\xbb\xbf{}\r\n", b"not json \xff\xfe\0", b"", "{\"custom_id\":\"\u{1f600}\\ud800\"}".as_bytes()];
    for content in odd {
        let id = server.upload(content).await;
        let answer = server.get(&format!("/v1/files/{id}/content")).await;
        assert_eq!(answer.body, content);
    }
}

// Field report 9: a malformed form gives 500 and an invalid purpose leaves an orphan.
#[tokio::test]
async fn refused_upload_leaves_nothing() {
    let server = Server::new().await;
    let purpose = ("purpose", None, b"batch".as_slice());
    let file = ("file", Some("in.jsonl"), LINE);
    let cases: Vec<(&str, Vec<u8>, Value, &str)> = vec![
        (
            "unknown purpose after the file",
            form(&[file, ("purpose", None, b"bach")]),
            json!("purpose"),
            "invalid_value",
        ),
        ("purpose of outputs", form(&[file, ("purpose", None, b"batch_output")]), json!("purpose"), "invalid_value"),
        ("no purpose", form(&[file]), json!("purpose"), "missing_required_parameter"),
        ("no file", form(&[purpose]), json!("file"), "missing_required_parameter"),
        ("two files", form(&[purpose, file, file]), json!("file"), "invalid_value"),
        ("two purposes", form(&[purpose, purpose, file]), json!("purpose"), "invalid_value"),
        (
            "not .jsonl, purpose first",
            form(&[purpose, ("file", Some("in.txt"), LINE)]),
            json!("file"),
            "invalid_file_format",
        ),
        (
            "not .jsonl, purpose last",
            form(&[("file", Some("in.txt"), LINE), purpose]),
            json!("file"),
            "invalid_file_format",
        ),
        ("no file name", form(&[purpose, ("file", None, LINE)]), json!("file"), "invalid_filename"),
        ("unknown field", form(&[file, purpose, ("surprise", None, b"1")]), json!("surprise"), "unknown_parameter"),
        (
            "seconds alone",
            form(&[file, purpose, ("expires_after[seconds]", None, b"3600")]),
            json!("expires_after.anchor"),
            "missing_required_parameter",
        ),
        (
            "anchor alone",
            form(&[file, purpose, ("expires_after[anchor]", None, b"created_at")]),
            json!("expires_after.seconds"),
            "missing_required_parameter",
        ),
        (
            "wrong anchor",
            form(&[file, purpose, ("expires_after[anchor]", None, b"now")]),
            json!("expires_after.anchor"),
            "invalid_value",
        ),
        (
            "seconds too few",
            form(&[file, purpose, ("expires_after[seconds]", None, b"3599")]),
            json!("expires_after.seconds"),
            "invalid_value",
        ),
        (
            "seconds too many",
            form(&[file, purpose, ("expires_after[seconds]", None, b"2592001")]),
            json!("expires_after.seconds"),
            "invalid_value",
        ),
        (
            "seconds not a number",
            form(&[file, purpose, ("expires_after[seconds]", None, b"1h")]),
            json!("expires_after.seconds"),
            "invalid_type",
        ),
        ("not a form at all", b"{\"a\":1}".to_vec(), Value::Null, "malformed_form"),
        ("empty body", Vec::new(), Value::Null, "malformed_form"),
        ("cut in the file", form(&[purpose, file])[..220].to_vec(), Value::Null, "truncated_body"),
    ];
    for (what, body, param, code) in cases {
        let answer = server.send(form_request(body)).await;
        let (kind, given_param, given_code, message) = answer.error(400);
        assert_eq!(
            (kind.as_str(), &given_param, &given_code),
            ("invalid_request_error", &param, &json!(code)),
            "{what}: {message}"
        );
        server.assert_no_file().await;
    }
}

#[tokio::test]
async fn wrong_content_type_is_400() {
    let server = Server::new().await;
    let plain = request(axum::http::Method::POST, "/v1/files", Body::from("x"));
    server.send(plain).await.refused(400, Value::Null, "malformed_form");
    let no_boundary = Request::builder().method("POST").uri("/v1/files").header("content-type", "multipart/form-data");
    server.send(no_boundary.body(Body::from("x")).unwrap()).await.refused(400, Value::Null, "malformed_form");
}

// Field report 18: each limit at N (accepted) and N + 1 (its own code).
#[tokio::test]
async fn size_limits_hold_at_n_and_n_plus_1_in_either_field_order() {
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.batch_file_bytes_max = 2_000;
        state.config.other_file_bytes_max = 1_000;
    })
    .await;
    for (purpose, limit, setting) in
        [("batch", 2_000, "api.batch_file_bytes_max"), ("user_data", 1_000, "api.other_file_bytes_max")]
    {
        let (fits, over) = (vec![b'x'; limit], vec![b'x'; limit + 1]);
        for purpose_first in [true, false] {
            let field = ("purpose", None, purpose.as_bytes());
            let parts = |content: &'static [u8]| match purpose_first {
                true => form(&[field, ("file", Some("in.jsonl"), content)]),
                false => form(&[("file", Some("in.jsonl"), content), field]),
            };
            let (fits, over) = (fits.clone().leak(), over.clone().leak());
            let made = server.send(form_request(parts(fits))).await.ok();
            server.delete(&format!("/v1/files/{}", made["id"].as_str().unwrap())).await.ok();
            let message = server.send(form_request(parts(over))).await.refused(413, "file", "too_large");
            assert!(message.contains(&limit.to_string()) && message.contains(setting), "{message}");
        }
    }
    // The objects of deleted files go with the sweep; rows are gone at once.
    assert_eq!(server.get("/v1/files").await.ok()["data"], json!([]));
}

#[tokio::test]
async fn oversized_upload_is_refused_while_it_streams() {
    // Goal: the limit stops the writing, not the end of the body. Method: a body without an end.
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.batch_file_bytes_max = 3 << 20;
        state.config.other_file_bytes_max = 1 << 20;
    })
    .await;
    let head = form(&[("purpose", None, b"batch")]);
    let head = String::from_utf8(head).unwrap().replace(&format!("--{BOUNDARY}--\r\n"), "");
    let head =
        format!("{head}--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n");
    let endless = futures::stream::unfold(Some(head), |head| async {
        let bytes = head.map_or_else(|| Bytes::from(vec![b'x'; 64 << 10]), Bytes::from);
        Some((Ok::<_, std::io::Error>(bytes), None))
    });
    server.send(form_request(Body::from_stream(endless))).await.refused(413, "file", "too_large");
    server.assert_no_file().await;
}

#[tokio::test]
async fn declared_length_over_the_limit_is_refused_before_reading() {
    let server = Server::with(ScriptedGenerate::echo(), |state| state.config.batch_file_bytes_max = 1 << 30).await;
    let mut upload = form_request(form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), LINE)]));
    upload.headers_mut().insert("content-length", (2_u64 << 30).into());
    server.send(upload).await.refused(413, "file", "too_large");
    server.assert_no_file().await;
}

// Field report 65: an upload stalls for ever.
#[tokio::test]
async fn silent_upload_ends_with_408_and_leaves_nothing() {
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.upload_idle_timeout = std::time::Duration::from_millis(50);
    })
    .await;
    let whole = form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), LINE)]);
    let half = Bytes::copy_from_slice(&whole[..whole.len() - 30]);
    let first = futures::stream::iter([Ok::<_, std::io::Error>(half)]);
    let silent = Body::from_stream(futures::StreamExt::chain(first, futures::stream::pending()));
    let message = server.send(form_request(silent)).await.refused(408, Value::Null, "upload_timeout");
    assert!(message.contains("api.upload_idle_timeout"), "{message}");
    server.assert_no_file().await;
}

#[tokio::test]
async fn connection_that_breaks_in_mid_upload_leaves_nothing() {
    let server = Server::new().await;
    let address = server.listen().await;
    let whole = form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), &[b'x'; 200_000])]);
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {}\r\n\r\n",
        whole.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(&whole[..100_000]).await.unwrap();
    socket.flush().await.unwrap();
    drop(socket);
    wait::until("the leftovers to go", || async {
        let left = crate::server::files_under(&server.service.objects_dir());
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    server.assert_no_file().await;
}

#[tokio::test]
async fn upload_whose_row_cannot_be_written_leaves_no_object() {
    let server = Server::new().await;
    server.service.store.fail("insert_file", 0, 1, Failing::Before);
    let parts = [("purpose", None, b"batch".as_slice()), ("file", Some("in.jsonl"), LINE)];
    let answer = server.post_form(&parts).await;
    assert_eq!(answer.error(503).2, "database_unavailable");
    server.assert_no_file().await;
    // A row whose answer was lost is there, and so is its object.
    server.service.store.fail("insert_file", 0, 1, Failing::After);
    let file = server.post_form(&parts).await.ok();
    let content = server.get(&format!("/v1/files/{}/content", file["id"].as_str().unwrap())).await;
    assert_eq!(content.body, LINE);
}

#[tokio::test]
async fn full_disk_is_503_before_anything_is_taken() {
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.free_disk_bytes_min = 100;
        state.free_disk = Some(std::sync::Arc::new(|| Ok(99)));
    })
    .await;
    let answer = server.post_form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), LINE)]).await;
    assert_eq!(answer.error(503).2, "disk_full");
    assert_eq!(answer.header("retry-after"), "5");
    let create = server.create("file-00000000000000000000000000000000").await;
    assert_eq!(create.error(503).2, "disk_full");
}

// The disk here says nothing about a store elsewhere.
#[tokio::test]
async fn full_disk_does_not_keep_files_from_a_remote_store() {
    let options = overnight_blobs::Options::default();
    let blobs = overnight_blobs::Blobs::remote_memory(&options).await.unwrap();
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.free_disk_bytes_min = 100;
        state.config.other_file_bytes_max = 12 << 20;
        state.free_disk = Some(std::sync::Arc::new(|| Ok(99)));
        state.blobs = blobs.clone();
    })
    .await;
    // Two parts and a byte, stored and given back.
    let content: Vec<u8> = (0..(10 << 20) + 1).map(|at: u32| (at % 251) as u8).collect();
    let file = server.post_form(&[("purpose", None, b"user_data"), ("file", Some("a.bin"), &content)]).await.ok();
    let back = server.get(&format!("/v1/files/{}/content", file["id"].as_str().unwrap())).await;
    assert!(back.body == content.as_slice(), "{} bytes came back", back.body.len());
    // One that grows too large for its limit leaves neither object nor upload.
    let large = vec![b'x'; (12 << 20) + 1];
    server.post_form(&[("purpose", None, b"user_data"), ("file", Some("b.bin"), &large)]).await.error(413);
    let objects: Vec<_> = futures::TryStreamExt::try_collect(blobs.list(overnight_blobs::Prefix::All)).await.unwrap();
    assert_eq!(objects.len(), 1);
    assert_eq!(blobs.sweep_leftovers(overnight_types::Timestamp::now(), std::time::Duration::ZERO).await.unwrap(), 0);
}

#[tokio::test]
async fn disk_that_fills_in_mid_upload_ends_it_and_leaves_nothing() {
    let looks = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counted = std::sync::Arc::clone(&looks);
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.free_disk_bytes_min = 100;
        // Room for the first look only, as when another upload takes the rest.
        let look = move || match counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => Ok(1 << 40),
            _ => Ok(99),
        };
        state.free_disk = Some(std::sync::Arc::new(look));
    })
    .await;
    let content = vec![b'x'; 6 << 20];
    let form = form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), &content)]);
    let pieces: Vec<_> =
        form.chunks(1 << 20).map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece))).collect();
    let answer = server.send(form_request(Body::from_stream(futures::stream::iter(pieces)))).await;
    assert_eq!(answer.error(503).2, "disk_full");
    assert_eq!(looks.load(std::sync::atomic::Ordering::Relaxed), 2, "one look at the start and one on the way");
    server.assert_no_file().await;
}

#[tokio::test]
async fn declared_length_counts_against_the_free_disk() {
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.config.free_disk_bytes_min = 100;
        state.free_disk = Some(std::sync::Arc::new(|| Ok(10_000)));
    })
    .await;
    let send = async |length: u64| {
        let mut request = form_request(form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), LINE)]));
        request.headers_mut().insert("content-length", length.into());
        server.send(request).await
    };
    assert_eq!(send(9_901).await.error(503).2, "disk_full");
    send(9_900).await.ok();
}

#[tokio::test]
async fn only_so_many_uploads_run_at_once() {
    let server = Server::with(ScriptedGenerate::echo(), |state| state.config.uploads_max = 1).await;
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    let body = Body::from_stream(futures::stream::unfold(receiver, |mut receiver| async {
        let chunk = receiver.recv().await?;
        Some((chunk, receiver))
    }));
    let whole = Bytes::from(form(&[("purpose", None, b"batch"), ("file", Some("in.jsonl"), LINE)]));
    sender.send(Ok(whole.slice(..40))).await.unwrap();
    let router = server.router.clone();
    let first =
        tokio::spawn(async move { tower::ServiceExt::oneshot(router, form_request(body)).await.unwrap().status() });
    // Its first piece is taken once the upload runs.
    sender.send(Ok(whole.slice(40..))).await.unwrap();
    wait::until("the second upload to be turned away", || async {
        let answer = server.post_form(&[("purpose", None, b"user_data"), ("file", Some("x"), b"x")]).await;
        if answer.status == 429 { Ok(answer) } else { Err(format!("{}", answer.status)) }
    })
    .await
    .refused(429, Value::Null, "rate_limit_exceeded");
    drop(sender);
    assert_eq!(first.await.unwrap(), 200);
}
