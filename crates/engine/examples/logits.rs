//! Writes the logits of every position of a prompt, to compare with another program's:
//!
//! `cargo run --release -p overnight-engine --example logits -- MODEL cpu|cuda CHUNK OUT ID…`
//!
//! OUT holds f32, `[positions, vocabulary]`, little-endian. CHUNK is how many tokens a step takes;
//! 1 goes through the decode path.

use std::io::Write;

use overnight_engine::cuda::DeviceOptions;
use overnight_engine::load::{LoadFormat, ModelSource, load_forward_on};
use overnight_engine::model::StepInput;
use overnight_engine::{DeviceKind, EngineConfig};

const BLOCK: u32 = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, device, chunk, out, ids @ ..] = args.as_slice() else {
        return Err("usage: logits MODEL cpu|cuda CHUNK OUT ID…".into());
    };
    let ids = ids.iter().map(|id| id.parse()).collect::<Result<Vec<u32>, _>>()?;
    let device = if device == "cuda" { DeviceKind::Cuda } else { DeviceKind::Cpu };
    let config =
        EngineConfig { device, max_num_seqs: Some(8), max_num_batched_tokens: Some(4096), ..EngineConfig::default() };
    let source = ModelSource { path: path.into(), load_format: LoadFormat::Auto };
    let (mut model, name) = load_forward_on(&source, &config, &DeviceOptions::default())?;
    writeln!(std::io::stderr(), "on {name}")?;
    let blocks = ids.len().div_ceil(BLOCK as usize) as u32;
    model.allocate_kv_cache(blocks, BLOCK)?;
    let table: Vec<u32> = (0..blocks).collect();
    let mut file = std::io::BufWriter::new(std::fs::File::create(out)?);
    let mut done = 0;
    for piece in ids.chunks(chunk.parse::<usize>()?.max(1)) {
        let positions: Vec<u32> = (done..done + piece.len() as u32).collect();
        done += piece.len() as u32;
        let used = done.div_ceil(BLOCK);
        let logits = model.forward(StepInput {
            token_ids: piece,
            positions: &positions,
            slot_mapping: &positions,
            cu_seqlens: &[0, piece.len() as u32],
            context_lens: &[done],
            block_tables: &table[..used as usize],
            block_table_starts: &[0, used],
            logits_tokens: &(0..piece.len() as u32).collect::<Vec<_>>(),
            feedback: &[],
        })?;
        for logit in logits {
            file.write_all(&logit.to_le_bytes())?;
        }
    }
    Ok(file.flush()?)
}
