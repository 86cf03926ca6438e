//! The CUDA back end against the CPU's, which is held to the reference's goldens. Each test runs
//! where a GPU is and says so where none is.

mod engine;
mod files;
mod graphs;

use std::path::Path;

use crate::config::{DtypeSetting, EngineConfig};
use crate::cpu::CpuModel;
use crate::cuda::{BuildOptions, CudaModel, DeviceOptions, SearchPaths};
use crate::load::{LoadFormat, ModelSource, load_cpu, load_cuda};
use crate::model::{Forward, SampleSpec};
use crate::model_bed::{ModelBed, distance, ids};
use crate::request::SamplingParams;
use crate::sampler::{SampleRow, Sampler, Task};
use crate::tiny_model::{TinyArch, TinyModel, VOCAB_ROWS, golden_cases};

const BLOCK: u32 = 16;
const NUM_BLOCKS: u32 = 1024;

#[expect(clippy::disallowed_methods, reason = "tests read their own variables here")]
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn options() -> DeviceOptions {
    let target = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/venv");
    let paths = SearchPaths {
        python: [Some(target.to_owned()), setting("VIRTUAL_ENV")].into_iter().flatten().map(Into::into).collect(),
        folders: setting("OVERNIGHT_TEST_CUDA_LIBRARIES").map(Into::into).into_iter().collect(),
        ..SearchPaths::default()
    };
    let cache = crate::cuda::KernelCache(setting("OVERNIGHT_TEST_KERNEL_CACHE").map(Into::into));
    DeviceOptions { ordinal: 0, build: BuildOptions { paths, cache, ..BuildOptions::default() } }
}

/// Whether a GPU is there; says so when not, and fails when it is required.
fn has_gpu(test: &str) -> bool {
    match crate::cuda::open(&options()) {
        Ok(_) => true,
        Err(error) => {
            let required = setting("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            assert!(!required.split(',').any(|what| what == "gpu"), "{test} needs a GPU: {source}");
            eprintln!("{test} needs a GPU and is skipped: {source}");
            false
        }
    }
}

fn tiny(arch: TinyArch, head_dim: usize) -> TinyModel {
    TinyModel { head_dim, rounded: true, ..TinyModel::new(arch) }
}

/// The types that an architecture computes in on a GPU, the finest first.
fn dtypes(arch: TinyArch) -> &'static [DtypeSetting] {
    match arch {
        TinyArch::Gemma3 => &[DtypeSetting::Bfloat16],
        TinyArch::Llama | TinyArch::Qwen3 => &[DtypeSetting::Float16, DtypeSetting::Bfloat16],
    }
}

fn config(dtype: DtypeSetting) -> EngineConfig {
    EngineConfig {
        dtype,
        block_size: 16,
        max_num_seqs: Some(64),
        max_num_batched_tokens: Some(512),
        gpu_memory_utilization: 0.1,
        num_threads: Some(2),
        ..EngineConfig::default()
    }
}

fn model_on_gpu(tiny: &TinyModel, config: &EngineConfig) -> CudaModel {
    let folder = tempfile::tempdir().expect("temporary folder");
    tiny.write(folder.path()).expect("write the checkpoint");
    file_model_on_gpu(folder.path(), config)
}

fn file_model_on_gpu(path: &Path, config: &EngineConfig) -> CudaModel {
    let source = ModelSource { path: path.to_owned(), load_format: LoadFormat::Auto };
    let device = crate::cuda::open(&options()).expect("seen before");
    load_cuda(&source, config, &options(), device, u32::MAX).unwrap_or_else(|error| panic!("{error:?}"))
}

fn file_on_cpu(path: &Path, config: &EngineConfig) -> ModelBed<CpuModel> {
    let source = ModelSource { path: path.to_owned(), load_format: LoadFormat::Auto };
    ModelBed::new(load_cpu(&source, config).expect("load the checkpoint"), NUM_BLOCKS, BLOCK)
}

fn on_gpu(tiny: &TinyModel, config: &EngineConfig) -> ModelBed<CudaModel> {
    ModelBed::new(model_on_gpu(tiny, config), NUM_BLOCKS, BLOCK)
}

fn on_cpu(tiny: &TinyModel, config: &EngineConfig) -> ModelBed<CpuModel> {
    let folder = tempfile::tempdir().expect("temporary folder");
    tiny.write(folder.path()).expect("write the checkpoint");
    file_on_cpu(folder.path(), config)
}

/// Nats that the oracle loses by taking the other's likeliest token, by position.
fn regrets(got: &[Vec<f32>], oracle: &[Vec<f32>]) -> Vec<f64> {
    let best = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let regret = |(got, oracle): (&Vec<f32>, &Vec<f32>)| {
        let choice = got.iter().position(|&logit| logit == best(got)).expect("a largest logit");
        f64::from(best(oracle) - oracle[choice])
    };
    let mut regrets: Vec<f64> = got.iter().zip(oracle).map(regret).collect();
    regrets.sort_by(f64::total_cmp);
    regrets
}

/// Rounding of 16-bit activations through a few layers whose gain is twice the usual.
fn tolerance(dtype: DtypeSetting) -> f64 {
    if dtype == DtypeSetting::Float16 { 0.01 } else { 0.06 }
}

#[test]
fn every_architecture_computes_what_the_oracle_does() {
    if !has_gpu("every_architecture_computes_what_the_oracle_does") {
        return;
    }
    for dtype in [DtypeSetting::Bfloat16, DtypeSetting::Float16] {
        for head_dim in [64, 128, 256] {
            // Over all cases: of one, the 99th percentile of 200 positions is the second largest.
            let mut all_regrets = Vec::new();
            for (name, case) in golden_cases().into_iter().filter(|(_, case)| dtypes(case.arch).contains(&dtype)) {
                let case = TinyModel { head_dim, rounded: true, ..case };
                let config = config(dtype);
                let (mut gpu, mut cpu) = (on_gpu(&case, &config), on_cpu(&case, &config));
                let prompt = ids(200, 3);
                let (got, oracle) = (gpu.all_logits(&prompt, 200), cpu.all_logits(&prompt, 200));
                let far = distance(&got, &oracle);
                let regrets = regrets(&got, &oracle);
                let mean = regrets.iter().sum::<f64>() / regrets.len() as f64;
                eprintln!("{name} head_dim {head_dim} {dtype:?}: distance {far:.4}, regret mean {mean:.4}");
                assert!(far <= tolerance(dtype), "{name}, head_dim {head_dim}, {dtype:?}: distance {far}");
                assert!(mean <= 0.06, "{name}, head_dim {head_dim}, {dtype:?}: regret {mean}");
                all_regrets.extend(regrets);
            }
            all_regrets.sort_by(f64::total_cmp);
            let p99 = all_regrets[all_regrets.len() * 99 / 100];
            assert!(p99 <= 0.20, "head_dim {head_dim}, {dtype:?}: 99th percentile of the regret {p99}");
        }
    }
}

#[test]
fn chunks_single_tokens_and_whole_prompts_agree() {
    if !has_gpu("chunks_single_tokens_and_whole_prompts_agree") {
        return;
    }
    for arch in [TinyArch::Gemma3, TinyArch::Qwen3, TinyArch::Llama] {
        let mut gpu = on_gpu(&tiny(arch, 64), &config(DtypeSetting::Bfloat16));
        let prompt = ids(150, 5);
        let whole = gpu.all_logits(&prompt, 150);
        // Single tokens go through the decode graphs.
        for chunk in [1, 7, 64] {
            let far = distance(&gpu.all_logits(&prompt, chunk), &whole);
            assert!(far <= tolerance(DtypeSetting::Bfloat16), "{arch:?} in chunks of {chunk}: {far}");
        }
    }
}

/// Prefills `num` sequences of different lengths together, then decodes `steps` tokens of each;
/// logits of the decoded ones by sequence.
fn decode_together(gpu: &mut ModelBed<CudaModel>, num: usize, steps: usize) -> Vec<Vec<Vec<f32>>> {
    let mut sequences: Vec<_> = (0..num).map(|salt| gpu.sequence(&ids(20 + 3 * salt + steps, salt as u32))).collect();
    for sequence in &mut sequences {
        let count = sequence.ids.len() - steps;
        gpu.step(&mut [(sequence, count)]);
    }
    let mut logits = vec![Vec::new(); num];
    for _ in 0..steps {
        let mut rows: Vec<_> = sequences.iter_mut().map(|sequence| (sequence, 1)).collect();
        for (logits, row) in logits.iter_mut().zip(gpu.step(&mut rows)) {
            logits.extend(row);
        }
    }
    logits
}

#[test]
fn graphs_equal_kernels_launched_one_by_one_and_padding_changes_nothing() {
    if !has_gpu("graphs_equal_kernels_launched_one_by_one_and_padding_changes_nothing") {
        return;
    }
    for arch in [TinyArch::Gemma3, TinyArch::Qwen3] {
        let mut gpu = on_gpu(&tiny(arch, 128), &config(DtypeSetting::Bfloat16));
        // 1, 8 and 32 fill their graph; the others are padded, at either side of an edge.
        for num in [1, 2, 3, 5, 8, 9, 31, 32, 33] {
            gpu.model.set_enforce_eager(false);
            let graph = decode_together(&mut gpu, num, 3);
            gpu.model.set_enforce_eager(true);
            let eager = decode_together(&mut gpu, num, 3);
            gpu.free_all();
            for (row, (graph, eager)) in graph.iter().zip(&eager).enumerate() {
                let far = distance(graph, eager);
                assert!(far <= 0.02, "{arch:?}, row {row} of {num}: {far}");
            }
        }
    }
}

#[test]
fn a_row_alone_equals_the_row_among_many() {
    if !has_gpu("a_row_alone_equals_the_row_among_many") {
        return;
    }
    let mut gpu = on_gpu(&tiny(TinyArch::Qwen3, 64), &config(DtypeSetting::Bfloat16));
    let together = decode_together(&mut gpu, 24, 4);
    for (salt, among) in together.iter().enumerate() {
        let prompt = ids(20 + 3 * salt + 4, salt as u32);
        gpu.free_all();
        let alone = gpu.all_logits(&prompt, prompt.len() - 4);
        let alone = &alone[prompt.len() - 4..];
        let far = distance(among, alone);
        assert!(far <= tolerance(DtypeSetting::Bfloat16), "row {salt}: {far}");
    }
}

#[test]
fn prefill_beside_decode_rows_changes_neither() {
    if !has_gpu("prefill_beside_decode_rows_changes_neither") {
        return;
    }
    let mut gpu = on_gpu(&tiny(TinyArch::Gemma3, 64), &config(DtypeSetting::Bfloat16));
    let (a, b) = (ids(90, 1), ids(130, 2));
    let (whole_a, whole_b) = (gpu.all_logits(&a, 90), gpu.all_logits(&b, 130));
    let (mut first, mut second) = (gpu.sequence(&a), gpu.sequence(&b));
    gpu.step(&mut [(&mut first, 60)]);
    let (mut got_a, mut got_b) = (Vec::new(), Vec::new());
    for count in [50, 1, 79] {
        let mut logits = gpu.step(&mut [(&mut first, 1), (&mut second, count)]);
        got_b.extend(logits.pop().expect("two rows"));
        got_a.extend(logits.pop().expect("two rows"));
    }
    assert!(distance(&got_a, &whole_a[60..63]) <= tolerance(DtypeSetting::Bfloat16));
    assert!(distance(&got_b, &whole_b) <= tolerance(DtypeSetting::Bfloat16));
}

#[test]
fn the_device_chooses_what_the_cpus_sampler_would() {
    if !has_gpu("the_device_chooses_what_the_cpus_sampler_would") {
        return;
    }
    let mut gpu = on_gpu(&tiny(TinyArch::Qwen3, 64), &config(DtypeSetting::Float16));
    let plain = SamplingParams { temperature: 0.9, ..SamplingParams::default() };
    let cases = [
        SamplingParams { temperature: 0.0, ..plain.clone() },
        plain.clone(),
        SamplingParams { top_p: 0.8, ..plain.clone() },
        SamplingParams { top_k: Some(5), ..plain.clone() },
        SamplingParams { min_p: 0.1, logit_bias: vec![(7, 3.0), (299, -50.0)], ..plain.clone() },
    ];
    let (mut num_equal, mut num_all) = (0, 0);
    for sampling in cases {
        let prompt = ids(120, 9);
        let mut sequence = gpu.sequence(&prompt);
        let arrays = gpu.arrays(&mut [(&mut sequence, 120)]);
        let samplings: Vec<_> = (0..120).map(|seed| SamplingParams { seed, ..sampling.clone() }).collect();
        let task = |index: usize| Task::Choose {
            sampling: &samplings[index],
            penalties: None,
            masked: &[3, 4],
            position: index as u32,
        };
        let specs: Vec<_> = (0..120).map(|index| SampleSpec { task: task(index), num_logprobs: Some(4) }).collect();
        let vocab = 300;
        let mut sampler = Sampler::default();
        let got = gpu.model.run(arrays.input(), &specs, vocab, &mut sampler).expect("chosen");
        let logits = gpu.model.forward(arrays.input()).expect("logits").to_vec();
        let rows: Vec<_> = specs
            .iter()
            .zip(logits.chunks_exact(VOCAB_ROWS))
            .map(|(spec, logits)| SampleRow {
                logits: &logits[..vocab as usize],
                task: spec.task,
                num_logprobs: spec.num_logprobs,
            })
            .collect();
        let want = sampler.sample(&rows);
        let is_greedy = sampling.is_greedy();
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            let (got, want) = (got.as_ref().expect("finite"), want.as_ref().expect("finite"));
            num_all += 1;
            num_equal += usize::from(got.token == want.token);
            assert!(!is_greedy || got.token == want.token, "position {index}: {got:?} instead of {want:?}");
            if got.token == want.token {
                let (got, want) = (got.logprobs.as_ref().expect("asked"), want.logprobs.as_ref().expect("asked"));
                assert_eq!(got.chosen.rank, want.chosen.rank, "position {index}");
                for (got, want) in got.top.iter().chain([&got.chosen]).zip(want.top.iter().chain([&want.chosen])) {
                    assert!((got.logprob - want.logprob).abs() < 1e-3, "{got:?} instead of {want:?}");
                }
            }
        }
    }
    // Sums are rounded differently, so that a draw at the edge of two tokens may fall to the other.
    assert!(num_equal * 100 >= num_all * 99, "{num_equal} of {num_all} choices are equal");
}

#[test]
fn memory_is_accounted_for_by_name() {
    if !has_gpu("memory_is_accounted_for_by_name") {
        return;
    }
    let gpu = on_gpu(&tiny(TinyArch::Llama, 64), &config(DtypeSetting::Bfloat16));
    let report = gpu.model.memory_report().expect("told");
    assert!(report.iter().any(|(name, _)| name == "graphs"), "{report:?}");
    for name in ["weights", "kv cache", "workspace", "activations", "free", "others", "free on the card"] {
        let bytes = report.iter().find(|(known, _)| known == name).map(|(_, bytes)| *bytes);
        assert!(bytes.is_some_and(|bytes| bytes > 0), "{name} in {report:?}");
    }
}
