//! The CUDA back end against the CPU's, which is held to the reference's goldens. Each test runs
//! where a GPU is and says so where none is.

use std::collections::HashMap;

use crate::config::{DtypeSetting, EngineConfig};
use crate::cuda::{BuildOptions, CudaModel, DeviceOptions, SearchPaths};
use crate::door::Limits;
use crate::load::{LoadFormat, ModelSource, load_cpu, load_cuda};
use crate::model::{Forward, ModelShape, SampleSpec, StepInput, StepResults};
use crate::request::{Class, Request, RequestId, SamplingParams, StopRules};
use crate::sampler::{SampleRow, Sampler, Task};
use crate::tiny_model::{TinyArch, TinyModel, VOCAB_ROWS, golden_cases};
use crate::{Engine, Error};

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
    let source = ModelSource { path: folder.path().to_owned(), load_format: LoadFormat::Auto };
    let device = crate::cuda::open(&options()).expect("seen before");
    load_cuda(&source, config, &options(), device, u32::MAX).unwrap_or_else(|error| panic!("{error:?}"))
}

fn on_gpu(tiny: &TinyModel, config: &EngineConfig) -> Bench<CudaModel> {
    Bench::new(model_on_gpu(tiny, config))
}

fn on_cpu(tiny: &TinyModel, config: &EngineConfig) -> Bench<crate::cpu::CpuModel> {
    let folder = tempfile::tempdir().expect("temporary folder");
    tiny.write(folder.path()).expect("write the checkpoint");
    let source = ModelSource { path: folder.path().to_owned(), load_format: LoadFormat::Auto };
    Bench::new(load_cpu(&source, config).expect("load the checkpoint"))
}

/// A sequence and the cache blocks it owns.
struct Sequence {
    ids: Vec<u32>,
    done: usize,
    table: Vec<u32>,
}

/// A model whose cache blocks are handed out in scattered order.
struct Bench<M> {
    model: M,
    free: Vec<u32>,
}

const BLOCK: u32 = 16;

/// Arrays of a step.
#[derive(Default)]
struct Arrays {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    cu_seqlens: Vec<u32>,
    contexts: Vec<u32>,
    tables: Vec<u32>,
    table_starts: Vec<u32>,
    wanted: Vec<u32>,
}

impl Arrays {
    fn new(rows: &mut [(&mut Sequence, usize)]) -> Self {
        let mut arrays = Self { cu_seqlens: vec![0], table_starts: vec![0], ..Self::default() };
        for (sequence, count) in rows.iter_mut() {
            for _ in 0..*count {
                let position = sequence.done as u32;
                arrays.token_ids.push(sequence.ids[sequence.done]);
                arrays.positions.push(position);
                arrays.slots.push(sequence.table[(position / BLOCK) as usize] * BLOCK + position % BLOCK);
                sequence.done += 1;
            }
            arrays.cu_seqlens.push(arrays.token_ids.len() as u32);
            arrays.contexts.push(sequence.done as u32);
            arrays.tables.extend(&sequence.table[..sequence.done.div_ceil(BLOCK as usize)]);
            arrays.table_starts.push(arrays.tables.len() as u32);
        }
        arrays.wanted = (0..arrays.token_ids.len() as u32).collect();
        arrays
    }

    fn input(&self) -> StepInput<'_> {
        StepInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            slot_mapping: &self.slots,
            cu_seqlens: &self.cu_seqlens,
            context_lens: &self.contexts,
            block_tables: &self.tables,
            block_table_starts: &self.table_starts,
            logits_tokens: &self.wanted,
            feedback: &[],
        }
    }
}

impl<M: Forward> Bench<M> {
    fn new(mut model: M) -> Self {
        let num_blocks = 1024;
        model.allocate_kv_cache(num_blocks, BLOCK).unwrap_or_else(|error| panic!("{error:?}"));
        // 7 is coprime to every power of two, so each block comes once.
        Self { model, free: (0..num_blocks).map(|index| index * 7 % num_blocks).collect() }
    }

    fn sequence(&mut self, ids: &[u32]) -> Sequence {
        let blocks = ids.len().div_ceil(BLOCK as usize);
        Sequence { ids: ids.to_vec(), done: 0, table: (0..blocks).map(|_| self.free.pop().expect("enough")).collect() }
    }

    /// One step of the next `count` tokens of each sequence, those of one token first; logits of
    /// all of them, by sequence.
    fn step(&mut self, rows: &mut [(&mut Sequence, usize)]) -> Vec<Vec<Vec<f32>>> {
        let arrays = Arrays::new(rows);
        let logits = self.model.forward(arrays.input()).unwrap_or_else(|error| panic!("{error:?}"));
        let mut rest = logits.chunks_exact(VOCAB_ROWS).map(<[f32]>::to_vec);
        rows.iter().map(|(_, count)| rest.by_ref().take(*count).collect()).collect()
    }

    /// Logits of every position, in chunks of `chunk` tokens.
    fn all_logits(&mut self, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        let mut sequence = self.sequence(ids);
        let mut logits = Vec::new();
        while sequence.done < ids.len() {
            let count = chunk.min(ids.len() - sequence.done);
            logits.extend(self.step(&mut [(&mut sequence, count)]).remove(0));
        }
        logits
    }
}

fn ids(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + salt * 101 + i * i) % 256).collect()
}

/// ‖a − b‖ / ‖b‖ over all positions; infinite when something is not a number.
fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    assert_eq!(a.len(), b.len(), "positions");
    let (mut difference, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        difference += f64::from(a - b).powi(2);
        norm += f64::from(*b).powi(2);
    }
    let ratio = (difference / norm).sqrt();
    if ratio.is_finite() { ratio } else { f64::INFINITY }
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
            for (name, case) in golden_cases() {
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
fn decode_together(gpu: &mut Bench<CudaModel>, num: usize, steps: usize) -> Vec<Vec<Vec<f32>>> {
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
            gpu.free = (0..1024).map(|index| index * 7 % 1024).collect();
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
        gpu.free = (0..1024).map(|index| index * 7 % 1024).collect();
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
        let arrays = Arrays::new(&mut [(&mut sequence, 120)]);
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
        gpu.free.extend(sequence.table);
    }
    // Sums are rounded differently, so that a draw at the edge of two tokens may fall to the other.
    assert!(num_equal * 100 >= num_all * 99, "{num_equal} of {num_all} choices are equal");
}

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

/// Tokens of each request, from an engine that runs all of them together.
fn generate(model: Box<dyn Forward>, config: &EngineConfig, requests: &[Request]) -> Vec<Vec<u32>> {
    let limits = Limits::resolve(model.shape(), config, None, None).expect("good settings");
    let mut engine = Engine::new(model, limits, true).expect("it starts");
    let mut tokens: HashMap<RequestId, Vec<u32>> = HashMap::new();
    for request in requests {
        engine.add(request.clone()).expect("the door lets it in");
    }
    while !engine.is_idle() {
        for output in engine.step().expect("the device works").outputs {
            tokens.entry(output.id).or_default().extend(output.token);
        }
    }
    requests.iter().map(|request| tokens.remove(&request.id).unwrap_or_default()).collect()
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
                logprobs: salt.is_multiple_of(3).then_some(2),
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
        let model = || model_on_gpu(&tiny(arch, 64), &config);
        let waits = generate(Box::new(Waiting(model())), &config, &requests);
        let ahead = generate(Box::new(model()), &config, &requests);
        assert!(waits.iter().all(|tokens| !tokens.is_empty()));
        // Steps hold other rows, so products round otherwise and a near tie may fall to another token.
        let num_equal = waits.iter().zip(&ahead).filter(|(waits, ahead)| waits == ahead).count();
        assert!(num_equal >= 34, "{arch:?}: {num_equal} of {} sequences are equal", requests.len());
    }
}

#[test]
fn memory_is_accounted_for_by_name() {
    if !has_gpu("memory_is_accounted_for_by_name") {
        return;
    }
    let gpu = on_gpu(&tiny(TinyArch::Llama, 64), &config(DtypeSetting::Bfloat16));
    let report = gpu.model.memory_report();
    for name in ["weights", "kv cache", "workspace", "activations", "free"] {
        let bytes = report.iter().find(|(known, _)| known == name).map(|(_, bytes)| *bytes);
        assert!(bytes.is_some_and(|bytes| bytes > 0), "{name} in {report:?}");
    }
}
