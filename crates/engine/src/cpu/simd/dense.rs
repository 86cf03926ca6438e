//! Products of f32, f16 and bf16 weights with f32 activations.
//!
//! `out[t, n] = sum over k of x[t, k] * w[n, k]`, by fused multiply-adds in rising order of k.

use half::{bf16, f16};

use crate::cpu::packed::{Data, LANES};
use crate::cpu::simd::Isa;
use crate::cpu::simd::quant::Target;

/// Computes the outputs of `groups` for `rows` of `x` `[rows, cols]`.
///
/// # Safety
/// No other task writes these rows and groups of the target.
pub(crate) unsafe fn run(
    isa: Isa,
    weights: &Data,
    x: &[f32],
    cols: usize,
    rows: std::ops::Range<usize>,
    groups: std::ops::Range<usize>,
    target: &Target<'_, '_>,
) {
    assert!(x.len() >= rows.end * cols && groups.end <= target.width.div_ceil(LANES));
    let len = match weights {
        Data::F32(w) => w.len(),
        Data::BF16(w) | Data::F16(w) => w.len(),
        Data::Quant(_) => unreachable!("quantized weights have their own kernel"),
    };
    assert!(len >= groups.end * LANES * cols);
    // SAFETY: the assertions bound every index that the kernels form, `Isa` names only what the
    // processor has, and the caller's promise covers the writes.
    unsafe {
        match (isa, weights) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2 | Isa::Vnni, Data::F32(w)) => avx2::run::<avx2::F32>(w.as_ptr(), x, cols, rows, groups, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2 | Isa::Vnni, Data::BF16(w)) => {
                avx2::run::<avx2::BF16>(w.as_ptr(), x, cols, rows, groups, target)
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2 | Isa::Vnni, Data::F16(w)) => avx2::run::<avx2::F16>(w.as_ptr(), x, cols, rows, groups, target),
            (_, Data::F32(w)) => plain(|at| w[at], x, cols, rows, groups, target),
            (_, Data::BF16(w)) => plain(|at| bf16::from_bits(w[at]).to_f32(), x, cols, rows, groups, target),
            (_, Data::F16(w)) => plain(|at| f16::from_bits(w[at]).to_f32(), x, cols, rows, groups, target),
            (_, Data::Quant(_)) => unreachable!("quantized weights have their own kernel"),
        }
    }
}

/// # Safety
/// As [`run`].
unsafe fn plain(
    w: impl Fn(usize) -> f32,
    x: &[f32],
    cols: usize,
    rows: std::ops::Range<usize>,
    groups: std::ops::Range<usize>,
    target: &Target<'_, '_>,
) {
    for group in groups {
        for row in rows.clone() {
            let mut sums = [0f32; LANES];
            for (k, &x) in x[row * cols..][..cols].iter().enumerate() {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    *sum = x.mul_add(w((group * cols + k) * LANES + lane), *sum);
                }
            }
            // SAFETY: the caller's promise.
            unsafe { target.put(row, group, sums) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;
    use std::ops::Range;

    use super::{LANES, Target};

    /// How eight weights become eight f32.
    pub(super) trait Element {
        type Bits;
        /// # Safety
        /// Eight elements can be read at `at`, and the processor has AVX2 and F16C.
        unsafe fn load(at: *const Self::Bits) -> __m256;
    }

    pub(super) struct F32;
    pub(super) struct BF16;
    pub(super) struct F16;

    impl Element for F32 {
        type Bits = f32;
        #[inline(always)]
        unsafe fn load(at: *const f32) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_loadu_ps(at) }
        }
    }

    impl Element for BF16 {
        type Bits = u16;
        #[inline(always)]
        unsafe fn load(at: *const u16) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())))) }
        }
    }

    impl Element for F16 {
        type Bits = u16;
        #[inline(always)]
        unsafe fn load(at: *const u16) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
        }
    }

    /// # Safety
    /// As [`super::run`], and the processor has AVX2, FMA and F16C.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn run<E: Element>(
        w: *const E::Bits,
        x: &[f32],
        cols: usize,
        rows: Range<usize>,
        groups: Range<usize>,
        target: &Target<'_, '_>,
    ) {
        let mut group = groups.start;
        // SAFETY: rows and groups of each tile lie within those of the caller.
        unsafe {
            if rows.len() == 1 {
                while group + 8 <= groups.end {
                    tile::<E, 1, 8>(w, x, cols, rows.start, group, target);
                    group += 8;
                }
            } else {
                while group + 2 <= groups.end {
                    let mut row = rows.start;
                    while row + 6 <= rows.end {
                        tile::<E, 6, 2>(w, x, cols, row, group, target);
                        row += 6;
                    }
                    while row < rows.end {
                        tile::<E, 1, 2>(w, x, cols, row, group, target);
                        row += 1;
                    }
                    group += 2;
                }
            }
            for group in group..groups.end {
                for row in rows.clone() {
                    tile::<E, 1, 1>(w, x, cols, row, group, target);
                }
            }
        }
    }

    /// # Safety
    /// As [`super::run`]: `row..row + R` and `group..group + G` are within bounds.
    #[expect(clippy::needless_range_loop, reason = "r and g number registers of a tile")]
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn tile<E: Element, const R: usize, const G: usize>(
        w: *const E::Bits,
        x: &[f32],
        cols: usize,
        row: usize,
        group: usize,
        target: &Target<'_, '_>,
    ) {
        let mut sums = [[_mm256_setzero_ps(); R]; G];
        // SAFETY: `run` asserted that weights and activations reach the last group and row.
        unsafe {
            let (x, w) = (x.as_ptr().add(row * cols), w.add(group * cols * LANES));
            for k in 0..cols {
                let mut wide = [_mm256_setzero_ps(); G];
                for g in 0..G {
                    wide[g] = E::load(w.add((g * cols + k) * LANES));
                }
                for r in 0..R {
                    let x = _mm256_set1_ps(*x.add(r * cols + k));
                    for g in 0..G {
                        sums[g][r] = _mm256_fmadd_ps(x, wide[g], sums[g][r]);
                    }
                }
            }
            for g in 0..G {
                for r in 0..R {
                    let mut values = [0f32; LANES];
                    _mm256_storeu_ps(values.as_mut_ptr(), sums[g][r]);
                    target.put(row + r, group + g, values);
                }
            }
        }
    }
}
