//! The definition of the choice: a full sort, and f64.

use super::{Adjustment, FLAG_SCORE, SampleParams, USE_MASKED, USE_PENALIZED};
use crate::fill::reference::philox4x32;

/// A number in [0, 1) with 53 random bits for a seed and an output position.
pub fn uniform(seed: u64, position: u32) -> f64 {
    let words = philox4x32([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    ((u64::from(words[0]) << 32 | u64::from(words[1])) >> 11) as f64 / (1u64 << 53) as f64
}

/// The logits after penalties, bias and mask.
pub fn adjusted(logits: &[f32], params: &SampleParams, adjustments: &[Adjustment]) -> Vec<f32> {
    let mut logits = logits.to_vec();
    for adjustment in adjustments {
        let Some(logit) = logits.get_mut(adjustment.id as usize) else { continue };
        if adjustment.use_ & USE_PENALIZED != 0 {
            let repetition = params.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            let num_output = adjustment.use_ & (USE_PENALIZED - 1);
            if num_output > 0 {
                *logit -= params.frequency_penalty * num_output as f32 + params.presence_penalty;
            }
        }
        *logit += adjustment.bias;
        if adjustment.use_ & USE_MASKED != 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
    logits
}

/// Likelier first, the lower id of equal ones first.
pub fn ranking(logits: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..).take(logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    ids
}

/// Weight of each id in order of ids, 0 for what the filters drop; the largest is 1. Of adjusted logits.
pub fn weights(logits: &[f32], params: &SampleParams) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| ((f64::from(logit) - f64::from(max)) / f64::from(params.temperature)).exp();
    let mut kept = ranking(logits);
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let of = |id: &u32| weight(logits[*id as usize]);
        let target = f64::from(params.top_p) * kept.iter().map(of).sum::<f64>();
        let mut reached = 0.0;
        let num_before = kept.iter().take_while(|id| {
            reached += of(id);
            reached < target
        });
        let num = num_before.count() + 1;
        kept.truncate(num);
    }
    let mut weights = vec![0.0; logits.len()];
    for id in kept {
        let weight = weight(logits[id as usize]);
        weights[id as usize] = if weight >= f64::from(params.min_p) { weight } else { 0.0 };
    }
    weights
}

/// The token of a row, or `None` when its logits are not finite numbers.
pub fn sample(logits: &[f32], params: &SampleParams, adjustments: &[Adjustment]) -> Option<u32> {
    is_sound(logits).then_some(())?;
    if params.flags & FLAG_SCORE != 0 {
        return Some(params.score_token);
    }
    let adjusted = adjusted(logits, params, adjustments);
    is_sound(&adjusted).then_some(())?;
    if params.temperature < 1e-5 {
        return ranking(&adjusted).first().copied();
    }
    let weights = weights(&adjusted, params);
    let target = uniform(params.seed, params.position) * weights.iter().sum::<f64>();
    let mut running = 0.0;
    let passed = weights.iter().position(|weight| {
        running += weight;
        target < running
    });
    let last = weights.iter().rposition(|&weight| weight > 0.0);
    passed.or(last).map(|id| id as u32)
}

fn is_sound(logits: &[f32]) -> bool {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max.is_finite() && !logits.iter().any(|logit| logit.is_nan())
}

/// Log probabilities by raw logits at temperature 1.
pub fn logprobs(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(max)).exp()).sum();
    logits.iter().map(|&logit| (f64::from(logit) - f64::from(max) - sum.ln()) as f32).collect()
}
