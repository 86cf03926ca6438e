//! The references by hand; the device against them.

use super::*;
use crate::compile::Dtype;
use crate::testing::bed;

#[test]
fn gates_close_far_below_zero_and_pass_far_above() {
    let gate_up = [30.0, -30.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0];
    let silu = reference::silu_mul(&gate_up, 4);
    let gelu = reference::gelu_tanh_mul(&gate_up, 4);
    for (out, at_one) in [(&silu, 0.731_058_6), (&gelu, 0.841_192)] {
        assert!((out[0] - 60.0).abs() < 1e-4 && out[1].abs() < 1e-4 && out[2] == 0.0, "{out:?}");
        assert!((out[3] / 2.0 - at_one).abs() < 1e-5, "{out:?}");
    }
}

#[test]
fn device_activations_equal_the_reference() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("device_activations_equal_the_reference", dtype) else { return };
        let activation = Activation::load(&bed.modules).expect("loaded");
        for (num_tokens, intermediate) in [(0, 8), (1, 8), (3, 1032), (130, 3072)] {
            let number = |i: u32| (i.wrapping_mul(2_654_435_761) >> 12) as f32 / (1 << 15) as f32 - 16.0;
            let gate_up: Vec<f32> =
                (0..num_tokens * 2 * intermediate).map(|i| bed.to_number(bed.to_bits(number(i)))).collect();
            let device = bed.upload_half(&gate_up);
            let width = intermediate as usize;
            let wants = [reference::silu_mul(&gate_up, width), reference::gelu_tanh_mul(&gate_up, width)];
            for (is_gelu, want) in [false, true].into_iter().zip(wants) {
                let out = bed.poisoned::<u16>((num_tokens * intermediate) as usize);
                let run = if is_gelu { Activation::gelu_tanh_mul } else { Activation::silu_mul };
                run(&activation, &bed.stream, out.slice(), device.slice(), num_tokens, intermediate).expect("ran");
                // Rounded once to 8 (11) bits; where the gate all but closes, the f32 exponential's error
                // of 1e-5 of up (16 at most) shows, and f16 has no smaller numbers.
                let step = if dtype == Dtype::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
                for (index, (got, want)) in bed.download_half(&out).into_iter().zip(want).enumerate() {
                    let off = (got - want).abs();
                    assert!(off <= step * want.abs() + 3e-4, "{got} at {index}, not {want}; gelu {is_gelu}");
                }
            }
        }
        let short = bed.poisoned::<u16>(16);
        let run = |width| activation.silu_mul(&bed.stream, short.slice(), short.slice(), 1, width);
        assert!(run(8).is_ok() && run(16).is_err() && run(4).is_err(), "too short, half a vector");
    }
}
