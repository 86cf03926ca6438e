//! Stop rules, logprobs and seeds through the whole engine.

use overnight_engine::sampler::choice_seed;
use overnight_engine::{FinishReason, Request, RequestError, SamplingParams, StopReason, StopRules};

use crate::bed::{Bed, Got, Results, again, alone, prompt, request, run, run_all};
use crate::toy::{EOS, NAN_TOKEN, Toy, VOCAB};

fn get(request: &Request) -> Got {
    run_all(&mut Bed::default().engine(), std::slice::from_ref(request)).of(request).clone()
}

/// A sampled request under which EOS comes up sooner or later.
fn sampled(seed: u64) -> Request {
    let sampling = SamplingParams { seed, temperature: 1.5, ..SamplingParams::default() };
    Request { sampling, ..request(prompt(seed, 12), 200) }
}

#[test]
fn end_of_sequence_stops_and_ignore_eos_goes_on() {
    let free = sampled(1);
    let tokens = get(&free).tokens;
    let at = tokens.iter().position(|&token| token == EOS).expect("EOS comes up in 200 tokens");
    let heeding = Request { stop: StopRules { ignore_eos: false, ..free.stop.clone() }, ..again(&free) };
    let got = get(&heeding);
    assert_eq!(got.tokens, tokens[..=at]);
    assert_eq!((got.finish().reason, &got.finish().stop_reason), (FinishReason::Stop, &None));
    assert_eq!(got.finish().num_output_tokens as usize, at + 1);
    assert_eq!(tokens.len(), 200);
}

#[test]
fn stop_token_ids_stop_and_are_named() {
    let free = request(prompt(4, 9), 30);
    let tokens = get(&free).tokens;
    let stop_id = tokens[7];
    let first = tokens.iter().position(|&token| token == stop_id).expect("it is there");
    let stop = StopRules { stop_token_ids: vec![stop_id], ..free.stop.clone() };
    let got = get(&Request { stop, ..again(&free) });
    assert_eq!(got.tokens, tokens[..=first]);
    assert_eq!(got.finish().stop_reason, Some(StopReason::Token(stop_id)));
}

#[test]
fn min_tokens_masks_every_end_until_then() {
    for seed in 0..20 {
        let free = sampled(seed);
        let stop = StopRules { ignore_eos: false, min_tokens: 150, stop_token_ids: vec![3, 4], ..free.stop.clone() };
        let got = get(&Request { stop, ..free });
        assert!(got.tokens.len() >= 150);
        let early = &got.tokens[..150.min(got.tokens.len() - 1)];
        assert!(!early.iter().any(|token| [EOS, 3, 4].contains(token)), "{early:?}");
    }
}

/// Field report 3: vllm#904. Prompt + max_tokens beyond the context is clamped, and says `length`.
#[test]
fn output_ends_with_the_context() {
    let bed = Bed { max_model_len: 40, ..Bed::default() };
    let request = request(prompt(1, 30), 1000);
    let results = run_all(&mut bed.engine(), std::slice::from_ref(&request));
    let got = results.of(&request);
    assert_eq!(got.tokens.len(), 10);
    assert_eq!(got.finish().reason, FinishReason::Length);
}

/// Field report 19: pegainfer#673; vllm#340, PR 48567.
#[test]
fn padded_vocabulary_is_never_chosen() {
    let toy = Toy::new(512).with_padding(31);
    let requests: Vec<_> = (0..20).map(sampled).chain([request(prompt(1, 5), 100)]).collect();
    let results = run_all(&mut Bed::default().engine_over(toy), &requests);
    for request in &requests {
        assert_eq!(results.of(request).tokens, alone(request).tokens);
        assert!(results.of(request).tokens.iter().all(|&token| token < VOCAB));
    }
}

/// Field report 53: vllm#14126, QwenLM/Qwen3#761.
#[test]
fn nan_fails_its_request_by_name_and_spares_the_neighbours() {
    let bad = request(vec![1, 2, NAN_TOKEN], 10);
    let good = [request(prompt(1, 9), 10), request(prompt(2, 9), 10)];
    let requests = [good[0].clone(), bad.clone(), good[1].clone()];
    let results = run_all(&mut Bed::default().engine(), &requests);
    let error = results.of(&bad).end.clone().expect("an end").expect_err("a failure");
    assert_eq!((error.code, error.transient), (RequestError::LOGITS_NOT_FINITE, false));
    good.iter().for_each(|request| assert_eq!(results.of(request).tokens, alone(request).tokens));
}

/// Field report 24: vllm#23138, #5898, #6197, #586, #6449; ollama#1749. Exactly equal on the CPU.
#[test]
fn same_seed_gives_same_tokens_alone_in_company_and_in_any_order() {
    let requests: Vec<_> = (0..12).map(sampled).collect();
    let mut reversed: Vec<_> = requests.iter().map(again).collect();
    reversed.reverse();
    let forward = run_all(&mut Bed::default().engine(), &requests);
    let backward = run_all(&mut Bed::default().engine(), &reversed);
    for (request, twin) in requests.iter().zip(reversed.iter().rev()) {
        let tokens = &forward.of(request).tokens;
        assert_eq!(tokens, &backward.of(twin).tokens);
        assert_eq!(tokens, &alone(request).tokens);
    }
}

/// Field report 22, 23: vllm PR 11898, #10852, #7808, #16449; #11953, PR 17929.
#[test]
fn choices_of_one_seed_differ_and_repeat() {
    let choice = |index| {
        let sampling = SamplingParams { seed: choice_seed(77, index), ..SamplingParams::default() };
        Request { sampling, ..request(prompt(1, 12), 30) }
    };
    let tokens: Vec<_> = (0..4).map(|index| get(&choice(index)).tokens).collect();
    for (index, of_choice) in tokens.iter().enumerate() {
        assert_eq!(&get(&choice(index as u32)).tokens, of_choice, "it repeats");
        assert_eq!(of_choice.len(), 30);
        assert!(!tokens[..index].contains(of_choice), "choice {index} is another's");
    }
    assert_eq!(choice_seed(77, 0), 77, "the first choice is the request with n = 1");
}

/// Field report 34: vllm#27878. The newest token counts already for the next one.
#[test]
fn penalties_see_the_newest_token() {
    let sampling = SamplingParams { temperature: 0.0, presence_penalty: 2.0, ..SamplingParams::default() };
    let bias: Vec<(u32, f32)> = (2..VOCAB).map(|id| (id, -100.0)).collect();
    let request = Request { sampling: SamplingParams { logit_bias: bias, ..sampling }, ..request(prompt(3, 5), 2) };
    // Two ids are left, whose raw logits lie within 8.4: penalize until only the other one is left.
    let strong = SamplingParams { frequency_penalty: 2.0, repetition_penalty: 1e6, ..request.sampling.clone() };
    let got = get(&Request { sampling: strong, ..request });
    assert_ne!(got.tokens[0], got.tokens[1], "the second choice knows of the first");
}

/// Field report 5: vllm#3752. One entry per prompt position, the first null, the prompt's own token marked.
#[test]
fn prompt_logprobs_cover_the_prompt() {
    let request = Request { prompt_logprobs: Some(3), logprobs: Some(2), ..request(prompt(1, 20), 4) };
    let got = get(&request);
    let scored = got.outputs[0].prompt_logprobs.as_ref().expect("with the first output");
    assert_eq!(scored.len(), 20);
    assert_eq!(scored[0], None);
    for (position, entry) in scored.iter().enumerate().skip(1) {
        let entry = entry.as_ref().expect("scored");
        assert_eq!(entry.chosen.token, request.prompt[position]);
        assert_eq!(entry.top.len(), 3);
        assert!(entry.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
    }
    assert!(got.outputs[1..].iter().all(|output| output.prompt_logprobs.is_none()));
    for output in &got.outputs {
        let logprobs = output.logprobs.as_ref().expect("one per token");
        assert_eq!(Some(logprobs.chosen.token), output.token);
        assert_eq!(logprobs.top[0], logprobs.chosen, "greedy takes the likeliest");
    }
}

/// Field report 21: vllm PR 42245, #42019, PR 29216.
#[test]
fn prompt_logprobs_do_not_depend_on_chunks_cache_or_preemption() {
    let scored = |bed: Bed, warm: bool| {
        let request = Request { prompt_logprobs: Some(5), ..request(prompt(1, 150), 3) };
        let mut engine = bed.engine();
        let mut results = Results::default();
        if warm {
            results = run_all(&mut engine, &[crate::bed::request(prompt(1, 150), 3)]);
        }
        engine.add(request.clone()).expect("fits");
        engine.add(crate::bed::request(prompt(2, 40), 30)).expect("fits");
        run(&mut engine, &mut results);
        results.of(&request).outputs[0].prompt_logprobs.clone().expect("with the first output")
    };
    let whole = scored(Bed { max_num_batched_tokens: 4096, ..Bed::default() }, false);
    assert_eq!(whole.len(), 150);
    assert_eq!(scored(Bed { max_num_batched_tokens: 9, ..Bed::default() }, false), whole, "in chunks");
    assert_eq!(scored(Bed::default(), true), whole, "after the same prompt was cached");
    assert_eq!(scored(Bed { num_blocks: 20, max_model_len: 160, ..Bed::default() }, true), whole, "in a small pool");
}

#[test]
fn prompt_logprobs_bound_the_logits_of_a_step() {
    let toy = Toy::new(512);
    let seen = toy.seen();
    let requests: Vec<_> =
        (0..3).map(|salt| Request { prompt_logprobs: Some(1), ..request(prompt(salt, 400), 2) }).collect();
    let bed = Bed { max_num_batched_tokens: 2048, ..Bed::default() };
    let results = run_all(&mut bed.engine_over(toy), &requests);
    assert!(requests.iter().all(|request| results.of(request).tokens == alone(request).tokens));
    assert!(seen.lock().expect("whole").num_logits_max <= 64 + 3);
}

/// Field report 4: helm#1469.
#[test]
fn max_tokens_zero_with_prompt_logprobs_scores_and_generates_nothing() {
    let request = Request { prompt_logprobs: Some(2), ..request(prompt(1, 20), 0) };
    let got = get(&request);
    assert!(got.tokens.is_empty());
    assert_eq!(got.outputs.len(), 1);
    assert_eq!(got.outputs[0].prompt_logprobs.as_ref().map(Vec::len), Some(20));
    assert_eq!((got.finish().reason, got.finish().num_output_tokens), (FinishReason::Length, 0));
    let one = Request { prompt_logprobs: Some(2), ..crate::bed::request(vec![5], 0) };
    assert_eq!(get(&one).outputs[0].prompt_logprobs, Some(vec![None]), "a single token has nothing to be scored");
}

/// Field report 11: vllm#4699. Nothing of a row's logprobs reaches the other rows.
#[test]
fn logprobs_of_one_row_leave_the_others_alone() {
    let requests = [Request { logprobs: Some(20), ..request(prompt(1, 9), 10) }, request(prompt(2, 9), 10)];
    let results = run_all(&mut Bed::default().engine(), &requests);
    assert!(results.of(&requests[0]).outputs.iter().all(|output| output.logprobs.is_some()));
    assert!(results.of(&requests[1]).outputs.iter().all(|output| output.logprobs.is_none()));
    assert_eq!(results.of(&requests[0]).tokens, alone(&request(prompt(1, 9), 10)).tokens);
}
