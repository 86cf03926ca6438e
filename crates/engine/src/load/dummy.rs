//! Seeded random weights in the shapes of a configuration: for speed, never for sense.

use half::bf16;

use crate::cpu::packed::Packed;
use crate::cpu::{CacheType, LayerWeights, Weights};
use crate::load::Model;
use crate::load::assemble::{Format, Role, embedding_scale};
use crate::model::config::ModelConfig;

/// Weights in bf16, uniform around 0; norms are 1.
pub(super) fn model(config: ModelConfig, seed: u64) -> Model {
    let mut next = 0u64;
    let mut matrix = |role: Role| {
        next += 1;
        let stream = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (next << 40);
        let [rows, cols] = role.dims(&config);
        let spread = (3.0 / cols as f32).sqrt();
        Packed::from_bf16(rows, cols, |row, col| {
            bf16::from_f32(spread * unit(stream ^ (row * cols + col) as u64)).to_bits()
        })
    };
    let norm = |role: Role| vec![1.0; role.dims(&config)[1]];
    let norms = |a: Role, b: Role| a.is_in(config.architecture).then(|| (norm(a), norm(b)));
    let embedding = matrix(Role::Embedding);
    let head = (config.tied == Some(false)).then(|| matrix(Role::Head));
    let layers = config
        .layers
        .iter()
        .map(|_| LayerWeights {
            attention_norm: norm(Role::AttentionNorm),
            q: matrix(Role::Q),
            k: matrix(Role::K),
            v: matrix(Role::V),
            o: matrix(Role::O),
            qk_norms: norms(Role::QNorm, Role::KNorm),
            post_norms: norms(Role::PostAttentionNorm, Role::PostFfnNorm),
            ffn_norm: norm(Role::FfnNorm),
            gate: matrix(Role::Gate),
            up: matrix(Role::Up),
            down: matrix(Role::Down),
        })
        .collect();
    let final_norm = norm(Role::FinalNorm);
    // In full precision: what these weights say means nothing.
    let embedding_scale = embedding_scale(&config, Format::F32);
    let weights = Weights { embedding, embedding_scale, layers, final_norm, head };
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
