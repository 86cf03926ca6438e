//! Top-k, top-p, min-p and the pick itself, without sorting the vocabulary.
//!
//! Candidates are keys whose order is (likelier first, lower id first), gathered in
//! order of ids above a bound that the kept ones cannot be below. A filter only moves
//! the last key kept; the pick then walks the candidates in order of ids.

use super::reduce::{self, CHUNK, weight};

/// What is kept of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filter {
    /// Below the number of ids.
    pub(super) top_k: Option<usize>,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    /// Largest logit.
    pub(super) max: f32,
    /// 1 / temperature.
    pub(super) scale: f32,
}

/// Orders like (logit, then lower id): greater is likelier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key(u64);

impl Key {
    fn new(logit: f32, id: usize) -> Self {
        let bits = logit.to_bits();
        // Flips negative numbers, so that unsigned order is the order of the numbers.
        let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        Self(u64::from(ordered) << 32 | u64::from(!(id as u32)))
    }

    fn id(self) -> u32 {
        !(self.0 as u32)
    }

    fn logit(self) -> f32 {
        let ordered = (self.0 >> 32) as u32;
        f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
    }
}

/// Buffers of candidates.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// In order of ids.
    keys: Vec<Key>,
    work: Vec<Key>,
    maxima: Vec<f32>,
}

impl Candidates {
    /// Picks an id by `random` in [0, 1) among those that `filter` keeps.
    pub(super) fn pick(
        &mut self,
        logits: &[f32],
        maxima: &[f32],
        sums: &mut Vec<f64>,
        filter: &Filter,
        random: f64,
    ) -> u32 {
        let Filter { top_k, top_p, min_p, max, scale } = *filter;
        let weigh = |key: &Key| f64::from(weight(key.logit(), max, scale));
        let mut total = None;
        let bound = if let Some(k) = top_k {
            self.bound_of_likeliest(maxima, k)
        } else if top_p < 1.0 {
            let sum = reduce::sum_weights(logits, max, scale, sums);
            total = Some(sum);
            nucleus_bound(logits, maxima, f64::from(top_p) * sum, filter)
        } else {
            max + min_p.ln() / scale
        };
        // The bound is rounded; one step below it is certainly low enough.
        self.gather(logits, maxima, bound - bound.abs() * 1e-6 - 1e-5 / scale);
        let mut last = Key(0);
        self.work.clear();
        self.work.extend_from_slice(&self.keys);
        if let Some(k) = top_k.filter(|&k| k < self.work.len()) {
            last = select(&mut self.work, k);
            self.work.truncate(k);
        }
        if top_p < 1.0 {
            let total = total.unwrap_or_else(|| self.work.iter().map(weigh).sum());
            last = last.max(last_of_nucleus(&mut self.work, f64::from(top_p) * total, weigh));
        }
        let is_kept = |key: &Key| *key >= last && weight(key.logit(), max, scale) >= min_p;
        let sum: f64 = self.keys.iter().filter(|key| is_kept(key)).map(weigh).sum();
        let mut left = random * sum;
        let mut picked = None;
        for key in self.keys.iter().filter(|key| is_kept(key)) {
            let weight = weigh(key);
            if weight > 0.0 {
                picked = Some(key.id());
            }
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        picked.expect("the likeliest id is kept by every filter")
    }

    /// The `num` likeliest ids with their logits, likeliest first.
    pub(super) fn likeliest(
        &mut self,
        logits: &[f32],
        maxima: &[f32],
        num: u32,
    ) -> impl Iterator<Item = (u32, f32)> + '_ {
        let num = (num as usize).min(logits.len());
        if num == 0 {
            self.keys.clear();
        } else {
            let bound = self.bound_of_likeliest(maxima, num);
            self.gather(logits, maxima, bound);
            if num < self.keys.len() {
                select(&mut self.keys, num);
                self.keys.truncate(num);
            }
            self.keys.sort_unstable_by(|a, b| b.cmp(a));
        }
        self.keys.iter().map(|key| (key.id(), key.logit()))
    }

    /// A logit that the `num` likeliest ids are not below: with as many chunks, the
    /// `num`-th of their maxima.
    fn bound_of_likeliest(&mut self, maxima: &[f32], num: usize) -> f32 {
        if num > maxima.len() {
            return f32::NEG_INFINITY;
        }
        self.maxima.clear();
        self.maxima.extend_from_slice(maxima);
        *self.maxima.select_nth_unstable_by(num - 1, |a, b| b.total_cmp(a)).1
    }

    fn gather(&mut self, logits: &[f32], maxima: &[f32], bound: f32) {
        self.keys.clear();
        for (index, chunk) in logits.chunks(CHUNK).enumerate() {
            if maxima[index] >= bound {
                let ids = index * CHUNK..;
                let keys = chunk.iter().zip(ids).filter(|&(&logit, _)| logit >= bound);
                self.keys.extend(keys.map(|(&logit, id)| Key::new(logit, id)));
            }
        }
    }
}

/// A logit that the ids of the nucleus, whose weights reach `mass`, are not below: counts
/// ids in steps of likelihood and takes each at its step's least weight.
fn nucleus_bound(logits: &[f32], maxima: &[f32], mass: f64, filter: &Filter) -> f32 {
    /// Steps per factor of e, and all of them; rarer ids are not counted.
    const PER_E: f32 = 8.0;
    const NUM_STEPS: usize = 256;
    let lowest = filter.max - NUM_STEPS as f32 / PER_E / filter.scale;
    let mut counts = [0u32; NUM_STEPS];
    for (chunk, _) in logits.chunks(CHUNK).zip(maxima).filter(|(_, max)| **max > lowest) {
        for &logit in chunk {
            let step = ((filter.max - logit) * filter.scale * PER_E) as usize;
            if let Some(count) = counts.get_mut(step) {
                *count += 1;
            }
        }
    }
    let mut reached = 0.0;
    for (step, &count) in (1..).zip(&counts) {
        let below = -(step as f32) / PER_E;
        // A thousandth less, so that no rounding makes the bound too high.
        reached += f64::from(count) * f64::from(below).exp() * 0.999;
        if reached >= mass {
            return filter.max + below / filter.scale;
        }
    }
    f32::NEG_INFINITY
}

/// Moves the `num` likeliest keys to the front and returns the last of them.
fn select(keys: &mut [Key], num: usize) -> Key {
    *keys.select_nth_unstable_by(num - 1, |a, b| b.cmp(a)).1
}

/// The last key of the smallest set of likeliest keys whose weights reach `mass`, by
/// halving: each round selects the likelier half of what is undecided.
fn last_of_nucleus(keys: &mut [Key], mut mass: f64, weigh: impl Fn(&Key) -> f64) -> Key {
    let mut undecided = keys;
    while undecided.len() > 1 {
        let half = undecided.len() / 2;
        select(undecided, half);
        let (likelier, rest) = undecided.split_at_mut(half);
        let sum: f64 = likelier.iter().map(&weigh).sum();
        if sum >= mass {
            undecided = likelier;
        } else {
            mass -= sum;
            undecided = rest;
        }
    }
    undecided[0]
}

/// Picks the id at which the running sum of weights passes `target`; `sums` are those of the chunks.
pub(super) fn pick_from_all(logits: &[f32], max: f32, scale: f32, sums: &[f64], target: f64) -> u32 {
    let mut left = target;
    let mut picked = 0;
    for (index, &sum) in sums.iter().enumerate() {
        if sum <= 0.0 {
            continue;
        }
        picked = index;
        if left < sum {
            break;
        }
        left -= sum;
    }
    let start = picked * CHUNK;
    let end = logits.len().min(start + CHUNK);
    let mut id = start;
    for (at, &logit) in logits[start..end].iter().enumerate() {
        let weight = f64::from(weight(logit, max, scale));
        if weight > 0.0 {
            id = start + at;
        }
        left -= weight;
        if left < 0.0 {
            break;
        }
    }
    u32::try_from(id).expect("ids are u32")
}
