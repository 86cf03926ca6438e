//! The same promises on the CPU back end, with seeded random weights of each architecture.

use overnight_engine::door::Limits;
use overnight_engine::load::{LoadFormat, ModelSource, load};
use overnight_engine::{Engine, EngineConfig, Request, SamplingParams};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::bed::{Results, again, prompt, request, run, run_all};
use crate::texts::write_tokenizer;
use crate::toy::{EOS, VOCAB};

const ARCHITECTURES: [&str; 3] = ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"];

fn model_config(architecture: &str) -> Value {
    let mut config = json!({
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "num_hidden_layers": 3,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "eos_token_id": EOS, "torch_dtype": "float32", "attention_bias": false, "hidden_act": "silu",
    });
    let extra = match architecture {
        "Qwen3ForCausalLM" => json!({"model_type": "qwen3"}),
        "LlamaForCausalLM" => json!({"model_type": "llama", "mlp_bias": false}),
        _ => json!({
            "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16,
            "rope_local_base_freq": 1000.0, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }),
    };
    config.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    config
}

/// A bed whose engine runs the CPU back end.
#[derive(Debug, Clone)]
struct Bed {
    architecture: &'static str,
    num_blocks: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    caching: bool,
}

impl Bed {
    fn roomy(architecture: &'static str) -> Self {
        Self { architecture, num_blocks: 256, max_num_seqs: 8, max_num_batched_tokens: 64, caching: true }
    }

    fn engine(&self) -> Engine {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write_tokenizer(folder.path());
        std::fs::write(folder.path().join("config.json"), model_config(self.architecture).to_string())
            .expect("written");
        let config = EngineConfig {
            max_num_seqs: Some(self.max_num_seqs),
            max_num_batched_tokens: Some(self.max_num_batched_tokens),
            max_model_len: Some(256),
            block_size: 8,
            num_gpu_blocks_override: Some(self.num_blocks),
            enable_prefix_caching: self.caching,
            num_threads: Some(2),
            seed: 5,
            ..EngineConfig::default()
        };
        let source = ModelSource { path: folder.path().to_owned(), load_format: LoadFormat::Dummy };
        let loaded = load(&source, &config).expect("it loads");
        let vocab_size = loaded.text.vocab_size();
        let mut limits =
            Limits::resolve(loaded.forward.shape(), &config, Some(vocab_size), None).expect("good settings");
        limits.expected_output_min = 1;
        Engine::new(loaded.forward, limits, self.caching).expect("it starts")
    }
}

fn alone(architecture: &'static str, request: &Request) -> Vec<u32> {
    let bed = Bed { max_num_seqs: 1, max_num_batched_tokens: 256, caching: false, ..Bed::roomy(architecture) };
    let request = again(request);
    run_all(&mut bed.engine(), std::slice::from_ref(&request)).of(&request).tokens.clone()
}

/// Greedy and sampled requests with prompts that share beginnings.
fn mixed(num: u64, max_tokens: u32) -> Vec<Request> {
    let requests = (0..num).map(|index| {
        let request = request([prompt(index % 2, 20), prompt(index, 2 + index as u32 * 7 % 40)].concat(), max_tokens);
        let sampling = SamplingParams { seed: index, top_p: 0.95, ..SamplingParams::default() };
        if index % 3 == 2 { Request { sampling, ..request } } else { request }
    });
    requests.collect()
}

#[test]
fn sequence_in_step_equals_sequence_alone_on_the_cpu() {
    for architecture in ARCHITECTURES {
        let requests = mixed(10, 12);
        let results = run_all(&mut Bed::roomy(architecture).engine(), &requests);
        for request in &requests {
            assert_eq!(results.of(request).tokens, alone(architecture, request), "{architecture}");
        }
    }
}

/// Field report 25, 27 on the CPU back end: outputs under pressure equal those without.
#[test]
fn small_pool_and_small_chunks_change_no_token_on_the_cpu() {
    for architecture in ARCHITECTURES {
        let bed = Bed { num_blocks: 18, max_num_batched_tokens: 11, ..Bed::roomy(architecture) };
        let requests = mixed(8, 60);
        let mut engine = bed.engine();
        let results = run_all(&mut engine, &requests);
        assert!(engine.scheduler().num_preemptions() > 0, "there was no pressure");
        for request in &requests {
            assert_eq!(results.of(request).tokens, alone(architecture, request), "{architecture}");
        }
    }
}

/// Field report 21, 29 on the CPU back end.
#[test]
fn prefix_hit_and_chunks_give_the_same_logprobs_on_the_cpu() {
    for architecture in ARCHITECTURES {
        let scored = |bed: &Bed, num_warm: usize| {
            let mut engine = bed.engine();
            let mut results = Results::default();
            let plain = Request { logprobs: Some(5), ..request(prompt(7, 90), 6) };
            for _ in 0..num_warm {
                results = run_all(&mut engine, &[again(&plain)]);
            }
            let (scored, plain) = (Request { prompt_logprobs: Some(3), ..again(&plain) }, again(&plain));
            engine.add(plain.clone()).expect("fits");
            run(&mut engine, &mut results);
            engine.add(scored.clone()).expect("fits");
            run(&mut engine, &mut results);
            let logprobs = |request: &Request| -> Vec<_> {
                results.of(request).outputs.iter().map(|output| output.logprobs.clone()).collect()
            };
            let of_prompt = results.of(&scored).outputs[0].prompt_logprobs.clone().expect("asked for");
            (logprobs(&plain), logprobs(&scored), of_prompt, results.of(&plain).finish().num_cached_tokens)
        };
        let whole = scored(&Bed { max_num_batched_tokens: 256, caching: false, ..Bed::roomy(architecture) }, 0);
        let cut = scored(&Bed { max_num_batched_tokens: 9, ..Bed::roomy(architecture) }, 0);
        let hit = scored(&Bed::roomy(architecture), 1);
        assert_eq!((whole.3, hit.3), (0, 88));
        assert_eq!((&cut.0, &cut.1, &cut.2), (&whole.0, &whole.1, &whole.2), "{architecture} in chunks");
        assert_eq!((&hit.0, &hit.1, &hit.2), (&whole.0, &whole.1, &whole.2), "{architecture} after a hit");
        assert_eq!(whole.0, whole.1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_pool_and_chunking_gives_the_tokens_of_decoding_alone_on_the_cpu(
        architecture in 0usize..3,
        num_blocks in 14u32..40,
        max_num_seqs in 1u32..7,
        chunk in 0u32..30,
        caching in any::<bool>(),
        order in Just((0..6usize).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let architecture = ARCHITECTURES[architecture];
        let bed = Bed { architecture, num_blocks, max_num_seqs, max_num_batched_tokens: max_num_seqs + chunk, caching };
        let requests = mixed(6, 25);
        let in_order: Vec<Request> = order.iter().map(|&index| requests[index].clone()).collect();
        let results = run_all(&mut bed.engine(), &in_order);
        for request in &requests {
            prop_assert_eq!(&results.of(request).tokens, &alone(architecture, request));
        }
    }
}
