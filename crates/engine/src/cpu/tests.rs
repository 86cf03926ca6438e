//! The CPU back end on tiny checkpoints: against the reference's goldens, and against itself.

use std::path::Path;

use serde_json::Value;

use crate::config::EngineConfig;
use crate::cpu::CpuModel;
use crate::cpu::simd::Isa;
use crate::load::{LoadFormat, ModelSource, load_cpu};
use crate::model::{Forward, StepInput};
use crate::model_bed::{ModelBed, distance, ids};
use crate::tiny_gguf::{Stored, gguf_bytes};
use crate::tiny_model::{TinyArch, TinyModel, VOCAB_ROWS, golden_cases};

fn load_tiny(tiny: &TinyModel, threads: u32) -> CpuModel {
    let folder = tempfile::tempdir().expect("temporary folder");
    tiny.write(folder.path()).expect("write the checkpoint");
    load_folder(folder.path(), LoadFormat::Auto, threads)
}

fn load_folder(folder: &Path, load_format: LoadFormat, threads: u32) -> CpuModel {
    let config = EngineConfig { num_threads: Some(threads), ..EngineConfig::default() };
    load_cpu(&ModelSource { path: folder.to_owned(), load_format }, &config).expect("load the checkpoint")
}

/// A bed whose cache holds what must not be read.
fn bed_on(model: CpuModel, block_size: u32) -> ModelBed<CpuModel> {
    let mut bed = ModelBed::new(model, 1024 / block_size * 4, block_size);
    bed.model.cache.as_mut().expect("just allocated").poison();
    bed
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (id, &x)| if x > best.1 { (id, x) } else { best });
    best.0 as u32
}

fn logprobs(logits: &[f32]) -> Vec<f64> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&x| (x as f64 - greatest).exp()).sum();
    logits.iter().map(|&x| x as f64 - greatest - sum.ln()).collect()
}

fn numbers<T>(value: &Value, one: impl Fn(&Value) -> Option<T>) -> Vec<T> {
    value.as_array().expect("an array").iter().map(|v| one(v).expect("a number")).collect()
}

fn token_ids(value: &Value) -> Vec<u32> {
    numbers(value, |v| v.as_u64().map(|id| id as u32))
}

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name);
    serde_json::from_slice(&std::fs::read(&path).expect("golden file")).expect("JSON")
}

/// Compares every position's likeliest tokens and the greedy continuation; gives the regrets.
fn compare(bed: &mut ModelBed<CpuModel>, golden: &Value, tolerance: f64, name: &str) -> Vec<f64> {
    let mut regrets = Vec::new();
    for case in golden["cases"].as_array().expect("cases") {
        let prompt = token_ids(&case["prompt"]);
        let logits = bed.all_logits(&prompt, prompt.len());
        for (position, logits) in logits.iter().enumerate() {
            let ours = logprobs(logits);
            let top = token_ids(&case["top_ids"][position]);
            let theirs = numbers(&case["top_logprobs"][position], Value::as_f64);
            for (&id, &theirs) in top.iter().zip(&theirs) {
                let ours = ours[id as usize];
                assert!((ours - theirs).abs() < tolerance, "{name} position {position} id {id}: {ours} for {theirs}");
            }
            let rank = top.iter().position(|&id| id == argmax(logits)).expect("among the likeliest twenty");
            regrets.push(theirs[0] - theirs[rank]);
        }
        let want = token_ids(&case["greedy"]);
        let mut sequence = bed.sequence(&prompt);
        let count = prompt.len();
        let mut last = bed.step(&mut [(&mut sequence, count)]).remove(0).pop().expect("a row");
        let mut got = Vec::new();
        while got.len() < want.len() {
            got.push(argmax(&last));
            sequence.ids.push(argmax(&last));
            last = bed.step(&mut [(&mut sequence, 1)]).remove(0).remove(0);
        }
        assert_eq!(got, want, "{name}, prompt of {count}");
    }
    regrets
}

fn assert_regret(mut regrets: Vec<f64>) {
    regrets.sort_by(f64::total_cmp);
    let mean = regrets.iter().sum::<f64>() / regrets.len() as f64;
    assert!(mean <= 0.06 && regrets[regrets.len() * 99 / 100] <= 0.20, "mean regret {mean}");
}

// Field reports 20, 56 and 57: windows shorter than the prompt, patterns by layer, rope variants.
#[test]
fn tiny_checkpoints_answer_as_the_reference_does() {
    let mut regrets = Vec::new();
    for (name, tiny) in golden_cases() {
        let mut bed = bed_on(load_tiny(&tiny, 1), 16);
        regrets.extend(compare(&mut bed, &golden(&format!("tiny/{name}.json")), 2e-3, name));
    }
    assert_regret(regrets);
}

/// The reference computes in f32 on the same quantized weights; ours has 16-bit activations and cache.
#[test]
#[expect(clippy::disallowed_methods, reason = "tests find fetched models by OVERNIGHT_TEST_MODELS")]
fn quantized_gemma_answers_as_the_reference_does() {
    let path = std::env::var_os("OVERNIGHT_TEST_MODELS").map(|folder| Path::new(&folder).join("gemma-3-270m.gguf"));
    let Some(path) = path.filter(|path| path.exists()) else {
        let required = std::env::var("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
        let detail = "gemma-3-270m.gguf in the folder OVERNIGHT_TEST_MODELS";
        assert!(!required.split(',').any(|word| word == "model"), "this test needs {detail}");
        eprintln!("skipped: this test needs {detail}");
        return;
    };
    let mut bed = bed_on(load_folder(&path, LoadFormat::Auto, 2), 16);
    assert_regret(compare(&mut bed, &golden("gemma-3-270m-q4_k_m.json"), 0.1, "gemma-3-270m"));
}

#[test]
fn gguf_of_the_same_weights_answers_as_the_folder() {
    let tiny = TinyModel { rounded: true, ..TinyModel::new(TinyArch::Qwen3) };
    let prompt = ids(60, 4);
    let want = bed_on(load_tiny(&tiny, 1), 16).all_logits(&prompt, 60);
    let folder = tempfile::tempdir().expect("temporary folder");
    for stored in Stored::ALL {
        let path = folder.path().join("tiny.gguf");
        std::fs::write(&path, gguf_bytes(&tiny, stored)).expect("write");
        let got = bed_on(load_folder(&path, LoadFormat::Auto, 1), 16).all_logits(&prompt, 60);
        let far = distance(&got, &want);
        // The same weights in every form but the last; K and V are kept in f16 here.
        let most = if stored == Stored::Q8_0 { 0.05 } else { 0.005 };
        assert!(far <= most, "{stored:?}: {far}");
        assert!(stored != Stored::Q8_0 || far > 0.0005, "weights of eight bits are not those of sixteen");
    }
}

#[test]
fn chunked_prompt_gives_the_bits_of_the_whole() {
    for arch in [TinyArch::Gemma3, TinyArch::Qwen3, TinyArch::Llama] {
        let mut bed = bed_on(load_tiny(&TinyModel::new(arch), 2), 16);
        let prompt = ids(50, 1);
        let whole = bed.all_logits(&prompt, 50);
        for chunk in [1, 7, 16, 17] {
            assert_eq!(bed.all_logits(&prompt, chunk), whole, "{arch:?} in chunks of {chunk}");
        }
    }
}

#[test]
fn row_among_many_gives_the_bits_of_the_row_alone() {
    let tiny = TinyModel::new(TinyArch::Gemma3);
    let prompts: Vec<_> = [(1, 2), (20, 3), (33, 4), (5, 5), (17, 6)].map(|(len, salt)| ids(len + 1, salt)).to_vec();
    let alone: Vec<_> = {
        let mut bed = bed_on(load_tiny(&tiny, 1), 16);
        prompts.iter().map(|prompt| bed.all_logits(prompt, 64)).collect()
    };
    let mut bed = bed_on(load_tiny(&tiny, 2), 8);
    let mut sequences: Vec<_> = prompts.iter().map(|prompt| bed.sequence(prompt)).collect();
    // All but the last token of each, in one ragged step; then the last ones as decode rows.
    let mut rows: Vec<_> = sequences
        .iter_mut()
        .map(|s| {
            let count = s.ids.len() - 1;
            (s, count)
        })
        .collect();
    let first = bed.step(&mut rows);
    let mut rows: Vec<_> = sequences.iter_mut().map(|s| (s, 1)).collect();
    let second = bed.step(&mut rows);
    for (index, alone) in alone.iter().enumerate() {
        let together: Vec<_> = first[index].iter().chain(&second[index]).cloned().collect();
        assert_eq!(&together, alone, "row {index}");
    }
}

#[test]
fn block_size_threads_and_instruction_set_do_not_show() {
    let tiny = TinyModel::new(TinyArch::Gemma3);
    let prompt = ids(40, 9);
    let want = bed_on(load_tiny(&tiny, 1), 64).all_logits(&prompt, 40);
    for block_size in [8, 16, 32] {
        assert_eq!(bed_on(load_tiny(&tiny, 1), block_size).all_logits(&prompt, 40), want, "blocks of {block_size}");
    }
    for threads in [2, 3, 5] {
        assert_eq!(bed_on(load_tiny(&tiny, threads), 64).all_logits(&prompt, 40), want, "{threads} threads");
    }
    for isa in Isa::available() {
        let mut model = load_tiny(&tiny, 2);
        model.use_isa(isa);
        assert_eq!(bed_on(model, 64).all_logits(&prompt, 40), want, "{isa:?}");
    }
}

/// A model of one layer with random weights and a window.
fn one_layer(window: u32) -> CpuModel {
    let folder = tempfile::tempdir().expect("temporary folder");
    let tiny = TinyModel::new(TinyArch::Gemma3);
    let mut config = tiny.config();
    config["num_hidden_layers"] = 1.into();
    config["layer_types"] = serde_json::json!(["sliding_attention"]);
    config["sliding_window"] = window.into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("write");
    load_folder(folder.path(), LoadFormat::Dummy, 1)
}

// Field report 56: the exact edge.
#[test]
fn token_sees_exactly_its_window() {
    let window = 12;
    let mut bed = bed_on(one_layer(window), 16);
    let prompt = ids(30, 3);
    let last = |bed: &mut ModelBed<CpuModel>, ids: &[u32]| bed.all_logits(ids, 9).pop().expect("a row");
    let want = last(&mut bed, &prompt);
    let changed = |at: usize| {
        let mut prompt = prompt.clone();
        prompt[at] ^= 1;
        prompt
    };
    let edge = prompt.len() - window as usize;
    assert_eq!(last(&mut bed, &changed(edge - 1)), want, "one token before the window is not seen");
    assert_ne!(last(&mut bed, &changed(edge)), want, "the first token of the window is seen");
}

// Field report 53.
#[test]
fn first_layer_that_is_not_finite_is_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let tiny = TinyModel::new(TinyArch::Qwen3);
    tiny.write(folder.path()).expect("write");
    let mut tensors = tiny.tensors();
    tensors.get_mut("model.layers.2.mlp.up_proj.weight").expect("tensor").1[5] = f32::NAN;
    std::fs::write(folder.path().join("model.safetensors"), crate::tiny_model::safetensors_bytes(&tensors))
        .expect("write");
    let mut bed = bed_on(load_folder(folder.path(), LoadFormat::Auto, 1), 16);
    let logits = bed.all_logits(&ids(3, 1), 3);
    assert!(logits.iter().flatten().any(|x| x.is_nan()), "NaN must not be hidden");
    assert_eq!(bed.model.first_bad_layer(), Some(2));
    let mut healthy = bed_on(load_tiny(&tiny, 1), 16);
    healthy.all_logits(&ids(3, 1), 3);
    assert_eq!(healthy.model.first_bad_layer(), None);
}

#[test]
fn malformed_step_is_refused() {
    let mut bed = bed_on(load_tiny(&TinyModel::new(TinyArch::Llama), 1), 16);
    let good = StepInput {
        token_ids: &[1, 2],
        positions: &[0, 1],
        slot_mapping: &[0, 1],
        cu_seqlens: &[0, 2],
        context_lens: &[2],
        block_tables: &[0],
        block_table_starts: &[0, 1],
        logits_tokens: &[1],
        feedback: &[],
    };
    assert_eq!(bed.model.forward(good).expect("in order").len(), VOCAB_ROWS);
    let bad = [
        ("token", StepInput { token_ids: &[1, VOCAB_ROWS as u32], ..good }),
        ("position", StepInput { positions: &[0, 2], ..good }),
        ("slot", StepInput { slot_mapping: &[0, u32::MAX], ..good }),
        ("rows", StepInput { cu_seqlens: &[0, 1], ..good }),
        ("context", StepInput { context_lens: &[17], ..good }),
        ("block", StepInput { block_tables: &[9999], ..good }),
        ("tables", StepInput { block_table_starts: &[0, 2], ..good }),
        ("logits", StepInput { logits_tokens: &[2], ..good }),
        ("rising", StepInput { logits_tokens: &[1, 1], ..good }),
    ];
    for (what, step) in bad {
        assert!(bed.model.forward(step).is_err(), "{what}");
    }
}
