//! Builds the lines of the published files: exactly four keys, always one valid
//! JSON object on one line, whatever an engine answered.

use std::borrow::Cow;

use bytes::Bytes;
use overnight_types::{BatchRequestId, ErrorCode};

use crate::json;

/// What replaces an answer that is not a JSON object.
const INVALID_BODY: &str = r#"{"error":{"message":"the engine's answer was not a JSON object","type":"server_error","param":null,"code":"invalid_engine_answer"}}"#;

/// The line of an item that got an HTTP answer.
///
/// `custom_id` is the JSON string token of the input line and `body` a JSON
/// object; both are kept byte for byte, but for line ends between the parts of
/// the body, which become spaces. A body that is no JSON object is replaced by an
/// error object: callers judge it with [`json::is_object`] first.
pub fn response_line(id: BatchRequestId, custom_id: &[u8], status: u16, request_id: &str, body: &[u8]) -> Bytes {
    debug_assert!((100..1000).contains(&status), "status {status}");
    let body = one_line(body);
    let mut line = start(id, custom_id, body.len() + request_id.len() + 80);
    line.extend_from_slice(b",\"response\":{\"status_code\":");
    line.extend_from_slice(status.to_string().as_bytes());
    line.extend_from_slice(b",\"request_id\":");
    push_string(&mut line, request_id);
    line.extend_from_slice(b",\"body\":");
    line.extend_from_slice(&body);
    line.extend_from_slice(b"},\"error\":null}");
    Bytes::from(line)
}

/// The line of an item that got no HTTP answer.
pub fn error_line(id: BatchRequestId, custom_id: &[u8], code: ErrorCode, message: &str) -> Bytes {
    let mut line = start(id, custom_id, message.len() + 80);
    line.extend_from_slice(b",\"response\":null,\"error\":{\"code\":");
    push_string(&mut line, code.as_str());
    line.extend_from_slice(b",\"message\":");
    push_string(&mut line, message);
    line.extend_from_slice(b"}}");
    Bytes::from(line)
}

fn start(id: BatchRequestId, custom_id: &[u8], more: usize) -> Vec<u8> {
    let id = id.to_string();
    let mut line = Vec::with_capacity(custom_id.len() + id.len() + more);
    line.extend_from_slice(b"{\"id\":\"");
    line.extend_from_slice(id.as_bytes());
    line.extend_from_slice(b"\",\"custom_id\":");
    line.extend_from_slice(custom_id);
    line
}

fn one_line(body: &[u8]) -> Cow<'_, [u8]> {
    if !json::is_object(body) {
        return Cow::Borrowed(INVALID_BODY.as_bytes());
    }
    let body = body.trim_ascii();
    if memchr::memchr2(b'\n', b'\r', body).is_none() {
        return Cow::Borrowed(body);
    }
    // In valid JSON a raw line end can only be white space between tokens.
    Cow::Owned(body.iter().map(|&byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }).collect())
}

fn push_string(line: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(line, text).expect("writing a string to memory cannot fail");
}

#[cfg(test)]
mod tests {
    use overnight_types::{ItemIndex, JobId};
    use serde_json::Value;

    use super::*;

    fn id() -> BatchRequestId {
        BatchRequestId { job: JobId::new(), item: ItemIndex(3) }
    }

    #[test]
    fn line_has_exactly_four_keys_and_never_both_answers() {
        let response: Value =
            serde_json::from_slice(&response_line(id(), b"\"a\"", 200, "req_1", b"{\"x\":1}")).unwrap();
        let error: Value =
            serde_json::from_slice(&error_line(id(), b"\"a\"", ErrorCode::BatchExpired, "window \"24h\" over"))
                .unwrap();
        for line in [&response, &error] {
            let keys: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(keys, ["id", "custom_id", "response", "error"]);
            assert!(line["response"].is_null() != line["error"].is_null());
        }
        assert_eq!(response["response"]["status_code"], 200);
        assert_eq!(response["response"]["request_id"], "req_1");
        assert_eq!(error["error"]["code"], "batch_expired");
        assert_eq!(error["error"]["message"], "window \"24h\" over");
    }

    #[test]
    fn body_and_custom_id_pass_through_byte_for_byte() {
        let body = br#"{"n":9007199254740993,"e":1e999,"s":"\ud800\u0000","k":1,"k":2}"#;
        let line = response_line(id(), br#""a\u0041\ud800""#, 200, "req_1", body);
        assert!(memchr::memmem::find(&line, body).is_some());
        assert!(memchr::memmem::find(&line, br#","custom_id":"a\u0041\ud800","#).is_some());
    }

    // One odd answer must not harm another line (field reports 7, 15 and 58).
    #[test]
    fn any_answer_gives_one_valid_line() {
        let odd: [&[u8]; 7] =
            [b"", b"<html>", b"{\n \"a\":\r\n 1}\n", b"{\"a\":NaN}", b"\xff\xfe", b"[1]", b"{\"a\":\"\ntorn"];
        for body in odd {
            let line = response_line(id(), b"\"a\"", 502, "req_1", body);
            assert!(memchr::memchr2(b'\n', b'\r', &line).is_none(), "{body:?}");
            let line: Value = serde_json::from_slice(&line).unwrap();
            assert!(line["response"]["body"].is_object(), "{body:?}");
        }
    }
}
