//! Seeded random weights in the shapes of a configuration: for speed, never for sense.

use half::bf16;

use crate::cpu::packed::Packed;
use crate::cpu::{CacheType, LayerWeights, Weights};
use crate::load::Model;
use crate::model::config::{Architecture, ModelConfig};

/// Weights in bf16, uniform around 0; norms are 1.
pub(super) fn model(config: ModelConfig, seed: u64) -> Model {
    let (hidden, ffn, dim) = (config.hidden, config.ffn, config.head_dim);
    let (q, kv) = (config.heads * dim, config.kv_heads * dim);
    let mut next = 0u64;
    let mut matrix = |rows: usize, cols: usize| {
        next += 1;
        let stream = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (next << 40);
        let spread = (3.0 / cols as f32).sqrt();
        Packed::from_bf16(rows, cols, |row, col| {
            bf16::from_f32(spread * unit(stream ^ (row * cols + col) as u64)).to_bits()
        })
    };
    let gemma = config.architecture == Architecture::Gemma3;
    let embedding = matrix(config.vocab_rows, hidden);
    let head = (config.tied == Some(false)).then(|| matrix(config.vocab_rows, hidden));
    let layers = config
        .layers
        .iter()
        .map(|_| LayerWeights {
            attention_norm: vec![1.0; hidden],
            q: matrix(q, hidden),
            k: matrix(kv, hidden),
            v: matrix(kv, hidden),
            o: matrix(hidden, q),
            qk_norms: config.architecture.qk_norm().then(|| (vec![1.0; dim], vec![1.0; dim])),
            post_norms: gemma.then(|| (vec![1.0; hidden], vec![1.0; hidden])),
            ffn_norm: vec![1.0; hidden],
            gate: matrix(ffn, hidden),
            up: matrix(ffn, hidden),
            down: matrix(hidden, ffn),
        })
        .collect();
    let embedding_scale = if gemma { (hidden as f32).sqrt() } else { 1.0 };
    let weights = Weights { embedding, embedding_scale, layers, final_norm: vec![1.0; hidden], head };
    Model { config, weights, cache_type: CacheType::F16 }
}

/// The n-th of a stream of numbers within -1…1 (the finalizer of SplitMix64, Steele, Lea and
/// Flood, Fast Splittable Pseudorandom Number Generators, 2014).
fn unit(n: u64) -> f32 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    ((z >> 41) as i32 - (1 << 22)) as f32 / (1 << 22) as f32
}
