//! Times steps of the CPU back end on a real model, many sequences at once:
//!
//! `cargo run --release -p overnight-engine --example cpu_step -- MODEL [N_SEQ PROMPT OUT THREADS]`
//!
//! Prefills `N_SEQ` random prompts in steps of 512 tokens, then decodes greedily, all sequences
//! in one step, and prints tokens per second of both and of the whole.

use std::io::Write;
use std::time::{Duration, Instant};

use overnight_engine::EngineConfig;
use overnight_engine::load::{LoadFormat, ModelSource, load_forward};
use overnight_engine::model::{Forward, StepInput};

const BLOCK: u32 = 64;
const STEP: usize = 512;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args.first().ok_or("usage: cpu_step MODEL [N_SEQ PROMPT OUT THREADS]")?;
    let number = |index: usize, default: usize| args.get(index).map_or(Ok(default), |text| text.parse());
    let (num_seqs, prompt, out) = (number(1, 32)?, number(2, 128)?, number(3, 64)?);
    let threads = number(4, 2)?;
    let mut report = std::io::stdout().lock();

    let started = Instant::now();
    let source = ModelSource { path: path.into(), load_format: LoadFormat::Auto };
    let config = EngineConfig { num_threads: Some(threads as u32), ..EngineConfig::default() };
    let mut model = load_forward(&source, &config)?;
    let loaded = started.elapsed();
    let blocks = (prompt + out).div_ceil(BLOCK as usize) as u32;
    model.allocate_kv_cache(blocks * num_seqs as u32, BLOCK)?;

    let mut sequences = Sequences::new(num_seqs, prompt, blocks);
    let started = Instant::now();
    let mut at = 0;
    while at < num_seqs * prompt {
        let end = (at + STEP).min(num_seqs * prompt);
        sequences.prefill(model.as_mut(), at, end)?;
        at = end;
    }
    let prefill = started.elapsed();
    let started = Instant::now();
    let mut fastest = Duration::MAX;
    for _ in 0..out {
        let step = Instant::now();
        sequences.decode(model.as_mut())?;
        fastest = fastest.min(step.elapsed());
    }
    let decode = started.elapsed();

    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
    writeln!(
        report,
        "nseq {num_seqs} prompt {prompt} out {out} threads {threads}: load {:.2} s prefill {:.1} tok/s decode {:.1} tok/s \
         (fastest step {:.1}) job {:.1} tok/s",
        loaded.as_secs_f64(),
        rate(num_seqs * prompt, prefill),
        rate(num_seqs * out, decode),
        rate(num_seqs, fastest),
        rate(num_seqs * (prompt + out), prefill + decode),
    )?;
    Ok(())
}

/// Prompts of random tokens and where each sequence is.
struct Sequences {
    prompts: Vec<Vec<u32>>,
    lens: Vec<usize>,
    last: Vec<u32>,
    blocks: u32,
}

impl Sequences {
    fn new(num: usize, prompt: usize, blocks: u32) -> Self {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            100 + (state >> 33) as u32 % 19_900
        };
        let prompts = (0..num).map(|_| (0..prompt).map(|_| random()).collect()).collect();
        Self { prompts, lens: vec![0; num], last: vec![42; num], blocks }
    }

    /// Tokens `from..to` of all prompts laid end to end.
    fn prefill(&mut self, model: &mut dyn Forward, from: usize, to: usize) -> Result<(), Box<dyn std::error::Error>> {
        let prompt = self.prompts[0].len();
        let mut rows = Vec::new();
        for sequence in from / prompt..to.div_ceil(prompt) {
            let start = self.lens[sequence];
            let end = prompt.min(to - sequence * prompt);
            rows.push((sequence, self.prompts[sequence][start..end].to_vec()));
        }
        self.step(model, &rows)
    }

    fn decode(&mut self, model: &mut dyn Forward) -> Result<(), Box<dyn std::error::Error>> {
        let rows: Vec<_> = self.last.iter().enumerate().map(|(sequence, &token)| (sequence, vec![token])).collect();
        self.step(model, &rows)
    }

    /// One step of rows (sequence, tokens); the last token of each is continued greedily.
    fn step(&mut self, model: &mut dyn Forward, rows: &[(usize, Vec<u32>)]) -> Result<(), Box<dyn std::error::Error>> {
        let (mut token_ids, mut positions, mut slots) = (vec![], vec![], vec![]);
        let (mut starts, mut contexts, mut tables, mut table_starts, mut wanted) =
            (vec![0], vec![], vec![], vec![0], vec![]);
        for (sequence, tokens) in rows {
            for &token in tokens {
                let position = self.lens[*sequence] as u32;
                let block = *sequence as u32 * self.blocks + position / BLOCK;
                token_ids.push(token);
                positions.push(position);
                slots.push(block * BLOCK + position % BLOCK);
                self.lens[*sequence] += 1;
            }
            starts.push(token_ids.len() as u32);
            wanted.push(token_ids.len() as u32 - 1);
            contexts.push(self.lens[*sequence] as u32);
            tables.extend((0..self.blocks).map(|block| *sequence as u32 * self.blocks + block));
            table_starts.push(tables.len() as u32);
        }
        let vocab = model.shape().vocab_size as usize;
        let logits = model.forward(StepInput {
            token_ids: &token_ids,
            positions: &positions,
            slot_mapping: &slots,
            cu_seqlens: &starts,
            context_lens: &contexts,
            block_tables: &tables,
            block_table_starts: &table_starts,
            logits_tokens: &wanted,
            feedback: &[],
        })?;
        for ((sequence, _), logits) in rows.iter().zip(logits.chunks_exact(vocab)) {
            let best = logits.iter().enumerate().fold(
                (0, f32::NEG_INFINITY),
                |best, (id, &x)| {
                    if x > best.1 { (id, x) } else { best }
                },
            );
            self.last[*sequence] = best.0 as u32;
        }
        Ok(())
    }
}
