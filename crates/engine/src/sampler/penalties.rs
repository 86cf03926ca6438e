//! Penalties for tokens already used, bias, and masked ids.

use std::collections::HashMap;

use crate::request::SamplingParams;

/// How often a sequence used each token; kept only when a penalty is on.
#[derive(Debug, Clone, Default)]
pub struct Penalties {
    /// Output occurrences of every token of prompt and output.
    uses: HashMap<u32, u32>,
}

impl Penalties {
    /// The state at the start, or `None` when no penalty is on.
    pub fn new(sampling: &SamplingParams, prompt: &[u32]) -> Option<Self> {
        let is_on =
            sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 || sampling.repetition_penalty != 1.0;
        is_on.then(|| {
            let seen = if sampling.repetition_penalty == 1.0 { &[] } else { prompt };
            Self { uses: seen.iter().map(|&token| (token, 0)).collect() }
        })
    }

    /// Tokens of prompt and output that count, each with its output occurrences; in no order.
    pub(crate) fn uses(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.uses.iter().map(|(&token, &num_output)| (token, num_output))
    }

    /// Counts an output token.
    pub fn count(&mut self, token: u32) {
        *self.uses.entry(token).or_insert(0) += 1;
    }
}

/// Applies penalties, then bias, then the mask to a row of logits.
///
/// Repetition: Keskar et al., CTRL, 2019, section 4.1, with negative logits multiplied.
/// Presence and frequency: OpenAI API reference, `presence_penalty`, `frequency_penalty`.
pub(super) fn adjust(logits: &mut [f32], sampling: &SamplingParams, penalties: Option<&Penalties>, masked: &[u32]) {
    for (&token, &num_output) in penalties.iter().flat_map(|penalties| &penalties.uses) {
        let Some(logit) = logits.get_mut(token as usize) else { continue };
        let repetition = sampling.repetition_penalty;
        *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        if num_output > 0 {
            *logit -= sampling.frequency_penalty * num_output as f32 + sampling.presence_penalty;
        }
    }
    for &(token, bias) in &sampling.logit_bias {
        logits[token as usize] += bias;
    }
    for &token in masked {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}
