//! The CPU back end: dense decoders over a paged KV cache, with weights quantized or not.
//!
//! Invariant: the logits of a token depend on its sequence alone, bit for bit: not on the rows
//! beside it, how its prompt was cut into chunks, the size of KV blocks, the number of threads
//! or the instruction set.
//! Knows nothing of files (see `load`), requests or sampling.
//! `forward` is the step, top down; `simd` the inner loops; `packed` the weights' layout.

mod buffers;
mod cache;
mod forward;
mod matmul;
pub(crate) mod packed;
mod pool;
mod simd;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) use cache::CacheType;

use crate::Error;
use crate::cpu::buffers::Buffers;
use crate::cpu::cache::Cache;
use crate::cpu::packed::{Data, Packed};
use crate::cpu::pool::Pool;
use crate::cpu::simd::Isa;
use crate::model::config::ModelConfig;
use crate::model::{Forward, ModelShape, StepInput};

/// The weights of a model, packed.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) embedding: Packed,
    /// What embeddings are multiplied with.
    pub(crate) embedding_scale: f32,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Vec<f32>,
    /// `None`: the embedding is the head.
    pub(crate) head: Option<Packed>,
}

/// One layer. Norm weights are the factors themselves (Gemma's files store them less one).
#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) q: Packed,
    pub(crate) k: Packed,
    pub(crate) v: Packed,
    pub(crate) o: Packed,
    /// Norms of each head of q and k.
    pub(crate) qk_norms: Option<(Vec<f32>, Vec<f32>)>,
    /// Norms of what attention and feed-forward give, before it joins the residual.
    pub(crate) post_norms: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: Packed,
    pub(crate) up: Packed,
    pub(crate) down: Packed,
}

impl LayerWeights {
    fn matrices(&self) -> [&Packed; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }
}

/// A model on the CPU.
#[derive(Debug)]
pub(crate) struct CpuModel {
    config: ModelConfig,
    shape: ModelShape,
    weights: Weights,
    cache_type: CacheType,
    cache: Option<Cache>,
    pool: Pool,
    isa: Isa,
    /// Whether some product reads quantized activations.
    quantized: bool,
    buffers: Buffers,
    /// Scratch of each thread.
    scratch: Vec<std::sync::Mutex<forward::Scratch>>,
    logits: Vec<f32>,
    /// First layer whose input was not finite in the last step; `u32::MAX`: none.
    bad_layer: AtomicU32,
}

impl CpuModel {
    /// Takes packed weights. `vocab_size` is the number of ids that are real tokens.
    pub(crate) fn new(
        config: ModelConfig,
        weights: Weights,
        cache_type: CacheType,
        vocab_size: u32,
        threads: usize,
    ) -> Result<Self, Error> {
        let matrices = || weights.layers.iter().flat_map(LayerWeights::matrices);
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let all = || matrices().chain([head]);
        let quantized = all().any(|m| matches!(m.data, Data::Quant(_)));
        let embedding = if weights.head.is_some() { weights.embedding.bytes() } else { 0 };
        let shape = ModelShape {
            architecture: config.architecture.name().to_owned(),
            vocab_size: vocab_size.min(config.vocab_rows as u32),
            max_position: config.max_position,
            eos_token_ids: config.eos_token_ids.clone(),
            kv_bytes_per_token: (2 * config.layers.len() * config.kv_heads * config.head_dim * cache_type.bytes())
                as u64,
            weights_bytes: all().map(Packed::bytes).sum::<u64>() + embedding,
        };
        let pool =
            Pool::new(threads).map_err(|source| Error::Stopped(format!("no thread for the CPU back end: {source}")))?;
        Ok(Self {
            config,
            shape,
            weights,
            cache_type,
            cache: None,
            pool,
            isa: Isa::detect(),
            quantized,
            buffers: Buffers::default(),
            scratch: forward::scratch(threads.max(1)),
            logits: Vec::new(),
            bad_layer: AtomicU32::new(u32::MAX),
        })
    }

    /// Computes with the plain loops from here on, for tests that compare the paths.
    #[cfg(test)]
    pub(crate) fn use_isa(&mut self, isa: Isa) {
        self.isa = isa;
    }
}

impl Forward for CpuModel {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn allocate_kv_cache(&mut self, num_blocks: u32, block_size: u32) -> Result<(), Error> {
        let row = self.config.kv_heads * self.config.head_dim;
        self.cache = None;
        self.cache =
            Some(Cache::new(self.cache_type, self.config.layers.len(), row, num_blocks as usize, block_size as usize)?);
        Ok(())
    }

    fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error> {
        self.step(step)?;
        Ok(&self.logits[..step.logits_tokens.len() * self.shape.vocab_size as usize])
    }

    fn first_bad_layer(&self) -> Option<u32> {
        Some(self.bad_layer.load(Ordering::Relaxed)).filter(|&layer| layer != u32::MAX)
    }
}
