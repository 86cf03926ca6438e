//! Kernels that make or move lists of a step: the work list of decode attention, block tables,
//! chosen tokens as inputs. Their operands are small: launches bound them, not the memory.

use super::{Bench, Case, Measured, scattered};
use crate::Error;
use crate::attention_decode::{AttentionDecode, ENTRY_WORDS, Workspace, chunks_max};
use crate::block_tables::BlockTables;
use crate::token_feedback::TokenFeedback;

/// Bytes of a number.
const WORD: u64 = 4;

impl Bench {
    pub(super) fn lists(&self, case: Case) -> Result<Measured, Error> {
        match case {
            Case::DecodePlan { rows, context_len, head_dim } => self.plan(rows, context_len, head_dim),
            Case::BlockTables { rows, blocks } => self.block_tables(rows, blocks),
            Case::TokenFeedback { rows } => self.token_feedback(rows),
            other => Err(Error::shape("bench", format!("{other:?} makes no list"))),
        }
    }

    fn plan(&self, rows: u32, context_len: u32, head_dim: u32) -> Result<Measured, Error> {
        let kernel = AttentionDecode::load(&self.device, &self.modules, head_dim)?;
        let num_chunks = chunks_max(rows, context_len, kernel.chunk());
        let (work, work_count) = (self.empty::<u32>(num_chunks as usize * ENTRY_WORDS)?, self.empty::<u32>(1)?);
        // The plan touches nothing of a run.
        let (numbers, counters) = (self.empty::<f32>(1)?, self.empty::<u32>(1)?);
        let workspace = Workspace {
            work: work.slice(),
            work_count: work_count.slice(),
            partial_out: numbers.slice(),
            partial_lse: numbers.slice(),
            counters: counters.slice(),
        };
        let context_lens = self.upload(&vec![context_len; rows as usize])?;
        let bytes = WORD * (u64::from(rows) + u64::from(num_chunks) * ENTRY_WORDS as u64 + 1);
        self.time(bytes, 0, 1, |_| kernel.plan(&self.stream, &workspace, context_lens.slice(), rows, num_chunks, 0))
    }

    fn block_tables(&self, rows: u32, blocks: u32) -> Result<Measured, Error> {
        let kernel = BlockTables::load(&self.modules)?;
        let len = rows as usize * blocks as usize;
        let starts: Vec<u32> = (0..=rows).map(|row| row * blocks).collect();
        let (starts, packed) = (self.upload(&starts)?, self.upload(&scattered(rows * blocks, 1 << 20))?);
        let tables = self.empty::<u32>(len)?;
        let bytes = WORD * (2 * len as u64 + u64::from(rows) + 1);
        self.time(bytes, 0, 1, |_| {
            kernel.expand(&self.stream, tables.slice(), starts.slice(), packed.slice(), rows, blocks)
        })
    }

    fn token_feedback(&self, rows: u32) -> Result<Measured, Error> {
        let kernel = TokenFeedback::load(&self.modules)?;
        let pairs: Vec<u32> = (0..rows).flat_map(|row| [row, rows - 1 - row]).collect();
        let pairs = self.upload(&pairs)?;
        let (ids, choices) = (self.empty::<u32>(rows as usize)?, self.upload(&scattered(rows, 1 << 17))?);
        let bytes = 4 * WORD * u64::from(rows);
        self.time(bytes, 0, 1, |_| kernel.feed(&self.stream, ids.slice(), pairs.slice(), choices.slice(), rows))
    }
}
