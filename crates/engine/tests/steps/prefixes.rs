//! Sequences that came together and share a prefix: each full block is computed once.

use std::collections::HashSet;

use overnight_engine::request::Class;
use overnight_engine::{Request, RequestError};
use proptest::prelude::*;

use crate::bed::{BLOCK_SIZE, Bed, Results, alone, prompt, request, run, run_all};
use crate::toy::{BAD_LAYER, NAN_END_TOKEN, Toy};

/// Requests for one token each, of `shared` tokens and `own` ones.
fn sharing(num: u64, shared: u32, own: u32) -> Vec<Request> {
    (0..num).map(|salt| request([prompt(99, shared), prompt(salt, own)].concat(), 1)).collect()
}

/// Tokens that the model computed for these requests, all added before the first step.
fn num_computed(bed: &Bed, requests: &[Request]) -> u64 {
    let toy = Toy::new(bed.max_model_len);
    let seen = toy.seen();
    let results = run_all(&mut bed.engine_over(toy), requests);
    for request in requests {
        assert_eq!(results.of(request).tokens, alone(request).tokens);
    }
    let seen = seen.lock().expect("whole");
    seen.num_tokens
}

#[test]
fn shared_prefix_of_sequences_that_came_together_is_computed_once() {
    let (num, shared, own) = (30, 5 * BLOCK_SIZE, 7);
    let requests = sharing(num, shared, own);
    // More rows than sequences, and room in a step for several whole prompts.
    let bed = Bed { max_num_seqs: 32, max_num_batched_tokens: 256, ..Bed::default() };
    assert_eq!(num_computed(&bed, &requests), u64::from(shared) + num * u64::from(own));
    let uncached = Bed { caching: false, ..bed.clone() };
    assert_eq!(num_computed(&uncached, &requests), num * u64::from(shared + own), "what it would cost");
    // The same when the prefix takes many steps.
    let narrow = Bed { max_num_batched_tokens: 32, ..bed };
    assert_eq!(num_computed(&narrow, &requests), u64::from(shared) + num * u64::from(own));
}

#[test]
fn nothing_waits_for_a_prefix_that_it_does_not_share() {
    let groups: Vec<_> = (0..3).map(|group| prompt(50 + group, 2 * BLOCK_SIZE)).collect();
    let requests: Vec<_> =
        (0..9).map(|salt| request([groups[salt / 3].clone(), prompt(salt as u64, 4)].concat(), 3)).collect();
    let bed = Bed { max_num_seqs: 16, ..Bed::default() };
    let toy = Toy::new(bed.max_model_len);
    let seen = toy.seen();
    run_all(&mut bed.engine_over(toy), &requests);
    let seen = seen.lock().expect("whole");
    assert_eq!(seen.query_lens[0], [20, 20, 20], "the first of each group");
    assert_eq!(seen.query_lens[1], [1, 1, 1, 4, 4, 4, 4, 4, 4], "the others, right after");
}

#[test]
fn cancelled_first_sequence_leaves_its_prefix_to_the_next() {
    let requests = sharing(5, 6 * BLOCK_SIZE, 5);
    let bed = Bed { max_num_batched_tokens: 20, ..Bed::default() };
    let toy = Toy::new(bed.max_model_len);
    let seen = toy.seen();
    let mut engine = bed.engine_over(toy);
    let mut results = Results::default();
    requests.iter().for_each(|request| engine.add(request.clone()).expect("fits"));
    engine.step().expect("works").outputs.into_iter().for_each(|output| results.take(output));
    assert_eq!(engine.scheduler().num_running(), 1, "the others wait for its prefix");
    results.take(engine.cancel(requests[0].id).expect("it runs"));
    run(&mut engine, &mut results);
    for request in &requests[1..] {
        assert_eq!(results.of(request).tokens, alone(request).tokens);
    }
    // Two of its blocks were full after 20 tokens; the next one goes on from there.
    let num_computed = seen.lock().expect("whole").num_tokens;
    assert_eq!(num_computed, 20 + 4 * u64::from(BLOCK_SIZE) + 4 * 5);
}

/// Field report 53: vllm#14126, QwenLM/Qwen3#761.
#[test]
fn failed_sequence_names_its_layer_and_leaves_nothing_in_the_cache() {
    let shared = prompt(7, 2 * BLOCK_SIZE);
    let bad = request([shared.clone(), vec![NAN_END_TOKEN]].concat(), 5);
    let good = request([shared, prompt(1, 3)].concat(), 5);
    let requests = [bad.clone(), good.clone()];
    let results = run_all(&mut Bed::default().engine(), &requests);
    let error = results.of(&bad).end.clone().expect("an end").expect_err("a failure");
    assert_eq!(error.code, RequestError::LOGITS_NOT_FINITE);
    assert!(error.message.contains("17 tokens"), "{}", error.message);
    assert!(error.message.contains(&format!("layer {BAD_LAYER} ")), "{}", error.message);
    assert_eq!(results.of(&good).tokens, alone(&good).tokens);
    assert_eq!(results.of(&good).finish().num_cached_tokens, 0, "it was computed anew");
}

#[test]
fn sequence_is_kept_back_behind_its_own_class_only() {
    for (class, num_waiting) in [(Class::Job, 1), (Class::Online, 0)] {
        let [job, other]: [Request; 2] = sharing(2, 6 * BLOCK_SIZE, 5).try_into().expect("two");
        let other = Request { class, ..other };
        let mut engine = Bed { max_num_batched_tokens: 40, ..Bed::default() }.engine();
        let mut results = Results::default();
        engine.add(job).expect("fits");
        engine.step().expect("works");
        // A shared block and 5 tokens are left of the job's prompt, and room for the other beside them.
        engine.add(other.clone()).expect("fits");
        engine.step().expect("works").outputs.into_iter().for_each(|output| results.take(output));
        assert_eq!(engine.scheduler().num_waiting(), num_waiting, "{class:?}");
        run(&mut engine, &mut results);
        assert_eq!(results.of(&other).tokens, alone(&other).tokens);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Prompts from a small tree: no full block before a prompt's last token is computed twice,
    /// whatever the step's size, and every request gets the tokens of decoding it alone.
    #[test]
    fn no_block_is_computed_twice(
        prompts in prop::collection::vec((0u64..2, 0u32..4, 0u64..2, 0u32..4, 1u32..12), 1..16),
        tokens in 8u32..80,
        seqs in 1u32..8,
    ) {
        let requests: Vec<_> = prompts.iter().enumerate().map(|(salt, &(first, num_first, second, num_second, own))| {
            let (first, second) = (prompt(100 + first, num_first * BLOCK_SIZE), prompt(200 + second, num_second * BLOCK_SIZE));
            request([first, second, prompt(salt as u64, own)].concat(), 1)
        }).collect();
        let size = BLOCK_SIZE as usize;
        let shareable = |request: &Request| (request.prompt.len() - 1) / size;
        let mut blocks = HashSet::new();
        let mut num_own = 0;
        for request in &requests {
            blocks.extend((1..=shareable(request)).map(|num| request.prompt[..num * size].to_vec()));
            num_own += request.prompt.len() - shareable(request) * size;
        }
        let bed = Bed { max_num_seqs: seqs, max_num_batched_tokens: tokens.max(seqs), ..Bed::default() };
        prop_assert!(num_computed(&bed, &requests) <= (blocks.len() * size + num_own) as u64);
    }
}
