//! Lets waiting sequences in, and keeps those back whose prefix is being computed.
//!
//! When several waiting sequences share full blocks, the first one in computes them and
//! the others wait until they are in the prefix cache: a block is computed once, however
//! many came together. Invariants: nobody is kept back but behind a running sequence of
//! its own class or a better one, so the wait ends with that one's prefill, its end or
//! its preemption; what a kept-back sequence does not need goes to those after it.

use std::collections::HashMap;
use std::ops::Bound;

use crate::blocks::ChainHash;
use crate::request::Class;
use crate::scheduler::{Budget, QueueKey, Scheduler, num_held};
use crate::sequence::{Sequence, SequenceId};
use crate::step::StepPlan;

/// Online sequences admitted before a waiting job's one before one of these takes its turn.
const PASSED_OVER_MAX: u32 = 8;
/// Sequences kept back in one step before the rest is not looked at; bounds the cost of a step.
const KEPT_BACK_MAX: u32 = 256;

/// The full block that each running sequence computes next, where another one may want it.
#[derive(Debug, Default)]
pub(super) struct Upcoming {
    by_hash: HashMap<ChainHash, Class>,
    /// Places of these blocks in their sequences, each once.
    indices: Vec<usize>,
}

impl Upcoming {
    fn clear(&mut self) {
        self.by_hash.clear();
        self.indices.clear();
    }

    /// Adds the block that a running sequence of `class` completes next, if it has one to come.
    fn add(&mut self, class: Class, sequence: &Sequence) {
        let index = sequence.num_published as usize;
        let Some(&hash) = sequence.hashes.get(index) else { return };
        let best = self.by_hash.entry(hash).or_insert(class);
        *best = class.min(*best);
        if !self.indices.contains(&index) {
            self.indices.push(index);
        }
    }

    /// The block of `sequence` that is on its way, by its hash; never the one with the last token,
    /// which is computed in any case.
    fn find(&self, class: Class, sequence: &Sequence, block_size: u32) -> Option<ChainHash> {
        let num_full = (sequence.tokens.len() - 1) / block_size as usize;
        let hashes = &sequence.hashes[..num_full.min(sequence.hashes.len())];
        let comes = |hash: &&ChainHash| self.by_hash.get(*hash).is_some_and(|&theirs| theirs <= class);
        self.indices.iter().filter_map(|&index| hashes.get(index)).find(comes).copied()
    }
}

impl Scheduler {
    /// Lets waiting sequences in, in order, while tokens, rows and blocks last.
    pub(super) fn admit(&mut self, budget: &mut Budget, plan: &mut StepPlan) {
        if self.waiting.is_empty() || budget.tokens == 0 {
            return;
        }
        let mut num_promised: u32 = self.running.iter().map(|&(_, _, id)| self.num_promised(self.sequence(id))).sum();
        self.note_upcoming();
        let mut num_kept_back = 0;
        let mut last_kept_back = None;
        while budget.tokens > 0 {
            let Some(key) = self.next_waiting(last_kept_back) else { return };
            let id = key.2;
            let has_row = self.running.len() < self.limits.max_num_seqs as usize;
            let displaceable =
                self.running.last().filter(|last| key.0 == Class::Online && last.0 == Class::Job).copied();
            if !has_row && displaceable.is_none() {
                return;
            }
            // Preempted while a step that chooses its next token is under way: that comes first.
            if self.sequence(id).num_pending > 0 {
                return;
            }
            if self.is_kept_back(key) {
                num_kept_back += 1;
                if num_kept_back == KEPT_BACK_MAX {
                    return;
                }
                last_kept_back = Some(key);
                continue;
            }
            self.find_cached(id);
            let sequence = self.sequence(id);
            let num_found = u32::try_from(self.found.len()).expect("at most the pool");
            let num_cached = num_found * self.limits.block_size;
            let chunk = budget.chunk(sequence, sequence.num_tokens() - num_cached);
            if chunk == 0 {
                // The step's rows for logprobs of prompts are used up; those behind may need none.
                num_kept_back += 1;
                if num_kept_back == KEPT_BACK_MAX {
                    return;
                }
                last_kept_back = Some(key);
                continue;
            }
            let num_needed = self.num_expected_blocks(sequence) - num_found + self.pool.num_unheld(&self.found);
            let has_blocks = self.pool.num_free() >= num_needed.saturating_add(num_promised);
            if self.running.is_empty() {
                if self.pool.blocks_for(sequence.num_tokens()) > self.pool.num_blocks() {
                    plan.unplaceable.push(id);
                    return;
                }
            } else if !has_row || !has_blocks {
                let Some(last) = displaceable else { return };
                let sequence = self.sequence(last.2);
                num_promised -= self.num_promised(sequence);
                if sequence.num_uncomputed() > 1 {
                    budget.tokens += sequence.num_scheduled;
                }
                self.preempt_last();
                continue;
            }
            let sequence = self.sequence(id);
            if sequence.num_cached_tokens.is_none() {
                plan.admitted.push(sequence.id);
            }
            self.start(key, num_cached, chunk);
            budget.take(self.sequence(id), chunk);
            num_promised += self.num_promised(self.sequence(id));
            self.upcoming.add(key.0, self.slots[id.0 as usize].as_ref().expect("just started"));
            self.count_passed_over(key.0);
        }
    }

    /// The first waiting sequence in order, or the first one after a sequence that is kept back.
    fn next_waiting(&self, after: Option<QueueKey>) -> Option<QueueKey> {
        match after {
            None => self.waiting.first().copied(),
            Some(key) => self.waiting.range((Bound::Excluded(key), Bound::Unbounded)).next().copied(),
        }
    }

    fn note_upcoming(&mut self) {
        self.upcoming.clear();
        for &(class, _, id) in &self.running {
            self.upcoming.add(class, self.slots[id.0 as usize].as_ref().expect("running"));
        }
    }

    /// Whether a running sequence is about to compute a block that this waiting one shares with it.
    fn is_kept_back(&mut self, (class, _, id): QueueKey) -> bool {
        let block_size = self.limits.block_size;
        let sequence = self.slots[id.0 as usize].as_mut().expect("waiting");
        if !self.limits.enable_prefix_caching || sequence.misses_prompt_logprobs() {
            return false;
        }
        sequence.extend_hashes(block_size);
        let upcoming = self.upcoming.find(class, sequence, block_size);
        upcoming.is_some_and(|hash| !self.pool.is_cached(hash))
    }

    /// Looks the waiting sequence up in the prefix cache, into `self.found`. The last token
    /// is always computed, because its logits are needed.
    fn find_cached(&mut self, id: SequenceId) {
        self.found.clear();
        let block_size = self.limits.block_size;
        let sequence = self.slots[id.0 as usize].as_mut().expect("waiting");
        if !self.limits.enable_prefix_caching || sequence.misses_prompt_logprobs() {
            return;
        }
        sequence.extend_hashes(block_size);
        let num_full = (sequence.tokens.len() - 1) / block_size as usize;
        let hashes = &sequence.hashes[..num_full.min(sequence.hashes.len())];
        self.pool.find_prefix(hashes, &sequence.tokens, &mut self.found);
    }

    /// Moves a waiting sequence to the running ones, on the blocks found and new ones.
    fn start(&mut self, key: QueueKey, num_cached: u32, chunk: u32) {
        let id = key.2;
        self.pool.hold(&self.found);
        self.waiting.remove(&key);
        let at = self.running.binary_search(&key).expect_err("it was waiting");
        self.running.insert(at, key);
        let caching = self.limits.enable_prefix_caching;
        let sequence = self.slots[id.0 as usize].as_mut().expect("waiting");
        debug_assert!(sequence.blocks.is_empty(), "a waiting sequence holds no blocks");
        sequence.blocks.extend_from_slice(&self.found);
        sequence.num_published = u32::try_from(self.found.len()).expect("at most the pool");
        sequence.num_computed = num_cached;
        sequence.num_scheduled = chunk;
        if sequence.num_cached_tokens.is_none() {
            sequence.num_cached_tokens = Some(num_cached);
            if caching {
                self.num_prefix_queries += u64::from(sequence.num_tokens());
                self.num_prefix_hits += u64::from(num_cached);
            }
        }
        let num_new = self.pool.blocks_for(num_cached + chunk) - num_held(sequence);
        self.allocate(id, num_new);
    }

    /// After enough online sequences went before it, the oldest waiting job's sequence
    /// becomes an online one, so that no load starves it.
    fn count_passed_over(&mut self, admitted: Class) {
        let Some(&key) = self.waiting.range((Class::Job, 0, SequenceId(0))..).next() else {
            self.num_passed_over = 0;
            return;
        };
        if admitted == Class::Job {
            self.num_passed_over = 0;
            return;
        }
        self.num_passed_over += 1;
        if self.num_passed_over >= PASSED_OVER_MAX {
            self.num_passed_over = 0;
            self.waiting.remove(&key);
            self.waiting.insert((Class::Online, key.1, key.2));
            self.sequence_mut(key.2).class = Class::Online;
        }
    }
}
