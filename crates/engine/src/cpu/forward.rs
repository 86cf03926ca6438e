//! One step through the layers.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use crate::Error;
use crate::cpu::CpuModel;
use crate::cpu::buffers::InputBuffer;
use crate::cpu::matmul::{Gate, matmul, matmul_gated};
use crate::cpu::pool::{Pool, Rows};
use crate::cpu::simd::Isa;
use crate::cpu::simd::vector::{self, Head};
use crate::model::StepInput;
use crate::model::check::check;
use crate::model::config::Architecture;
use crate::model::rope::Rope;

impl CpuModel {
    /// Computes the step and leaves the logits in `self.logits`.
    pub(crate) fn step(&mut self, step: StepInput<'_>) -> Result<(), Error> {
        let Some(cache) = &self.cache else {
            return Err(Error::Step("the KV cache is not allocated".to_owned()));
        };
        check(&step, cache.num_blocks, cache.block_size, self.config.vocab_rows)?;
        let tokens = step.token_ids.len();
        self.bad_layer.store(u32::MAX, Ordering::Relaxed);
        self.buffers.grow(&self.config, tokens);
        self.buffers.row_of.clear();
        for (row, range) in step.cu_seqlens.windows(2).enumerate() {
            self.buffers.row_of.extend((range[0]..range[1]).map(|_| row as u32));
        }
        self.embed(&step);
        for (rope, (cos, sin)) in self.config.ropes.iter().zip(&mut self.buffers.rotations) {
            rotations(&mut self.pool, rope, self.config.head_dim, step.positions, cos, sin);
        }
        self.norm_input(0, tokens);
        for layer in 0..self.config.layers.len() {
            self.attention(layer, &step);
            self.join(layer, tokens, Block::Attention);
            self.feed_forward(layer, tokens);
            self.join(layer, tokens, Block::FeedForward);
        }
        self.compute_logits(&step);
        Ok(())
    }

    fn embed(&mut self, step: &StepInput<'_>) {
        let hidden = self.config.hidden;
        let (embedding, scale) = (&self.weights.embedding, self.weights.embedding_scale);
        let x = Rows::new(&mut self.buffers.x, hidden);
        self.pool.each(step.token_ids.len(), x, |token, x, _| {
            embedding.read_row(step.token_ids[token] as usize, x);
            if scale != 1.0 {
                x.iter_mut().for_each(|x| *x *= scale);
            }
        });
    }

    /// Norms the residual into the input of a layer's attention.
    fn norm_input(&mut self, layer: usize, tokens: usize) {
        let hidden = self.config.hidden;
        let (isa, eps, quantized) = (self.isa, self.config.norm_eps, self.quantized);
        let weight = &self.weights.layers[layer].attention_norm;
        let bad = &self.bad_layer;
        let x = Rows::new(&mut self.buffers.x, hidden);
        self.pool.each(tokens, (x, input_rows(&mut self.buffers.input, hidden)), |_, (x, mut input), _| {
            if !vector::rms_norm(isa, input.0, x, weight, eps).is_finite() {
                bad.fetch_min(layer as u32, Ordering::Relaxed);
            }
            quantize(isa, quantized, &mut input);
        });
    }

    fn attention(&mut self, layer: usize, step: &StepInput<'_>) {
        let (config, weights, isa) = (&self.config, &self.weights.layers[layer], self.isa);
        let tokens = step.token_ids.len();
        let (q_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let width = q_width + 2 * kv_width;
        let buffers = &mut self.buffers;
        let matrices = [(&weights.q, 0), (&weights.k, q_width), (&weights.v, q_width + kv_width)];
        let inputs = buffers.input.inputs(tokens, config.hidden);
        matmul(&mut self.pool, isa, inputs, &matrices, &mut buffers.qkv, width);

        let (cos, sin) = &buffers.rotations[config.layers[layer].rope];
        let (half, dim) = (config.head_dim / 2, config.head_dim);
        self.pool.each(tokens, Rows::new(&mut buffers.qkv, width), |token, qkv, _| {
            let (cos, sin) = (&cos[token * half..][..half], &sin[token * half..][..half]);
            for (index, head) in qkv[..q_width + kv_width].chunks_exact_mut(dim).enumerate() {
                if let Some((q_norm, k_norm)) = &weights.qk_norms {
                    let norm = if index < config.heads { q_norm } else { k_norm };
                    vector::rms_norm_in_place(isa, head, norm, config.norm_eps);
                }
                vector::rope(isa, head, cos, sin);
            }
        });
        let cache = self.cache.as_mut().expect("checked at the start of the step");
        for (token, qkv) in buffers.qkv.chunks_exact(width).take(tokens).enumerate() {
            let (k, v) = qkv[q_width..].split_at(kv_width);
            cache.write(isa, layer, step.slot_mapping[token] as usize, k, v);
        }
        self.attend(layer, step);
        let (config, buffers) = (&self.config, &mut self.buffers);
        self.pool.each(tokens, input_rows(&mut buffers.input, q_width), |_, mut input, _| {
            quantize(isa, self.quantized, &mut input);
        });
        let inputs = buffers.input.inputs(tokens, q_width);
        matmul(&mut self.pool, isa, inputs, &[(&self.weights.layers[layer].o, 0)], &mut buffers.block, config.hidden);
    }

    /// Attention of every token over its row's cache, into the dense input.
    fn attend(&mut self, layer: usize, step: &StepInput<'_>) {
        let (config, isa) = (&self.config, self.isa);
        let cache = self.cache.as_ref().expect("checked at the start of the step");
        let (k, v) = cache.layer(layer);
        let tokens = step.token_ids.len();
        let dim = config.head_dim;
        let kv_width = config.kv_heads * dim;
        let width = (config.heads + 2 * config.kv_heads) * dim;
        let shared = config.heads / config.kv_heads;
        // Heads that share K and V go together, unless threads would have nothing to do.
        let mut together = shared;
        while together.is_multiple_of(2) && tokens * config.heads / together < self.pool.threads() {
            together /= 2;
        }
        let parts = config.heads / together;
        let window = config.layers[layer].window;
        let (buffers, scratch) = (&mut self.buffers, &self.scratch);
        let qkv = &buffers.qkv;
        let row_of = &buffers.row_of;
        let out = Rows::new(&mut buffers.input.dense, together * dim);
        self.pool.each(tokens * parts, out, |index, out, thread| {
            let (token, part) = (index / parts, index % parts);
            let head = part * together;
            let row = row_of[token] as usize;
            let table =
                &step.block_tables[step.block_table_starts[row] as usize..step.block_table_starts[row + 1] as usize];
            let last = step.positions[token] as usize;
            let first = window.map_or(0, |window| (last + 1).saturating_sub(window as usize));
            let mut scratch = scratch[thread].lock().expect("a thread's own scratch");
            let Scratch { offsets, scores } = &mut *scratch;
            offsets.clear();
            offsets.extend((first..=last).map(|position| {
                let slot = table[position / cache.block_size] as usize * cache.block_size + position % cache.block_size;
                slot * kv_width + head / shared * dim
            }));
            let q = &qkv[token * width + head * dim..][..together * dim];
            let head = Head { offsets, dim, scale: config.attention_scale };
            vector::attend(isa, out, q, k, v, head, scores);
        });
    }

    fn feed_forward(&mut self, layer: usize, tokens: usize) {
        let (config, weights, isa) = (&self.config, &self.weights.layers[layer], self.isa);
        let buffers = &mut self.buffers;
        let kind = match config.architecture {
            Architecture::Gemma3 => Gate::Gelu,
            Architecture::Llama | Architecture::Qwen3 => Gate::Silu,
        };
        // The product reads the input while it writes the gate, which is the next input.
        let mut gate = std::mem::take(&mut buffers.gate);
        let inputs = buffers.input.inputs(tokens, config.hidden);
        matmul_gated(&mut self.pool, isa, inputs, (&weights.gate, &weights.up), kind, (&mut gate, &mut buffers.up));
        buffers.gate = gate;
        std::mem::swap(&mut buffers.gate, &mut buffers.input.dense);
        let quantized = self.quantized;
        self.pool.each(tokens, input_rows(&mut buffers.input, config.ffn), |_, mut input, _| {
            quantize(isa, quantized, &mut input);
        });
        let inputs = buffers.input.inputs(tokens, config.ffn);
        matmul(&mut self.pool, isa, inputs, &[(&weights.down, 0)], &mut buffers.block, config.hidden);
    }

    /// Adds a block's output to the residual and norms it for what comes next.
    fn join(&mut self, layer: usize, tokens: usize, block: Block) {
        let (isa, eps, hidden, quantized) = (self.isa, self.config.norm_eps, self.config.hidden, self.quantized);
        let weights = &self.weights.layers[layer];
        let (post, next) = match block {
            Block::Attention => (weights.post_norms.as_ref().map(|(attention, _)| attention), &weights.ffn_norm),
            Block::FeedForward => (
                weights.post_norms.as_ref().map(|(_, ffn)| ffn),
                self.weights.layers.get(layer + 1).map_or(&self.weights.final_norm, |next| &next.attention_norm),
            ),
        };
        let bad = &self.bad_layer;
        let buffers = &mut self.buffers;
        let rows = (
            Rows::new(&mut buffers.x, hidden),
            Rows::new(&mut buffers.block, hidden),
            input_rows(&mut buffers.input, hidden),
        );
        self.pool.each(tokens, rows, |_, (x, block, mut input), _| {
            if let Some(post) = post {
                vector::rms_norm_in_place(isa, block, post, eps);
            }
            vector::add(isa, x, block);
            if !vector::rms_norm(isa, input.0, x, next, eps).is_finite() {
                bad.fetch_min(layer as u32, Ordering::Relaxed);
            }
            quantize(isa, quantized, &mut input);
        });
    }

    fn compute_logits(&mut self, step: &StepInput<'_>) {
        let (hidden, wanted) = (self.config.hidden, step.logits_tokens);
        let vocab = self.shape.vocab_size as usize;
        if self.logits.len() < wanted.len() * vocab {
            self.logits.resize(wanted.len() * vocab, 0.0);
        }
        // Wanted rows move to the front; they rise, so none is overwritten before it has moved.
        let input = &mut self.buffers.input;
        let blocks = hidden / 32;
        for (to, &from) in wanted.iter().enumerate() {
            let from = from as usize;
            input.dense.copy_within(from * hidden..(from + 1) * hidden, to * hidden);
            input.quants.copy_within(from * hidden..(from + 1) * hidden, to * hidden);
            input.scales[to] = input.scales[from];
            input.sums.copy_within(from * blocks..(from + 1) * blocks, to * blocks);
        }
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.embedding);
        let inputs = input.inputs(wanted.len(), hidden);
        matmul(&mut self.pool, self.isa, inputs, &[(head, 0)], &mut self.logits, vocab);
    }
}

#[derive(Clone, Copy)]
enum Block {
    Attention,
    FeedForward,
}

/// Scratch of one thread.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    offsets: Vec<usize>,
    scores: Vec<f32>,
}

/// One for each thread of the pool.
pub(crate) fn scratch(threads: usize) -> Vec<Mutex<Scratch>> {
    (0..threads).map(|_| Mutex::default()).collect()
}

type InputRows<'a> = (Rows<'a, f32>, Rows<'a, i16>, Rows<'a, f32>, Rows<'a, f32>);

/// The parts of an input of `cols` columns by row: dense, quantized, scale, sums.
fn input_rows(input: &mut InputBuffer, cols: usize) -> InputRows<'_> {
    (
        Rows::new(&mut input.dense, cols),
        Rows::new(&mut input.quants, cols),
        Rows::new(&mut input.scales, 1),
        Rows::new(&mut input.sums, (cols / 32).max(1)),
    )
}

fn quantize(
    isa: Isa,
    wanted: bool,
    (dense, quants, scale, sums): &mut (&mut [f32], &mut [i16], &mut [f32], &mut [f32]),
) {
    if wanted {
        scale[0] = vector::quantize(isa, quants, sums, dense);
    }
}

/// Cosines and sines of each token's angles, `[tokens, dim / 2]` each.
fn rotations(pool: &mut Pool, rope: &Rope, dim: usize, positions: &[u32], cos: &mut [f32], sin: &mut [f32]) {
    let frequencies = rope.frequencies(dim);
    let factor = rope.attention_factor();
    let rows = (Rows::new(cos, dim / 2), Rows::new(sin, dim / 2));
    pool.each(positions.len(), rows, |token, (cos, sin), _| {
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
            let (s, c) = (positions[token] as f32 * frequency).sin_cos();
            (*cos, *sin) = (c * factor, s * factor);
        }
    });
}
