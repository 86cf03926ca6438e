//! The reference by hand; the device against the reference.

use super::reference::{Inputs, qk_norm_rope_kv_write};
use super::*;
use crate::PAD_SLOT;
use crate::compile::Dtype;
use crate::paged_case::{Noise, assert_near};
use crate::testing::bed;

const HEADS: Heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 4 };

fn inputs<'a>(slots: &'a [i32], rope: &'a [f32]) -> Inputs<'a> {
    Inputs {
        slots,
        positions: &[0; 8],
        norm_weights: None,
        rope,
        heads: HEADS,
        block_size: 2,
        eps: 0.0,
        weight_offset: 0.0,
    }
}

#[test]
fn a_quarter_turn_moves_the_first_half_to_the_second_and_leaves_v() {
    let mut qkv: Vec<f32> = (1..=16).map(|x| x as f32).collect();
    let (mut k, mut v) = ([0.0; 16], [0.0; 16]);
    let quarter = [0.0, 0.0, 1.0, 1.0];
    qk_norm_rope_kv_write(&mut qkv, &mut k, &mut v, &inputs(&[3], &quarter));
    assert_eq!(qkv[..8], [-3.0, -4.0, 1.0, 2.0, -7.0, -8.0, 5.0, 6.0]);
    assert_eq!(qkv[8..], [9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0], "k and v stay in qkv");
    assert_eq!(k[12..], [-11.0, -12.0, 9.0, 10.0], "slot 3 of a cache of one head");
    assert_eq!(v[12..], [13.0, 14.0, 15.0, 16.0]);
    assert!(k[..12].iter().chain(&v[..12]).all(|&x| x == 0.0));
}

#[test]
fn a_padding_token_writes_nothing_and_a_norm_has_mean_square_one() {
    let mut qkv: Vec<f32> = (1..=16).map(|x| x as f32).collect();
    let (mut k, mut v) = ([0.0; 16], [0.0; 16]);
    let weight = [1.0; 4];
    let mut inputs = inputs(&[PAD_SLOT], &[1.0, 1.0, 0.0, 0.0]);
    inputs.norm_weights = Some((&weight, &weight));
    inputs.weight_offset = 1.0;
    qk_norm_rope_kv_write(&mut qkv, &mut k, &mut v, &inputs);
    let mean_square = qkv[..4].iter().map(|x| x * x).sum::<f32>() / 4.0;
    assert!((mean_square - 4.0).abs() < 1e-4, "weight 1 + 1, squared: {mean_square}");
    assert!(k.iter().chain(&v).all(|&x| x == 0.0));
}

#[test]
fn device_equals_reference_for_every_head_dim_norm_and_padding() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("device_equals_reference_for_every_head_dim_norm_and_padding", dtype) else { return };
        let round = |x: f32| bed.to_number(bed.to_bits(x));
        let rounded = |numbers: Vec<f32>| numbers.into_iter().map(round).collect::<Vec<_>>();
        for (head_dim, num_tokens, has_norm) in
            [(64, 1, true), (64, 33, false), (128, 77, true), (128, 0, true), (256, 5, true), (256, 19, false)]
        {
            let heads = Heads { num_heads: 6, num_kv_heads: 3, head_dim };
            let (dim, num_blocks, block_size) = (head_dim as usize, 8, 16);
            let mut noise = Noise::new(u64::from(head_dim + num_tokens));
            let qkv = rounded(noise.numbers(num_tokens as usize * heads.qkv_width()));
            let weights = [rounded(noise.numbers(dim)), rounded(noise.numbers(dim))];
            let rope: Vec<f32> = (0..50 * dim)
                .map(|i| {
                    let angle = (i / dim) as f32 * 0.3 + (i % (dim / 2)) as f32;
                    if i % dim < dim / 2 { angle.cos() } else { angle.sin() }
                })
                .collect();
            let positions: Vec<u32> = (0..num_tokens).map(|token| token * 7 % 50).collect();
            let slots: Vec<i32> =
                (0..num_tokens as i32).map(|token| if token == 3 { PAD_SLOT } else { 127 - token }).collect();
            let len = num_blocks as usize * 3 * block_size as usize * dim;
            let (mut k, mut v) = (vec![0.5; len], vec![0.5; len]);
            let (k_device, v_device) = (bed.upload_half(&k), bed.upload_half(&v));
            let qkv_device = bed.upload_half(&qkv);
            let weights_device = weights.each_ref().map(|weight| bed.upload_half(weight));
            let (slots_device, positions_device) = (bed.upload(&slots), bed.upload(&positions));
            let rope_device = bed.upload(&rope);
            let kernel = QkNormRopeKvWrite::load(&bed.modules, head_dim).expect("loaded");
            let cache = PagedCache { k: k_device.slice(), v: v_device.slice(), num_blocks, block_size };
            let call = QkNormRope {
                slot_mapping: slots_device.slice(),
                positions: positions_device.slice(),
                norm_weights: has_norm.then(|| (weights_device[0].slice(), weights_device[1].slice())),
                rope: rope_device.slice(),
                num_tokens,
                heads,
                cache: &cache,
                eps: 1e-6,
                weight_offset: 1.0,
            };
            kernel.run(&bed.stream, qkv_device.slice(), &call).expect("launched");

            let mut expected = qkv.clone();
            let inputs = Inputs {
                slots: &slots,
                positions: &positions,
                norm_weights: has_norm.then_some((&weights[0], &weights[1])),
                rope: &rope,
                heads,
                block_size: block_size as usize,
                eps: 1e-6,
                weight_offset: 1.0,
            };
            qk_norm_rope_kv_write(&mut expected, &mut k, &mut v, &inputs);
            // The result is rounded once to 8 (11) bits: half a step is 2^-9 (2^-12) of a number.
            let tolerance = if dtype == Dtype::Bf16 { 2e-3 } else { 3e-4 };
            let what = format!("head_dim {head_dim}, {num_tokens} tokens, norm {has_norm}");
            for (device, expected, name) in
                [(&qkv_device, &expected, "qkv"), (&k_device, &k, "k"), (&v_device, &v, "v")]
            {
                let bits = bed.stream.download_now(device.slice()).expect("downloaded");
                let numbers: Vec<f32> = bits.into_iter().map(|bits| bed.to_number(bits)).collect();
                assert_near(&numbers, expected, tolerance, &format!("{name} of {what}"));
            }
        }
    }
}
