//! One step ahead: a step is started before the choices of the one before are known.

use std::collections::VecDeque;

use overnight_engine::Error;
use overnight_engine::model::{Feedback, Forward, ModelShape, SampleSpec, StepInput, StepResults};
use overnight_engine::request::{FinishReason, StopRules};
use overnight_engine::sampler::Sampler;
use overnight_engine::{Request, SamplingParams};

use crate::bed::{Bed, Results, alone, prompt, request, run, run_all};
use crate::toy::{NAN_TOKEN, Toy};

/// A device that computes in order of starting and tells results only when they are collected.
pub(crate) struct Ahead {
    model: Toy,
    /// Started and not collected, the oldest first.
    results: VecDeque<StepResults>,
    /// Choices of the step started last, by row of logits.
    choices: Vec<Option<u32>>,
}

impl Ahead {
    pub(crate) fn new(model: Toy) -> Self {
        Self { model, results: VecDeque::new(), choices: Vec::new() }
    }
}

impl Forward for Ahead {
    fn shape(&self) -> &ModelShape {
        self.model.shape()
    }

    fn allocate_kv_cache(&mut self, num_blocks: u32, block_size: u32) -> Result<(), Error> {
        self.model.allocate_kv_cache(num_blocks, block_size)
    }

    fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error> {
        self.model.forward(step)
    }

    fn depth(&self) -> usize {
        2
    }

    fn start(
        &mut self,
        step: StepInput<'_>,
        specs: &[SampleSpec<'_>],
        vocab_size: u32,
        sampler: &mut Sampler,
    ) -> Result<Option<StepResults>, Error> {
        assert!(self.results.len() < 2, "at most two steps are under way");
        let mut token_ids = step.token_ids.to_vec();
        for &Feedback { token, choice } in step.feedback {
            assert_eq!(token_ids[token as usize], 0, "a pending token has no id");
            // The choice of a row whose logits were not finite is any token: the row is of no use.
            token_ids[token as usize] = self.choices[choice as usize].unwrap_or(0);
        }
        let results = self.model.run(StepInput { token_ids: &token_ids, ..step }, specs, vocab_size, sampler)?;
        self.choices = results.iter().map(|result| result.as_ref().ok().map(|sampled| sampled.token)).collect();
        self.results.push_back(results);
        Ok(None)
    }

    fn collect(&mut self) -> Result<StepResults, Error> {
        Ok(self.results.pop_front().expect("a step was started"))
    }
}

fn ahead() -> Bed {
    Bed { is_ahead: true, ..Bed::default() }
}

#[test]
fn steps_start_before_the_last_one_is_collected() {
    let request = request(prompt(1, 12), 5);
    let mut engine = ahead().engine();
    engine.add(request.clone()).expect("the door lets it in");
    let first = engine.step().expect("the toy works");
    assert_eq!((first.outputs.len(), first.num_prefill_tokens), (0, 0), "started, not collected");
    let second = engine.step().expect("the toy works");
    assert_eq!((second.outputs.len(), second.num_prefill_tokens), (1, 12), "the first one's choice");
    assert!(!engine.is_idle());
    let mut results = Results::default();
    second.outputs.into_iter().for_each(|output| results.take(output));
    run(&mut engine, &mut results);
    assert_eq!(results.of(&request).tokens, alone(&request).tokens);
}

#[test]
fn a_sequence_that_ends_by_its_token_wastes_a_row_and_nothing_else() {
    // Stop tokens are likely, so ends come in the middle of the batch.
    let requests: Vec<Request> = (0..40)
        .map(|salt| {
            let mut request = request(prompt(salt, 5 + salt as u32 % 7), 60);
            request.stop = StopRules { max_tokens: 60, stop_token_ids: (0..8).collect(), ..StopRules::default() };
            request
        })
        .collect();
    let results = run_all(&mut ahead().engine(), &requests);
    let ended_early = requests.iter().filter(|request| results.of(request).finish().reason == FinishReason::Stop);
    assert!(ended_early.count() > 20, "stop tokens are met");
    for request in &requests {
        let (got, alone) = (results.of(request), alone(request));
        assert_eq!((&got.tokens, got.finish()), (&alone.tokens, alone.finish()));
    }
}

#[test]
fn penalties_see_every_token_before_the_next_choice() {
    let penalized = |salt| {
        let mut request = request(prompt(salt, 9), 24);
        let penalties = SamplingParams { presence_penalty: 1.8, repetition_penalty: 1.7, ..request.sampling.clone() };
        request.sampling = penalties;
        request
    };
    let requests: Vec<Request> = (0..6).flat_map(|salt| [penalized(salt), request(prompt(salt, 9), 24)]).collect();
    let results = run_all(&mut ahead().engine(), &requests);
    for request in &requests {
        assert_eq!(results.of(request).tokens, alone(request).tokens);
    }
}

#[test]
fn logits_that_are_not_finite_end_their_own_sequence_alone() {
    let mut bad = prompt(3, 3);
    bad.push(NAN_TOKEN);
    let requests = [request(bad, 8), request(prompt(4, 10), 12)];
    let results = run_all(&mut ahead().engine(), &requests);
    let error = results.of(&requests[0]).end.clone().expect("it ended").expect_err("its logits are NaN");
    assert_eq!(error.code, "logits_not_finite");
    assert_eq!(results.of(&requests[1]).tokens, alone(&requests[1]).tokens);
}

#[test]
fn a_cancelled_sequence_counts_what_was_told() {
    let request = request(prompt(7, 10), 50);
    let mut engine = ahead().engine();
    engine.add(request.clone()).expect("the door lets it in");
    let mut told = 0;
    while told < 5 {
        told += engine.step().expect("the toy works").outputs.len();
    }
    let end = engine.cancel(request.id).expect("it runs").end.expect("an end").expect("no failure");
    assert_eq!(end.num_output_tokens, 5, "the tokens under way are not counted");
    let mut results = Results::default();
    run(&mut engine, &mut results);
    assert!(results.0.is_empty(), "nothing comes after the end");
}

/// Field report 26: blocks come back a step late, in a pool that holds one sequence and a bit.
#[test]
fn late_frees_in_a_pool_too_small_for_two_end_everything() {
    let bed = Bed { num_blocks: 9, expected_output_min: 1, ..ahead() };
    // 50 tokens are 7 blocks; two prompts of 3 blocks come in together.
    let requests: Vec<Request> = (0..12).map(|salt| request(prompt(salt, 20), 30)).collect();
    let mut engine = bed.engine();
    let results = run_all(&mut engine, &requests);
    assert!(engine.scheduler().num_preemptions() > 0, "the pool was too small");
    for request in &requests {
        assert_eq!(results.of(request).tokens, alone(request).tokens);
    }
}
