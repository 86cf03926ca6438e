//! What a body may say, and what is refused at the door.

use super::*;

// Field report 1: vllm#7283, #7632, PR 7746.
#[test]
fn empty_prompts_fail_by_themselves_with_a_named_error() {
    for prompt in [json!(""), json!([""]), json!([]), json!([[]]), json!(["a", ""])] {
        assert_refused(completion(json!({"prompt": prompt})), "prompt", "empty");
    }
    assert_refused(chat(json!({"messages": []})), "messages", "at least one");
    assert_refused(completion(json!({})), "prompt", "required");
    assert_refused(chat(json!({})), "messages", "required");
    assert!(completion(json!({"prompt": "a"})).is_ok(), "the next one is served");
}

// Field report 3: vllm#904. Output is cut to what the context has left; a prompt that fills it is refused.
#[test]
fn context_is_kept_by_the_stated_rule() {
    let of_length = |len: usize| "a".repeat(len - 1);
    let too_long = completion(json!({"prompt": of_length(64), "max_tokens": 1}));
    assert_refused(too_long, "prompt", "64 tokens");
    let refusal = completion(json!({"prompt": of_length(70)})).unwrap_err();
    assert_eq!(refusal.error.code.as_deref(), Some("context_length_exceeded"));
    assert!(refusal.error.message.contains("70") && refusal.error.message.contains("64"), "{refusal:?}");

    // The rule: what does not fit any more is cut off, and the output ends with `length`.
    let max_tokens = |prepared: Prepared| tokens(&prepared.requests[0]).stop.max_tokens;
    assert_eq!(max_tokens(completion(json!({"prompt": of_length(60), "max_tokens": 5})).unwrap()), 4);
    assert_eq!(max_tokens(completion(json!({"prompt": of_length(2), "max_tokens": 3_000_000_000u64})).unwrap()), 62);
    assert_eq!(max_tokens(completion(json!({"prompt": of_length(60), "max_tokens": 4})).unwrap()), 4);
    assert_eq!(max_tokens(completion(json!({"prompt": of_length(60)})).unwrap()), 4);
    assert_eq!(max_tokens(completion(json!({"prompt": of_length(10)})).unwrap()), 16);
    let prepared = chat(json!({"messages": user("hi")})).unwrap();
    let num_prompt = tokens(&prepared.requests[0]).prompt.len();
    assert_eq!(max_tokens(prepared) as usize, 64 - num_prompt);
    let wishful = chat(json!({"messages": user("hi"), "max_completion_tokens": 4_096})).unwrap();
    assert_eq!(max_tokens(wishful) as usize, 64 - num_prompt);
    assert_refused(
        completion(json!({"prompt": of_length(60), "max_tokens": 9, "min_tokens": 5})),
        "min_tokens",
        "4 tokens are left",
    );
}

// Field report 4: helm#1469.
#[test]
fn zero_tokens_are_for_scoring_a_prompt_only() {
    assert_refused(completion(json!({"prompt": "a", "max_tokens": 0})), "max_tokens", "at least 1");
    assert_refused(
        chat(json!({"messages": user("a"), "max_completion_tokens": 0})),
        "max_completion_tokens",
        "at least 1",
    );
    let prepared = completion(json!({"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1})).unwrap();
    assert_eq!(tokens(&prepared.requests[0]).prompt_logprobs, Some(1));
    assert_eq!(tokens(&prepared.requests[0]).stop.max_tokens, 0);
    assert!(completion(json!({"prompt": "a", "max_tokens": 0, "echo": true})).is_ok());
    let full = completion(json!({"prompt": "a".repeat(63), "max_tokens": 0, "prompt_logprobs": 0}));
    assert!(full.is_ok(), "a prompt as long as the context can be scored");
}

// Field reports 6, 8, 9, 10, 11: top_k clamps; ids outside the vocabulary and too many logprobs are refused.
#[test]
fn parameters_out_of_range_are_refused_with_name_and_value() {
    for (field, value, part) in [
        ("temperature", json!(-1), "-1"),
        ("temperature", json!("hot"), "temperature"),
        ("temperature", json!(1e39), "1e"),
        ("top_p", json!(0), "above 0"),
        ("top_p", json!(1.5), "1.5"),
        ("top_k", json!(-2), "-2"),
        ("min_p", json!(2), "within 0"),
        ("presence_penalty", json!(2.5), "2.5"),
        ("frequency_penalty", json!(-3), "-3"),
        ("repetition_penalty", json!(0), "above 0"),
        ("n", json!(0), "0"),
        ("n", json!(129), "129"),
        ("best_of", json!(3), "best_of"),
        ("seed", json!(1.5), "1.5"),
        ("seed", json!(1e30), "64-bit"),
        ("logit_bias", json!({"258": 1}), "258"),
        ("logit_bias", json!({"-1": 1}), "-1"),
        ("logit_bias", json!({"x": 1}), "token ids"),
        ("logit_bias", json!({"3": 101}), "101"),
        ("stop_token_ids", json!([258]), "258"),
        ("stop_token_ids", json!([-1]), "-1"),
        ("stop", json!(""), "empty"),
        ("stop", json!(["a", ""]), "empty"),
        ("stop", json!(7), "string"),
        ("logprobs", json!(21), "21"),
        ("logprobs", json!(-1), "-1"),
        ("prompt_logprobs", json!(258), "258"),
        ("min_tokens", json!(65), "65"),
        ("max_tokens", json!(-1), "max_tokens"),
        ("truncate_prompt_tokens", json!(0), "0"),
        ("truncation_side", json!("middle"), "left or right"),
        ("stream_options", json!({"include_usage": true}), "stream"),
        ("suffix", json!("x"), "suffix"),
        ("response_format", json!({"type": "json_object"}), "format"),
    ] {
        assert_refused(completion(json!({"prompt": "abc", field: value})), field, part);
    }
    assert_refused(completion(json!({"prompt": [1, 258]})), "prompt", "258");
    assert_refused(completion(json!({"prompt": [[1], [-5]]})), "prompt", "-5");
    assert_refused(chat(json!({"messages": user("a"), "top_logprobs": 5})), "top_logprobs", "logprobs = true");
    assert_refused(
        chat(json!({"messages": user("a"), "logprobs": true, "top_logprobs": 9_999_999})),
        "top_logprobs",
        "20",
    );
}

#[test]
fn parameters_reach_the_engine_as_given() {
    let prepared = completion(json!({
        "prompt": "abc", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 9_999_999, "min_p": 0.1, "seed": -1,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": -100, "7": 2.5},
        "stop": ["x", "yz"], "stop_token_ids": [9], "ignore_eos": true, "min_tokens": 2, "logprobs": 3,
        "include_stop_str_in_output": true, "skip_special_tokens": false, "user": "u", "n": null,
    }))
    .unwrap();
    let request = tokens(&prepared.requests[0]);
    assert_eq!(request.prompt, [vec![BOS], ids("abc")].concat());
    let sampling = &request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (0.5, 0.9, 0.1));
    // Field report 6: sendnn-inference#542, PR 543: larger than the vocabulary keeps all.
    assert_eq!((sampling.top_k, sampling.seed), (None, u64::MAX));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty), (1.0, -1.0, 1.1));
    assert_eq!(sampling.logit_bias, [(5, -100.0), (7, 2.5)]);
    let stop = &request.stop;
    assert_eq!((stop.max_tokens, stop.min_tokens, stop.ignore_eos), (7, 2, true));
    assert_eq!((&*stop.stop, &*stop.stop_token_ids), (&["x".to_owned(), "yz".to_owned()][..], &[9][..]));
    assert!(stop.include_stop_str_in_output && !request.skip_special_tokens);
    assert_eq!((request.logprobs, request.prompt_logprobs, request.class), (Some(3), None, Class::Job));
    let kept =
        |top_k: i64| tokens(&completion(json!({"prompt": "a", "top_k": top_k})).unwrap().requests[0]).sampling.top_k;
    assert_eq!([kept(-1), kept(0), kept(40)], [None, None, Some(40)]);
}

// Field reports 22 and 23: vllm PR 11898, #10852, #7808, #16449; #11953, PR 17929.
#[test]
fn samples_differ_and_repeat_with_the_seed() {
    let seeds = |fields: Value| -> Vec<u64> {
        let prepared = completion(fields).unwrap();
        prepared.requests.iter().map(|request| tokens(request).sampling.seed).collect()
    };
    // Each prompt of a seeded body gives what it gives alone.
    let seeded = seeds(json!({"prompt": ["a", "b"], "n": 2, "seed": 7}));
    let alone = seeds(json!({"prompt": "b", "n": 2, "seed": 7}));
    assert_eq!((seeded[0], &seeded[..2], &seeded[2..]), (7, &*alone, &*alone));
    // A sweep over seeds repeats no sample of another seed.
    let mut swept: Vec<u64> = (0..50).flat_map(|seed| seeds(json!({"prompt": "a", "n": 4, "seed": seed}))).collect();
    swept.sort_unstable();
    swept.dedup();
    assert_eq!(swept.len(), 200);
    // Without a seed, equal prompts differ too, and repeat with the drawn one.
    let unseeded = seeds(json!({"prompt": ["a", "a"], "n": 2}));
    assert_eq!((unseeded[0], &unseeded), (1_000, &seeds(json!({"prompt": ["a", "a"], "n": 2}))));
    assert!((1..4).all(|index| !unseeded[..index].contains(&unseeded[index])), "{unseeded:?}");
    assert_eq!(completion(json!({"prompt": "a"})).unwrap().seed_used, Some(1_000));
    assert_eq!(completion(json!({"prompt": "a", "seed": 7})).unwrap().seed_used, Some(7));
}

#[test]
fn unknown_models_are_not_found_and_others_are_served() {
    let refusal = prepare_raw(Endpoint::Completions, br#"{"model":"other","prompt":"a"}"#).unwrap_err();
    assert_eq!((refusal.status, refusal.error.code.as_deref()), (404, Some("model_not_found")));
    assert_refused(prepare_raw(Endpoint::Completions, br#"{"prompt":"a"}"#), "model", "required");
}

#[test]
fn deep_and_damaged_bodies_fail_by_themselves() {
    let deep = format!(r#"{{"model":"toy","messages":{}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert_refused(prepare_raw(Endpoint::ChatCompletions, deep.as_bytes()), "messages", "recursion");
    for body in [&b"{"[..], b"[]", b"\xff", b"", b"{\"model\":\"toy\",\"prompt\":\"a\xff\"}"] {
        assert_eq!(prepare_raw(Endpoint::Completions, body).unwrap_err().status, 400);
    }
}

#[test]
fn odd_characters_reach_the_prompt() {
    let prompt =
        |body: &str| tokens(&prepare_raw(Endpoint::Completions, body.as_bytes()).unwrap().requests[0]).prompt.clone();
    assert_eq!(prompt(r#"{"model":"toy","prompt":"a\u0000b"}"#), [BOS, 97, 0, 98]);
    assert_eq!(prompt(r#"{"model":"toy","prompt":"\ud83d!"}"#)[1..], ids("\u{fffd}!"));
    assert_eq!(prompt(r#"{"model":"toy","prompt":"\ud83d\ude00"}"#)[1..], ids("😀"));
}

#[test]
fn streams_are_refused_for_items_of_a_job() {
    let options = PrepareOptions { allow_stream: false, ..options() };
    let refused = mapper().prepare(Endpoint::Completions, br#"{"model":"toy","prompt":"a","stream":true}"#, options);
    assert_refused(refused, "stream", "job");
    let options = PrepareOptions { allow_stream: false, ..options };
    assert!(
        mapper().prepare(Endpoint::Completions, br#"{"model":"toy","prompt":"a","stream":false}"#, options).is_ok()
    );
}

#[test]
fn prompts_are_cut_only_when_asked_and_on_the_side_asked_for() {
    let prompt = |side: Value| {
        let fields = json!({"prompt": "abcdef", "truncate_prompt_tokens": 3, "truncation_side": side});
        tokens(&completion(fields).unwrap().requests[0]).prompt.clone()
    };
    assert_eq!(prompt(Value::Null), ids("def"));
    assert_eq!(prompt(json!("right")), [vec![BOS], ids("ab")].concat());
}

// Decision 0008: what needs no model to be told is told without one, in the same words.
#[test]
fn what_every_model_refuses_is_found_without_one() {
    let body = |fields: &Value| {
        let mut body = json!({"model": "toy"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        serde_json::to_vec(&body).unwrap()
    };
    let both = |endpoint: Endpoint, fields: &Value| {
        let options = PrepareOptions { allow_stream: false, ..options() };
        let whole = mapper().prepare(endpoint, &body(fields), options).map(drop);
        (whole, check_without_model(endpoint, &body(fields)))
    };
    for fault in [
        json!({"temperture": 1}),
        json!({"tools": [{"type": "function"}]}),
        json!({"max_tokens": -1}),
        json!({"max_tokens": 0}),
        json!({"top_p": "x"}),
        json!({"temperature": -1}),
        json!({"n": 0}),
        json!({"stop": 7}),
        json!({"seed": 1.5}),
        json!({"min_tokens": 3, "max_tokens": 2}),
        json!({"stream": true}),
        json!({"truncation_side": "middle"}),
        json!({"add_special_tokens": 7}),
    ] {
        for endpoint in [Endpoint::Completions, Endpoint::ChatCompletions] {
            let mut fields = json!({"prompt": "abc"});
            if endpoint == Endpoint::ChatCompletions {
                fields = json!({"messages": user("abc")});
            }
            fields.as_object_mut().unwrap().extend(fault.as_object().unwrap().clone());
            let (whole, without) = both(endpoint, &fields);
            assert_eq!(without.unwrap_err(), whole.unwrap_err(), "{endpoint} {fault}");
        }
    }
    for prompt in [json!(""), json!([]), json!([[]]), json!(7), json!([[1], [-5]]), Value::Null] {
        assert!(both(Endpoint::Completions, &json!({"prompt": prompt})).1.is_err(), "{prompt}");
    }
    for messages in [json!([]), json!("x"), json!([{"role": "robot", "content": "x"}]), Value::Null] {
        assert!(both(Endpoint::ChatCompletions, &json!({"messages": messages})).1.is_err(), "{messages}");
    }
    // What hangs on the model is left to it.
    for fields in [
        json!({"prompt": "a".repeat(70)}),
        json!({"prompt": [1, 258]}),
        json!({"prompt": "a", "logprobs": 21}),
        json!({"prompt": "a", "logit_bias": {"258": 1}}),
    ] {
        let (whole, without) = both(Endpoint::Completions, &fields);
        assert!(whole.is_err() && without.is_ok(), "{fields}");
    }
}
