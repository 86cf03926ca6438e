//! The pool of KV cache blocks: reference counts, a free list in order of last use,
//! and the prefix cache.
//!
//! Invariants: a block is on the free list exactly when nobody holds it; a hash leads
//! only to a block that holds just those tokens after just that prefix; a block that
//! is handed out anew has lost its hash. [`BlockPool::check`] tests them.
//! Counts and ids only: it knows neither the memory behind a block nor requests.
//!
//! A finished block keeps its content and its place in the prefix cache while it lies
//! on the free list, and loses both when it is handed out again, least recently used first.

mod hash;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use crate::model::BlockId;

pub use hash::ChainHash;

/// What the prefix cache knows of a block.
#[derive(Debug, Clone, Copy)]
struct Cached {
    hash: ChainHash,
    parent: ChainHash,
}

#[derive(Debug, Clone, Default)]
struct Block {
    num_holders: u32,
    cached: Option<Cached>,
    /// Neighbours on the free list; meaningless while held.
    previous: Option<BlockId>,
    next: Option<BlockId>,
}

/// All KV blocks of an engine.
#[derive(Debug)]
pub struct BlockPool {
    block_size: u32,
    blocks: Vec<Block>,
    /// `[num_blocks, block_size]`; valid where a block is cached.
    tokens: Vec<u32>,
    /// Least recently used end, handed out first.
    free_head: Option<BlockId>,
    free_tail: Option<BlockId>,
    num_free: u32,
    caching: bool,
    by_hash: HashMap<ChainHash, BlockId>,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks of `block_size` token slots each.
    /// With `caching` off, [`BlockPool::publish`] forgets and [`BlockPool::find_prefix`] finds nothing.
    pub fn new(num_blocks: u32, block_size: u32, caching: bool) -> Self {
        let num_tokens = if caching { num_blocks as usize * block_size as usize } else { 0 };
        let mut pool = Self {
            block_size,
            blocks: vec![Block::default(); num_blocks as usize],
            tokens: vec![0; num_tokens],
            free_head: None,
            free_tail: None,
            num_free: 0,
            caching,
            by_hash: HashMap::new(),
        };
        for block in 0..num_blocks {
            pool.push_free_back(block);
        }
        pool
    }

    /// Token slots in a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// All blocks, held or free.
    pub fn num_blocks(&self) -> u32 {
        u32::try_from(self.blocks.len()).expect("made from a u32")
    }

    /// Blocks that nobody holds; finished blocks that may still be found again are among them.
    pub fn num_free(&self) -> u32 {
        self.num_free
    }

    /// Blocks that `num_tokens` tokens take.
    pub fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.block_size)
    }

    /// Appends to `found` the cached blocks of the longest prefix of `tokens`, whose full
    /// blocks have the chain `hashes`. Stops at the first block that is not cached, so a
    /// prefix with a gap ends there. Holds nothing: call [`BlockPool::hold`] before the next allocation.
    pub fn find_prefix(&self, hashes: &[ChainHash], tokens: &[u32], found: &mut Vec<BlockId>) {
        if !self.caching {
            return;
        }
        let mut parent = ChainHash::default();
        for (hash, tokens) in hashes.iter().zip(tokens.chunks_exact(self.block_size as usize)) {
            let Some(&block) = self.by_hash.get(hash) else { return };
            let cached = self.blocks[block as usize].cached.expect("a hash leads to a cached block");
            if cached.parent != parent || self.tokens_of(block) != tokens {
                return;
            }
            found.push(block);
            parent = *hash;
        }
    }

    /// Whether a block with this content can be found.
    pub fn is_cached(&self, hash: ChainHash) -> bool {
        self.by_hash.contains_key(&hash)
    }

    /// How many of `blocks` nobody holds yet: what holding them takes from the free ones.
    pub fn num_unheld(&self, blocks: &[BlockId]) -> u32 {
        blocks.iter().map(|&block| u32::from(self.blocks[block as usize].num_holders == 0)).sum()
    }

    /// One more holder for each of `blocks`, found by [`BlockPool::find_prefix`].
    pub fn hold(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if self.blocks[block as usize].num_holders == 0 {
                self.unlink_free(block);
            }
            self.blocks[block as usize].num_holders += 1;
        }
    }

    /// Takes a free block, the least recently used one; it loses its hash. `None` when all are held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free_head?;
        self.unlink_free(block);
        self.forget(block);
        self.blocks[block as usize].num_holders = 1;
        Some(block)
    }

    /// Makes a full, computed, held block findable. When another block already has
    /// that content, or caching is off, nothing changes.
    ///
    /// `hash` must be `parent.then(tokens)`.
    pub fn publish(&mut self, block: BlockId, parent: ChainHash, hash: ChainHash, tokens: &[u32]) {
        debug_assert_eq!(tokens.len(), self.block_size as usize, "only full blocks are published");
        debug_assert!(self.blocks[block as usize].num_holders > 0, "block {block} is published but not held");
        if !self.caching || self.by_hash.contains_key(&hash) || self.blocks[block as usize].cached.is_some() {
            return;
        }
        let start = block as usize * self.block_size as usize;
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
        self.blocks[block as usize].cached = Some(Cached { hash, parent });
        self.by_hash.insert(hash, block);
    }

    /// Gives back one hold of each block, which are in token order. The last ones come
    /// to be reused first, so that a prefix outlives what follows it.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            let held = &mut self.blocks[block as usize];
            assert!(held.num_holders > 0, "block {block} released more often than held");
            held.num_holders -= 1;
            if held.num_holders > 0 {
                continue;
            }
            if held.cached.is_some() {
                self.push_free_back(block);
            } else {
                self.push_free_front(block);
            }
        }
    }

    fn tokens_of(&self, block: BlockId) -> &[u32] {
        let start = block as usize * self.block_size as usize;
        &self.tokens[start..start + self.block_size as usize]
    }

    fn forget(&mut self, block: BlockId) {
        if let Some(cached) = self.blocks[block as usize].cached.take() {
            self.by_hash.remove(&cached.hash);
        }
    }

    fn push_free_back(&mut self, block: BlockId) {
        let tail = self.free_tail.replace(block);
        self.blocks[block as usize].previous = tail;
        self.blocks[block as usize].next = None;
        match tail {
            Some(tail) => self.blocks[tail as usize].next = Some(block),
            None => self.free_head = Some(block),
        }
        self.num_free += 1;
    }

    fn push_free_front(&mut self, block: BlockId) {
        let head = self.free_head.replace(block);
        self.blocks[block as usize].previous = None;
        self.blocks[block as usize].next = head;
        match head {
            Some(head) => self.blocks[head as usize].previous = Some(block),
            None => self.free_tail = Some(block),
        }
        self.num_free += 1;
    }

    fn unlink_free(&mut self, block: BlockId) {
        let (previous, next) = (self.blocks[block as usize].previous, self.blocks[block as usize].next);
        match previous {
            Some(previous) => self.blocks[previous as usize].next = next,
            None => self.free_head = next,
        }
        match next {
            Some(next) => self.blocks[next as usize].previous = previous,
            None => self.free_tail = previous,
        }
        self.num_free -= 1;
    }

    /// Asserts the pool's invariants, and that each block has as many holders as `held`
    /// (all block tables after each other) says. Costs O(blocks): for debug builds and tests.
    pub fn check(&self, held: impl Iterator<Item = BlockId>) {
        let mut num_holders = vec![0u32; self.blocks.len()];
        held.for_each(|block| num_holders[block as usize] += 1);
        for (block, state) in self.blocks.iter().enumerate() {
            assert_eq!(state.num_holders, num_holders[block], "holders of block {block}");
            if let Some(cached) = state.cached {
                assert_eq!(self.by_hash.get(&cached.hash), Some(&(block as BlockId)), "hash of block {block}");
                let tokens = self.tokens_of(block as BlockId);
                assert_eq!(cached.parent.then(tokens), cached.hash, "content of block {block}");
            }
        }
        let num_cached = self.blocks.iter().filter(|block| block.cached.is_some()).count();
        assert_eq!(self.by_hash.len(), num_cached, "hashes and cached blocks");
        let (mut num_free, mut at, mut previous) = (0, self.free_head, None);
        while let Some(block) = at {
            let state = &self.blocks[block as usize];
            assert_eq!(state.num_holders, 0, "block {block} is free and held");
            assert_eq!(state.previous, previous, "link of block {block}");
            num_free += 1;
            assert!(num_free <= self.num_blocks(), "the free list is a ring");
            (previous, at) = (Some(block), state.next);
        }
        assert_eq!(self.free_tail, previous, "end of the free list");
        assert_eq!(num_free, self.num_free, "length of the free list");
        let num_held = num_holders.iter().filter(|&&holders| holders > 0).count();
        assert_eq!(num_held + num_free as usize, self.blocks.len(), "blocks held and free");
    }
}
