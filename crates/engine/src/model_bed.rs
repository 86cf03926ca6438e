//! A model driven step by step, without an engine: for the tests of both back ends.

use crate::model::{Forward, StepInput};

/// A sequence and the cache blocks it owns.
pub(crate) struct Sequence {
    pub(crate) ids: Vec<u32>,
    /// Of `ids`, those computed.
    pub(crate) done: usize,
    pub(crate) table: Vec<u32>,
}

/// A model whose cache blocks are handed out in scattered order.
pub(crate) struct ModelBed<M> {
    pub(crate) model: M,
    pub(crate) block_size: u32,
    num_blocks: u32,
    free: Vec<u32>,
}

/// Arrays of a step.
pub(crate) struct Arrays {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    cu_seqlens: Vec<u32>,
    contexts: Vec<u32>,
    tables: Vec<u32>,
    table_starts: Vec<u32>,
    /// Every token's logits.
    wanted: Vec<u32>,
}

impl Arrays {
    pub(crate) fn input(&self) -> StepInput<'_> {
        StepInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            slot_mapping: &self.slots,
            cu_seqlens: &self.cu_seqlens,
            context_lens: &self.contexts,
            block_tables: &self.tables,
            block_table_starts: &self.table_starts,
            logits_tokens: &self.wanted,
            feedback: &[],
        }
    }
}

impl<M: Forward> ModelBed<M> {
    pub(crate) fn new(mut model: M, num_blocks: u32, block_size: u32) -> Self {
        model.allocate_kv_cache(num_blocks, block_size).unwrap_or_else(|error| panic!("{error:?}"));
        let mut bed = Self { model, block_size, num_blocks, free: Vec::new() };
        bed.free_all();
        bed
    }

    /// Gives the blocks of all sequences back; until then none is used twice.
    pub(crate) fn free_all(&mut self) {
        let num = self.num_blocks;
        assert!(!num.is_multiple_of(7), "7 and {num} have nothing in common, so each block comes once");
        self.free = (0..num).map(|index| index * 7 % num).collect();
    }

    /// Gives these blocks back.
    pub(crate) fn free(&mut self, blocks: &[u32]) {
        self.free.extend(blocks);
    }

    pub(crate) fn sequence(&self, ids: &[u32]) -> Sequence {
        Sequence { ids: ids.to_vec(), done: 0, table: Vec::new() }
    }

    /// The arrays of a step of the next `count` tokens of each sequence, those of one token first.
    pub(crate) fn arrays(&mut self, rows: &mut [(&mut Sequence, usize)]) -> Arrays {
        let (mut token_ids, mut positions, mut slots, mut cu_seqlens) = (vec![], vec![], vec![], vec![0]);
        let (mut contexts, mut tables, mut table_starts) = (vec![], vec![], vec![0]);
        for (sequence, count) in rows.iter_mut() {
            for _ in 0..*count {
                let position = sequence.done as u32;
                if position.is_multiple_of(self.block_size) {
                    sequence.table.push(self.free.pop().expect("enough blocks"));
                }
                token_ids.push(sequence.ids[sequence.done]);
                positions.push(position);
                let block = sequence.table[(position / self.block_size) as usize];
                slots.push(block * self.block_size + position % self.block_size);
                sequence.done += 1;
            }
            cu_seqlens.push(token_ids.len() as u32);
            contexts.push(sequence.done as u32);
            tables.extend(&sequence.table);
            table_starts.push(tables.len() as u32);
        }
        let wanted = (0..token_ids.len() as u32).collect();
        Arrays { token_ids, positions, slots, cu_seqlens, contexts, tables, table_starts, wanted }
    }

    /// One such step; logits of all its tokens, by sequence.
    pub(crate) fn step(&mut self, rows: &mut [(&mut Sequence, usize)]) -> Vec<Vec<Vec<f32>>> {
        let arrays = self.arrays(rows);
        let width = self.model.shape().vocab_size as usize;
        let logits = self.model.forward(arrays.input()).unwrap_or_else(|error| panic!("{error:?}"));
        let mut rest = logits.chunks_exact(width).map(<[f32]>::to_vec);
        rows.iter().map(|(_, count)| rest.by_ref().take(*count).collect()).collect()
    }

    /// Logits of every position, in chunks of `chunk` tokens.
    pub(crate) fn all_logits(&mut self, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        self.go_on(&mut self.sequence(ids), chunk, ids.len())
    }

    /// Logits of the positions up to `end`, in chunks of `chunk` tokens.
    pub(crate) fn go_on(&mut self, sequence: &mut Sequence, chunk: usize, end: usize) -> Vec<Vec<f32>> {
        let mut logits = Vec::new();
        while sequence.done < end {
            let count = chunk.min(end - sequence.done);
            logits.extend(self.step(&mut [(&mut *sequence, count)]).remove(0));
        }
        logits
    }
}

/// Token ids that differ by `salt`.
pub(crate) fn ids(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i.wrapping_mul(37) + salt * 101 + i.wrapping_mul(i)) % 256).collect()
}

/// ‖a − b‖ / ‖b‖ over all positions; infinite when something is not a number.
pub(crate) fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    assert_eq!(a.len(), b.len(), "positions");
    let (mut difference, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        difference += f64::from(a - b).powi(2);
        norm += f64::from(*b).powi(2);
    }
    let ratio = (difference / norm).sqrt();
    if ratio.is_finite() { ratio } else { f64::INFINITY }
}
