//! Device tables against a plain copy.

use super::*;
use crate::Dtype;
use crate::testing::bed;

#[test]
fn tables_hold_each_rows_blocks_and_nothing_else_is_written() {
    let Some(bed) = bed("tables_hold_each_rows_blocks_and_nothing_else_is_written", Dtype::F16) else { return };
    let kernels = BlockTables::load(&bed.modules).expect("loaded");
    for lens in [vec![], vec![0], vec![1], vec![40, 0, 33, 1], (0..77).collect::<Vec<u32>>()] {
        let stride = 80u32;
        let mut starts = vec![0];
        for len in &lens {
            starts.push(starts[starts.len() - 1] + len);
        }
        let blocks: Vec<u32> = (0..starts[lens.len()]).map(|index| index * 7 + 1).collect();
        let (dstarts, dblocks) = (bed.upload(&starts), bed.upload(&blocks));
        let tables = bed.poisoned::<u32>(lens.len() * stride as usize);
        let num_rows = lens.len() as u32;
        kernels
            .expand(&bed.stream, tables.slice(), dstarts.slice(), dblocks.slice(), num_rows, stride)
            .expect("launched");
        for (at, got) in bed.download(&tables).into_iter().enumerate() {
            let (row, j) = (at / stride as usize, at as u32 % stride);
            let want = if j < lens[row] { blocks[(starts[row] + j) as usize] } else { u32::MAX };
            assert_eq!(got, want, "row {row}, entry {j}");
        }
    }
    let short = bed.poisoned::<u32>(79);
    let starts = bed.upload(&[0u32, 1]);
    let result = kernels.expand(&bed.stream, short.slice(), starts.slice(), starts.slice(), 1, 80);
    assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
}
