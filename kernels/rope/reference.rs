//! The definition of the operation, in f32.

use crate::PAD_SLOT;
use crate::paged::Heads;

/// Inputs beside the tensors that are written.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[num_tokens]`.
    pub slots: &'a [i32],
    /// `[num_tokens]`.
    pub positions: &'a [u32],
    /// `[head_dim]` each, or none.
    pub norm_weights: Option<(&'a [f32], &'a [f32])>,
    /// `[max_position, head_dim]`.
    pub rope: &'a [f32],
    /// Heads of the layer.
    pub heads: Heads,
    /// Token slots of a block.
    pub block_size: usize,
    /// Of the norm.
    pub eps: f32,
    /// Added to norm weights.
    pub weight_offset: f32,
}

/// Norms and rotates q in `qkv`, writes k and v to the caches.
pub fn qk_norm_rope_kv_write(qkv: &mut [f32], k_cache: &mut [f32], v_cache: &mut [f32], inputs: &Inputs<'_>) {
    let heads = inputs.heads;
    let dim = heads.head_dim as usize;
    let (num_heads, num_kv_heads) = (heads.num_heads as usize, heads.num_kv_heads as usize);
    for (token, row) in qkv.chunks_exact_mut(heads.qkv_width()).enumerate() {
        let angles = &inputs.rope[inputs.positions[token] as usize * dim..][..dim];
        let slot = inputs.slots[token];
        for (head, x) in row.chunks_exact_mut(dim).enumerate() {
            if head < num_heads {
                norm_and_rotate(x, inputs.norm_weights.map(|(q, _)| q), angles, inputs);
                continue;
            }
            if slot == PAD_SLOT {
                continue;
            }
            let (block, offset) = (slot as usize / inputs.block_size, slot as usize % inputs.block_size);
            let kv_head = (head - num_heads) % num_kv_heads;
            let place = ((block * num_kv_heads + kv_head) * inputs.block_size + offset) * dim;
            let mut written = x.to_vec();
            let cache = if head < num_heads + num_kv_heads {
                norm_and_rotate(&mut written, inputs.norm_weights.map(|(_, k)| k), angles, inputs);
                &mut *k_cache
            } else {
                &mut *v_cache
            };
            cache[place..place + dim].copy_from_slice(&written);
        }
    }
}

fn norm_and_rotate(x: &mut [f32], weight: Option<&[f32]>, angles: &[f32], inputs: &Inputs<'_>) {
    let dim = x.len();
    if let Some(weight) = weight {
        let mean = x.iter().map(|x| x * x).sum::<f32>() / dim as f32;
        let factor = 1.0 / (mean + inputs.eps).sqrt();
        for (x, weight) in x.iter_mut().zip(weight) {
            *x *= factor * (weight + inputs.weight_offset);
        }
    }
    let (cos, sin) = angles.split_at(dim / 2);
    let (low, high) = x.split_at_mut(dim / 2);
    for i in 0..dim / 2 {
        (low[i], high[i]) = (low[i] * cos[i] - high[i] * sin[i], high[i] * cos[i] + low[i] * sin[i]);
    }
}
