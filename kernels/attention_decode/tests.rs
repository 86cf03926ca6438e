//! The cut of rows and the sizes by hand; the device against the reference.

use super::reference::{Chunk, cut, decode};
use super::*;
use crate::attention_prefill::tests::tolerance;
use crate::compile::Dtype;
use crate::memory::Buffer;
use crate::paged_case::{OnDevice, PagedCase, assert_near};
use crate::testing::{Bed, bed, setting};

#[test]
fn chunks_follow_each_other_and_only_the_ends_differ_in_length() {
    let ends =
        |context_len, window| cut(0, context_len, 512, window).iter().map(|c| (c.begin, c.end)).collect::<Vec<_>>();
    assert_eq!(ends(1, 0), [(0, 1)]);
    assert_eq!(ends(767, 0), [(0, 767)], "a short tail stays");
    assert_eq!(ends(768, 0), [(0, 512), (512, 768)]);
    assert_eq!(ends(1100, 0), [(0, 512), (512, 1100)]);
    assert_eq!(ends(1100, 100), [(1000, 1100)]);
    assert_eq!(ends(1400, 600), [(800, 1024), (1024, 1400)]);
    assert_eq!(ends(1030, 100), [(930, 1030)], "also after a window's begin");
    for context_len in 1..3000 {
        for window in [0, 1, 513, 1024] {
            let chunks = cut(0, context_len, 512, window);
            assert!(chunks.len() <= chunks_max(1, context_len, 512) as usize, "{context_len}, window {window}");
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].begin));
            assert!(chunks.iter().all(|chunk| chunk.begin < chunk.end && chunk.end - chunk.begin < 768));
        }
    }
}

/// The chunks of a row as plan.cu reckons them, line by line.
fn num_chunks_of_the_plan(length: u32, chunk: u32, window: u32) -> u32 {
    let start = if window != 0 && length > window { length - window } else { 0 };
    let first = start / chunk;
    let mut last = if length == 0 { 0 } else { (length - 1) / chunk };
    if last > first && length - last * chunk < chunk / 2 {
        last -= 1;
    }
    if length == 0 { 0 } else { last - first + 1 }
}

/// Steps are sent to a list of fixed length by this count: one chunk more on the device is one too many.
#[test]
fn counted_chunks_are_those_that_the_plan_lists() {
    for chunk in [64, 256, 512, 640, 768, 1024] {
        for length in (0..5 * chunk + 2).chain([40 * chunk - 1, 40 * chunk, 40 * chunk + chunk / 2]) {
            let counted = num_chunks(length, chunk);
            assert_eq!(counted, num_chunks_of_the_plan(length, chunk, 0), "{length} tokens in chunks of {chunk}");
            if length == 0 {
                continue;
            }
            assert_eq!(counted as usize, cut(0, length, chunk, 0).len(), "{length} tokens in chunks of {chunk}");
            for window in [1, chunk / 2, chunk, chunk + 1, 3 * chunk] {
                let listed = num_chunks_of_the_plan(length, chunk, window);
                assert_eq!(listed as usize, cut(0, length, chunk, window).len(), "{length}, {chunk}, window {window}");
                assert!(listed <= counted, "{length} tokens in chunks of {chunk}, window {window}: {listed}");
            }
        }
    }
}

#[test]
fn every_variant_fits_its_architecture_and_a_warps_lanes_name_all_its_slices() {
    for (arch, bytes) in
        [(75, 64 << 10), (80, 163 << 10), (86, 99 << 10), (89, 99 << 10), (90, 227 << 10), (120, 99 << 10)]
    {
        for head_dim in [64, 128, 256] {
            let variant = choose(Arch { number: arch, is_specific: arch == 90 }, head_dim).expect("a head dim");
            // Beside the stages: the ring of items, maxima and sums, a few words.
            let shared = variant.shared_bytes(head_dim) + 2048;
            assert!(shared <= bytes, "sm_{arch}, head_dim {head_dim}: {shared} of {bytes}");
            assert_eq!(variant.chunk % SLICE, 0);
            assert!(variant.chunk * 3 / 2 <= 32 * SLICE * variant.num_warps, "sm_{arch}, head_dim {head_dim}");
        }
    }
    assert!(choose(Arch::of((9, 0)), 96).expect_err("refused").to_string().contains("96"));
}

struct Scratch {
    work: Buffer<u32>,
    work_count: Buffer<u32>,
    partial_out: Buffer<f32>,
    partial_lse: Buffer<f32>,
    counters: Buffer<u32>,
    num_chunks_max: u32,
}

impl Scratch {
    fn new(bed: &Bed, kernel: &AttentionDecode, case: &PagedCase) -> Self {
        let longest = case.context_lens.iter().copied().max().unwrap_or(1);
        let num_rows = case.rows.len() as u32;
        let num_chunks_max = chunks_max(num_rows, longest, kernel.chunk());
        let lens = workspace_lens(case.heads, num_rows, num_chunks_max);
        let scratch = Self {
            work: Buffer::new(&bed.device, "work", lens.work).expect("room"),
            work_count: bed.upload(&[u32::MAX]),
            partial_out: Buffer::new(&bed.device, "partials", lens.partial_out).expect("room"),
            partial_lse: Buffer::new(&bed.device, "partials", lens.partial_lse).expect("room"),
            counters: bed.upload(&vec![0; lens.counters]),
            num_chunks_max,
        };
        bed.stream.fill_bytes(scratch.work.slice(), 0xff).expect("filled");
        bed.stream.fill_bytes(scratch.partial_out.slice(), 0xff).expect("filled");
        bed.stream.fill_bytes(scratch.partial_lse.slice(), 0xff).expect("filled");
        scratch
    }

    fn workspace(&self) -> Workspace {
        Workspace {
            work: self.work.slice(),
            work_count: self.work_count.slice(),
            partial_out: self.partial_out.slice(),
            partial_lse: self.partial_lse.slice(),
            counters: self.counters.slice(),
        }
    }
}

fn run(bed: &Bed, case: &PagedCase, on_device: &OnDevice) -> Vec<f32> {
    let kernel = AttentionDecode::load(&bed.device, &bed.modules, case.heads.head_dim).expect("loaded");
    let scratch = Scratch::new(bed, &kernel, case);
    let workspace = scratch.workspace();
    let num_rows = case.rows.len() as u32;
    let lens = on_device.context_lens.slice();
    kernel.plan(&bed.stream, &workspace, lens, num_rows, scratch.num_chunks_max, case.window).expect("planned");
    let call = call(case, on_device, &workspace, scratch.num_chunks_max);
    let [first, second] = [(), ()].map(|()| {
        let out = bed.poisoned::<u16>(case.rows.len() * case.heads.out_width());
        kernel.run(&bed.stream, out.slice(), &call).expect("launched");
        let counters = bed.stream.download_now(scratch.counters.slice()).expect("downloaded");
        assert!(counters.iter().all(|&counter| counter == 0), "counters are left at zero");
        bed.download_half(&out)
    });
    assert_eq!(first, second, "the second run has the same bits");
    assert!(on_device.len_on_device() > 0);
    first
}

fn call<'a>(case: &PagedCase, on_device: &'a OnDevice, workspace: &'a Workspace, num_chunks_max: u32) -> Decode<'a> {
    Decode {
        qkv: on_device.qkv.slice(),
        cache: &on_device.cache,
        block_tables: &on_device.block_tables,
        context_lens: on_device.context_lens.slice(),
        workspace,
        num_rows: case.rows.len() as u32,
        num_chunks_max,
        heads: case.heads,
        scale: case.scale(),
        window: case.window,
    }
}

/// One-query rows at the edges of slices, blocks and chunks.
const EDGES: [u32; 22] =
    [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 383, 384, 511, 513, 767, 768, 1025, 1536, 1600];

#[test]
fn rows_at_every_edge_equal_the_reference() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("rows_at_every_edge_equal_the_reference", dtype) else { return };
        let round = |x: f32| bed.to_number(bed.to_bits(x));
        let rows = EDGES.map(|context_len| (1, context_len));
        for (head_dim, num_heads, num_kv_heads, block_size, window) in [
            (64, 4, 2, 16, 0),
            (64, 16, 1, 64, 0),
            (128, 2, 2, 64, 0),
            (128, 8, 1, 32, 300),
            (128, 4, 2, 16, 100),
            (128, 12, 1, 256, 0),
            (128, 3, 1, 128, 513),
            (256, 4, 1, 64, 0),
            (256, 16, 1, 16, 512),
        ] {
            let heads = Heads { num_heads, num_kv_heads, head_dim };
            let case = PagedCase::new(&rows, heads, block_size, window, round);
            let out = run(&bed, &case, &case.upload(&bed));
            let mut expected = vec![f32::NAN; out.len()];
            decode(&mut expected, &case.inputs());
            let what = format!("{heads:?}, block_size {block_size}, window {window}, {}", dtype.name());
            assert_near(&out, &expected, tolerance(dtype), &what);
        }
    }
}

#[test]
fn a_row_in_a_batch_has_the_bits_of_the_row_alone() {
    let Some(bed) = bed("a_row_in_a_batch_has_the_bits_of_the_row_alone", Dtype::Bf16) else { return };
    let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 128 };
    let round = |x: f32| bed.to_number(bed.to_bits(x));
    // More items than CTAs know beforehand, so that the queue deals some.
    let rows: Vec<(u32, u32)> = (0..700).map(|row| (1, EDGES[row * 5 % EDGES.len()])).collect();
    let case = PagedCase::new(&rows[..], heads, 64, 0, round);
    let together = run(&bed, &case, &case.upload(&bed));
    for row in [0, 77, 301, 699] {
        let alone = case.alone(row);
        let out = run(&bed, &alone, &alone.upload(&bed));
        assert_eq!(out, together[row * heads.out_width()..][..out.len()], "row {row} of {:?}", rows[row]);
    }
}

#[test]
fn the_plan_lists_every_chunk_once_longest_first() {
    let Some(bed) = bed("the_plan_lists_every_chunk_once_longest_first", Dtype::Bf16) else { return };
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 128 };
    let kernel = AttentionDecode::load(&bed.device, &bed.modules, 128).expect("loaded");
    for (num_rows, window) in [(1, 0), (33, 700), (2500, 0), (2500, 600)] {
        let context_lens: Vec<u32> = (0..num_rows).map(|row| 1 + row * 37 % 3000).collect();
        let lens_device = bed.upload(&context_lens);
        let num_chunks_max = chunks_max(num_rows, 3000, kernel.chunk());
        let lens = workspace_lens(heads, num_rows, num_chunks_max);
        let (work, count) = (bed.poisoned::<u32>(lens.work), bed.poisoned::<u32>(1));
        let none = bed.upload::<f32>(&[]);
        let workspace = Workspace {
            work: work.slice(),
            work_count: count.slice(),
            partial_out: none.slice(),
            partial_lse: none.slice(),
            counters: bed.upload::<u32>(&[]).slice(),
        };
        kernel.plan(&bed.stream, &workspace, lens_device.slice(), num_rows, num_chunks_max, window).expect("planned");
        let num_listed = bed.download(&count)[0] as usize;
        let words = bed.download(&work);
        let entries: Vec<&[u32]> = words.chunks_exact(ENTRY_WORDS).take(num_listed).collect();
        let chunk_of = |e: &[u32]| Chunk { row: e[0], begin: e[1], end: e[2], index: e[3], num_chunks: e[4] };
        let mut listed: Vec<Chunk> = entries.iter().map(|entry| chunk_of(entry)).collect();
        let slack = kernel.chunk() * 3 / 2 / 32;
        for pair in listed.windows(2) {
            let length = |chunk: &Chunk| chunk.end - chunk.begin;
            assert!(length(&pair[1]) <= length(&pair[0]) + slack, "{pair:?}");
        }
        let mut places: Vec<u32> =
            entries.iter().filter(|entry| entry[4] > 1).map(|entry| entry[5] + entry[3]).collect();
        places.sort_unstable();
        assert!(places.iter().zip(0..).all(|(&place, expected)| place == expected), "partials do not overlap");
        listed.sort_unstable();
        let expected: Vec<Chunk> =
            (0..num_rows).flat_map(|row| cut(row, context_lens[row as usize], kernel.chunk(), window)).collect();
        assert_eq!(listed, expected, "{num_rows} rows, window {window}");
    }
}

#[test]
fn a_plan_without_room_lists_nothing_and_says_so() {
    let Some(bed) = bed("a_plan_without_room_lists_nothing_and_says_so", Dtype::Bf16) else { return };
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 128 };
    let kernel = AttentionDecode::load(&bed.device, &bed.modules, 128).expect("loaded");
    let num_rows = 1024;
    let context_lens: Vec<u32> = (0..num_rows).map(|row| if row < 910 { 9 * kernel.chunk() } else { 1 }).collect();
    let total: u32 = context_lens.iter().map(|&len| num_chunks(len, kernel.chunk())).sum();
    let lens_device = bed.upload(&context_lens);
    for (num_chunks_max, has_room) in [(total, true), (total - 1, false), (1, false)] {
        let len = workspace_lens(heads, num_rows, num_chunks_max).work;
        let (work, count) = (bed.poisoned::<u32>(len), bed.poisoned::<u32>(1));
        let none = bed.upload::<f32>(&[]);
        let workspace = Workspace {
            work: work.slice(),
            work_count: count.slice(),
            partial_out: none.slice(),
            partial_lse: none.slice(),
            counters: bed.upload::<u32>(&[]).slice(),
        };
        let planned = kernel.plan(&bed.stream, &workspace, lens_device.slice(), num_rows, num_chunks_max, 0);
        planned.expect("launched");
        // The guards around the list are looked at too.
        let is_listed = bed.download(&work).iter().any(|&word| word != u32::MAX);
        let listed = bed.download(&count)[0];
        assert_eq!((listed, is_listed), if has_room { (total, true) } else { (u32::MAX, false) }, "{num_chunks_max}");
    }
}

/// In a process of its own: the error takes the device's context with it.
#[test]
fn a_run_over_a_plan_without_room_is_a_device_error() {
    const NAME: &str = "a_run_over_a_plan_without_room_is_a_device_error";
    let Some(bed) = bed(NAME, Dtype::Bf16) else { return };
    if setting("OVERNIGHT_TEST_CHILD").is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().expect("this test's file"));
        child.args(["--exact", &format!("attention_decode::tests::{NAME}")]).env("OVERNIGHT_TEST_CHILD", "1");
        let output = child.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 128 };
    let case = PagedCase::new(&[(1, 2000), (1, 2000)], heads, 64, 0, |x| bed.to_number(bed.to_bits(x)));
    let on_device = case.upload(&bed);
    let kernel = AttentionDecode::load(&bed.device, &bed.modules, 128).expect("loaded");
    let scratch = Scratch::new(&bed, &kernel, &case);
    let workspace = scratch.workspace();
    kernel.plan(&bed.stream, &workspace, on_device.context_lens.slice(), 2, 1, 0).expect("launched");
    bed.stream.synchronize().expect("the plan itself is no error");
    let out = bed.poisoned::<u16>(2 * heads.out_width());
    let run = kernel.run(&bed.stream, out.slice(), &call(&case, &on_device, &workspace, 1));
    let error = run.and_then(|()| bed.stream.synchronize()).expect_err("it has no list to go by");
    assert!(error.is_sticky(), "{error}");
}

#[test]
fn blocks_beyond_two_to_the_31_elements_are_reached() {
    let Some(bed) = bed("blocks_beyond_two_to_the_31_elements_are_reached", Dtype::Bf16) else { return };
    let (free_bytes, _) = bed.device.memory_bytes().expect("asked");
    if free_bytes < 12 << 30 {
        eprintln!("blocks_beyond_two_to_the_31_elements_are_reached needs 12 GiB of GPU memory and is skipped");
        return;
    }
    let heads = Heads { num_heads: 2, num_kv_heads: 2, head_dim: 128 };
    let round = |x: f32| bed.to_number(bed.to_bits(x));
    let case = PagedCase::new(&[(1, 300), (1, 40)], heads, 64, 0, round);
    let mut on_device = case.upload(&bed);
    let len = 2 * 64 * 128;
    let far = (1usize << 31) / len + 5;
    let total = (far + case.num_blocks as usize) * len;
    let (k, v) =
        (Buffer::new(&bed.device, "k", total).expect("room"), Buffer::new(&bed.device, "v", total).expect("room"));
    for (big, small) in [(&k, on_device.cache.k), (&v, on_device.cache.v)] {
        bed.stream.fill_bytes::<u16>(big.slice(), 0xff).expect("filled");
        bed.stream.copy(big.slice().slice(far * len, small.len()), small).expect("copied");
    }
    on_device.cache =
        PagedCache { k: k.slice(), v: v.slice(), num_blocks: far as u32 + case.num_blocks, block_size: 64 };
    let moved: Vec<u32> = case.tables.iter().map(|&block| block.wrapping_add(far as u32)).collect();
    let moved = bed.upload(&moved);
    on_device.block_tables.entries = moved.slice();
    let out = run(&bed, &case, &on_device);
    let mut expected = vec![f32::NAN; out.len()];
    decode(&mut expected, &case.inputs());
    assert_near(&out, &expected, tolerance(Dtype::Bf16), "far blocks");
}
