//! Any order, any chunking, any KV pool: each request gets the tokens of decoding it alone.

use overnight_engine::request::Class;
use overnight_engine::{FinishReason, Request, SamplingParams};
use proptest::prelude::*;

use crate::bed::{BLOCK_SIZE, Bed, Results, again, alone, prompt, request, run, run_all};
use crate::toy::Toy;

#[track_caller]
fn assert_as_alone(results: &Results, requests: &[Request]) {
    for request in requests {
        let (got, want) = (results.of(request), alone(&again(request)));
        assert_eq!(got.tokens, want.tokens, "tokens of {:?}", request.id);
        assert_eq!(got.finish().reason, want.finish().reason);
    }
}

#[test]
fn sequence_in_step_equals_sequence_alone() {
    let requests: Vec<_> = (0..20).map(|salt| request(prompt(salt, 3 + salt as u32 * 5), 12)).collect();
    let results = run_all(&mut Bed::default().engine(), &requests);
    assert_as_alone(&results, &requests);
    for request in &requests {
        assert_eq!(results.of(request).tokens.len(), 12);
        assert_eq!(results.of(request).finish().reason, FinishReason::Length);
    }
}

#[test]
fn decode_rows_come_first_and_prefill_is_cut_to_the_token_budget() {
    let bed = Bed { max_num_batched_tokens: 16, ..Bed::default() };
    let toy = Toy::new(bed.max_model_len);
    let seen = toy.seen();
    let requests = [request(prompt(1, 10), 30), request(prompt(2, 50), 5)];
    let results = run_all(&mut bed.engine_over(toy), &requests);
    assert_as_alone(&results, &requests);
    let seen = seen.lock().expect("whole");
    assert_eq!(seen.num_tokens_max, 16, "the budget is used whole, and not passed");
    assert_eq!(seen.query_lens[0], [10, 6]);
    assert_eq!(seen.query_lens[1], [1, 15], "the decode row goes first, the prompt goes on beside it");
    assert_eq!(seen.query_lens[5], [1, 1]);
}

/// Field report 25: vllm#45387, #45388, PR 57104, PR 57841. Without room, the newest gives its blocks away.
#[test]
fn preempted_sequences_get_the_tokens_of_a_run_without_pressure() {
    let bed = Bed { num_blocks: 40, max_model_len: 320, expected_output_min: 1, ..Bed::default() };
    // Admitted on a share of their length, so that blocks run short.
    let requests: Vec<_> = (0..8).map(|salt| request(prompt(salt, 8), 300)).collect();
    let mut engine = bed.engine();
    let results = run_all(&mut engine, &requests);
    assert!(engine.scheduler().num_preemptions() > 0, "there was no pressure");
    assert_as_alone(&results, &requests);
}

/// Field report 35: vllm PR 38624, tenstorrent/vllm#395.
#[test]
fn no_token_appears_twice_after_a_preemption() {
    let bed = Bed { num_blocks: 40, max_model_len: 320, expected_output_min: 1, ..Bed::default() };
    let requests: Vec<_> = (0..6).map(|salt| request(prompt(salt, 8), 300)).collect();
    let mut engine = bed.engine();
    let results = run_all(&mut engine, &requests);
    assert!(engine.scheduler().num_preemptions() > 0, "there was no pressure");
    for request in &requests {
        let got = results.of(request);
        assert_eq!(got.tokens.len(), 300);
        assert_eq!(got.finish().num_output_tokens, 300);
        assert_eq!(got.outputs.iter().filter(|output| output.token.is_some()).count(), 300);
    }
}

/// Field report 27: pegainfer#85; inference-sim#297, #963.
#[test]
fn tiny_pool_and_many_requests_all_complete() {
    let bed = Bed { num_blocks: 3, max_num_seqs: 16, max_model_len: 24, ..Bed::default() };
    let requests: Vec<_> = (0..60).map(|salt| request(prompt(salt, 1 + salt as u32 % 15), 9)).collect();
    let results = run_all(&mut bed.engine(), &requests);
    assert_as_alone(&results, &requests);
}

/// Field report 2, 32: vllm#39734, mistral.rs#1383. What can never fit is refused at the
/// door with the numbers, and nothing waits behind it.
#[test]
fn request_beyond_the_pool_is_refused_and_blocks_nobody() {
    let bed = Bed { num_blocks: 4, max_model_len: 100, ..Bed::default() };
    let mut engine = bed.engine();
    let error = engine.add(request(prompt(1, 20), 30)).expect_err("49 tokens do not fit into 32");
    assert_eq!((error.code, error.transient), ("kv_cache_exceeded", false));
    for number in ["49", "20", "32", "4 blocks of 8"] {
        assert!(error.message.contains(number), "{number} is not in: {}", error.message);
    }
    // The last token is chosen but never computed: 20 + 13 tokens need 32 slots.
    let fitting = [request(prompt(1, 20), 13), request(prompt(2, 5), 5)];
    assert_as_alone(&run_all(&mut engine, &fitting), &fitting);
}

/// Field report 29: tenstorrent/vllm#415, kvcached#362, LMCache#443.
#[test]
fn prefix_hit_gives_the_tokens_of_a_miss() {
    let shared = prompt(9, 40);
    let requests: Vec<_> = (0..4).map(|salt| request([shared.clone(), prompt(salt, 10)].concat(), 10)).collect();
    let mut engine = Bed::default().engine();
    let mut results = Results::default();
    for request in &requests {
        engine.add(request.clone()).expect("fits");
        run(&mut engine, &mut results);
    }
    assert_as_alone(&results, &requests);
    assert_eq!(results.of(&requests[0]).finish().num_cached_tokens, 0);
    for request in &requests[1..] {
        assert_eq!(results.of(request).finish().num_cached_tokens, 40, "five full blocks");
    }
    assert_eq!(engine.scheduler().prefix_cache_counts(), (200, 120));
}

/// Field report 30: vllm PR 18411.
#[test]
fn hit_on_the_whole_prompt_still_computes_the_last_token() {
    let request = request(prompt(3, 4 * BLOCK_SIZE), 6);
    let twin = again(&request);
    let mut engine = Bed::default().engine();
    let mut results = run_all(&mut engine, std::slice::from_ref(&request));
    engine.add(twin.clone()).expect("fits");
    run(&mut engine, &mut results);
    assert_eq!(results.of(&twin).tokens, results.of(&request).tokens);
    assert_eq!(results.of(&twin).finish().num_cached_tokens, 3 * BLOCK_SIZE, "the last block is computed again");
}

/// Field report 28: local-inference-lab/vllm#480.
#[test]
fn no_phantom_hit_after_an_eviction() {
    let bed = Bed { num_blocks: 6, max_model_len: 48, ..Bed::default() };
    let first = request(prompt(1, 30), 5);
    let others: Vec<_> = (2..6).map(|salt| request(prompt(salt, 40), 5)).collect();
    let last = again(&first);
    let mut engine = bed.engine();
    let mut results = Results::default();
    for request in std::iter::once(&first).chain(&others).chain([&last]) {
        engine.add(request.clone()).expect("fits");
        run(&mut engine, &mut results);
    }
    assert_eq!(results.of(&last).finish().num_cached_tokens, 0, "its blocks were used since");
    assert_eq!(results.of(&last).tokens, results.of(&first).tokens);
}

/// Field report 31: vllm PR 25067, PR 18485.
#[test]
fn cancelling_a_finished_or_unknown_request_does_nothing() {
    let requests = [request(prompt(1, 20), 5), request(prompt(2, 20), 9)];
    let mut engine = Bed::default().engine();
    let results = run_all(&mut engine, &requests[..1]);
    engine.add(requests[1].clone()).expect("fits");
    engine.step().expect("works");
    assert_eq!(engine.cancel(requests[0].id), None, "finished");
    assert_eq!(engine.cancel(request(vec![1], 1).id), None, "never here");
    engine.scheduler().check();
    let mut results = results;
    run(&mut engine, &mut results);
    assert!(results.of(&requests[1]).tokens.ends_with(&alone(&requests[1]).tokens[1..]), "the other one went on");
}

#[test]
fn cancelled_sequence_says_so_once_and_gives_its_blocks_back() {
    let requests = [request(prompt(1, 20), 50), request(prompt(2, 20), 9)];
    let mut engine = Bed::default().engine();
    let mut results = Results::default();
    requests.iter().for_each(|request| engine.add(request.clone()).expect("fits"));
    for _ in 0..4 {
        engine.step().expect("works").outputs.into_iter().for_each(|output| results.take(output));
    }
    let output = engine.cancel(requests[0].id).expect("it runs");
    let finish = output.end.clone().expect("an end").expect("no failure");
    assert_eq!((finish.reason, finish.num_output_tokens), (FinishReason::Abort, 4));
    assert_eq!(engine.cancel(requests[0].id), None, "only once");
    results.take(output);
    run(&mut engine, &mut results);
    assert_as_alone(&results, &requests[1..]);
    assert_eq!(results.of(&requests[0]).tokens, alone(&requests[0]).tokens[..4]);
}

#[test]
fn online_requests_go_before_job_items() {
    let bed = Bed { max_num_seqs: 2, ..Bed::default() };
    let jobs: Vec<_> = (0..6).map(|salt| request(prompt(salt, 10), 20)).collect();
    let online = Request { class: Class::Online, ..request(prompt(9, 10), 5) };
    let mut engine = bed.engine();
    let mut results = Results::default();
    jobs.iter().for_each(|request| engine.add(request.clone()).expect("fits"));
    for _ in 0..3 {
        engine.step().expect("works").outputs.into_iter().for_each(|output| results.take(output));
    }
    engine.add(online.clone()).expect("fits");
    for _ in 0..6 {
        engine.step().expect("works").outputs.into_iter().for_each(|output| results.take(output));
    }
    assert_eq!(results.of(&online).tokens.len(), 5, "it took the newest job item's row at once");
    assert!(jobs.iter().all(|job| !results.0.contains_key(&job.id) || results.of(job).end.is_none()));
    run(&mut engine, &mut results);
    let all: Vec<_> = jobs.into_iter().chain([online]).collect();
    assert_as_alone(&results, &all);
}

#[test]
fn job_items_are_not_starved_by_online_requests_without_end() {
    let bed = Bed { max_num_seqs: 2, ..Bed::default() };
    let job = request(prompt(1, 10), 40);
    let mut engine = bed.engine();
    let mut results = Results::default();
    engine.add(job.clone()).expect("fits");
    for salt in 0..2_000 {
        // More online work than the engine can do: one short request per step and two rows.
        let online = Request { class: Class::Online, ..request(prompt(salt, 10), 4) };
        engine.add(online).expect("fits");
        engine.step().expect("works").outputs.into_iter().for_each(|output| results.take(output));
        if results.0.get(&job.id).is_some_and(|got| got.end.is_some()) {
            assert_eq!(results.of(&job).tokens, alone(&job).tokens);
            return;
        }
    }
    panic!("the job's item starved");
}

#[test]
fn begin_is_told_once_however_often_a_sequence_is_let_in() {
    for is_ahead in [false, true] {
        let pressed = Bed { num_blocks: 40, max_model_len: 320, expected_output_min: 1, ..Bed::default() };
        let bed = Bed { max_num_seqs: 4, is_ahead, ..pressed };
        let jobs: Vec<_> = (0..8).map(|salt| request(prompt(salt, 8), 300)).collect();
        let online = Request { class: Class::Online, ..request(prompt(9, 8), 30) };
        let mut engine = bed.engine();
        jobs.iter().chain([&online]).for_each(|request| engine.add(request.clone()).expect("fits"));
        let (mut begun, mut num_by_step) = (Vec::new(), Vec::new());
        while !engine.is_idle() {
            let step = engine.step().expect("works");
            begun.extend(step.begun);
            num_by_step.push(begun.len());
            for output in step.outputs {
                assert!(begun.contains(&output.id) || output.id == online.id, "an output of what has not begun");
            }
        }
        assert!(engine.scheduler().num_preemptions() > 0, "there was no pressure");
        assert_eq!(num_by_step[0], 2, "as many as have blocks beside the online one");
        assert_eq!(begun, jobs.iter().map(|request| request.id).collect::<Vec<_>>());
    }
}

#[test]
fn requests_start_in_the_order_they_came() {
    let bed = Bed { max_num_seqs: 1, ..Bed::default() };
    let requests: Vec<_> = (0..5).map(|salt| request(prompt(salt, 5 + (5 - salt as u32) * 9), 3)).collect();
    let mut engine = bed.engine();
    requests.iter().for_each(|request| engine.add(request.clone()).expect("fits"));
    let mut order = Vec::new();
    while !engine.is_idle() {
        order.extend(engine.step().expect("works").outputs.into_iter().filter(|o| o.end.is_some()).map(|o| o.id));
    }
    assert_eq!(order, requests.iter().map(|request| request.id).collect::<Vec<_>>());
}

#[test]
fn logprobs_of_prompts_hold_nobody_up_who_wants_none() {
    let mut engine = Bed { max_num_batched_tokens: 2048, ..Bed::default() }.engine();
    let scored = |salt| Request { prompt_logprobs: Some(1), ..request(prompt(salt, 200), 2) };
    let requests = [scored(1), scored(2), request(prompt(3, 10), 2)];
    for request in &requests {
        engine.add(request.clone()).expect("the door lets it in");
    }
    let first = engine.step().expect("the toy works").outputs;
    let served: Vec<_> = first.iter().map(|output| output.id).collect();
    assert_eq!(served, [requests[2].id], "the first step gives the one behind them its token");
    let mut results = Results::default();
    first.into_iter().for_each(|output| results.take(output));
    run(&mut engine, &mut results);
    assert_as_alone(&results, &requests);
}

#[derive(Debug, Clone)]
struct Trace {
    bed: Bed,
    /// Prompt salt and length, tokens to generate, online, seed, step before which it comes.
    requests: Vec<(u64, u32, u32, bool, Option<u64>, u32)>,
    /// Request index and step before which it is cancelled.
    cancels: Vec<(prop::sample::Index, u32)>,
}

fn traces() -> impl Strategy<Value = Trace> {
    let bed = (2u32..24, 1u32..10, 0u32..40, any::<bool>(), prop_oneof![Just(1), Just(256)], any::<bool>());
    let bed = bed.prop_map(|(num_blocks, seqs, tokens, caching, expected_output_min, is_ahead)| Bed {
        num_blocks,
        max_num_seqs: seqs,
        max_num_batched_tokens: seqs + tokens,
        caching,
        max_model_len: 300,
        expected_output_min,
        is_ahead,
    });
    // Few salts, so that prompts share prefixes.
    let request = (0u64..3, 1u32..60, 1u32..40, any::<bool>(), prop::option::of(0u64..4), 0u32..40);
    let requests = prop::collection::vec(request, 1..14);
    let cancels = prop::collection::vec((any::<prop::sample::Index>(), 0u32..60), 0..4);
    (bed, requests, cancels).prop_map(|(bed, requests, cancels)| Trace { bed, requests, cancels })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Random traces: blocks are conserved (checked in every step), every request ends or
    /// is refused, and its tokens are those of decoding it alone, cancelled ones a prefix of them,
    /// whether or not the engine is a step ahead.
    #[test]
    fn any_order_pool_and_chunking_gives_the_tokens_of_decoding_alone(trace in traces()) {
        let mut requests: Vec<(Request, u32)> = trace.requests.iter().map(|&(salt, len, max, online, seed, at)| {
            let class = if online { Class::Online } else { Class::Job };
            let sampling = match seed {
                None => SamplingParams { temperature: 0.0, ..Default::default() },
                Some(seed) => SamplingParams { seed, top_p: 0.9, frequency_penalty: 0.3, ..Default::default() },
            };
            (Request { class, sampling, ..request(prompt(salt, len), max) }, at)
        }).collect();
        let cancels: Vec<_> =
            trace.cancels.iter().map(|(index, at)| (requests[index.index(requests.len())].0.id, *at)).collect();
        requests.sort_by_key(|request| request.1);
        let mut engine = trace.bed.engine();
        let mut results = Results::default();
        let mut refused = Vec::new();
        for step in 0..60 {
            for (request, _) in requests.iter().filter(|request| request.1 == step) {
                if let Err(error) = engine.add(request.clone()) {
                    prop_assert_eq!(error.code, "kv_cache_exceeded");
                    let needed = request.prompt.len() as u32 + request.stop.max_tokens - 1;
                    prop_assert!(needed > trace.bed.num_blocks * BLOCK_SIZE);
                    refused.push(request.id);
                }
            }
            for (id, _) in cancels.iter().filter(|cancel| cancel.1 == step) {
                engine.cancel(*id).into_iter().for_each(|output| results.take(output));
            }
            engine.step().expect("works").outputs.into_iter().for_each(|output| results.take(output));
        }
        run(&mut engine, &mut results);
        for (request, _) in requests.iter().filter(|request| !refused.contains(&request.0.id)) {
            let (got, want) = (results.of(request), alone(request));
            prop_assert_eq!(got.finish().num_output_tokens as usize, got.tokens.len());
            if got.finish().reason == FinishReason::Abort {
                prop_assert!(want.tokens.starts_with(&got.tokens), "a cancelled one has a prefix");
                prop_assert!(cancels.iter().any(|cancel| cancel.0 == request.id));
            } else {
                prop_assert_eq!(&got.tokens, &want.tokens);
                prop_assert_eq!(&got.finish().reason, &want.finish().reason);
            }
        }
    }
}
