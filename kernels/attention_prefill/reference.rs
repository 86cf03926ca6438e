//! The definition of attention over a paged cache, in f32, for rows of any length.

use crate::paged::Heads;

/// What attention reads.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[num_tokens, qkv_width]`; only q is read.
    pub qkv: &'a [f32],
    /// `[num_blocks, num_kv_heads, block_size, head_dim]`.
    pub k_cache: &'a [f32],
    /// The same.
    pub v_cache: &'a [f32],
    /// `[num_rows, block_table_stride]`.
    pub block_tables: &'a [u32],
    /// Entries of a row.
    pub block_table_stride: usize,
    /// `[num_rows + 1]`: where each row's queries begin.
    pub cu_seqlens: &'a [u32],
    /// `[num_rows]`: tokens in the cache, the queries included.
    pub context_lens: &'a [u32],
    /// Heads of the layer.
    pub heads: Heads,
    /// Token slots of a block.
    pub block_size: usize,
    /// Of the scores.
    pub scale: f32,
    /// Keys that a query sees, itself included; 0: all.
    pub window: u32,
}

/// Writes `out [num_tokens, out_width]`.
pub fn attention(out: &mut [f32], inputs: &Inputs<'_>) {
    let heads = inputs.heads;
    for (row, &context_len) in inputs.context_lens.iter().enumerate() {
        let (first, end) = (inputs.cu_seqlens[row] as usize, inputs.cu_seqlens[row + 1] as usize);
        for token in first..end {
            let position = context_len as usize - (end - token);
            for head in 0..heads.num_heads as usize {
                attend(out, inputs, row, token, position, head);
            }
        }
    }
}

fn attend(out: &mut [f32], inputs: &Inputs<'_>, row: usize, token: usize, position: usize, head: usize) {
    let heads = inputs.heads;
    let dim = heads.head_dim as usize;
    let query = &inputs.qkv[token * heads.qkv_width() + head * dim..][..dim];
    let kv_head = head / heads.group() as usize;
    let begin = if inputs.window == 0 { 0 } else { (position + 1).saturating_sub(inputs.window as usize) };
    let place = |key: usize| {
        let block = inputs.block_tables[row * inputs.block_table_stride + key / inputs.block_size] as usize;
        ((block * heads.num_kv_heads as usize + kv_head) * inputs.block_size + key % inputs.block_size) * dim
    };
    let scores: Vec<f32> = (begin..=position)
        .map(|key| {
            let k = &inputs.k_cache[place(key)..][..dim];
            inputs.scale * query.iter().zip(k).map(|(q, k)| q * k).sum::<f32>()
        })
        .collect();
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f32 = weights.iter().sum();
    let out = &mut out[token * heads.out_width() + head * dim..][..dim];
    out.fill(0.0);
    for (key, weight) in (begin..).zip(&weights) {
        let v = &inputs.v_cache[place(key)..][..dim];
        for (out, v) in out.iter_mut().zip(v) {
            *out += weight / sum * v;
        }
    }
}
