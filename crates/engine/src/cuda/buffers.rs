//! Activations and work space, set aside once for the largest step.

use overnight_kernels::attention_decode::{Workspace, workspace_lens};
use overnight_kernels::paged::Heads;
use overnight_kernels::{Arena, DeviceSlice};

use crate::cuda::StepLimits;
use crate::model::config::ModelConfig;

/// Chunks of all decode rows that one launch takes; a step of more runs in several.
pub(super) const DECODE_CHUNKS_MAX: u32 = 8192;

/// Everything a step writes besides the KV cache.
#[derive(Debug)]
pub(super) struct Buffers {
    /// `[num_tokens, hidden]`, what the layers add to.
    pub(super) residual: DeviceSlice<u16>,
    /// `[num_tokens, hidden]`.
    pub(super) normed: DeviceSlice<u16>,
    /// `[num_tokens, hidden]`: a block's output where it is normed before it joins.
    pub(super) block: DeviceSlice<u16>,
    /// `[num_tokens, (heads + 2 * kv_heads) * head_dim]`.
    pub(super) qkv: DeviceSlice<u16>,
    /// `[num_tokens, heads * head_dim]`.
    pub(super) attention: DeviceSlice<u16>,
    /// `[num_tokens, 2 * ffn]`.
    pub(super) gate_up: DeviceSlice<u16>,
    /// `[num_tokens, ffn]`.
    pub(super) gated: DeviceSlice<u16>,
    /// `[logits_rows, hidden]`.
    pub(super) last: DeviceSlice<u16>,
    /// `[logits_rows, head_rows]`.
    pub(super) logits: DeviceSlice<u16>,
    /// `[num_rows, blocks_per_row]`.
    pub(super) block_tables: DeviceSlice<u32>,
    /// Per variant of rope `[max_position, head_dim]`.
    pub(super) ropes: Vec<DeviceSlice<f32>>,
    /// Of decode attention, with the work list of layers without a window and of those with one.
    pub(super) decode: [Workspace; 2],
}

impl Buffers {
    pub(super) fn new(
        arena: &mut Arena,
        config: &ModelConfig,
        limits: &StepLimits,
        positions: usize,
        head_rows: usize,
    ) -> Result<Self, overnight_kernels::Error> {
        let (tokens, rows, last) = (limits.num_tokens as usize, limits.num_rows as usize, limits.logits_rows as usize);
        let (hidden, dim) = (config.hidden, config.head_dim);
        let mut take = |len: usize| arena.take::<u16>("activations", len);
        let residual = take(tokens * hidden)?;
        let normed = take(tokens * hidden)?;
        let block = take(tokens * hidden)?;
        let qkv = take(tokens * (config.heads + 2 * config.kv_heads) * dim)?;
        let attention = take(tokens * config.heads * dim)?;
        let gate_up = take(tokens * 2 * config.ffn)?;
        let gated = take(tokens * config.ffn)?;
        let last_hidden = take(last * hidden)?;
        let logits = arena.take("logits", last * head_rows)?;
        let block_tables = arena.take("step arrays", rows * limits.blocks_per_row as usize)?;
        let ropes =
            config.ropes.iter().map(|_| arena.take("rope tables", positions * dim)).collect::<Result<_, _>>()?;
        let lens = workspace_lens(heads(config), limits.num_rows, DECODE_CHUNKS_MAX);
        let counters = arena.take("attention work", lens.counters)?;
        let partial_out = arena.take("attention work", lens.partial_out)?;
        let partial_lse = arena.take("attention work", lens.partial_lse)?;
        let mut workspace = || {
            let (work, work_count) = (arena.take("attention work", lens.work)?, arena.take("attention work", 1)?);
            Ok::<_, overnight_kernels::Error>(Workspace { work, work_count, partial_out, partial_lse, counters })
        };
        let decode = [workspace()?, workspace()?];
        Ok(Self {
            residual,
            normed,
            block,
            qkv,
            attention,
            gate_up,
            gated,
            last: last_hidden,
            logits,
            block_tables,
            ropes,
            decode,
        })
    }
}

/// The attention heads of a model.
pub(super) fn heads(config: &ModelConfig) -> Heads {
    let [num_heads, num_kv_heads, head_dim] =
        [config.heads, config.kv_heads, config.head_dim].map(|size| u32::try_from(size).expect("a checked size"));
    Heads { num_heads, num_kv_heads, head_dim }
}

/// The table of a rope: per position, `dim / 2` cosines, then as many sines, the attention factor
/// multiplied in.
pub(super) fn rope_table(rope: &crate::model::rope::Rope, dim: usize, positions: usize) -> Vec<f32> {
    use rayon::prelude::*;
    let (frequencies, factor) = (rope.frequencies(dim), rope.attention_factor());
    let mut table = vec![0.0; positions * dim];
    table.par_chunks_mut(dim).enumerate().for_each(|(position, row)| {
        let (cos, sin) = row.split_at_mut(dim / 2);
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
            let (s, c) = (position as f32 * frequency).sin_cos();
            (*cos, *sin) = (c * factor, s * factor);
        }
    });
    table
}
