//! Chunks of online streams.

use super::super::StreamEnd;
use super::*;

/// Pushes outputs and returns the chunks as JSON, `[DONE]` as a string, and the end.
fn chunks(prepared: &mut Prepared, outputs: Vec<TokenOutput>) -> (Vec<Value>, Option<StreamEnd>) {
    let (mut chunks, mut end) = (Vec::new(), None);
    for output in outputs {
        assert!(end.is_none());
        let step = prepared.answer.push_stream(Output::Tokens(output));
        chunks.extend(step.chunks.iter().map(|chunk| {
            if &chunk[..] == b"[DONE]" { json!("[DONE]") } else { serde_json::from_slice(chunk).unwrap() }
        }));
        end = step.end;
    }
    (chunks, end)
}

#[test]
fn chat_stream_begins_with_the_role_and_ends_with_usage() {
    let fields = json!({"messages": user("hi"), "stream": true, "stream_options": {"include_usage": true}});
    let mut prepared = chat(fields).unwrap();
    assert!(prepared.stream && tokens(&prepared.requests[0]).stream);
    let id = prepared.requests[0].id;
    let outputs = vec![output(id, "Hel", None), output(id, "", None), output(id, "lo", Some(FinishReason::Stop))];
    let (chunks, end) = chunks(&mut prepared, outputs);
    let deltas: Vec<&Value> = chunks[..3].iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(
        deltas,
        [&json!({"role": "assistant", "content": ""}), &json!({"content": "Hel"}), &json!({"content": "lo"})]
    );
    assert_eq!(chunks[1]["choices"][0]["finish_reason"], Value::Null);
    assert_eq!(chunks[2]["choices"][0]["finish_reason"], "stop");
    for chunk in &chunks[..3] {
        assert_eq!((&chunk["object"], &chunk["id"]), (&json!("chat.completion.chunk"), &json!("chatcmpl-r1")));
        assert_eq!(chunk.get("usage"), Some(&Value::Null));
    }
    assert_eq!((&chunks[3]["choices"], &chunks[3]["usage"]["completion_tokens"]), (&json!([]), &json!(2)));
    assert_eq!(chunks[4..], [json!("[DONE]")]);
    assert!(matches!(end, Some(StreamEnd::Done { finish_reason: Some(reason), .. }) if reason == "stop"));
}

#[test]
fn completion_stream_shows_choices_side_by_side() {
    let fields = json!({"prompt": "a", "n": 2, "stream": true, "echo": true, "logprobs": 0, "return_token_ids": true});
    let mut prepared = completion(fields).unwrap();
    let ids: Vec<RequestId> = prepared.requests.iter().map(|request| request.id).collect();
    let scored = |id, text: &str, ends| {
        let mut output = output(id, text, ends);
        output.logprobs = text.bytes().map(|byte| logprobs(u32::from(byte), -1.0, &[])).collect();
        output
    };
    let outputs = vec![
        scored(ids[1], "x", None),
        scored(ids[0], "y", Some(FinishReason::Stop)),
        scored(ids[1], "z", Some(FinishReason::Length)),
    ];
    let (chunks, _) = chunks(&mut prepared, outputs);
    let shown: Vec<(u64, &str, Value)> = chunks[..3]
        .iter()
        .map(|chunk| &chunk["choices"][0])
        .map(|choice| {
            (
                choice["index"].as_u64().unwrap(),
                choice["text"].as_str().unwrap(),
                choice["logprobs"]["text_offset"].clone(),
            )
        })
        .collect();
    assert_eq!(shown, [(1, "ax", json!([0, 0, 1])), (0, "ay", json!([0, 0, 1])), (1, "z", json!([2]))]);
    assert_eq!(chunks[2]["choices"][0]["token_ids"], json!([122]));
    assert!(chunks[0].get("usage").is_none());
    assert_eq!(chunks[3..], [json!("[DONE]")]);
}

#[test]
fn failed_stream_ends_with_an_error_object() {
    use crate::generate::Failure;

    let mut prepared = completion(json!({"prompt": "a", "stream": true})).unwrap();
    let id = prepared.requests[0].id;
    let step = prepared.answer.push_stream(Output::Failed { id, failure: Failure::Timeout });
    let Some(StreamEnd::Failed(response)) = step.end else { panic!("{step:?}") };
    let body: Value = serde_json::from_slice(&response.body).unwrap();
    assert_eq!((response.status, &body["error"]["code"]), (504, &json!("request_timeout")));
    let late = prepared.answer.push_stream(Output::Tokens(output(id, "b", Some(FinishReason::Stop))));
    assert!(late.chunks.is_empty() && late.end.is_none());
    assert_refused(
        completion(json!({"prompt": "a", "stream": true, "prompt_logprobs": 1})),
        "prompt_logprobs",
        "stream",
    );
}
