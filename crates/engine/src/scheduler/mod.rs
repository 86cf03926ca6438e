//! Decides what is in a step: which sequences, how many tokens of each, on which blocks.
//!
//! Decode rows come first, then prefill chunks up to the token budget. Sequences are
//! served in the order of (class, arrival): it keeps the order it is given. When
//! blocks run short the last in that order is preempted: its blocks go, and it
//! prefills again later with the tokens it has.
//!
//! Invariants: every sequence is either waiting or running; a block table covers
//! exactly the computed and scheduled tokens of a running sequence; the first sequence
//! in order always gets on, so everything ends. Knows token ids and block counts only:
//! no clock, no channel, no text, no device.
//!
//! `admission` lets waiting sequences in; the rest is here.

mod admission;

use std::collections::{BTreeSet, HashMap};

use crate::blocks::BlockPool;
use crate::model::BlockId;
use crate::request::{Class, RequestId};
use crate::scheduler::admission::Upcoming;
use crate::sequence::{Sequence, SequenceId};
use crate::step::StepPlan;

/// Limits of the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Most rows of a step.
    pub max_num_seqs: u32,
    /// Most tokens of a step; at least `max_num_seqs`.
    pub max_num_batched_tokens: u32,
    /// Token slots in a block.
    pub block_size: u32,
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Finished blocks are found again.
    pub enable_prefix_caching: bool,
    /// Output tokens that admission keeps room for, as far as they are allowed. Of longer
    /// outputs a share is expected when that is more.
    pub expected_output_min: u32,
}

/// Share of the tokens still allowed that a long generation is expected to use, in tenths.
const EXPECTED_TENTHS: u32 = 3;
/// Rows of logits per step for logprobs of prompts: they bound the size of the logits.
const PROMPT_LOGITS_MAX: u32 = 64;

/// Debug builds check the invariants in every step of a pool up to this size.
const CHECKED_BLOCKS_MAX: u32 = 1024;

/// Order of service.
type QueueKey = (Class, u64, SequenceId);

/// What is left for prefill in the step being planned.
#[derive(Debug)]
struct Budget {
    tokens: u32,
    prompt_logits: u32,
}

impl Budget {
    /// Tokens of `wanted` that may be computed for this sequence.
    fn chunk(&self, sequence: &Sequence, wanted: u32) -> u32 {
        let limit = if sequence.misses_prompt_logprobs() { self.prompt_logits } else { u32::MAX };
        wanted.min(self.tokens).min(limit)
    }

    fn take(&mut self, sequence: &Sequence, chunk: u32) {
        self.tokens -= chunk;
        if sequence.misses_prompt_logprobs() {
            self.prompt_logits -= chunk;
        }
    }
}

/// The queues and the block pool.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    pool: BlockPool,
    slots: Vec<Option<Sequence>>,
    free_slots: Vec<SequenceId>,
    by_id: HashMap<RequestId, SequenceId>,
    waiting: BTreeSet<QueueKey>,
    /// In order of service.
    running: Vec<QueueKey>,
    num_passed_over: u32,
    num_preemptions: u64,
    num_prefix_queries: u64,
    num_prefix_hits: u64,
    found: Vec<BlockId>,
    upcoming: Upcoming,
}

impl Scheduler {
    /// An empty scheduler over a pool of free blocks.
    pub fn new(limits: SchedulerLimits) -> Self {
        assert!(limits.max_num_batched_tokens >= limits.max_num_seqs, "every decode row needs a token of the budget");
        Self {
            pool: BlockPool::new(limits.num_blocks, limits.block_size, limits.enable_prefix_caching),
            limits,
            slots: Vec::new(),
            free_slots: Vec::new(),
            by_id: HashMap::new(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            num_passed_over: 0,
            num_preemptions: 0,
            num_prefix_queries: 0,
            num_prefix_hits: 0,
            found: Vec::new(),
            upcoming: Upcoming::default(),
        }
    }

    /// Appends a sequence to the waiting ones. Its request id must not be here already.
    pub fn add(&mut self, sequence: Sequence) {
        let id = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(None);
            SequenceId(u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 sequences"))
        });
        let known = self.by_id.insert(sequence.id, id);
        assert!(known.is_none(), "request {:?} was added twice", sequence.id);
        self.waiting.insert((sequence.class, sequence.arrival, id));
        self.slots[id.0 as usize] = Some(sequence);
    }

    /// Whether the request is waiting or running.
    pub fn contains(&self, id: RequestId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Where a request is kept.
    pub fn find(&self, id: RequestId) -> Option<SequenceId> {
        self.by_id.get(&id).copied()
    }

    /// The state of the sequence of this arrival, if it is still kept at `id`.
    pub fn sequence_of(&self, id: SequenceId, arrival: u64) -> Option<&Sequence> {
        self.slots[id.0 as usize].as_ref().filter(|sequence| sequence.arrival == arrival)
    }

    /// The state of a sequence that is here.
    pub fn sequence(&self, id: SequenceId) -> &Sequence {
        self.slots[id.0 as usize].as_ref().expect("the sequence is waiting or running")
    }

    /// The same, to change.
    pub fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.slots[id.0 as usize].as_mut().expect("the sequence is waiting or running")
    }

    /// Takes a sequence out, finished or cancelled, and gives its blocks back.
    pub fn remove(&mut self, id: SequenceId) -> Sequence {
        let sequence = self.slots[id.0 as usize].take().expect("the sequence is waiting or running");
        let key = (sequence.class, sequence.arrival, id);
        if !self.waiting.remove(&key) {
            let at = self.running.binary_search(&key).expect("the sequence is waiting or running");
            self.running.remove(at);
        }
        self.by_id.remove(&sequence.id);
        self.free_slots.push(id);
        self.pool.release(&sequence.blocks);
        sequence
    }

    /// Plans the next step into `plan`. An empty plan means that nothing is here, or that
    /// `plan.unplaceable` names what must be removed.
    pub fn plan(&mut self, plan: &mut StepPlan) {
        plan.clear();
        let num_preemptions = self.num_preemptions;
        let mut num_decode = 0;
        for &(_, _, id) in &self.running {
            let sequence = self.slots[id.0 as usize].as_mut().expect("running");
            sequence.num_scheduled = 0;
            num_decode += u32::from(sequence.num_computable() == 1);
        }
        let mut budget =
            Budget { tokens: self.limits.max_num_batched_tokens - num_decode, prompt_logits: PROMPT_LOGITS_MAX };
        self.schedule_running(&mut budget);
        if self.num_preemptions == num_preemptions {
            self.admit(&mut budget, plan);
        }
        plan.num_preempted = u32::try_from(self.num_preemptions - num_preemptions).expect("at most the running ones");
        self.fill(plan);
    }

    /// Schedules the running sequences in order, preempting from the end.
    fn schedule_running(&mut self, budget: &mut Budget) {
        let mut at = 0;
        while at < self.running.len() {
            let id = self.running[at].2;
            let sequence = self.sequence(id);
            let wanted = sequence.num_computable();
            let chunk = if wanted == 1 { 1 } else { budget.chunk(sequence, wanted) };
            if chunk > 0 && !self.grow(at, chunk) {
                break;
            }
            let sequence = self.sequence_mut(id);
            sequence.num_scheduled = chunk;
            if wanted > 1 {
                budget.take(self.sequence(id), chunk);
            }
            at += 1;
        }
    }

    /// Gives the running sequence at `at` blocks for `chunk` more tokens. False when it
    /// was itself the last in order and had to go.
    fn grow(&mut self, at: usize, chunk: u32) -> bool {
        let id = self.running[at].2;
        let sequence = self.sequence(id);
        let num_blocks = self.pool.blocks_for(sequence.num_computed + chunk);
        let num_new = num_blocks.saturating_sub(num_held(sequence));
        while self.pool.num_free() < num_new {
            let last = self.running.len() - 1;
            self.preempt_last();
            if last == at {
                return false;
            }
        }
        self.allocate(id, num_new);
        true
    }

    fn allocate(&mut self, id: SequenceId, num_new: u32) {
        let sequence = self.slots[id.0 as usize].as_mut().expect("the sequence is waiting or running");
        for _ in 0..num_new {
            sequence.blocks.push(self.pool.allocate().expect("free blocks were counted"));
        }
    }

    /// Takes the blocks of the last running sequence; it waits again, with its tokens.
    fn preempt_last(&mut self) {
        let key = self.running.pop().expect("something runs");
        let sequence = self.slots[key.2.0 as usize].as_mut().expect("running");
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.num_computed = 0;
        sequence.num_scheduled = 0;
        sequence.num_published = 0;
        self.waiting.insert(key);
        self.num_preemptions += 1;
    }

    /// Blocks that a sequence is expected to hold before its end.
    fn num_expected_blocks(&self, sequence: &Sequence) -> u32 {
        let left = sequence.max_tokens - sequence.num_output_tokens();
        let expected = (left / 10 * EXPECTED_TENTHS).max(left.min(self.limits.expected_output_min));
        // The last token is chosen but never computed.
        self.pool.blocks_for(sequence.num_tokens() + expected.saturating_sub(1)).min(self.pool.num_blocks())
    }

    /// Blocks that a running sequence is expected to take yet.
    fn num_promised(&self, sequence: &Sequence) -> u32 {
        self.num_expected_blocks(sequence).saturating_sub(num_held(sequence))
    }

    /// Packs what was scheduled: decode rows, then prefill chunks, each in order of service.
    fn fill(&mut self, plan: &mut StepPlan) {
        for decode in [true, false] {
            for &(_, _, id) in &self.running {
                let sequence = self.slots[id.0 as usize].as_ref().expect("running");
                if sequence.num_scheduled > 0 && (sequence.num_scheduled == 1) == decode {
                    plan.push_row(id, sequence, self.limits.block_size);
                    plan.num_decode_rows += u32::from(decode);
                }
            }
        }
        debug_assert!(plan.num_tokens() <= self.limits.max_num_batched_tokens, "the token budget holds");
        if cfg!(debug_assertions) && self.limits.num_blocks <= CHECKED_BLOCKS_MAX {
            self.check();
        }
    }

    /// Marks the scheduled tokens of a sequence as computed by a step that was started.
    /// `choice` is the row of its logits that gives the sequence's next token.
    pub fn note_started(&mut self, id: SequenceId, choice: Option<u32>) {
        let sequence = self.slots[id.0 as usize].as_mut().expect("running");
        sequence.num_computed += sequence.num_scheduled;
        sequence.num_scheduled = 0;
        if let Some(choice) = choice {
            sequence.num_pending += 1;
            sequence.last_choice = choice;
        }
    }

    /// Offers the full blocks among the first `num_computed` tokens of a sequence to the prefix
    /// cache. A sequence that was preempted meanwhile holds none.
    pub fn publish(&mut self, id: SequenceId, num_computed: u32) {
        let block_size = self.limits.block_size;
        let sequence = self.slots[id.0 as usize].as_mut().expect("running or waiting");
        let num_full = num_computed.min(known(sequence)) / block_size;
        if !self.limits.enable_prefix_caching || sequence.blocks.is_empty() || sequence.num_published >= num_full {
            return;
        }
        sequence.extend_hashes(block_size);
        for index in sequence.num_published as usize..num_full as usize {
            let parent = index.checked_sub(1).map_or_else(Default::default, |last| sequence.hashes[last]);
            let start = index * block_size as usize;
            let tokens = &sequence.tokens[start..start + block_size as usize];
            self.pool.publish(sequence.blocks[index], parent, sequence.hashes[index], tokens);
        }
        sequence.num_published = num_full;
    }

    /// Sequences that run.
    pub fn num_running(&self) -> u32 {
        u32::try_from(self.running.len()).expect("at most max_num_seqs")
    }

    /// Sequences that wait.
    pub fn num_waiting(&self) -> u32 {
        u32::try_from(self.waiting.len()).expect("bounded by the submission queue")
    }

    /// Blocks that nobody holds.
    pub fn num_free_blocks(&self) -> u32 {
        self.pool.num_free()
    }

    /// Preemptions since the start.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// Prompt tokens looked up in the prefix cache, and those found, since the start.
    pub fn prefix_cache_counts(&self) -> (u64, u64) {
        (self.num_prefix_queries, self.num_prefix_hits)
    }

    /// Asserts the invariants of the queues and the pool. Costs O(blocks).
    pub fn check(&self) {
        assert!(self.running.is_sorted(), "running sequences are in order");
        assert_eq!(self.running.len() + self.waiting.len(), self.by_id.len(), "each sequence is in one queue");
        for &(class, arrival, id) in self.waiting.iter().chain(&self.running) {
            let sequence = self.sequence(id);
            assert_eq!((sequence.class, sequence.arrival), (class, arrival), "key of {:?}", sequence.id);
        }
        for &(_, _, id) in &self.waiting {
            assert!(self.sequence(id).blocks.is_empty(), "a waiting sequence holds no blocks");
        }
        let running = || self.running.iter().map(|&(_, _, id)| self.sequence(id));
        for sequence in running() {
            let num_needed = self.pool.blocks_for(sequence.num_computed + sequence.num_scheduled);
            assert_eq!(num_held(sequence), num_needed, "block table of {:?}", sequence.id);
        }
        self.pool.check(running().flat_map(|sequence| sequence.blocks.iter().copied()));
    }
}

fn num_held(sequence: &Sequence) -> u32 {
    u32::try_from(sequence.blocks.len()).expect("at most the pool")
}

/// Tokens whose ids are known.
fn known(sequence: &Sequence) -> u32 {
    u32::try_from(sequence.tokens.len()).expect("bounded by max_model_len")
}
