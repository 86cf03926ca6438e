//! The start in named stages: device, kernels, weights, then with the KV cache: products, graphs.
//!
//! Each stage logs its time and what is left of the memory; a failure names its stage, what took
//! the memory and which setting to change first.

use std::time::Instant;

use overnight_kernels::gemm::store::{FORMAT, Identity};
use overnight_kernels::gemm::{self, Gemm, Shape};
use overnight_kernels::memory::ALIGNMENT;
use overnight_kernels::{Arena, Device, DeviceSlice, Error as DeviceError, Modules, Stream};

use crate::Error;
use crate::config::EngineConfig;
use crate::cuda::buffers::{Buffers, rope_table};
use crate::cuda::graphs::{Graphs, buckets};
use crate::cuda::kernels::Kernels;
use crate::cuda::memory::{Purpose, amount, arena_bytes, arena_refused, check_room, out_of_memory};
use crate::cuda::packing::Packing;
use crate::cuda::sampling::Sampling;
use crate::cuda::settings::{dtype, limits, refuse_unbuilt};
use crate::cuda::weights::{self, Loader};
use crate::cuda::{CudaModel, DeviceOptions, KvCache, StepLimits, during};
use crate::load::assemble::Source;
use crate::model::config::ModelConfig;
use crate::model::{DeviceDefaults, ModelShape};

/// Logs the stages.
struct Stages {
    device: Device,
    begun: Instant,
}

impl Stages {
    fn end(&mut self, stage: &'static str, detail: &str) -> Result<(), Error> {
        let (free, total) = self.device.memory_bytes().map_err(during("could not ask the GPU for its memory"))?;
        let seconds = self.begun.elapsed().as_secs_f64();
        tracing::info!(
            stage,
            stage.seconds = seconds,
            gpu.used_bytes = total - free,
            gpu.free_bytes = free,
            "start: {stage} in {seconds:.2} s; {detail}"
        );
        self.begun = Instant::now();
        Ok(())
    }
}

impl CudaModel {
    /// Puts a model on the GPU, all but its KV cache. `source` gives the tensors; without one they
    /// are random. Ids from `vocab_size` on are no tokens.
    pub(crate) fn load(
        device: Device,
        options: &DeviceOptions,
        config: &EngineConfig,
        model: &ModelConfig,
        source: Option<&mut dyn Source>,
        tied: bool,
        vocab_size: u32,
    ) -> Result<Self, Error> {
        let mut stages = Stages { device: device.clone(), begun: Instant::now() };
        device.bind().map_err(during("could not use the GPU"))?;
        let dtype = dtype(&device, config);
        refuse_unbuilt(model, config, dtype, device.arch())?;
        let limits = limits(&device, config, model);
        let stream = Stream::new(&device).map_err(during("could not use the GPU"))?;
        let (free, total) = device.memory_bytes().map_err(during("could not ask the GPU for its memory"))?;
        let others_bytes = total - free;
        let bytes = arena_bytes(free, total, config.gpu_memory_utilization)?;
        let refused = |source| arena_refused(config.gpu_memory_utilization, source);
        let mut arena = Arena::new(&device, bytes).map_err(refused)?;
        let properties = device.properties();
        let (major, minor) = properties.compute_capability;
        let detail = format!("{}, compute capability {major}.{minor}, {}", properties.name, dtype.name());
        stages.end("device", &detail)?;

        let modules = Modules::build(&device, dtype, &options.build).map_err(explain_compile)?;
        let kernels = Kernels::load(&modules, &device, model).map_err(during("could not load the kernels"))?;
        let workspace = arena.take("workspace", gemm::WORKSPACE_BYTES as usize);
        let workspace = workspace
            .map_err(|source| out_of_memory(arena.ledger().regions(), others_bytes, Purpose::Steps, source))?;
        let gemm = Gemm::open(&device, dtype, workspace, &options.build.paths)
            .map_err(during("could not open the library of matrix products"))?;
        let counts = modules.counts();
        let detail = format!("{} compiled, {} from the cache", counts.num_compiled, counts.num_cached);
        stages.end("kernels", &detail)?;

        let weights_bytes = weights::bytes(model, tied);
        check_room(arena.ledger(), others_bytes, Purpose::Weights, weights_bytes)?;
        let loader = Loader::new(&device, &mut arena, &stream, &kernels, model, source, (dtype, config.seed))?;
        let weights = loader.load(tied)?;
        stages.end("weights", &format!("{:.2} GB", weights_bytes as f64 / 1e9))?;

        let positions = config.max_model_len.unwrap_or(model.max_position).min(model.max_position) as usize;
        let head_rows = weights.head_rows;
        let taken = take_work_space(&device, &mut arena, model, &limits, (positions, head_rows));
        let (buffers, packing, sampling) =
            taken.map_err(|source| out_of_memory(arena.ledger().regions(), others_bytes, Purpose::Steps, source))?;
        for (rope, &table) in model.ropes.iter().zip(&buffers.ropes) {
            let values = rope_table(rope, model.head_dim, positions);
            stream.upload_now(table, &values).map_err(during("could not copy the rope tables"))?;
        }
        for tables in [buffers.decode[0].counters, buffers.block_tables] {
            stream.fill_bytes(tables, 0).map_err(during("could not clear the work space"))?;
        }
        let shape = ModelShape {
            architecture: model.architecture.name().to_owned(),
            vocab_size: vocab_size.min(model.vocab_rows as u32),
            max_position: model.max_position,
            eos_token_ids: model.eos_token_ids.clone(),
            kv_bytes_per_token: (2 * model.layers.len() * model.kv_heads * model.head_dim * 2) as u64,
            weights_bytes,
        };
        let block_bytes = shape.kv_bytes_per_token * u64::from(limits.block_size);
        // One block is for padding rows; each layer's two halves are rounded up.
        let rounding = 2 * model.layers.len() as u64 * ALIGNMENT;
        let left = arena.ledger().free_bytes().saturating_sub(block_bytes + rounding);
        let defaults = DeviceDefaults {
            max_num_seqs: Some(limits.num_rows),
            max_num_batched_tokens: Some(limits.num_tokens),
            kv_cache_memory_bytes: Some(left),
        };
        // A first block for a row, beside the one for padding.
        check_room(arena.ledger(), others_bytes, Purpose::KvCache(None), 2 * block_bytes + rounding)?;
        Ok(Self {
            config: model.clone(),
            shape,
            defaults,
            limits,
            enforce_eager: config.enforce_eager,
            others_bytes,
            cache_purpose: Purpose::kv_cache(config),
            graphs_bytes: 0,
            graphs: Graphs::default(),
            weights,
            kernels,
            gemm,
            buffers,
            cache: None,
            packing,
            sampling,
            logits: Vec::new(),
            tiles: Vec::new(),
            stream,
            dtype,
            cache_folder: options.build.cache.0.clone(),
            arena,
            device,
        })
    }

    /// The KV cache, the timed products and the graphs.
    pub(super) fn finish_start(&mut self, num_blocks: u32, block_size: u32) -> Result<(), Error> {
        if self.cache.is_some() || block_size != self.limits.block_size {
            let what = format!("a KV cache of blocks of {block_size}; one of {} was planned", self.limits.block_size);
            return Err(Error::Step(what));
        }
        let mut stages = Stages { device: self.device.clone(), begun: Instant::now() };
        self.device.bind().map_err(during("could not use the GPU"))?;
        let heads = self.config.kv_heads * self.config.head_dim;
        let len = (num_blocks as usize + 1) * block_size as usize * heads;
        let mut layers = Vec::with_capacity(self.config.layers.len());
        let half_bytes = (2 * len as u64).next_multiple_of(ALIGNMENT);
        let cache_bytes = 2 * self.config.layers.len() as u64 * half_bytes;
        check_room(self.arena.ledger(), self.others_bytes, self.cache_purpose, cache_bytes)?;
        for _ in 0..self.config.layers.len() {
            let mut half = || -> Result<_, DeviceError> {
                let half = self.arena.take::<u16>("kv cache", len)?;
                self.stream.fill_bytes(half, 0)?;
                Ok(half)
            };
            let failed = during("could not clear the KV cache");
            layers.push(half().and_then(|k| Ok((k, half()?))).map_err(failed)?);
        }
        self.cache = Some(KvCache { layers, num_blocks });
        self.stream.synchronize().map_err(during("could not clear the KV cache"))?;
        let tokens = u64::from(num_blocks) * u64::from(block_size);
        stages.end("kv cache", &format!("{num_blocks} blocks of {block_size}, {tokens} tokens"))?;

        let num_timed = self.tune().map_err(during("could not time the matrix products"))?;
        stages.end("products", &format!("{num_timed} timed"))?;
        let free_before = self.free_on_card()?;
        if !self.enforce_eager {
            self.record_graphs()?;
            self.stream.synchronize().map_err(during("could not upload the decode graphs"))?;
        }
        // Of another program's memory that went meanwhile this knows nothing.
        self.graphs_bytes = free_before.saturating_sub(self.free_on_card()?);
        stages.end("graphs", &format!("{} recorded, {}", self.graphs.len(), amount(self.graphs_bytes)))?;
        let report = self.memory_report()?;
        let report: Vec<_> = report.iter().map(|(name, bytes)| format!("{name} {}", amount(*bytes))).collect();
        tracing::info!(stage = "ready", "start: ready; memory: {}", report.join(", "));
        Ok(())
    }

    fn free_on_card(&self) -> Result<u64, Error> {
        let (free, _) = self.device.memory_bytes().map_err(during("could not ask the GPU for its memory"))?;
        Ok(free)
    }

    /// Finds algorithms for all products of decode steps and of full steps; those of an earlier
    /// start on this card are taken from disk. Gives how many were timed.
    fn tune(&mut self) -> Result<u32, DeviceError> {
        let properties = self.device.properties().clone();
        let identity = Identity {
            format: FORMAT,
            device: properties.name,
            uuid: properties.uuid,
            version: self.gemm.version(),
            dtype: self.dtype,
        };
        if let Some(folder) = &self.cache_folder {
            self.gemm.set_algorithms(identity.load(folder));
        }
        let mut sizes = buckets(self.limits.num_rows, self.limits.logits_rows);
        let large = [2048, 4096, 8192, 16_384, 32_768];
        sizes.extend(large.into_iter().filter(|&size| size <= self.limits.num_tokens));
        // Zeros would be faster than what steps compute with.
        for operand in [self.buffers.normed, self.buffers.attention, self.buffers.gated, self.buffers.last] {
            self.kernels.fill.fill_normal(&self.stream, operand, operand.len() as u64, 1, 1.0)?;
        }
        let mut num_timed = 0;
        for m in sizes {
            for (shape, operands) in self.products(m) {
                if let Some((y, x, weights)) = operands {
                    let timing = self.gemm.tune(&self.stream, y, x, &weights, shape)?;
                    num_timed += u32::from(timing.is_some());
                }
            }
        }
        if let (Some(folder), true) = (&self.cache_folder, num_timed > 0) {
            let saved = identity.save(folder, self.gemm.algorithms().collect());
            if let Err(error) = saved {
                tracing::warn!(path = %folder.display(), %error, "timed algorithms could not be kept");
            }
        }
        // Timing has added to the residual; a step overwrites it before it reads it.
        Ok(num_timed)
    }

    /// Makes the layouts of all products of a decode step, so that recording it allocates nothing.
    pub(super) fn prepare_products(&mut self, rows: u32) -> Result<(), DeviceError> {
        for (shape, _) in self.products(rows) {
            self.gemm.prepare(shape)?;
        }
        Ok(())
    }

    /// The products of a step of `m` tokens, with operands that fit its bucket: y, x and the
    /// matrices of all layers.
    fn products(&self, m: u32) -> Vec<(Shape, Option<Operands>)> {
        let config = &self.config;
        let [hidden, ffn, heads, kv_heads, dim] =
            [config.hidden, config.ffn, config.heads, config.kv_heads, config.head_dim].map(|size| size as u32);
        let (b, layers) = (&self.buffers, &self.weights.layers);
        let (out, accumulates) = self.block_output();
        let each = |of: fn(&weights::LayerWeights) -> DeviceSlice<u16>| layers.iter().map(of).collect::<Vec<_>>();
        let shape = |n, k, accumulates| Shape { m, n, k, accumulates };
        let mut products = vec![
            (shape((heads + 2 * kv_heads) * dim, hidden, false), (b.qkv, b.normed, each(|layer| layer.qkv))),
            (shape(hidden, heads * dim, accumulates), (out, b.attention, each(|layer| layer.o))),
            (shape(2 * ffn, hidden, false), (b.gate_up, b.normed, each(|layer| layer.gate_up))),
            (shape(hidden, ffn, accumulates), (out, b.gated, each(|layer| layer.down))),
        ];
        if m <= self.limits.logits_rows {
            products.push((
                shape(self.weights.head_rows as u32, hidden, false),
                (b.logits, b.last, vec![self.weights.head]),
            ));
        }
        let fits = |shape: &Shape, (y, x, _): &Operands| {
            let rows = gemm::bucket(shape.m) as usize;
            y.len() >= rows * shape.n as usize && x.len() >= rows * shape.k as usize
        };
        products.into_iter().map(|(shape, operands)| (shape, Some(operands).filter(|o| fits(&shape, o)))).collect()
    }
}

type Operands = (DeviceSlice<u16>, DeviceSlice<u16>, Vec<DeviceSlice<u16>>);

/// Everything that steps write besides the KV cache.
fn take_work_space(
    device: &Device,
    arena: &mut Arena,
    model: &ModelConfig,
    limits: &StepLimits,
    (positions, head_rows): (usize, usize),
) -> Result<(Buffers, Packing, Sampling), DeviceError> {
    let buffers = Buffers::new(arena, model, limits, positions, head_rows)?;
    let packing = Packing::new(device, arena, limits)?;
    Ok((buffers, packing, Sampling::new(device, arena, limits, head_rows as u32)?))
}

/// A compiler's log belongs to the log of the engine.
fn explain_compile(source: DeviceError) -> Error {
    if let DeviceError::Compile { log, .. } = &source {
        tracing::error!("the compiler says:\n{log}");
    }
    during("could not build the kernels")(source)
}
