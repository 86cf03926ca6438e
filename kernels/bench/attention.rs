//! The kernels that read or write the paged cache. Each turn has blocks of its own in one cache,
//! scattered as those of an engine that has run for a while.

use super::{Bench, Case, Measured};
use crate::Error;
use crate::attention_decode::{AttentionDecode, Decode, Workspace, chunks_max, workspace_lens};
use crate::attention_prefill::{AttentionPrefill, Prefill, Row, list_tiles};
use crate::memory::Buffer;
use crate::paged::{BlockTables, Heads, PagedCache};
use crate::rope::{QkNormRope, QkNormRopeKvWrite};

/// Token slots of a block, the engine's default.
const BLOCK_SIZE: u32 = 64;
/// Bytes of a number.
const HALF: u64 = 2;
const EPS: f32 = 1e-6;

/// A cache with blocks for `rows` of `context_len` tokens in every turn.
struct Cache {
    k: Buffer<u16>,
    v: Buffer<u16>,
    tables: Buffer<u32>,
    stride: u32,
    num_blocks: u32,
    rows: u32,
}

impl Cache {
    fn view(&self) -> PagedCache {
        PagedCache { k: self.k.slice(), v: self.v.slice(), num_blocks: self.num_blocks, block_size: BLOCK_SIZE }
    }

    fn tables(&self, turn: usize) -> BlockTables {
        let len = self.rows as usize * self.stride as usize;
        BlockTables { entries: self.tables.slice().slice(turn * len, len), stride: self.stride }
    }
}

impl Bench {
    pub(super) fn attention(&self, case: Case) -> Result<Measured, Error> {
        match case {
            Case::AttentionDecode { rows, context_len, num_heads, num_kv_heads, head_dim } => {
                self.decode(rows, context_len, Heads { num_heads, num_kv_heads, head_dim })
            }
            Case::AttentionPrefill { rows, query_len, num_heads, num_kv_heads, head_dim } => {
                self.prefill(rows, query_len, Heads { num_heads, num_kv_heads, head_dim })
            }
            Case::QkNormRopeKvWrite { rows, num_heads, num_kv_heads, head_dim } => {
                self.rope(rows, Heads { num_heads, num_kv_heads, head_dim })
            }
            other => Err(Error::shape("bench", format!("{other:?} does not use the cache"))),
        }
    }

    fn decode(&self, rows: u32, context_len: u32, heads: Heads) -> Result<Measured, Error> {
        let kernel = AttentionDecode::load(&self.device, &self.modules, heads.head_dim)?;
        let num_chunks_max = chunks_max(rows, context_len, kernel.chunk());
        let lens = workspace_lens(heads, rows, num_chunks_max);
        let (work, work_count) = (self.empty::<u32>(lens.work)?, self.empty::<u32>(1)?);
        let (partial_out, partial_lse) = (self.empty::<f32>(lens.partial_out)?, self.empty::<f32>(lens.partial_lse)?);
        let counters = self.empty::<u32>(lens.counters)?;
        self.stream.fill_bytes(counters.slice(), 0)?;
        let workspace = Workspace {
            work: work.slice(),
            work_count: work_count.slice(),
            partial_out: partial_out.slice(),
            partial_lse: partial_lse.slice(),
            counters: counters.slice(),
        };
        let context_lens = self.upload(&vec![context_len; rows as usize])?;
        kernel.plan(&self.stream, &workspace, context_lens.slice(), rows, num_chunks_max, 0)?;
        let cache_bytes = kv_bytes(heads) * u64::from(rows) * u64::from(context_len);
        let bytes = cache_bytes + 2 * HALF * u64::from(rows) * heads.out_width() as u64;
        let num_turns = self.num_turns(cache_bytes);
        let cache = self.cache(rows, context_len, heads, num_turns)?;
        let view = cache.view();
        let qkv = self.normal(rows as usize * heads.qkv_width(), 5, 1.0)?;
        let out = self.empty(rows as usize * heads.out_width())?;
        self.time(bytes, 0, num_turns, |turn| {
            let call = Decode {
                qkv: qkv.slice(),
                cache: &view,
                block_tables: &cache.tables(turn),
                context_lens: context_lens.slice(),
                workspace: &workspace,
                num_rows: rows,
                num_chunks_max,
                heads,
                scale: scale(heads),
                window: 0,
            };
            kernel.run(&self.stream, out.slice(), &call)
        })
    }

    fn prefill(&self, rows: u32, query_len: u32, heads: Heads) -> Result<Measured, Error> {
        let kernel = AttentionPrefill::load(&self.device, &self.modules, heads.head_dim)?;
        let mut tiles = Vec::new();
        let listed = (0..rows).map(|row| Row { row, query_len, context_len: query_len });
        list_tiles(&mut tiles, listed, kernel.tile_queries(heads.group()), 0);
        let num_tiles = tiles.len() as u32;
        let tiles = self.upload(&tiles.concat())?;
        let cu_seqlens = self.upload(&(0..=rows).map(|row| row * query_len).collect::<Vec<_>>())?;
        let context_lens = self.upload(&vec![query_len; rows as usize])?;
        let num_tokens = rows * query_len;
        let tokens = u64::from(num_tokens);
        let pairs = u64::from(rows) * u64::from(query_len) * (u64::from(query_len) + 1) / 2;
        let flops = 4 * u64::from(heads.head_dim) * u64::from(heads.num_heads) * pairs;
        let bytes = tokens * (kv_bytes(heads) + 2 * HALF * heads.out_width() as u64);
        let num_turns = self.num_turns(bytes);
        let cache = self.cache(rows, query_len, heads, num_turns)?;
        let view = cache.view();
        let qkv = self.turns(bytes, |seed| self.normal(num_tokens as usize * heads.qkv_width(), seed, 1.0))?;
        let out = self.empty(num_tokens as usize * heads.out_width())?;
        self.time(bytes, flops, num_turns, |turn| {
            let call = Prefill {
                qkv: qkv[turn].slice(),
                cache: &view,
                block_tables: &cache.tables(turn),
                cu_seqlens: cu_seqlens.slice(),
                context_lens: context_lens.slice(),
                tiles: tiles.slice(),
                num_tiles,
                num_rows: rows,
                num_tokens,
                heads,
                scale: scale(heads),
                window: 0,
            };
            kernel.run(&self.stream, out.slice(), &call)
        })
    }

    fn rope(&self, rows: u32, heads: Heads) -> Result<Measured, Error> {
        let kernel = QkNormRopeKvWrite::load(&self.modules, heads.head_dim)?;
        let dim = heads.head_dim as usize;
        let bytes = 2 * HALF * u64::from(rows) * heads.qkv_width() as u64;
        let num_turns = self.num_turns(bytes);
        // A token is a row of one block's length here: any slots do, each used once.
        let cache = self.cache(1, rows * num_turns as u32, heads, 1)?;
        let view = cache.view();
        let slots: Vec<i32> = (0..rows as i32 * num_turns as i32).collect();
        let slots = self.upload(&slots)?;
        let positions = self.upload(&(0..rows).collect::<Vec<_>>())?;
        let angles: Vec<f32> = (0..rows as usize * dim).map(|at| (at as f32).sin()).collect();
        let angles = self.upload(&angles)?;
        let weights = [self.normal(dim, 1, 1.0)?, self.normal(dim, 2, 1.0)?];
        let qkv = self.turns(bytes, |seed| self.normal(rows as usize * heads.qkv_width(), seed, 1.0))?;
        self.time(bytes, 0, num_turns, |turn| {
            let call = QkNormRope {
                slot_mapping: slots.slice().slice(turn * rows as usize, rows as usize),
                positions: positions.slice(),
                norm_weights: Some((weights[0].slice(), weights[1].slice())),
                rope: angles.slice(),
                num_tokens: rows,
                heads,
                cache: &view,
                eps: EPS,
                weight_offset: 0.0,
            };
            kernel.run(&self.stream, qkv[turn].slice(), &call)
        })
    }

    fn cache(&self, rows: u32, context_len: u32, heads: Heads, num_turns: usize) -> Result<Cache, Error> {
        let stride = context_len.div_ceil(BLOCK_SIZE);
        let num_blocks = stride * rows * num_turns as u32;
        let len = num_blocks as usize * (heads.num_kv_heads * BLOCK_SIZE) as usize * heads.head_dim as usize;
        let tables = self.upload(&shuffled(num_blocks))?;
        let (k, v) = (self.normal(len, 3, 1.0)?, self.normal(len, 4, 1.0)?);
        Ok(Cache { k, v, tables, stride, num_blocks, rows })
    }
}

/// Bytes of K and V of a token.
fn kv_bytes(heads: Heads) -> u64 {
    2 * HALF * u64::from(heads.num_kv_heads) * u64::from(heads.head_dim)
}

fn scale(heads: Heads) -> f32 {
    (heads.head_dim as f32).sqrt().recip()
}

/// Every number below `len` once, in an order without neighbours.
fn shuffled(len: u32) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..len).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for at in (1..numbers.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        numbers.swap(at, (state % (at as u64 + 1)) as usize);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_each_used_once_and_scattered() {
        let numbers = shuffled(1000);
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        let num_neighbours = numbers.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(num_neighbours < 20, "{num_neighbours} blocks follow each other");
    }
}
