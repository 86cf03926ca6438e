//! Whole engines on the card.

use std::collections::HashMap;

use super::{config, dtypes, has_gpu, model_on_gpu, tiny};
use crate::config::{DtypeSetting, EngineConfig};
use crate::cuda::CudaModel;
use crate::door::Limits;
use crate::model::{Forward, ModelShape, SampleSpec, StepInput, StepResults};
use crate::model_bed::ids;
use crate::request::{Class, Request, RequestId, SamplingParams, StopRules, TokenLogprobs};
use crate::sampler::Sampler;
use crate::tiny_model::{TinyArch, TinyModel};
use crate::{Engine, Error};

/// The model with every step waited for before the next is planned.
struct Waiting(CudaModel);

impl Forward for Waiting {
    fn shape(&self) -> &ModelShape {
        self.0.shape()
    }

    fn allocate_kv_cache(&mut self, num_blocks: u32, block_size: u32) -> Result<(), Error> {
        self.0.allocate_kv_cache(num_blocks, block_size)
    }

    fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error> {
        self.0.forward(step)
    }

    fn run(
        &mut self,
        step: StepInput<'_>,
        specs: &[SampleSpec<'_>],
        vocab_size: u32,
        sampler: &mut Sampler,
    ) -> Result<StepResults, Error> {
        self.0.run(step, specs, vocab_size, sampler)
    }
}

/// A token, and how many nats it led the next likely one by; infinite where that was not asked.
type Choice = (u32, f32);

/// Choices of each request, from an engine that runs all of them together.
fn generate(model: Box<dyn Forward>, config: &EngineConfig, requests: &[Request]) -> Vec<Vec<Choice>> {
    run(model, config, requests, None).0
}

/// What an engine counted of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    /// How often blocks were taken away.
    preemptions: u64,
    /// Tokens of prompts that were found in the prefix cache.
    prefix_hits: u64,
}

/// The same with what the engine counted. `expected_output`: output tokens that admission keeps
/// room for; few make preemptions.
fn run(
    model: Box<dyn Forward>,
    config: &EngineConfig,
    requests: &[Request],
    expected_output: Option<u32>,
) -> (Vec<Vec<Choice>>, Counts) {
    let mut limits = Limits::resolve(model.shape(), config, None, None).expect("good settings");
    limits.expected_output_min = expected_output.unwrap_or(limits.expected_output_min);
    let mut engine = Engine::new(model, limits, config.enable_prefix_caching).expect("it starts");
    let mut choices: HashMap<RequestId, Vec<Choice>> = HashMap::new();
    for request in requests {
        engine.add(request.clone()).expect("the door lets it in");
    }
    while !engine.is_idle() {
        for output in engine.step().expect("the device works").outputs {
            let lead = output.logprobs.as_ref().map_or(f32::INFINITY, lead);
            choices.entry(output.id).or_default().extend(output.token.map(|token| (token, lead)));
        }
    }
    let num_blocks = engine.limits().num_blocks;
    assert_eq!(engine.scheduler().num_free_blocks(), num_blocks, "all blocks come back");
    let choices = requests.iter().map(|request| choices.remove(&request.id).unwrap_or_default()).collect();
    let scheduler = engine.scheduler();
    (choices, Counts { preemptions: scheduler.num_preemptions(), prefix_hits: scheduler.prefix_cache_counts().1 })
}

/// Nats between the two likeliest tokens.
fn lead(logprobs: &TokenLogprobs) -> f32 {
    match logprobs.top.as_slice() {
        [first, second, ..] => first.logprob - second.logprob,
        _ => f32::INFINITY,
    }
}

/// Steps that hold other rows round products otherwise, which moves a logit by this much, in nats: of two tokens
/// that are closer either may be taken.
const LEAD_MAX: f32 = 0.25;

/// Where a greedy sequence first differs from that of `want`, the choice there must have been a near tie; what
/// follows another token cannot be compared.
#[track_caller]
fn assert_equal_where_margins_allow(got: &[Choice], want: &[Choice], what: &str) {
    match got.iter().zip(want).enumerate().find(|(_, (got, want))| got.0 != want.0) {
        Some((index, (got, want))) => {
            assert!(want.1 <= LEAD_MAX, "{what}: token {index} is {got:?} instead of {want:?}, which led by more");
        }
        None => assert_eq!(got.len(), want.len(), "{what}: tokens"),
    }
}

#[test]
fn a_token_may_differ_only_where_it_was_a_near_tie() {
    let want = [(1, 3.0), (2, 0.01), (3, 5.0)];
    assert_equal_where_margins_allow(&want, &want, "equal");
    assert_equal_where_margins_allow(&[(1, 3.0), (9, 0.02), (7, 1.0)], &want, "a near tie, and what follows it");
    let wrong = || assert_equal_where_margins_allow(&[(9, 3.0), (2, 0.01), (3, 5.0)], &want, "another choice");
    assert!(std::panic::catch_unwind(wrong).is_err(), "a clear choice must not change");
    let wrong = || assert_equal_where_margins_allow(&want[..2], &want, "cut off");
    assert!(std::panic::catch_unwind(wrong).is_err(), "no token may be missing");
    let unknown = [(2, f32::INFINITY)];
    let wrong = || assert_equal_where_margins_allow(&[(1, f32::INFINITY)], &unknown, "without a margin");
    assert!(std::panic::catch_unwind(wrong).is_err(), "no margin allows nothing");
}

#[test]
fn an_engine_one_step_ahead_gives_the_tokens_of_one_that_waits() {
    if !has_gpu("an_engine_one_step_ahead_gives_the_tokens_of_one_that_waits") {
        return;
    }
    let requests: Vec<Request> = (0..40)
        .map(|salt: u32| {
            let temperature = if salt.is_multiple_of(2) { 0.0 } else { 0.7 };
            let presence_penalty = if salt.is_multiple_of(5) { 1.0 } else { 0.0 };
            Request {
                id: RequestId::next(),
                class: Class::Job,
                prompt: ids(10 + 7 * salt as usize, salt),
                sampling: SamplingParams {
                    temperature,
                    presence_penalty,
                    seed: salt.into(),
                    ..SamplingParams::default()
                },
                stop: StopRules { max_tokens: 5 + salt, stop_token_ids: vec![1, 2, 3], ..StopRules::default() },
                // Greedy ones for their margins, and some of the others.
                logprobs: (salt.is_multiple_of(2) || salt.is_multiple_of(3)).then_some(2),
                prompt_logprobs: None,
                skip_special_tokens: true,
                stream: false,
            }
        })
        .collect();
    // Few rows and blocks, so that sequences come, go and are preempted in between.
    let config = EngineConfig {
        max_num_seqs: Some(12),
        max_num_batched_tokens: Some(96),
        max_model_len: Some(512),
        num_gpu_blocks_override: Some(140),
        ..config(DtypeSetting::Float16)
    };
    for arch in [TinyArch::Qwen3, TinyArch::Gemma3] {
        let config = EngineConfig { dtype: dtypes(arch)[0], ..config.clone() };
        let model = || model_on_gpu(&tiny(arch, 64), &config);
        let waits = generate(Box::new(Waiting(model())), &config, &requests);
        let ahead = generate(Box::new(model()), &config, &requests);
        assert!(waits.iter().all(|tokens| !tokens.is_empty()));
        let of_request = requests.iter().zip(ahead.iter().zip(&waits));
        for (request, (ahead, waits)) in of_request.clone().filter(|(request, _)| is_plain_greedy(request)) {
            assert_equal_where_margins_allow(ahead, waits, &format!("{arch:?}, {:?}", request.id));
        }
        // Of draws and penalties the margin is not told.
        let num_equal = of_request.filter(|(_, (ahead, waits))| tokens(ahead) == tokens(waits)).count();
        assert!(num_equal >= 34, "{arch:?}: {num_equal} of {} sequences are equal", requests.len());
    }
}

/// The likeliest token is the choice.
fn is_plain_greedy(request: &Request) -> bool {
    request.sampling.is_greedy() && request.sampling.presence_penalty == 0.0
}

fn tokens(choices: &[Choice]) -> Vec<u32> {
    choices.iter().map(|&(token, _)| token).collect()
}

/// A greedy request of its own prompt.
fn greedy(salt: u32, prompt_len: usize, max_tokens: u32) -> Request {
    Request {
        id: RequestId::next(),
        class: Class::Job,
        prompt: ids(prompt_len, salt),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        stop: StopRules { max_tokens, ignore_eos: true, ..StopRules::default() },
        logprobs: Some(2),
        prompt_logprobs: None,
        skip_special_tokens: true,
        stream: false,
    }
}

/// Field report 25: a pool that holds a fraction of what runs costs time and no token.
#[test]
fn preempted_sequences_end_as_those_that_had_room() {
    if !has_gpu("preempted_sequences_end_as_those_that_had_room") {
        return;
    }
    let requests: Vec<Request> = (0..40).map(|salt| greedy(salt, 20 + 5 * salt as usize, 60)).collect();
    let roomy = EngineConfig { max_num_seqs: Some(32), max_model_len: Some(512), ..config(DtypeSetting::Bfloat16) };
    // The longest needs 18 blocks; 32 of them would need about 400.
    let tight = EngineConfig { num_gpu_blocks_override: Some(60), ..roomy.clone() };
    for arch in [TinyArch::Qwen3, TinyArch::Gemma3] {
        let tiny = tiny(arch, 64);
        let (want, none) = run(Box::new(model_on_gpu(&tiny, &roomy)), &roomy, &requests, None);
        let (got, some) = run(Box::new(model_on_gpu(&tiny, &tight)), &tight, &requests, Some(1));
        assert!(none.preemptions == 0 && some.preemptions > 0, "{arch:?}: {none:?} and {some:?}");
        assert!(got.iter().all(|tokens| tokens.len() == 60), "{arch:?}: every token is there, once");
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_equal_where_margins_allow(got, want, &format!("{arch:?}, sequence {index}"));
        }
        // Ties are few: that every sequence met one would be a fault of its own.
        let num_equal = got.iter().zip(&want).filter(|(got, want)| tokens(got) == tokens(want)).count();
        assert!(num_equal * 10 >= want.len() * 8, "{arch:?}: {num_equal} of {} sequences are equal", want.len());
    }
}

/// Prompts that begin alike: what one has computed is read by the others, and no token changes.
#[test]
fn sequences_that_hit_the_prefix_cache_end_as_those_that_compute_all() {
    if !has_gpu("sequences_that_hit_the_prefix_cache_end_as_those_that_compute_all") {
        return;
    }
    let shared = ids(300, 99);
    let requests: Vec<Request> = (0..24)
        .map(|salt| {
            let own = greedy(salt, 5 + salt as usize, 30);
            Request { prompt: [&shared[..], &own.prompt[..]].concat(), ..own }
        })
        .collect();
    let cached = EngineConfig { max_num_seqs: Some(16), max_model_len: Some(512), ..config(DtypeSetting::Bfloat16) };
    let plain = EngineConfig { enable_prefix_caching: false, ..cached.clone() };
    for arch in [TinyArch::Qwen3, TinyArch::Llama, TinyArch::Gemma3] {
        let tiny = tiny(arch, 64);
        let (want, none) = run(Box::new(model_on_gpu(&tiny, &plain)), &plain, &requests, None);
        let (got, some) = run(Box::new(model_on_gpu(&tiny, &cached)), &cached, &requests, None);
        assert_eq!(none.prefix_hits, 0);
        assert!(some.prefix_hits >= 20 * 288, "{arch:?}: {some:?} of 23 times 300 shared tokens");
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_equal_where_margins_allow(got, want, &format!("{arch:?}, sequence {index}"));
        }
        let num_equal = got.iter().zip(&want).filter(|(got, want)| tokens(got) == tokens(want)).count();
        assert!(num_equal * 10 >= want.len() * 8, "{arch:?}: {num_equal} of {} sequences are equal", want.len());
    }
}

/// Field report 67: as many long prompts at once as rows; nothing is read or written beyond the plan.
#[test]
fn many_long_prompts_at_once_are_all_answered() {
    if !has_gpu("many_long_prompts_at_once_are_all_answered") {
        return;
    }
    let tiny = TinyModel { max_position: 4096, ..tiny(TinyArch::Qwen3, 128) };
    let config = EngineConfig {
        max_num_seqs: Some(256),
        max_num_batched_tokens: Some(4096),
        max_model_len: Some(4096),
        ..config(DtypeSetting::Bfloat16)
    };
    let requests: Vec<Request> = (0..256).map(|salt| greedy(salt, 2000 + 7 * salt as usize, 8)).collect();
    let (choices, _) = run(Box::new(model_on_gpu(&tiny, &config)), &config, &requests, None);
    assert!(choices.iter().all(|choices| choices.len() == 8 && choices.iter().all(|&(token, _)| token < 320)));
}
