//! Bodies for a remote engine, and what its answers are worth.

use super::*;

fn prepare(names: Option<Vec<String>>, body: &[u8]) -> Result<Prepared, Refusal> {
    Mapper::remote(names).prepare(Endpoint::ChatCompletions, body, options())
}

fn judged(status: u16, body: &str) -> Response {
    let mut prepared = prepare(None, br#"{"model":"m"}"#).unwrap();
    let output =
        Output::Response { id: prepared.requests[0].id, status, body: body.to_owned().into(), retry_after: None };
    let AnswerState::Done(response) = prepared.answer.push(output) else { panic!("one output is the answer") };
    response
}

#[test]
fn body_goes_out_byte_for_byte() {
    let body = br#"{ "model" : "m", "seed":5, "messages":[{"role":"user","content":"\ud800\u0000"}], "odd":[1e400] }"#;
    let prepared = prepare(None, body).unwrap();
    let Input::Body { json, endpoint } = &prepared.requests[0].input else { panic!("not a body") };
    assert_eq!((&json[..], *endpoint), (&body[..], Endpoint::ChatCompletions));
    assert_eq!((prepared.seed_used, prepared.order_key().len(), prepared.stream), (Some(5), 0, false));
    assert_eq!(prepare(Some(vec!["n".to_owned()]), body).unwrap_err().status, 404);
    assert_refused(prepare(None, br#"{"model":"m","stream":true}"#), "stream", "remote");
    assert_eq!(prepare(None, b"[1]").unwrap_err().status, 400);
}

#[test]
fn good_answer_stands_byte_for_byte() {
    let body = r#"{ "choices":[{"finish_reason":"stop"},{"finish_reason":"length"}], "error":null,
        "usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":1},
                 "completion_tokens_details":{"reasoning_tokens":2}} }"#;
    let response = judged(200, body);
    assert_eq!((response.status, &response.body[..], response.retryable), (200, body.as_bytes(), false));
    let usage = response.usage;
    assert_eq!((usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens), (3, 1, 4, 2));
    assert_eq!(response.finish_reason.as_deref(), Some("length"));
}

#[test]
fn answer_is_judged_by_its_result() {
    for (status, body, becomes, retryable, code) in [
        (200, r#"{"error":{"message":"boom","code":400}}"#, 400, false, Some("400")),
        (200, r#"{"error":{"message":"boom","code":"overloaded"}}"#, 502, true, Some("overloaded")),
        (200, r#"{"error":"boom"}"#, 502, true, None),
        (200, r#"{"choices":[]}"#, 502, true, Some("unusable_response")),
        (200, "<html>", 502, true, Some("unusable_response")),
        (200, r#"{"choices":[{"finish_re"#, 502, true, Some("unusable_response")),
        (400, r#"{"error":{"message":"m","type":"t","param":null,"code":null}}"#, 400, false, None),
        (429, "slow down", 429, true, Some("unusable_response")),
        (503, r#"{"error":{"message":"m","code":"starting"}}"#, 503, true, Some("starting")),
        (302, "", 502, true, Some("unusable_response")),
    ] {
        let response = judged(status, body);
        assert_eq!((response.status, response.retryable), (becomes, retryable), "{status} {body}");
        assert_eq!(response.error_code.as_deref(), code, "{status} {body}");
        let json: Value = serde_json::from_slice(&response.body).unwrap();
        assert!(json.is_object(), "{status} {body}");
    }
}

#[test]
fn odd_types_in_an_answer_harm_nothing() {
    let response = judged(200, r#"{"choices":[{"finish_reason":7}],"usage":{"prompt_tokens":"three"}}"#);
    assert_eq!((response.status, response.finish_reason, response.usage.input_tokens), (200, None, 0));
}
