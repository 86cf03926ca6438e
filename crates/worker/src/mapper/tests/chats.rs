//! Chats: messages in, `chat.completion` out.

use super::*;

fn prompt(fields: Value) -> String {
    let prepared = chat(fields).unwrap();
    text(None).decode(&tokens(&prepared.requests[0]).prompt, false).unwrap()
}

// Field report 41: the template writes the BOS; nobody adds a second one.
#[test]
fn messages_render_with_one_bos() {
    assert_eq!(prompt(json!({"messages": user("hi")})), "<bos>[user]hi[assistant]");
    assert_eq!(prompt(json!({"messages": user("hi"), "add_special_tokens": true})), "<bos>[user]hi[assistant]");
    let talk = json!([
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": null, "refusal": null, "tool_calls": [], "reasoning_content": "~"},
        {"role": "user", "content": "hi", "name": "ann"},
    ]);
    assert_eq!(prompt(json!({"messages": talk})), "<bos>[system]be\nbrief[assistant]~[user]hi[assistant]");
    let kwargs =
        json!({"messages": user("hi"), "chat_template_kwargs": {"extra": "?"}, "add_generation_prompt": false});
    assert_eq!(prompt(kwargs), "<bos>[user]hi?");
}

#[test]
fn final_message_is_continued() {
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]);
    let fields = json!({"messages": messages, "continue_final_message": true, "echo": true});
    assert_eq!(prompt(fields.clone()), "<bos>[user]hi[assistant]Well,");
    let (_, body) = answered(&mut chat(fields).unwrap(), &[" yes"]);
    assert_eq!(body["choices"][0]["message"]["content"], "Well, yes");
    let both = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
    assert_refused(chat(both), "continue_final_message", "exclude");
}

#[test]
fn messages_that_cannot_be_served_are_refused_by_place() {
    for (message, param, part) in [
        (json!("hi"), "messages[0]", "object"),
        (json!({"content": "hi"}), "messages[0].role", "string"),
        (json!({"role": "robot", "content": "hi"}), "messages[0].role", "robot"),
        (json!({"role": "tool", "content": "hi", "tool_call_id": "x"}), "messages[0].role", "tool"),
        (json!({"role": "user"}), "messages[0].content", "string"),
        (json!({"role": "user", "content": null}), "messages[0].content", "string"),
        (
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            "messages[0].content",
            "image_url",
        ),
        (json!({"role": "user", "content": [{"type": "input_audio"}]}), "messages[0].content", "input_audio"),
        (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content", "no text"),
        (json!({"role": "assistant", "content": "", "tool_calls": [{}]}), "messages[0].tool_calls", "not supported"),
        (json!({"role": "user", "content": "hi", "mood": "calm"}), "messages[0].mood", "not supported"),
    ] {
        assert_refused(chat(json!({"messages": [message]})), param, part);
    }
    for field in ["tools", "functions"] {
        assert_refused(chat(json!({"messages": user("hi"), field: [{"type": "function"}]})), field, "tool");
        assert!(chat(json!({"messages": user("hi"), field: []})).is_ok());
    }
}

// Field report 40: a missing template is an error that names the remedy.
#[test]
fn chat_without_a_template_names_the_remedy() {
    let mapper = Mapper::local(text(None), vec!["toy".to_owned()], LIMITS);
    let body = br#"{"model":"toy","messages":[{"role":"user","content":"hi"}]}"#;
    let refusal = mapper.prepare(Endpoint::ChatCompletions, body, options()).unwrap_err();
    assert_eq!(refusal.error.code.as_deref(), Some("chat_template_missing"));
    assert!(refusal.error.message.contains("/v1/completions"), "{refusal:?}");
    assert!(mapper.prepare(Endpoint::Completions, br#"{"model":"toy","prompt":"a"}"#, options()).is_ok());
}

#[test]
fn answer_has_every_key() {
    let mut prepared = chat(json!({"messages": user("hi"), "n": 2})).unwrap();
    let (response, body) = answered(&mut prepared, &["one", "two!"]);
    let choice = |index: u32, content: &str| {
        json!({
            "index": index,
            "message": {
                "role": "assistant", "content": content, "refusal": null, "annotations": null, "audio": null,
                "function_call": null, "tool_calls": [], "reasoning": null, "reasoning_content": null,
            },
            "logprobs": null, "finish_reason": "stop", "stop_reason": null, "token_ids": null,
        })
    };
    assert_eq!(
        body,
        json!({
            "id": "chatcmpl-r1", "object": "chat.completion", "created": 1_700_000_000, "model": "toy",
            "choices": [choice(0, "one"), choice(1, "two!")],
            "service_tier": null, "system_fingerprint": concat!("overnight-", env!("CARGO_PKG_VERSION")),
            "usage": {
                "prompt_tokens": 20, "total_tokens": 27, "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
            "prompt_logprobs": null, "prompt_token_ids": null,
        })
    );
    assert_eq!((response.usage.input_tokens, response.usage.output_tokens, response.usage.cached_tokens), (20, 7, 2));
    assert_eq!((response.finish_reason.as_deref(), response.status), (Some("stop"), 200));
}

// Field report 20: negative infinity is written as a number, and bytes that are no text can be told.
#[test]
fn logprobs_are_valid_json_with_exact_bytes() {
    let mut prepared = chat(json!({"messages": user("hi"), "logprobs": true, "top_logprobs": 2})).unwrap();
    let mut last = output(prepared.requests[0].id, "é", Some(FinishReason::Length));
    last.logprobs = vec![
        logprobs(0xc3, -0.5, &[(0xc3, -0.5), (97, f32::NEG_INFINITY)]),
        logprobs(0xa9, f32::NAN, &[(0xa9, 0.0), (98, -1.0)]),
    ];
    let (response, body) = finished(&mut prepared, vec![last]);
    assert_eq!(
        body["choices"][0]["logprobs"],
        json!({
            "content": [
                {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xc3], "top_logprobs": [
                    {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xc3]},
                    {"token": "a", "logprob": -9999.0, "bytes": [97]},
                ]},
                {"token": "bytes:\\xa9", "logprob": -9999.0, "bytes": [0xa9], "top_logprobs": [
                    {"token": "bytes:\\xa9", "logprob": 0.0, "bytes": [0xa9]},
                    {"token": "b", "logprob": -1.0, "bytes": [98]},
                ]},
            ],
            "refusal": null,
        })
    );
    assert_eq!(response.finish_reason.as_deref(), Some("length"));
}

#[test]
fn token_ids_and_prompt_scores_come_when_asked_for() {
    let fields =
        json!({"messages": user("a"), "return_token_ids": true, "prompt_logprobs": 1, "add_generation_prompt": false});
    let mut prepared = chat(fields).unwrap();
    let mut last = output(prepared.requests[0].id, "ok", Some(FinishReason::Stop));
    last = stopped_by(last, StopReason::Text("!".to_owned()));
    last.prompt_logprobs = Some(vec![None, Some(logprobs(91, -2.0, &[(97, -1.0)]))]);
    let (_, body) = finished(&mut prepared, vec![last]);
    assert_eq!(body["prompt_token_ids"], json!([vec![BOS], ids("[user]a")].concat()));
    assert_eq!(body["choices"][0]["token_ids"], json!(ids("ok")));
    assert_eq!(body["choices"][0]["stop_reason"], "!");
    // Field report 5: vllm#3752: the first is null; the prompt's own token comes first and is marked.
    assert_eq!(
        body["prompt_logprobs"],
        json!([null, {
            "91": {"logprob": -2.0, "rank": 1, "decoded_token": "[", "is_prompt_token": true},
            "97": {"logprob": -1.0, "rank": 1, "decoded_token": "a", "is_prompt_token": false},
        }])
    );
}
