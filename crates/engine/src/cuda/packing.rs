//! A step's arrays in one block of words, so that one copy brings them to the device.

use overnight_kernels::memory::Pinned;
use overnight_kernels::{Arena, Device, DeviceSlice, Event, PAD_SLOT, Stream};

use crate::Error;
use crate::cuda::{StepLimits, during};
use crate::model::StepInput;

/// Regions start at multiples of 16 bytes.
const WORDS: usize = 4;

/// Where a step's arrays lie; fixed by the counts alone, so that a graph finds them again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) num_tokens: u32,
    pub(super) num_rows: u32,
    /// Rows of one token, which come first.
    pub(super) num_decode: u32,
    pub(super) num_tiles: u32,
    pub(super) num_logits: u32,
}

/// The arrays of a step on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepView {
    pub(super) layout: Layout,
    pub(super) token_ids: DeviceSlice<u32>,
    pub(super) positions: DeviceSlice<u32>,
    pub(super) slot_mapping: DeviceSlice<i32>,
    pub(super) context_lens: DeviceSlice<u32>,
    pub(super) cu_seqlens: DeviceSlice<u32>,
    pub(super) tiles: DeviceSlice<u32>,
    pub(super) logits_tokens: DeviceSlice<u32>,
    pub(super) table_starts: DeviceSlice<u32>,
    /// `[num_rows, 2]`, as many as the step has tokens that the one before chooses.
    pub(super) feedback: DeviceSlice<u32>,
    /// Up to the end of the memory: a graph does not know how many there are.
    pub(super) blocks: DeviceSlice<u32>,
    /// The logits of all rows are computed already.
    pub(super) has_logits: bool,
}

/// First words of the arrays, in the order of [`StepView`]; the last is that of the blocks.
fn starts(layout: &Layout) -> [usize; 10] {
    let [tokens, rows, tiles, logits] =
        [layout.num_tokens, layout.num_rows, layout.num_tiles, layout.num_logits].map(|num| num as usize);
    let lens = [tokens, tokens, tokens, rows, rows + 1, 2 * tiles, logits, rows + 1, 2 * rows];
    let mut starts = [0; 10];
    for (index, len) in lens.into_iter().enumerate() {
        starts[index + 1] = (starts[index] + len).next_multiple_of(WORDS);
    }
    starts
}

/// The pinned side, the device side, and what was packed last.
#[derive(Debug)]
pub(super) struct Packing {
    host: Pinned<u32>,
    device: DeviceSlice<u32>,
    /// The last copy is over.
    copied: Event,
}

impl Packing {
    pub(super) fn new(
        device: &Device,
        arena: &mut Arena,
        limits: &StepLimits,
    ) -> Result<Self, overnight_kernels::Error> {
        let (tokens, rows) = (limits.num_tokens as usize, limits.num_rows as usize);
        let blocks = rows * limits.blocks_per_row as usize;
        // Tiles are at most one a token.
        let words = 6 * tokens + 5 * (rows + 1) + blocks + 10 * WORDS;
        Ok(Self {
            host: Pinned::new(device, words)?,
            device: arena.take("step arrays", words)?,
            copied: Event::new(device)?,
        })
    }

    /// The device arrays of a layout.
    pub(super) fn view(&self, layout: Layout) -> StepView {
        let at = starts(&layout);
        let [tokens, rows, tiles, logits] =
            [layout.num_tokens, layout.num_rows, layout.num_tiles, layout.num_logits].map(|num| num as usize);
        let part = |index: usize, len: usize| self.device.slice(at[index], len);
        StepView {
            layout,
            token_ids: part(0, tokens),
            positions: part(1, tokens),
            slot_mapping: part(2, tokens).cast(),
            context_lens: part(3, rows),
            cu_seqlens: part(4, rows + 1),
            tiles: part(5, 2 * tiles),
            logits_tokens: part(6, logits),
            table_starts: part(7, rows + 1),
            feedback: part(8, 2 * rows),
            blocks: part(9, self.device.len() - at[9]),
            has_logits: false,
        }
    }

    /// Packs a step and starts its copy. Where the layout has more rows, a step of decode rows is filled up
    /// with rows of one token on `dummy_block` that write nothing.
    pub(super) fn pack(
        &mut self,
        stream: &Stream,
        step: &StepInput<'_>,
        layout: Layout,
        tiles: &[[u32; 2]],
        dummy_block: u32,
    ) -> Result<StepView, Error> {
        self.copied.synchronize().map_err(during("could not copy a step"))?;
        let at = starts(&layout);
        let num_blocks = step.block_tables.len() + (layout.num_rows as usize - step.context_lens.len());
        let words = at[9] + num_blocks;
        if words > self.host.len() {
            return Err(Error::Step(format!("a step of {words} words; memory for {} was set aside", self.host.len())));
        }
        let host = self.host.as_mut_slice();
        let [tokens, rows, logits] = [layout.num_tokens, layout.num_rows, layout.num_logits].map(|num| num as usize);
        let (num_tokens, num_rows) = (step.token_ids.len() as u32, step.context_lens.len());
        // Copies an array and counts up from `padding` by `step` to the end of its region.
        let mut put = |index: usize, len: usize, values: &[u32], padding: u32, step: u32| {
            let (copied, padded) = host[at[index]..at[index] + len].split_at_mut(values.len());
            copied.copy_from_slice(values);
            for (word, count) in padded.iter_mut().zip(0..) {
                *word = padding.wrapping_add(step * count);
            }
        };
        put(0, tokens, step.token_ids, 0, 0);
        put(1, tokens, step.positions, 0, 0);
        put(2, tokens, step.slot_mapping, PAD_SLOT as u32, 0);
        put(3, rows, step.context_lens, 1, 0);
        // Padding rows have one token and one block each.
        put(4, rows + 1, step.cu_seqlens, num_tokens + 1, 1);
        put(5, 2 * layout.num_tiles as usize, tiles.as_flattened(), 0, 0);
        put(6, logits, step.logits_tokens, num_tokens, 1);
        put(7, rows + 1, step.block_table_starts, step.block_tables.len() as u32 + 1, 1);
        put(9, num_blocks, step.block_tables, dummy_block, 0);
        for (pair, feedback) in host[at[8]..at[9]].chunks_exact_mut(2).zip(step.feedback) {
            pair.copy_from_slice(&[feedback.token, feedback.choice]);
        }
        debug_assert!(num_rows <= rows && step.feedback.len() <= rows, "the layout holds the step");
        stream.upload(self.device, &self.host, words).map_err(during("could not copy a step"))?;
        self.copied.record(stream).map_err(during("could not copy a step"))?;
        Ok(self.view(layout))
    }
}

/// Rows of one token at the beginning of a step.
pub(super) fn num_decode_rows(step: &StepInput<'_>) -> u32 {
    step.cu_seqlens.windows(2).take_while(|pair| pair[1] - pair[0] == 1).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_follow_each_other_without_overlap_and_from_counts_alone() {
        let layout = Layout { num_tokens: 5, num_rows: 3, num_decode: 1, num_tiles: 2, num_logits: 3 };
        let at = starts(&layout);
        for (index, len) in [5, 5, 5, 3, 4, 4, 3, 4, 6].into_iter().enumerate() {
            assert!(at[index] + len <= at[index + 1], "array {index} of {at:?}");
            assert!(at[index].is_multiple_of(WORDS));
        }
    }

    #[test]
    fn decode_rows_are_those_of_one_token_at_the_beginning() {
        let step = |cu_seqlens: &'static [u32]| StepInput {
            token_ids: &[],
            positions: &[],
            slot_mapping: &[],
            cu_seqlens,
            context_lens: &[],
            block_tables: &[],
            block_table_starts: &[],
            logits_tokens: &[],
            feedback: &[],
        };
        assert_eq!(num_decode_rows(&step(&[0])), 0);
        assert_eq!(num_decode_rows(&step(&[0, 1, 2, 7, 8])), 2);
        assert_eq!(num_decode_rows(&step(&[0, 3])), 0);
    }
}
