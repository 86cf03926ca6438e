//! Dot products of 8-bit weights with activations of 16 bits.
//!
//! `out[t, n] = scale[t] * sum over blocks b of (ws[n, b] * isum[t, n, b] + wm[n, b] * asum[t, b])`
//! with `isum` the exact integer sum over a block of weight times activation and `asum` the sum
//! of a block's activations; the blocks are added in rising order by fused multiply-adds.

use half::f16;

use crate::cpu::packed::{LANES, Quant, QuantKind, Scales};
use crate::cpu::pool::Parts;
use crate::cpu::simd::Isa;

/// Activations, quantized: value = scale of the row × integer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acts<'a> {
    /// `[rows, cols]`.
    pub(crate) quants: &'a [i16],
    /// `[rows]`.
    pub(crate) scales: &'a [f32],
    /// `[rows, cols / 32]`: sums of the integers of a block of 32.
    pub(crate) sums: &'a [f32],
    pub(crate) cols: usize,
}

/// Rectangle of the output, and where it goes: `out[row * stride + column]`.
pub(crate) struct Target<'a, 'b> {
    pub(crate) out: &'a Parts<'b, f32>,
    pub(crate) stride: usize,
    /// Column of the matrix's first output.
    pub(crate) column: usize,
    /// Outputs of the matrix.
    pub(crate) width: usize,
}

impl Target<'_, '_> {
    /// Writes the outputs of one group for one row.
    ///
    /// # Safety
    /// No other task writes this row and group.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, row: usize, group: usize, values: [f32; LANES]) {
        let first = group * LANES;
        let n = LANES.min(self.width - first);
        let start = row * self.stride + self.column + first;
        // SAFETY: the caller's promise; the bounds are checked by `slice`.
        let out = unsafe { self.out.slice(start..start + n) };
        out.copy_from_slice(&values[..n]);
    }
}

/// Computes the outputs of `groups` for `rows`.
///
/// # Safety
/// No other task writes these rows and groups of the target.
pub(crate) unsafe fn run(
    isa: Isa,
    weights: &Quant,
    acts: Acts<'_>,
    rows: std::ops::Range<usize>,
    groups: std::ops::Range<usize>,
    target: &Target<'_, '_>,
) {
    let blocks = acts.cols / weights.kind.block();
    assert!(acts.cols.is_multiple_of(weights.kind.block()) && groups.end <= target.width.div_ceil(LANES));
    assert!(weights.quants.len() >= groups.end * LANES * acts.cols);
    assert!(acts.quants.len() >= rows.end * acts.cols && acts.scales.len() >= rows.end);
    let scales = match &weights.scales {
        Scales::Half(s) => s.len(),
        Scales::Full(s) => s.len(),
        Scales::WithMins(s, m) => {
            assert!(acts.cols.is_multiple_of(32) && acts.sums.len() >= rows.end * (acts.cols / 32));
            s.len().min(m.len())
        }
    };
    assert!(scales >= groups.end * blocks * LANES);
    let job = Job { weights, acts, blocks, target };
    // SAFETY: the assertions bound every index that the kernels form, `Isa` names only what
    // the processor has, and the caller's promise covers the writes.
    unsafe {
        match isa {
            Isa::Plain => plain(&job, rows, groups),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => match weights.kind {
                QuantKind::Half32 => avx2::run::<16, true, false>(&job, rows, groups),
                QuantKind::Mins32 => avx2::run::<16, false, true>(&job, rows, groups),
                QuantKind::Full16 => avx2::run::<8, false, false>(&job, rows, groups),
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Vnni => match weights.kind {
                QuantKind::Half32 => vnni::run::<16, true, false>(&job, rows, groups),
                QuantKind::Mins32 => vnni::run::<16, false, true>(&job, rows, groups),
                QuantKind::Full16 => vnni::run::<8, false, false>(&job, rows, groups),
            },
        }
    }
}

struct Job<'a, 'b> {
    weights: &'a Quant,
    acts: Acts<'a>,
    /// Blocks in a row of weights.
    blocks: usize,
    target: &'a Target<'a, 'b>,
}

/// # Safety
/// As [`run`].
unsafe fn plain(job: &Job<'_, '_>, rows: std::ops::Range<usize>, groups: std::ops::Range<usize>) {
    let (acts, block) = (job.acts, job.weights.kind.block());
    for group in groups {
        let quants = &job.weights.quants[group * LANES * acts.cols..][..LANES * acts.cols];
        for row in rows.clone() {
            let x = &acts.quants[row * acts.cols..][..acts.cols];
            let mut sums = [0f32; LANES];
            for b in 0..job.blocks {
                let mut isum = [0i32; LANES];
                for k in b * block..(b + 1) * block {
                    for (lane, isum) in isum.iter_mut().enumerate() {
                        *isum += i32::from(quants[k / 2 * 2 * LANES + 2 * lane + k % 2]) * i32::from(x[k]);
                    }
                }
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let at = (group * job.blocks + b) * LANES + lane;
                    let isum = isum[lane] as f32;
                    *sum = match &job.weights.scales {
                        Scales::Half(s) => isum.mul_add(f16::from_bits(s[at]).to_f32(), *sum),
                        Scales::Full(s) => isum.mul_add(s[at], *sum),
                        Scales::WithMins(s, m) => {
                            let asum = acts.sums[row * (acts.cols / 32) + b];
                            m[at].mul_add(asum, isum.mul_add(s[at], *sum))
                        }
                    };
                }
            }
            // SAFETY: the caller's promise.
            unsafe { job.target.put(row, group, sums.map(|sum| sum * acts.scales[row])) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! kernels {
    ($module:ident, $features:literal, $dot:ident) => {
        mod $module {
            use std::arch::x86_64::*;
            use std::ops::Range;

            use super::{Job, LANES, Scales};

            /// # Safety
            /// As [`super::run`], and the processor has the features of this module.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn run<const PAIRS: usize, const HALF: bool, const MINS: bool>(
                job: &Job<'_, '_>,
                rows: Range<usize>,
                groups: Range<usize>,
            ) {
                // SAFETY: rows and groups of each tile lie within those of the caller.
                unsafe {
                    if rows.len() == 1 {
                        let mut group = groups.start;
                        while group + 4 <= groups.end {
                            tile::<PAIRS, HALF, MINS, 1, 4>(job, rows.start, group);
                            group += 4;
                        }
                        while group < groups.end {
                            tile::<PAIRS, HALF, MINS, 1, 1>(job, rows.start, group);
                            group += 1;
                        }
                        return;
                    }
                    for group in groups {
                        let mut row = rows.start;
                        while row + 6 <= rows.end {
                            tile::<PAIRS, HALF, MINS, 6, 1>(job, row, group);
                            row += 6;
                        }
                        match rows.end - row {
                            1 => tile::<PAIRS, HALF, MINS, 1, 1>(job, row, group),
                            2 => tile::<PAIRS, HALF, MINS, 2, 1>(job, row, group),
                            3 => tile::<PAIRS, HALF, MINS, 3, 1>(job, row, group),
                            4 => tile::<PAIRS, HALF, MINS, 4, 1>(job, row, group),
                            5 => tile::<PAIRS, HALF, MINS, 5, 1>(job, row, group),
                            _ => {}
                        }
                    }
                }
            }

            #[inline]
            #[target_feature(enable = $features)]
            fn multiply_add(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
                $dot!(sum, a, b)
            }

            /// `R` rows by `G` groups of eight outputs, kept in registers.
            ///
            /// # Safety
            /// As [`super::run`]: `row..row + R` and `group..group + G` are within bounds.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn tile<const PAIRS: usize, const HALF: bool, const MINS: bool, const R: usize, const G: usize>(
                job: &Job<'_, '_>,
                row: usize,
                group: usize,
            ) {
                let acts = job.acts;
                let mut sums = [[_mm256_setzero_ps(); R]; G];
                // SAFETY: `run` asserted that quants, scales, minima and activations reach the
                // last group, block and row; the pointers below stay within those.
                unsafe {
                    let quants = job.weights.quants.as_ptr();
                    let mut x = [acts.quants.as_ptr().add(row * acts.cols); R];
                    for r in 1..R {
                        x[r] = x[r - 1].add(acts.cols);
                    }
                    for b in 0..job.blocks {
                        let mut isums = [[_mm256_setzero_si256(); R]; G];
                        for pair in 0..PAIRS {
                            let mut wide = [_mm256_setzero_si256(); G];
                            for g in 0..G {
                                let w = quants.add(((group + g) * acts.cols + (b * PAIRS + pair) * 2) * LANES);
                                wide[g] = _mm256_cvtepi8_epi16(_mm_loadu_si128(w.cast()));
                            }
                            for r in 0..R {
                                let both = x[r].add((b * PAIRS + pair) * 2).cast::<i32>().read_unaligned();
                                let both = _mm256_set1_epi32(both);
                                for g in 0..G {
                                    isums[g][r] = multiply_add(isums[g][r], wide[g], both);
                                }
                            }
                        }
                        for g in 0..G {
                            let at = ((group + g) * job.blocks + b) * LANES;
                            let (scale, min) = match &job.weights.scales {
                                Scales::Half(s) if HALF => {
                                    (_mm256_cvtph_ps(_mm_loadu_si128(s.as_ptr().add(at).cast())), _mm256_setzero_ps())
                                }
                                Scales::WithMins(s, m) if MINS => {
                                    (_mm256_loadu_ps(s.as_ptr().add(at)), _mm256_loadu_ps(m.as_ptr().add(at)))
                                }
                                Scales::Full(s) if !HALF && !MINS => {
                                    (_mm256_loadu_ps(s.as_ptr().add(at)), _mm256_setzero_ps())
                                }
                                _ => unreachable!("the kind of a matrix says which scales it has"),
                            };
                            for r in 0..R {
                                sums[g][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isums[g][r]), scale, sums[g][r]);
                                if MINS {
                                    let asum = *acts.sums.as_ptr().add((row + r) * (acts.cols / 32) + b);
                                    sums[g][r] = _mm256_fmadd_ps(min, _mm256_set1_ps(asum), sums[g][r]);
                                }
                            }
                        }
                    }
                    for g in 0..G {
                        for r in 0..R {
                            let scale = _mm256_set1_ps(*acts.scales.as_ptr().add(row + r));
                            let mut values = [0f32; LANES];
                            _mm256_storeu_ps(values.as_mut_ptr(), _mm256_mul_ps(sums[g][r], scale));
                            job.target.put(row + r, group + g, values);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! madd_then_add {
    ($sum:expr, $a:expr, $b:expr) => {
        _mm256_add_epi32($sum, _mm256_madd_epi16($a, $b))
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! dot_of_vnni {
    ($sum:expr, $a:expr, $b:expr) => {
        _mm256_dpwssd_epi32($sum, $a, $b)
    };
}

#[cfg(target_arch = "x86_64")]
kernels!(avx2, "avx2,fma,f16c", madd_then_add);
#[cfg(target_arch = "x86_64")]
kernels!(vnni, "avx2,fma,f16c,avx512vnni,avx512vl", dot_of_vnni);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::packed::{Blocks, Data, Packed};
    use crate::cpu::simd::vector;

    /// Rows of blocks with random bytes, and scales of a sensible size.
    fn packed(format: Blocks, rows: usize, cols: usize) -> Packed {
        let (elements, len, halves): (usize, usize, &[usize]) = match format {
            Blocks::Q5_0 => (32, 22, &[0]),
            Blocks::Q8_0 => (32, 34, &[0]),
            Blocks::Q4K => (256, 144, &[0, 2]),
            Blocks::Q6K => (256, 210, &[208]),
        };
        let mut state = 7u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let mut bytes: Vec<u8> = (0..rows * cols / elements * len).map(|_| random()).collect();
        for block in bytes.chunks_exact_mut(len) {
            for &at in halves {
                let scale = f16::from_f32(0.01 + f32::from(block[5]) / 1e4);
                block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        Packed::from_blocks(format, rows, cols, &bytes)
    }

    fn product(isa: Isa, matrix: &Packed, x: &[f32], split: usize) -> Vec<f32> {
        let (cols, rows) = (matrix.cols, x.len() / matrix.cols);
        let (mut quants, mut sums) = (vec![0; x.len()], vec![0.0; x.len() / 32]);
        let scales: Vec<f32> = (0..rows)
            .map(|t| {
                let (q, s) = (&mut quants[t * cols..][..cols], &mut sums[t * cols / 32..][..cols / 32]);
                vector::quantize(isa, q, s, &x[t * cols..][..cols])
            })
            .collect();
        let mut out = vec![f32::NAN; rows * matrix.rows];
        let parts = Parts::new(&mut out);
        let target = Target { out: &parts, stride: matrix.rows, column: 0, width: matrix.rows };
        let acts = Acts { quants: &quants, scales: &scales, sums: &sums, cols };
        let Data::Quant(weights) = &matrix.data else { panic!("quantized") };
        for first in (0..rows).step_by(split) {
            // SAFETY: one thread.
            unsafe {
                run(isa, weights, acts, first..(first + split).min(rows), 0..matrix.rows.div_ceil(LANES), &target);
            }
        }
        out
    }

    #[test]
    fn products_are_near_exact_and_the_same_bits_on_every_path() {
        for format in [Blocks::Q5_0, Blocks::Q8_0, Blocks::Q4K, Blocks::Q6K] {
            let matrix = packed(format, 37, 512);
            let x: Vec<f32> = (0..13 * 512).map(|i| ((i * 31 % 97) as f32 - 48.0) / 20.0).collect();
            let got = product(Isa::Plain, &matrix, &x, 13);
            let mut row = vec![0.0; 512];
            for n in 0..37 {
                matrix.read_row(n, &mut row);
                for t in 0..13 {
                    let terms = || row.iter().zip(&x[t * 512..]).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let (want, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                    let error = (f64::from(got[t * 37 + n]) - want).abs();
                    assert!(error <= 1e-4 * size, "{format:?} [{t}, {n}]: off by {error} of {size}");
                }
            }
            for isa in Isa::available() {
                for split in [1, 5, 13] {
                    assert_eq!(product(isa, &matrix, &x, split), got, "{format:?} {isa:?} in rows of {split}");
                }
            }
        }
    }
}
