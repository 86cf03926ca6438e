//! What the door refuses, and that what it lets in is served.

use overnight_engine::door::Limits;
use overnight_engine::model::Forward;
use overnight_engine::{EngineConfig, Error, Request, SamplingParams, StopRules};

use crate::bed::{Bed, alone, prompt, request, run_all};
use crate::toy::{Toy, VOCAB};

/// The request is refused with this code and parameter and these words, and the engine serves the next one.
#[track_caller]
fn assert_refused(request: Request, code: &str, param: &str, words: &[&str]) {
    let mut engine = Bed::default().engine();
    let error = engine.add(request).expect_err("it must be refused");
    assert_eq!((error.code, error.param, error.transient), (code, Some(param), false), "{}", error.message);
    for word in words {
        assert!(error.message.contains(word), "{word} is not in: {}", error.message);
    }
    let next = crate::bed::request(prompt(1, 5), 3);
    assert_eq!(run_all(&mut engine, std::slice::from_ref(&next)).of(&next).tokens, alone(&next).tokens);
}

fn with_sampling(change: impl FnOnce(&mut SamplingParams)) -> Request {
    let mut request = request(prompt(1, 5), 3);
    change(&mut request.sampling);
    request
}

fn with_stop(change: impl FnOnce(&mut StopRules)) -> Request {
    let mut request = request(prompt(1, 5), 3);
    change(&mut request.stop);
    request
}

/// Field report 1: vllm#7283, #7632, PR 7746.
#[test]
fn empty_prompt_is_refused_alone() {
    assert_refused(request(vec![], 3), "empty_prompt", "prompt", &["no tokens"]);
}

/// Field report 3: vllm#904.
#[test]
fn prompt_beyond_the_context_is_refused_with_both_lengths() {
    let words = ["600", "512"];
    assert_refused(request(prompt(1, 600), 3), "context_length_exceeded", "prompt", &words);
    assert_refused(request(prompt(1, 512), 3), "context_length_exceeded", "prompt", &["512", "at least one"]);
}

/// Field report 4: helm#1469.
#[test]
fn max_tokens_zero_without_prompt_logprobs_is_refused() {
    assert_refused(request(prompt(1, 5), 0), "invalid_value", "max_tokens", &["prompt_logprobs"]);
}

/// Field report 8: vllm PR 16529.
#[test]
fn logit_bias_outside_the_vocabulary_is_refused() {
    let request = with_sampling(|sampling| sampling.logit_bias = vec![(1, 1.0), (VOCAB, 1.0)]);
    assert_refused(request, "invalid_token_id", "logit_bias", &["97"]);
    let request = with_sampling(|sampling| sampling.logit_bias = vec![(1, f32::NAN)]);
    assert_refused(request, "invalid_value", "logit_bias", &["NaN", "token 1"]);
}

/// Field report 9: vllm#54195, PR 54196.
#[test]
fn stop_token_ids_outside_the_vocabulary_are_refused() {
    let request = with_stop(|stop| stop.stop_token_ids = vec![5, u32::MAX]);
    assert_refused(request, "invalid_token_id", "stop_token_ids", &["4294967295", "97"]);
    assert_refused(self::request(vec![1, VOCAB], 3), "invalid_token_id", "prompt", &["97"]);
}

/// Field report 10, 11: sglang PR 40099, #40076; vllm#4699.
#[test]
fn logprobs_beyond_the_limit_are_refused_with_the_limit() {
    let request = || self::request(prompt(1, 5), 3);
    let huge = Request { logprobs: Some(1_000_000), ..request() };
    assert_refused(huge, "invalid_value", "logprobs", &["1000000", "20"]);
    let huge = Request { prompt_logprobs: Some(21), ..request() };
    assert_refused(huge, "invalid_value", "prompt_logprobs", &["21", "20"]);
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let refused = |param: &str, change: fn(&mut SamplingParams)| {
        assert_refused(with_sampling(change), "invalid_value", param, &[param]);
    };
    refused("temperature", |sampling| sampling.temperature = -1.0);
    refused("temperature", |sampling| sampling.temperature = f32::NAN);
    refused("temperature", |sampling| sampling.temperature = f32::INFINITY);
    refused("top_p", |sampling| sampling.top_p = 0.0);
    refused("top_p", |sampling| sampling.top_p = 1.1);
    refused("top_k", |sampling| sampling.top_k = Some(0));
    refused("min_p", |sampling| sampling.min_p = -0.1);
    refused("presence_penalty", |sampling| sampling.presence_penalty = 2.1);
    refused("frequency_penalty", |sampling| sampling.frequency_penalty = f32::NAN);
    refused("repetition_penalty", |sampling| sampling.repetition_penalty = 0.0);
    refused("logit_bias", |sampling| sampling.logit_bias = vec![(1, 101.0)]);
}

#[test]
fn stop_rules_out_of_range_are_refused_by_name() {
    assert_refused(with_stop(|stop| stop.min_tokens = 4), "invalid_value", "min_tokens", &["4", "3"]);
    assert_refused(
        with_stop(|stop| stop.stop_token_ids = vec![1; 2_000]),
        "invalid_value",
        "stop_token_ids",
        &["2000"],
    );
}

#[test]
fn stop_texts_without_a_tokenizer_are_refused() {
    let toy = Toy::new(512);
    let limits = Limits::resolve(toy.shape(), &Bed::default().config(), None, None).expect("good settings");
    let error = limits.check(&with_stop(|stop| stop.stop = vec!["x".to_owned()])).expect_err("no tokenizer");
    assert_eq!((error.code, error.param), ("unsupported_parameter", Some("stop")));
}

#[test]
fn request_id_that_is_already_inside_is_refused() {
    let mut engine = Bed::default().engine();
    let request = request(prompt(1, 5), 3);
    engine.add(request.clone()).expect("the first");
    assert_eq!(engine.add(request.clone()).expect_err("the second").code, "duplicate_request_id");
    assert_eq!(run_all(&mut engine, &[]).of(&request).tokens.len(), 3);
}

fn resolve(max_position: u32, change: impl FnOnce(&mut EngineConfig), free: u64) -> Result<Limits, Error> {
    let mut config = EngineConfig { block_size: 8, ..EngineConfig::default() };
    change(&mut config);
    Limits::resolve(Toy::new(max_position).shape(), &config, None, Some(free))
}

#[test]
fn kv_pool_is_a_quarter_of_free_memory_up_to_what_full_sequences_need() {
    // A token takes 16 bytes, a block 128.
    let limits = resolve(1 << 20, |_| {}, 128 * 400).expect("room");
    assert_eq!((limits.num_blocks, limits.pool_tokens()), (100, 800));
    assert_eq!(limits.max_model_len, 800, "the model's own length yields to the pool");
    assert!((limits.max_concurrency() - 1.0).abs() < 1e-9);
    let limits = resolve(80, |config| config.max_num_seqs = Some(4), 1 << 40).expect("room");
    assert_eq!((limits.num_blocks, limits.max_model_len), (40, 80), "more would never be used");
    let limits = resolve(800, |config| config.kv_cache_memory_bytes = Some(1280), 0).expect("room");
    assert_eq!(limits.num_blocks, 10);
}

#[test]
fn settings_that_cannot_work_stop_the_start_by_key() {
    let key = |result: Result<Limits, Error>| match result {
        Err(Error::Config { key, .. }) => key,
        other => panic!("{other:?}"),
    };
    assert_eq!(key(resolve(100, |config| config.max_model_len = Some(101), 1 << 30)), "max_model_len");
    assert_eq!(
        key(resolve(100, |config| config.num_gpu_blocks_override = Some(0), 1 << 30)),
        "num_gpu_blocks_override"
    );
    assert_eq!(key(resolve(100, |_| {}, 100)), "kv_cache_memory_bytes");
    assert_eq!(key(resolve(100, |config| config.block_size = 12, 1 << 30)), "block_size");
}

/// Kernels take a slot as i32 and store nothing at a negative one.
#[test]
fn no_pool_has_slots_that_a_kernel_would_take_for_padding() {
    for block_size in [8, 64, 256] {
        let most = i32::MAX as u32 / block_size - 1;
        let with = |num_blocks| {
            let change = |config: &mut EngineConfig| {
                config.block_size = block_size;
                config.num_gpu_blocks_override = Some(num_blocks);
            };
            resolve(100, change, 1 << 30)
        };
        assert_eq!(with(most).expect("room").num_blocks, most);
        let error = with(most + 1).expect_err("one block too many").to_string();
        assert!(error.contains("num_gpu_blocks_override") && error.contains(&most.to_string()), "{error}");
        let endless = |config: &mut EngineConfig| {
            config.block_size = block_size;
            config.max_num_seqs = Some(4096);
            config.kv_cache_memory_bytes = Some(u64::MAX);
        };
        assert_eq!(resolve(u32::MAX, endless, 0).expect("cut to what can be numbered").num_blocks, most);
    }
}
