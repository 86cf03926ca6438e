//! The reference by hand; the device against the reference.

use super::*;
use crate::compile::Dtype;
use crate::testing::{Bed, bed};

#[test]
fn a_norm_has_mean_square_one_and_takes_its_weight() {
    let out = reference::rms_norm(&[3.0, -4.0, 0.3, -0.4], &[1.0, 2.0], 0.0, 1.0);
    let scale = 1.0 / 12.5f32.sqrt();
    let want = [3.0 * scale * 2.0, -4.0 * scale * 3.0, 3.0 * scale * 2.0, -4.0 * scale * 3.0];
    assert!(out.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{out:?}, not {want:?}");
    let mut residual = [1.0, 1.0];
    let out = reference::add_rms_norm(&mut residual, &[2.2, -1.0], &[1.0, 1.0], 0.0, 0.0, f32::round);
    assert_eq!(residual, [3.0, 0.0]);
    assert!((out[0] - 2.0f32.sqrt()).abs() < 1e-6 && out[1] == 0.0, "{out:?}");
}

#[test]
fn geometry_holds_every_row_and_spreads_few() {
    for hidden in (8..=HIDDEN_MAX).step_by(8) {
        for num_rows in [1, 256, 2048, 16_384] {
            let Geometry { threads, rows } = choose(num_rows, hidden);
            assert!(threads * VEC * VECTORS >= hidden && threads % 32 == 0, "{threads} threads for {hidden}");
            assert!(threads * rows <= 1024 && rows <= 32, "{threads} x {rows} threads");
        }
    }
    assert_eq!(choose(256, 1024), Geometry { threads: 64, rows: 1 });
    assert_eq!(choose(16_384, 1024), Geometry { threads: 64, rows: 4 });
    assert_eq!(choose(16_384, 4096), Geometry { threads: 256, rows: 1 });
}

/// Numbers of the bed's type that differ by place.
fn numbers(bed: &Bed, salt: u32, len: u32) -> Vec<f32> {
    let number =
        |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(salt * 97_003) >> 12) as f32 / (1 << 19) as f32 - 1.0;
    (0..len).map(|i| bed.to_number(bed.to_bits(number(i) * 3.0))).collect()
}

#[track_caller]
fn assert_near(bed: &Bed, got: &[f32], want: &[f32], what: &str) {
    // Rounded once to 8 (11) bits: half a step, and as much again for f32 sums in another order.
    let step = if bed.dtype == Dtype::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= step * want.abs() + 1e-6, "{what}: {got} at {index}, not {want}");
    }
}

#[test]
fn device_norms_equal_the_reference() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("device_norms_equal_the_reference", dtype) else { return };
        let norm = RmsNorm::load(&bed.modules).expect("loaded");
        let round = |x: f32| bed.to_number(bed.to_bits(x));
        for (rows, hidden, offset) in
            [(0, 8, 0.0), (1, 8, 0.0), (3, 640, 1.0), (701, 1024, 0.0), (5, 5120, 0.0), (2, 16_384, 0.0)]
        {
            let (len, eps) = (rows * hidden, 1e-6);
            let (x, before) = (numbers(&bed, 1, len), numbers(&bed, 2, len));
            let (weight, post) = (numbers(&bed, 3, hidden), numbers(&bed, 4, hidden));
            let (dx, dweight, dpost) = (bed.upload_half(&x), bed.upload_half(&weight), bed.upload_half(&post));
            let what = format!("{rows} rows of {hidden}");

            let index: Vec<u32> = (0..rows).rev().collect();
            let dindex = bed.upload(&index);
            let out = bed.poisoned::<u16>(len as usize);
            norm.rms_norm(
                &bed.stream,
                out.slice(),
                dx.slice(),
                dweight.slice(),
                Some(dindex.slice()),
                rows,
                hidden,
                eps,
                offset,
            )
            .expect("ran");
            let reversed: Vec<f32> = x.chunks(hidden as usize).rev().flatten().copied().collect();
            let want = reference::rms_norm(&reversed, &weight, eps, offset);
            assert_near(&bed, &bed.download_half(&out), &want, &format!("rms_norm of {what}"));

            let (mut residual, dresidual) = (before.clone(), bed.upload_half(&before));
            let out = bed.poisoned::<u16>(len as usize);
            norm.post_add_rms_norm(
                &bed.stream,
                out.slice(),
                dresidual.slice(),
                dx.slice(),
                dpost.slice(),
                dweight.slice(),
                rows,
                hidden,
                eps,
                offset,
            )
            .expect("ran");
            let normed = reference::rms_norm(&x, &post, eps, offset);
            reference::add_rms_norm(&mut residual, &normed, &weight, eps, offset, round);
            let got = bed.stream.download_now(dresidual.slice()).expect("downloaded");
            let got: Vec<f32> = got.into_iter().map(|bits| bed.to_number(bits)).collect();
            // Both are rounded, so that a last bit of f32 can be a whole step of up to 2^-7 (2^-10);
            // and terms of up to about 10 may cancel, which leaves the error of their f32 bits.
            let step = if dtype == Dtype::Bf16 { 1.0 / 128.0 } else { 1.0 / 1024.0 };
            for (index, (got, want)) in got.iter().zip(&residual).enumerate() {
                assert!((got - want).abs() <= step * want.abs() + 1e-5, "{got} at {index}, not {want}: post {what}");
            }
            // Of the device's own sums, whose last bit may differ.
            let want = reference::rms_norm(&got, &weight, eps, offset);
            assert_near(&bed, &bed.download_half(&out), &want, &format!("post_add_rms_norm of {what}"));
        }
        let one = bed.poisoned::<u16>(24);
        let refused = |hidden| {
            norm.rms_norm(&bed.stream, one.slice(), one.slice(), one.slice(), None, 1, hidden, 1e-6, 0.0).is_err()
        };
        assert!(refused(12) && refused(32) && refused(HIDDEN_MAX + 8), "half a vector, too short, too wide");
    }
}
