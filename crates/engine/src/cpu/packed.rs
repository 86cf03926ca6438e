//! Weight matrices in the order in which the CPU kernels read them.
//!
//! Rows (outputs) are taken eight at a time, so that a vector register holds one element of
//! eight outputs and no sum across a register is ever needed: element `(row, column)` of a dense
//! matrix lies at `[row / 8][column][row % 8]`; of a quantized one, columns go in pairs,
//! `[row / 8][column / 2][row % 8][column % 2]`. Rows beyond the last are zeros.
//! Quantized values keep their file's exact value: an integer of 8 bits times a scale, plus, for
//! Q4_K, a minimum, both of a block of 32 or 16 columns. Formats: ggml `block_q5_0`, `block_q8_0`,
//! `block_q4_K` and `block_q6_K` (GGUF specification).

use half::{bf16, f16};
use rayon::prelude::*;

/// Outputs that lie together.
pub(crate) const LANES: usize = 8;

/// A weight matrix `[rows, cols]`.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Data,
}

/// The elements, by type.
#[derive(Debug)]
pub(crate) enum Data {
    F32(Vec<f32>),
    /// bf16 bits.
    BF16(Vec<u16>),
    /// f16 bits.
    F16(Vec<u16>),
    Quant(Quant),
}

/// Integers of 8 bits with scales by block.
#[derive(Debug)]
pub(crate) struct Quant {
    pub(crate) quants: Vec<i8>,
    /// `[row / 8][block][row % 8]`.
    pub(crate) scales: Scales,
    pub(crate) kind: QuantKind,
}

/// Scales, as exact as the file's.
#[derive(Debug)]
pub(crate) enum Scales {
    /// f16 bits.
    Half(Vec<u16>),
    Full(Vec<f32>),
    /// Scales and (negated) minima.
    WithMins(Vec<f32>, Vec<f32>),
}

/// Which kernel reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuantKind {
    /// Blocks of 32, f16 scales: Q5_0, Q8_0.
    Half32,
    /// Blocks of 32, f32 scales and minima: Q4_K.
    Mins32,
    /// Blocks of 16, f32 scales: Q6_K.
    Full16,
}

impl QuantKind {
    pub(crate) fn block(self) -> usize {
        match self {
            Self::Half32 | Self::Mins32 => 32,
            Self::Full16 => 16,
        }
    }
}

/// A file format that [`Packed::from_blocks`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocks {
    Q5_0,
    Q8_0,
    Q4K,
    Q6K,
}

impl Packed {
    /// Bytes that a pass over the matrix reads.
    pub(crate) fn bytes(&self) -> u64 {
        let scales = |s: &Scales| match s {
            Scales::Half(v) => v.len() * 2,
            Scales::Full(v) => v.len() * 4,
            Scales::WithMins(a, b) => (a.len() + b.len()) * 4,
        };
        (match &self.data {
            Data::F32(v) => v.len() * 4,
            Data::BF16(v) | Data::F16(v) => v.len() * 2,
            Data::Quant(q) => q.quants.len() + scales(&q.scales),
        }) as u64
    }

    /// Packs f32 values, `[rows, cols]` row-major, read through `row`.
    pub(crate) fn from_f32(rows: usize, cols: usize, row: impl Fn(usize, usize) -> f32 + Sync) -> Self {
        Self { rows, cols, data: Data::F32(pack_dense(rows, cols, 0.0, row)) }
    }

    /// Packs bf16 bits, `[rows, cols]`, read through `element(row, col)`.
    pub(crate) fn from_bf16(rows: usize, cols: usize, element: impl Fn(usize, usize) -> u16 + Sync) -> Self {
        Self { rows, cols, data: Data::BF16(pack_dense(rows, cols, 0, element)) }
    }

    /// Packs f16 bits, `[rows, cols]`, read through `element(row, col)`.
    pub(crate) fn from_f16(rows: usize, cols: usize, element: impl Fn(usize, usize) -> u16 + Sync) -> Self {
        Self { rows, cols, data: Data::F16(pack_dense(rows, cols, 0, element)) }
    }

    /// Packs quantized rows: `bytes` holds `rows` rows of whole blocks.
    pub(crate) fn from_blocks(format: Blocks, rows: usize, cols: usize, bytes: &[u8]) -> Self {
        let row_bytes = bytes.len() / rows;
        let kind = match format {
            Blocks::Q5_0 | Blocks::Q8_0 => QuantKind::Half32,
            Blocks::Q4K => QuantKind::Mins32,
            Blocks::Q6K => QuantKind::Full16,
        };
        let groups = rows.div_ceil(LANES);
        let blocks = cols / kind.block();
        let mut quants = vec![0i8; groups * LANES * cols];
        let mut scales = vec![0f32; groups * LANES * blocks];
        let mut mins = vec![0f32; if kind == QuantKind::Mins32 { scales.len() } else { 0 }];
        let mins_chunk = if mins.is_empty() { 1 } else { LANES * blocks };
        if mins.is_empty() {
            mins = vec![0.0; groups];
        }
        quants
            .par_chunks_mut(LANES * cols)
            .zip(scales.par_chunks_mut(LANES * blocks))
            .zip(mins.par_chunks_mut(mins_chunk))
            .enumerate()
            .for_each(|(group, ((quants, scales), mins))| {
                let mut row = Row { quants: vec![0; cols], scales: vec![0.0; blocks], mins: vec![0.0; blocks] };
                for lane in 0..LANES.min(rows - group * LANES) {
                    let from = (group * LANES + lane) * row_bytes;
                    row.read(format, &bytes[from..from + row_bytes]);
                    for (pair, values) in row.quants.chunks_exact(2).enumerate() {
                        quants[pair * 2 * LANES + 2 * lane] = values[0];
                        quants[pair * 2 * LANES + 2 * lane + 1] = values[1];
                    }
                    for block in 0..blocks {
                        scales[block * LANES + lane] = row.scales[block];
                        if kind == QuantKind::Mins32 {
                            mins[block * LANES + lane] = row.mins[block];
                        }
                    }
                }
            });
        let scales = match kind {
            // They came from f16, so nothing is lost.
            QuantKind::Half32 => Scales::Half(scales.iter().map(|&s| f16::from_f32(s).to_bits()).collect()),
            QuantKind::Mins32 => Scales::WithMins(scales, mins),
            QuantKind::Full16 => Scales::Full(scales),
        };
        Self { rows, cols, data: Data::Quant(Quant { quants, scales, kind }) }
    }

    /// Writes row `row` as f32 to `out` `[cols]`.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let (group, lane) = (row / LANES, row % LANES);
        let dense = |col: usize| (group * self.cols + col) * LANES + lane;
        for (col, out) in out.iter_mut().enumerate() {
            *out = match &self.data {
                Data::F32(v) => v[dense(col)],
                Data::BF16(v) => bf16::from_bits(v[dense(col)]).to_f32(),
                Data::F16(v) => f16::from_bits(v[dense(col)]).to_f32(),
                Data::Quant(q) => {
                    let quant = f32::from(q.quants[(group * self.cols + col / 2 * 2) * LANES + 2 * lane + col % 2]);
                    let block = q.kind.block();
                    let scale = (group * (self.cols / block) + col / block) * LANES + lane;
                    match &q.scales {
                        Scales::Half(s) => f16::from_bits(s[scale]).to_f32() * quant,
                        Scales::Full(s) => s[scale] * quant,
                        Scales::WithMins(s, m) => s[scale].mul_add(quant, m[scale]),
                    }
                }
            };
        }
    }
}

fn pack_dense<T: Copy + Send + Sync>(
    rows: usize,
    cols: usize,
    zero: T,
    element: impl Fn(usize, usize) -> T + Sync,
) -> Vec<T> {
    let mut packed = vec![zero; rows.div_ceil(LANES) * LANES * cols];
    packed.par_chunks_mut(LANES * cols).enumerate().for_each(|(group, chunk)| {
        for lane in 0..LANES.min(rows - group * LANES) {
            for col in 0..cols {
                chunk[col * LANES + lane] = element(group * LANES + lane, col);
            }
        }
    });
    packed
}

/// One row, unpacked: value = scale * quant + min.
struct Row {
    quants: Vec<i8>,
    scales: Vec<f32>,
    mins: Vec<f32>,
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

impl Row {
    fn read(&mut self, format: Blocks, bytes: &[u8]) {
        match format {
            Blocks::Q8_0 => self.read_q8_0(bytes),
            Blocks::Q5_0 => self.read_q5_0(bytes),
            Blocks::Q4K => self.read_q4_k(bytes),
            Blocks::Q6K => self.read_q6_k(bytes),
        }
    }

    fn read_q8_0(&mut self, bytes: &[u8]) {
        for (index, block) in bytes.chunks_exact(34).enumerate() {
            self.scales[index] = half_at(block, 0);
            for (quant, &byte) in self.quants[index * 32..].iter_mut().zip(&block[2..]) {
                *quant = byte as i8;
            }
        }
    }

    /// Scale, 32 fifth bits, then low halves of elements 0…15 and high halves of 16…31.
    fn read_q5_0(&mut self, bytes: &[u8]) {
        for (index, block) in bytes.chunks_exact(22).enumerate() {
            self.scales[index] = half_at(block, 0);
            let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
            let out = &mut self.quants[index * 32..index * 32 + 32];
            for j in 0..16 {
                let byte = block[6 + j];
                let bit = |k: usize| ((fifth >> k & 1) << 4) as u8;
                out[j] = ((byte & 15) | bit(j)) as i8 - 16;
                out[j + 16] = ((byte >> 4) | bit(j + 16)) as i8 - 16;
            }
        }
    }

    /// Scale and minimum of 256, twelve bytes of 6-bit scales and minima, 128 bytes of 4 bits.
    fn read_q4_k(&mut self, bytes: &[u8]) {
        for (index, block) in bytes.chunks_exact(144).enumerate() {
            let (scale, min) = (half_at(block, 0), half_at(block, 2));
            let six = &block[4..16];
            for sub in 0..8 {
                let (s, m) = if sub < 4 {
                    (six[sub] & 63, six[sub + 4] & 63)
                } else {
                    ((six[sub + 4] & 15) | (six[sub - 4] >> 6 << 4), (six[sub + 4] >> 4) | (six[sub] >> 6 << 4))
                };
                self.scales[index * 8 + sub] = scale * f32::from(s);
                self.mins[index * 8 + sub] = -(min * f32::from(m));
                let nibbles = &block[16 + sub / 2 * 32..];
                let out = &mut self.quants[index * 256 + sub * 32..][..32];
                for (quant, byte) in out.iter_mut().zip(nibbles) {
                    *quant = (if sub % 2 == 0 { byte & 15 } else { byte >> 4 }) as i8;
                }
            }
        }
    }

    /// 128 bytes of low 4 bits, 64 of high 2 bits, sixteen scales, scale of 256.
    fn read_q6_k(&mut self, bytes: &[u8]) {
        for (index, block) in bytes.chunks_exact(210).enumerate() {
            let scale = half_at(block, 208);
            for sub in 0..16 {
                self.scales[index * 16 + sub] = scale * f32::from(block[192 + sub] as i8);
            }
            for part in 0..2 {
                let (low, high) = (&block[part * 64..], &block[128 + part * 32..]);
                let out = &mut self.quants[index * 256 + part * 128..];
                for j in 0..32 {
                    let two = |shift: u32| (high[j] >> shift & 3) << 4;
                    out[j] = (low[j] & 15 | two(0)) as i8 - 32;
                    out[j + 32] = (low[j + 32] & 15 | two(2)) as i8 - 32;
                    out[j + 64] = (low[j] >> 4 | two(4)) as i8 - 32;
                    out[j + 96] = (low[j + 32] >> 4 | two(6)) as i8 - 32;
                }
            }
        }
    }
}
