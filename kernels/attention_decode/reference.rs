//! The definition of the plan, and of decode attention by that of attention.

use crate::attention_prefill::reference::{Inputs, attention};

/// A chunk of a row as the plan lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chunk {
    /// The row.
    pub row: u32,
    /// First visible token.
    pub begin: u32,
    /// One past the last.
    pub end: u32,
    /// Its place in the row.
    pub index: u32,
    /// Chunks of the row.
    pub num_chunks: u32,
}

/// The chunks of a row: cut at multiples of `chunk`, a tail of less than half a chunk left with
/// the chunk before it.
pub fn cut(row: u32, context_len: u32, chunk: u32, window: u32) -> Vec<Chunk> {
    let begin = if window == 0 { 0 } else { context_len.saturating_sub(window) };
    let mut borders: Vec<u32> = (begin + 1..context_len).filter(|token| token % chunk == 0).collect();
    if borders.last().is_some_and(|&last| context_len - last < chunk / 2) {
        borders.pop();
    }
    let num_chunks = borders.len() as u32 + 1;
    let begins = std::iter::once(begin).chain(borders.iter().copied());
    let ends = borders.iter().copied().chain(std::iter::once(context_len));
    (0..).zip(begins.zip(ends)).map(|(index, (begin, end))| Chunk { row, begin, end, index, num_chunks }).collect()
}

/// Writes `out [num_rows, out_width]`; row r has token r as its one query.
pub fn decode(out: &mut [f32], inputs: &Inputs<'_>) {
    let one_query_a_row: Vec<u32> = (0..=inputs.context_lens.len() as u32).collect();
    attention(out, &Inputs { cu_seqlens: &one_query_a_row, ..*inputs });
}
