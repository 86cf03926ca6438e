//! Decode graphs at their edges and at their limits: many rows over a long context that they share.

use super::{BLOCK, config, has_gpu, model_on_gpu, tiny};
use crate::config::{DtypeSetting, EngineConfig};
use crate::cuda::CudaModel;
use crate::model_bed::{ModelBed, Sequence, distance, ids};
use crate::tiny_model::{TinyArch, TinyModel};

/// Nine chunks of decode attention: 897 rows fit its work list, 897 padded to 1,024 do not.
const SHARED_LEN: usize = 9 * 768;
/// Less than one chunk: 1,024 rows fit the list.
const SHORT_LEN: usize = 6 * BLOCK as usize;
/// Tokens that every row decodes.
const NUM_STEPS: usize = 2;

/// Decodes a few tokens of `num` rows that differ after what they share; logits by row.
fn decode_over(gpu: &mut ModelBed<CudaModel>, shared: &Sequence, num: usize) -> Vec<Vec<Vec<f32>>> {
    let mut rows: Vec<Sequence> = (0..num as u32)
        .map(|row| {
            let ids = [&shared.ids[..], &ids(NUM_STEPS, row)].concat();
            Sequence { ids, done: shared.done, table: shared.table.clone() }
        })
        .collect();
    let mut logits = vec![Vec::new(); num];
    for _ in 0..NUM_STEPS {
        let mut step: Vec<_> = rows.iter_mut().map(|row| (row, 1)).collect();
        for (logits, row) in logits.iter_mut().zip(gpu.step(&mut step)) {
            logits.extend(row);
        }
    }
    for row in rows {
        gpu.free(&row.table[shared.table.len()..]);
    }
    logits
}

fn assert_near(got: &[Vec<Vec<f32>>], want: &[Vec<Vec<f32>>], what: &str) {
    for (row, (got, want)) in got.iter().zip(want).enumerate() {
        let far = distance(got, want);
        assert!(far <= 0.02, "{what}, row {row} of {}: {far}", want.len());
    }
}

/// Decodes by graphs and by kernels launched one by one; what the graphs gave.
fn assert_graph_equals_eager(
    gpu: &mut ModelBed<CudaModel>,
    shared: &Sequence,
    num: usize,
    what: &str,
) -> Vec<Vec<Vec<f32>>> {
    gpu.model.set_enforce_eager(false);
    let graph = decode_over(gpu, shared, num);
    gpu.model.set_enforce_eager(true);
    let eager = decode_over(gpu, shared, num);
    assert_near(&graph, &eager, what);
    gpu.model.set_enforce_eager(false);
    graph
}

#[test]
fn every_graph_over_a_shared_context_equals_kernels_launched_one_by_one() {
    if !has_gpu("every_graph_over_a_shared_context_equals_kernels_launched_one_by_one") {
        return;
    }
    for arch in [TinyArch::Qwen3, TinyArch::Gemma3] {
        let tiny = TinyModel { max_position: 8192, ..tiny(arch, 128) };
        let config = EngineConfig {
            max_num_seqs: Some(1024),
            max_num_batched_tokens: Some(1024),
            ..config(DtypeSetting::Bfloat16)
        };
        let mut gpu = ModelBed::new(model_on_gpu(&tiny, &config), 1600, BLOCK);
        // Short ones first, whose largest steps are graphs of 1,024 rows.
        let mut short = gpu.sequence(&ids(SHORT_LEN, 5));
        gpu.go_on(&mut short, 512, SHORT_LEN);
        for num in [832, 896, 897, 1000, 1023, 1024] {
            assert_graph_equals_eager(&mut gpu, &short, num, &format!("{arch:?}, short"));
        }
        gpu.free(&short.table);
        let mut shared = gpu.sequence(&ids(SHARED_LEN, 7));
        gpu.go_on(&mut shared, 512, SHARED_LEN);
        let mut first = None;
        // Either side of the edges of graphs; from 897 on the padding is what the list has no room for.
        for num in [63, 64, 65, 255, 256, 257, 896, 897, 910, 1023, 1024] {
            let graph = assert_graph_equals_eager(&mut gpu, &shared, num, &format!("{arch:?}"));
            first.get_or_insert(graph);
        }
        // Nothing is left behind by the largest steps.
        gpu.model.set_enforce_eager(false);
        let again = decode_over(&mut gpu, &shared, 63);
        assert_near(&again, &first.expect("a first one"), &format!("{arch:?}, again"));
    }
}
