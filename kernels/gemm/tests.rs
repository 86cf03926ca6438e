//! Device products against plain sums, at odd and real sizes.

use super::*;
use crate::memory::Buffer;
use crate::testing::{Bed, bed, search_paths};

#[test]
fn buckets_never_shrink_m_and_rise_with_it() {
    let mut last = 0;
    for m in 1..=20_000 {
        let at = bucket(m);
        assert!(at >= m && at >= last, "bucket({m}) = {at}, before {last}");
        assert_eq!(bucket(at), at, "a bucket is its own bucket");
        last = at;
    }
    assert_eq!([1, 2, 3, 9, 256, 257, 1025].map(bucket), [1, 2, 4, 16, 256, 320, 2048]);
}

/// Numbers in -1..1 that differ by place.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn gemm(bed: &Bed) -> (Gemm, Buffer<u8>) {
    let workspace = Buffer::new(&bed.device, "workspace", WORKSPACE_BYTES as usize).expect("room");
    (Gemm::open(&bed.device, bed.dtype, workspace.slice(), &search_paths()).expect("cuBLASLt"), workspace)
}

#[test]
fn products_equal_plain_sums_and_add_where_asked() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("products_equal_plain_sums_and_add_where_asked", dtype) else { return };
        let (mut gemm, _workspace) = gemm(&bed);
        for (m, n, k) in [(1, 8, 8), (3, 64, 40), (17, 256, 128), (65, 72, 1024)] {
            for accumulates in [false, true] {
                let round = |numbers: Vec<f32>| -> Vec<f32> {
                    numbers.iter().map(|&number| bed.to_number(bed.to_bits(number))).collect()
                };
                let (x, w, before) = (round(noise(1, m * k)), round(noise(2, n * k)), round(noise(3, m * n)));
                let (dx, dw) = (bed.upload_half(&x), bed.upload_half(&w));
                let y = bed.poisoned::<u16>(m * n);
                if accumulates {
                    let bits: Vec<u16> = before.iter().map(|&number| bed.to_bits(number)).collect();
                    bed.stream.upload_now(y.slice(), &bits).expect("uploaded");
                }
                let shape = Shape { m: m as u32, n: n as u32, k: k as u32, accumulates };
                gemm.run(&bed.stream, y.slice(), dx.slice(), dw.slice(), shape).expect("ran");
                let got = bed.download_half(&y);
                for (index, got) in got.into_iter().enumerate() {
                    let (row, col) = (index / n, index % n);
                    let sum: f64 =
                        (0..k).map(|at| f64::from(x[row * k + at]) * f64::from(w[col * k + at])).sum::<f64>();
                    let want = sum + if accumulates { f64::from(before[index]) } else { 0.0 };
                    // Half a unit of the result's eight bits, and the sums' own rounding. cuBLASLt may
                    // round a product before it adds to it, as a caller that adds by itself would.
                    let roundings = if accumulates { 2.0 } else { 1.0 };
                    let near = roundings * want.abs() / 200.0 + 1e-2;
                    assert!((f64::from(got) - want).abs() <= near, "{shape:?} at {index}: {got} instead of {want}");
                }
            }
        }
    }
}

#[test]
fn a_timed_algorithm_is_kept_and_gives_the_same_product() {
    let Some(bed) = bed("a_timed_algorithm_is_kept_and_gives_the_same_product", Dtype::Bf16) else { return };
    let (mut gemm, _workspace) = gemm(&bed);
    let (m, n, k) = (48usize, 512usize, 256usize);
    let (x, w) = (bed.upload_half(&noise(1, m * k)), bed.upload_half(&noise(2, n * k)));
    let (y, z) = (bed.poisoned::<u16>(m * n), bed.poisoned::<u16>(m * n));
    let shape = Shape { m: m as u32, n: n as u32, k: k as u32, accumulates: false };
    gemm.run(&bed.stream, y.slice(), x.slice(), w.slice(), shape).expect("ran");
    let timing = gemm.tune(&bed.stream, z.slice(), x.slice(), &[w.slice()], shape).expect("timed").expect("new");
    assert!(timing.best_us <= timing.first_us && timing.num_candidates >= 1, "{timing:?}");
    assert!(gemm.algorithms().any(|(known, _)| known == Shape { m: bucket(shape.m), ..shape }));
    assert_eq!(gemm.tune(&bed.stream, z.slice(), x.slice(), &[w.slice()], shape).expect("known"), None);
    let (a, b) = (bed.download_half(&y), bed.download_half(&z));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 0.02 * a.abs().max(1.0)), "another product");
    let slices = (y.slice(), x.slice(), w.slice());
    let short = gemm.run(&bed.stream, slices.0, slices.1, slices.2.slice(0, n * k - 8), shape);
    assert!(matches!(short, Err(Error::Shape { .. })), "{short:?}");
}
