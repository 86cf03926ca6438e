//! Chooses the next token of each row, and scores tokens.
//!
//! Order: penalties and bias, masked ids, temperature, top-k, top-p, min-p. The random
//! number of a choice is a pure function of the request's seed and its own output
//! position ([`philox::uniform`]), so that a text never depends on its neighbours.
//! Among equal logits the lower id is the likelier one.
//! Never sorts a vocabulary: chunk maxima bound the candidates, selection does the rest.
//! Knows nothing of sequences or steps; rows are independent and run in parallel.

mod filter;
mod penalties;
pub mod philox;
mod reduce;
#[cfg(test)]
mod tests;

use rayon::prelude::*;

use crate::request::{SamplingParams, TokenLogprob, TokenLogprobs};
use filter::Candidates;
pub use penalties::Penalties;

/// Rows times ids from which threads pay.
const PARALLEL_MIN: usize = 1 << 19;

/// A row to choose from.
#[derive(Debug, Clone, Copy)]
pub struct SampleRow<'a> {
    /// `[vocab_size]`, real ids only.
    pub logits: &'a [f32],
    /// What to do with the row.
    pub task: Task<'a>,
    /// Likeliest tokens to report beside the chosen one; `None`: no logprobs at all.
    pub num_logprobs: Option<u32>,
}

/// What to do with a row.
#[derive(Debug, Clone, Copy)]
pub enum Task<'a> {
    /// Choose a token.
    Choose {
        /// How.
        sampling: &'a SamplingParams,
        /// What was used so far, when a penalty is on.
        penalties: Option<&'a Penalties>,
        /// Ids that may not be chosen.
        masked: &'a [u32],
        /// Output position, from 0.
        position: u32,
    },
    /// Only score this token.
    Score(u32),
}

/// The token of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Chosen, or given to score.
    pub token: u32,
    /// When asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// A row of logits has a NaN, or no finite largest value: the model broke down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the model's logits are not finite numbers")]
pub struct NotFinite;

/// The seed of choice `index` of a request with this seed: choices differ and repeat,
/// and the first one is what the request gives with a single choice.
pub fn choice_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    // SplitMix64 (Steele, Lea & Flood, Fast Splittable Pseudorandom Number Generators, 2014, figure 15).
    let mixed = seed.wrapping_add(u64::from(index).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// Keeps its buffers from step to step.
#[derive(Debug, Default)]
pub struct Sampler {
    scratches: Vec<Scratch>,
}

#[derive(Debug, Default)]
struct Scratch {
    adjusted: Vec<f32>,
    maxima: Vec<f32>,
    sums: Vec<f64>,
    candidates: Candidates,
}

impl Sampler {
    /// One result per row.
    pub fn sample(&mut self, rows: &[SampleRow<'_>]) -> Vec<Result<Sampled, NotFinite>> {
        if self.scratches.len() < rows.len() {
            self.scratches.resize_with(rows.len(), Scratch::default);
        }
        let num_logits: usize = rows.iter().map(|row| row.logits.len()).sum();
        if rows.len() > 1 && num_logits >= PARALLEL_MIN {
            let rows = rows.par_iter().zip(self.scratches.par_iter_mut());
            rows.map(|(row, scratch)| scratch.run(row)).collect()
        } else {
            rows.iter().zip(&mut self.scratches).map(|(row, scratch)| scratch.run(row)).collect()
        }
    }
}

impl Scratch {
    fn run(&mut self, row: &SampleRow<'_>) -> Result<Sampled, NotFinite> {
        let raw_max = reduce::chunk_maxima(row.logits, &mut self.maxima).ok_or(NotFinite)?;
        let token = match row.task {
            Task::Score(token) => token,
            Task::Choose { sampling, penalties, masked, position } => {
                let bias = sampling.logit_bias.as_slice();
                if penalties.is_none() && masked.is_empty() && bias.is_empty() {
                    self.choose(row.logits, raw_max, sampling, position)
                } else {
                    let mut adjusted = std::mem::take(&mut self.adjusted);
                    adjusted.clear();
                    adjusted.extend_from_slice(row.logits);
                    penalties::adjust(&mut adjusted, sampling, penalties, masked);
                    let max = reduce::chunk_maxima(&adjusted, &mut self.maxima);
                    let token = max.map(|max| self.choose(&adjusted, max, sampling, position));
                    self.adjusted = adjusted;
                    if row.num_logprobs.is_some() {
                        reduce::chunk_maxima(row.logits, &mut self.maxima);
                    }
                    token.ok_or(NotFinite)?
                }
            }
        };
        let logprobs = row.num_logprobs.map(|num| self.score(row.logits, raw_max, token, num));
        Ok(Sampled { token, logprobs })
    }

    /// Chooses among `logits`, whose chunk maxima are in `self.maxima`.
    fn choose(&mut self, logits: &[f32], max: f32, sampling: &SamplingParams, position: u32) -> u32 {
        if sampling.is_greedy() {
            return reduce::argmax(logits, &self.maxima, max);
        }
        let scale = 1.0 / sampling.temperature;
        let random = philox::uniform(sampling.seed, position);
        let num_ids = logits.len();
        let top_k = sampling.top_k.map(|k| (k as usize).min(num_ids)).filter(|&k| k < num_ids);
        if top_k.is_none() && sampling.top_p >= 1.0 && sampling.min_p <= 0.0 {
            let sum = reduce::sum_weights(logits, max, scale, &mut self.sums);
            return filter::pick_from_all(logits, max, scale, &self.sums, random * sum);
        }
        let filter = filter::Filter { top_k, top_p: sampling.top_p, min_p: sampling.min_p, max, scale };
        self.candidates.pick(logits, &self.maxima, &mut self.sums, &filter, random)
    }

    /// Log probabilities by the raw logits, whose chunk maxima are in `self.maxima`.
    fn score(&mut self, logits: &[f32], max: f32, token: u32, num_top: u32) -> TokenLogprobs {
        let sum = reduce::sum_weights(logits, max, 1.0, &mut self.sums);
        let log_sum = f64::from(max) + sum.ln();
        let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
        let mut top = Vec::with_capacity(num_top as usize);
        for (index, (token, logit)) in self.candidates.likeliest(logits, &self.maxima, num_top).enumerate() {
            let rank = u32::try_from(index + 1).expect("at most the vocabulary");
            top.push(TokenLogprob { token, logprob: logprob(logit), rank });
        }
        let chosen = top.iter().find(|entry| entry.token == token).copied().unwrap_or_else(|| {
            let logit = logits[token as usize];
            TokenLogprob { token, logprob: logprob(logit), rank: reduce::num_before(logits, logit, token) + 1 }
        });
        TokenLogprobs { chosen, top }
    }
}
