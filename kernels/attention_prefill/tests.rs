//! The reference and the tiles by hand; the device against the reference.

use super::reference::attention;
use super::*;
use crate::compile::Dtype;
use crate::memory::Buffer;
use crate::paged_case::{OnDevice, PagedCase, assert_near};
use crate::testing::{Bed, bed};

const SMALL: Heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 8 };

fn reference(case: &PagedCase) -> Vec<f32> {
    let mut out = vec![f32::NAN; case.num_tokens() as usize * case.heads.out_width()];
    attention(&mut out, &case.inputs());
    out
}

fn value(case: &PagedCase, row: usize, key: u32) -> &[f32] {
    let block = case.tables[row * case.stride as usize + (key / case.block_size) as usize];
    &case.v_cache[((block * case.block_size + key % case.block_size) * 8) as usize..][..8]
}

#[test]
fn a_query_that_sees_one_key_answers_its_value() {
    let case = PagedCase::new(&[(1, 1), (2, 20)], SMALL, 16, 1, |x| x);
    let out = reference(&case);
    let seen = [(0, 0, 0), (1, 1, 18), (2, 1, 19)];
    for (token, row, key) in seen {
        for head in 0..2 {
            assert_near(&out[(token * 2 + head) * 8..][..8], value(&case, row, key), 1e-6, "window 1");
        }
    }
}

#[test]
fn equal_scores_answer_the_mean_of_the_visible_values_alone() {
    let mut case = PagedCase::new(&[(3, 19)], SMALL, 16, 0, |x| x);
    case.qkv.fill(0.0);
    let out = reference(&case);
    for query in 0..3 {
        let visible = 17 + query as u32;
        let mut mean = [0.0; 8];
        for key in 0..visible {
            mean.iter_mut().zip(value(&case, 0, key)).for_each(|(mean, v)| *mean += v / visible as f32);
        }
        assert_near(&out[query * 16..][..8], &mean, 1e-5, "mean");
    }
}

#[test]
fn tiles_cover_every_query_once_and_the_most_keys_come_first() {
    let rows = [(1, 500), (70, 70), (0, 9), (32, 1000), (33, 33)];
    let rows = rows.iter().zip(0..).map(|(&(query_len, context_len), row)| Row { row, query_len, context_len });
    let mut tiles = Vec::new();
    list_tiles(&mut tiles, rows.clone(), 32, 0);
    assert_eq!(tiles, [[3, 0], [0, 0], [1, 64], [1, 32], [4, 32], [1, 0], [4, 0]]);
    tiles.clear();
    list_tiles(&mut tiles, rows, 32, 10);
    let of_row_1: Vec<u32> = tiles.iter().filter(|tile| tile[0] == 1).map(|tile| tile[1]).collect();
    assert_eq!(of_row_1, [32, 0, 64], "a window makes early tiles as long as late ones");
}

#[test]
fn every_variant_fits_the_shared_memory_of_its_architecture() {
    for (arch, bytes) in
        [(75, 64 << 10), (80, 163 << 10), (86, 99 << 10), (89, 99 << 10), (90, 227 << 10), (120, 99 << 10)]
    {
        for head_dim in [64, 128, 256] {
            let variant = choose(Arch { number: arch, is_specific: arch == 90 }, head_dim).expect("a head dim");
            let shared = variant.shared_bytes(head_dim);
            assert!(shared <= bytes, "sm_{arch}, head_dim {head_dim}: {shared} of {bytes}");
            assert_eq!(variant.tile_rows % (variant.num_warps * 16), 0);
        }
    }
    assert!(choose(Arch::of((9, 0)), 96).expect_err("refused").to_string().contains("96"));
}

fn run(bed: &Bed, case: &PagedCase, on_device: &OnDevice) -> Vec<f32> {
    let kernel = AttentionPrefill::load(&bed.device, &bed.modules, case.heads.head_dim).expect("loaded");
    let mut tiles = Vec::new();
    let rows = case.rows.iter().zip(0..).map(|(&(query_len, context_len), row)| Row { row, query_len, context_len });
    list_tiles(&mut tiles, rows, kernel.tile_queries(case.heads.group()), case.window);
    let words: Vec<u32> = tiles.iter().flatten().copied().collect();
    let tiles_device: Buffer<u32> = bed.upload(&words);
    let out = bed.poisoned::<u16>(case.num_tokens() as usize * case.heads.out_width());
    let call = Prefill {
        qkv: on_device.qkv.slice(),
        cache: &on_device.cache,
        block_tables: &on_device.block_tables,
        cu_seqlens: on_device.cu_seqlens.slice(),
        context_lens: on_device.context_lens.slice(),
        tiles: tiles_device.slice(),
        num_tiles: tiles.len() as u32,
        num_rows: case.rows.len() as u32,
        num_tokens: case.num_tokens(),
        heads: case.heads,
        scale: case.scale(),
        window: case.window,
    };
    kernel.run(&bed.stream, out.slice(), &call).expect("launched");
    let numbers = bed.download_half(&out);
    assert!(on_device.len_on_device() > 0);
    numbers
}

/// Weights of the values are rounded to the 16-bit type, and so is the answer: about three half
/// steps of 2^-9 (2^-12).
pub(crate) fn tolerance(dtype: Dtype) -> f32 {
    if dtype == Dtype::Bf16 { 6e-3 } else { 1e-3 }
}

#[test]
fn ragged_rows_equal_the_reference() {
    let rows = [(1, 1), (1, 300), (130, 130), (1, 64), (7, 7), (63, 200), (64, 64), (65, 165), (33, 400), (1, 65)];
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("ragged_rows_equal_the_reference", dtype) else { return };
        let round = |x: f32| bed.to_number(bed.to_bits(x));
        for (head_dim, num_heads, num_kv_heads, block_size, window) in [
            (64, 4, 2, 16, 0),
            (64, 3, 1, 64, 50),
            (128, 2, 2, 64, 0),
            (128, 4, 1, 16, 100),
            (128, 7, 1, 256, 37),
            (128, 16, 1, 32, 0),
            (256, 2, 1, 64, 0),
            (256, 4, 1, 16, 70),
        ] {
            let heads = Heads { num_heads, num_kv_heads, head_dim };
            let case = PagedCase::new(&rows, heads, block_size, window, round);
            let out = run(&bed, &case, &case.upload(&bed));
            let what = format!("{heads:?}, block_size {block_size}, window {window}, {}", dtype.name());
            assert_near(&out, &reference(&case), tolerance(dtype), &what);
        }
    }
}

#[test]
fn a_row_in_a_step_has_the_bits_of_the_row_alone() {
    let Some(bed) = bed("a_row_in_a_step_has_the_bits_of_the_row_alone", Dtype::Bf16) else { return };
    let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 128 };
    let round = |x: f32| bed.to_number(bed.to_bits(x));
    let case = PagedCase::new(&[(70, 200), (1, 90), (130, 130)], heads, 16, 0, round);
    let together = run(&bed, &case, &case.upload(&bed));
    for row in 0..3 {
        let alone = case.alone(row);
        let out = run(&bed, &alone, &alone.upload(&bed));
        let first = case.cu_seqlens[row] as usize * heads.out_width();
        assert_eq!(out, together[first..first + out.len()], "row {row}");
    }
}
