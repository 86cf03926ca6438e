//! The reference by hand; the device against the reference, bit for bit.

use super::*;
use crate::compile::Dtype;
use crate::testing::bed;

#[test]
fn rows_come_in_the_order_of_ids_and_scaled() {
    let table = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    assert_eq!(reference::gather(&table, &[2, 0, 2], 2, 0.5), [2.5, 3.0, 0.5, 1.0, 2.5, 3.0]);
}

#[test]
fn gathered_rows_equal_the_reference() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("gathered_rows_equal_the_reference", dtype) else { return };
        let embedding = Embedding::load(&bed.modules).expect("loaded");
        for (num_tokens, hidden, scale) in [(0, 8, 1.0), (1, 8, 1.0), (5, 640, 25.298_221), (33, 8200, 1.0)] {
            let table: Vec<f32> =
                (0..50 * hidden).map(|i| bed.to_number(bed.to_bits((i % 517) as f32 * 0.03 - 4.0))).collect();
            let ids: Vec<u32> = (0..num_tokens).map(|token| token * 7 % 50).collect();
            let (device_table, device_ids) = (bed.upload_half(&table), bed.upload(&ids));
            let out = bed.poisoned::<u16>((num_tokens * hidden) as usize);
            embedding
                .gather(&bed.stream, out.slice(), device_table.slice(), device_ids.slice(), num_tokens, hidden, scale)
                .expect("ran");
            let want: Vec<u16> =
                reference::gather(&table, &ids, hidden as usize, scale).into_iter().map(|x| bed.to_bits(x)).collect();
            assert_eq!(bed.download(&out), want, "{num_tokens} tokens of {hidden}, scale {scale}");
        }
        let short = bed.poisoned::<u16>(8);
        let ids = bed.upload(&[0u32; 2]);
        let refused = |hidden| embedding.gather(&bed.stream, short.slice(), short.slice(), ids.slice(), 2, hidden, 1.0);
        assert!(refused(8).is_err(), "out is too short");
        assert!(refused(4).is_err(), "rows of half a vector");
    }
}
