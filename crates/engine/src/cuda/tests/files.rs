//! Weights from every form of file, and contexts of many chunks.

use super::{
    BLOCK, NUM_BLOCKS, config, dtypes, file_model_on_gpu, file_on_cpu, has_gpu, on_cpu, on_gpu, tiny, tolerance,
};
use crate::config::{DtypeSetting, EngineConfig};
use crate::model_bed::{ModelBed, distance, ids};
use crate::tiny_gguf::{Stored, gguf_bytes};
use crate::tiny_model::{TinyArch, TinyModel};

#[test]
fn gguf_weights_compute_what_the_oracle_does() {
    if !has_gpu("gguf_weights_compute_what_the_oracle_does") {
        return;
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("tiny.gguf");
    let prompt = ids(120, 3);
    for dtype in [DtypeSetting::Bfloat16, DtypeSetting::Float16] {
        for stored in Stored::ALL {
            std::fs::write(&path, gguf_bytes(&tiny(TinyArch::Qwen3, 64), stored)).expect("write");
            let config = config(dtype);
            let mut gpu = ModelBed::new(file_model_on_gpu(&path, &config), NUM_BLOCKS, BLOCK);
            let oracle = file_on_cpu(&path, &config).all_logits(&prompt, 120);
            let far = distance(&gpu.all_logits(&prompt, 120), &oracle);
            eprintln!("{stored:?} in {dtype:?}: {far:.4}");
            assert!(far <= tolerance(dtype), "{stored:?} in {dtype:?}: {far}");
        }
    }
}

#[test]
fn sharded_folder_computes_what_the_single_file_does() {
    if !has_gpu("sharded_folder_computes_what_the_single_file_does") {
        return;
    }
    let prompt = ids(120, 5);
    for arch in [TinyArch::Llama, TinyArch::Qwen3, TinyArch::Gemma3] {
        let (tiny, config) = (tiny(arch, 128), config(dtypes(arch)[0]));
        let whole = on_gpu(&tiny, &config).all_logits(&prompt, 120);
        let folder = tempfile::tempdir().expect("temporary folder");
        tiny.write_sharded(folder.path()).expect("write");
        let mut gpu = ModelBed::new(file_model_on_gpu(folder.path(), &config), NUM_BLOCKS, BLOCK);
        let far = distance(&gpu.all_logits(&prompt, 120), &whole);
        // The same weights; a product may be timed to another algorithm.
        assert!(far <= 0.005, "{arch:?}: {far}");
    }
}

/// Contexts of several chunks of decode attention, with and without a window, against the oracle.
#[test]
fn contexts_of_many_chunks_compute_what_the_oracle_does() {
    if !has_gpu("contexts_of_many_chunks_compute_what_the_oracle_does") {
        return;
    }
    let (len, num_decoded) = (3000, 24);
    let prompt = ids(len, 7);
    let config = EngineConfig { num_threads: Some(8), ..config(DtypeSetting::Bfloat16) };
    for (arch, head_dim) in [(TinyArch::Qwen3, 64), (TinyArch::Llama, 128), (TinyArch::Gemma3, 256)] {
        let tiny = TinyModel { max_position: 8192, ..tiny(arch, head_dim) };
        let mut cpu = on_cpu(&tiny, &config);
        let mut known = cpu.sequence(&prompt);
        cpu.go_on(&mut known, 512, len - num_decoded);
        let oracle = cpu.go_on(&mut known, 512, len);
        let mut gpu = on_gpu(&tiny, &config);
        let mut sequence = gpu.sequence(&prompt);
        gpu.go_on(&mut sequence, 500, len - num_decoded);
        let decoded = gpu.go_on(&mut sequence, 1, len);
        let far = distance(&decoded, &oracle);
        eprintln!("{arch:?}, {len} tokens: {far:.4}");
        assert!(far <= tolerance(DtypeSetting::Bfloat16), "{arch:?}, head_dim {head_dim}: {far}");
    }
}
