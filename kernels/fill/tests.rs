//! The generator against the paper, the numbers against their distribution, the device against both.

use super::*;
use crate::compile::Dtype;
use crate::testing::bed;

/// The known answers that the authors publish with Random123 (kat_vectors).
#[test]
fn words_are_those_of_the_paper() {
    let philox = reference::philox4x32;
    assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
}

#[test]
fn numbers_are_normal() {
    let numbers = reference::fill_normal(40_000, 3, 0.02);
    let moment = |power| numbers.iter().map(|&x| (f64::from(x) / 0.02).powi(power)).sum::<f64>() / 40_000.0;
    // Five standard deviations of each mean.
    let moments = [1, 2, 4].map(moment);
    assert!(
        moments[0].abs() < 0.025 && (moments[1] - 1.0).abs() < 0.036 && (moments[2] - 3.0).abs() < 0.25,
        "{moments:?}"
    );
}

#[test]
fn device_numbers_equal_the_reference_and_stop_at_the_count() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("device_numbers_equal_the_reference_and_stop_at_the_count", dtype) else { return };
        let fill = Fill::load(&bed.modules).expect("loaded");
        for count in [0usize, 1, 7, 8, 9, 70_001] {
            let out = bed.poisoned::<u16>(count);
            fill.fill_normal(&bed.stream, out.slice(), count as u64, 0x1234_5678_9abc_def0, 0.02).expect("ran");
            let want = reference::fill_normal(count, 0x1234_5678_9abc_def0, 0.02);
            for (index, (got, want)) in bed.download_half(&out).into_iter().zip(want).enumerate() {
                // Rounding to 8 (11) bits, and the fast sine and logarithm, a few 1e-6 of a deviation.
                assert!((got - want).abs() <= want.abs() / 128.0 + 1e-6, "{got} at {index} of {count}, not {want}");
            }
        }
        let out = bed.poisoned::<u16>(8);
        assert!(fill.fill_normal(&bed.stream, out.slice(), 9, 0, 1.0).is_err(), "too short");
    }
}
