//! Completions: prompts of every form in, `text_completion` out.

use super::*;

#[test]
fn prompts_of_every_form_become_ids() {
    let prompts = |prompt: Value| -> Vec<Vec<u32>> {
        let prepared = completion(json!({"prompt": prompt})).unwrap();
        prepared.requests.iter().map(|request| tokens(request).prompt.clone()).collect()
    };
    // Field report 42: a raw completion gets its BOS too; ids are taken as they are.
    assert_eq!(prompts(json!("ab")), [vec![BOS, 97, 98]]);
    assert_eq!(prompts(json!(["ab", "<bos>c"])), [vec![BOS, 97, 98], vec![BOS, 99]]);
    assert_eq!(prompts(json!([97, 98])), [vec![97, 98]]);
    assert_eq!(prompts(json!([[97], [98, 99]])), [vec![97], vec![98, 99]]);
    for odd in [json!(7), json!({"a": 1}), json!([1, "a"]), json!([null]), json!(true)] {
        assert_refused(completion(json!({"prompt": odd})), "prompt", "must be a string");
    }
    assert_eq!(completion(json!({"prompt": "ab"})).unwrap().order_key(), [BOS, 97, 98]);
}

#[test]
fn answer_has_every_key_and_choices_in_order_of_prompts() {
    let mut prepared = completion(json!({"prompt": ["a", "b"], "n": 2})).unwrap();
    let ids: Vec<RequestId> = prepared.requests.iter().map(|request| request.id).collect();
    assert_eq!(prepared.answer.request_ids(), ids);
    // Outputs come in any order, in pieces, and strangers' among them.
    let outputs = [
        output(ids[3], "d", Some(FinishReason::Length)),
        output(ids[0], "a", None),
        output(RequestId::next(), "x", Some(FinishReason::Stop)),
        output(ids[2], "c", Some(FinishReason::Stop)),
        output(ids[1], "b", Some(FinishReason::Stop)),
        output(ids[0], "A", Some(FinishReason::Stop)),
    ];
    let (response, body) = finished(&mut prepared, outputs.to_vec());
    let texts: Vec<&str> =
        body["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["aA", "b", "c", "d"]);
    assert_eq!(
        body["choices"][3],
        json!({"index": 3, "text": "d", "logprobs": null, "finish_reason": "length", "stop_reason": null,
               "token_ids": null, "prompt_logprobs": null, "prompt_token_ids": null})
    );
    let keys: Vec<&String> = body.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"]);
    assert_eq!((body["id"].as_str(), body["object"].as_str()), (Some("cmpl-r1"), Some("text_completion")));
    // Each prompt counts once.
    assert_eq!(body["usage"]["prompt_tokens"], 4);
    assert_eq!(response.finish_reason.as_deref(), Some("length"));
}

#[test]
fn echo_puts_the_prompt_before_text_and_logprobs() {
    let mut prepared = completion(json!({"prompt": "né", "echo": true, "logprobs": 1, "max_tokens": 1})).unwrap();
    assert_eq!(tokens(&prepared.requests[0]).prompt_logprobs, Some(1));
    let mut last = output(prepared.requests[0].id, "e", Some(FinishReason::Length));
    last.logprobs = vec![logprobs(101, -3.0, &[(97, -1.0)])];
    let scored = [(110, -0.25), (0xc3, -0.5), (0xa9, -0.75)];
    last.prompt_logprobs = Some(
        std::iter::once(None).chain(scored.map(|(id, score)| Some(logprobs(id, score, &[(id, score)])))).collect(),
    );
    let (_, body) = finished(&mut prepared, vec![last]);
    assert_eq!(body["choices"][0]["text"], "née");
    assert_eq!(
        body["choices"][0]["logprobs"],
        json!({
            // The BOS has no text; a character counts where it begins.
            "text_offset": [0, 0, 1, 2, 2],
            "token_logprobs": [null, -0.25, -0.5, -0.75, -3.0],
            "tokens": ["<bos>", "n", "bytes:\\xc3", "bytes:\\xa9", "e"],
            // The chosen token is always in the list, besides the likeliest.
            "top_logprobs": [null, {"n": -0.25}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.75}, {"a": -1.0, "e": -3.0}],
        })
    );
    assert_eq!(body["choices"][0]["prompt_logprobs"], Value::Null, "echo is not prompt_logprobs");
}

#[test]
fn tokens_are_shown_as_ids_when_asked_for() {
    let fields = json!({"prompt": "a", "logprobs": 0, "return_tokens_as_token_ids": true});
    let mut prepared = completion(fields).unwrap();
    let mut last = output(prepared.requests[0].id, "b", Some(FinishReason::Stop));
    last.logprobs = vec![logprobs(98, -1.0, &[])];
    let (_, body) = finished(&mut prepared, vec![last]);
    assert_eq!(body["choices"][0]["logprobs"]["tokens"], json!(["token_id:98"]));
    assert_eq!(body["choices"][0]["logprobs"]["top_logprobs"], json!([{"token_id:98": -1.0}]));
}

#[test]
fn failure_of_one_request_ends_the_answer() {
    use crate::generate::Failure;

    let mut prepared = completion(json!({"prompt": "a", "n": 2})).unwrap();
    let (first, second) = (prepared.requests[0].id, prepared.requests[1].id);
    let trouble = Failure::EngineTrouble { message: "poisoned".to_owned() };
    let state = prepared.answer.push(Output::Failed { id: first, failure: trouble.clone() });
    assert_eq!(state, AnswerState::Failed(trouble));
    let late = prepared.answer.push(Output::Tokens(output(second, "b", Some(FinishReason::Stop))));
    assert_eq!(late, AnswerState::Pending);

    let mut prepared = completion(json!({"prompt": "a"})).unwrap();
    let failure = Failure::Refused {
        status: 400,
        code: "context_length_exceeded".to_owned(),
        param: Some("prompt".to_owned()),
        message: "too long for the KV pool".to_owned(),
    };
    let state = prepared.answer.push(Output::Failed { id: prepared.requests[0].id, failure });
    let AnswerState::Done(response) = state else { panic!("{state:?}") };
    assert_eq!((response.status, response.retryable), (400, false));
    assert_eq!(response.error_code.as_deref(), Some("context_length_exceeded"));

    let mut prepared = completion(json!({"prompt": "a"})).unwrap();
    let aborted = output(prepared.requests[0].id, "", Some(FinishReason::Abort));
    assert_eq!(prepared.answer.push(Output::Tokens(aborted)), AnswerState::Failed(Failure::Cancelled));
}
