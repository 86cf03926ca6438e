//! The memory of a step: made for the largest step so far and used again.

use crate::cpu::matmul::Inputs;
use crate::cpu::simd::quant::Acts;
use crate::model::config::ModelConfig;

/// Activations of a step, `[tokens, …]` each.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    pub(crate) tokens: usize,
    /// The residual, `[tokens, hidden]`.
    pub(crate) x: Vec<f32>,
    /// Q, K and V beside each other, `[tokens, (heads + 2 kv_heads) * head_dim]`.
    pub(crate) qkv: Vec<f32>,
    /// Output of a block before it joins the residual, `[tokens, hidden]`.
    pub(crate) block: Vec<f32>,
    /// Rows like those of `input.dense`, `[tokens, ffn]` used.
    pub(crate) gate: Vec<f32>,
    /// `[tokens, ffn]`.
    pub(crate) up: Vec<f32>,
    pub(crate) input: InputBuffer,
    /// Cosines and sines of each rotary variant, `[tokens, head_dim / 2]` each.
    pub(crate) rotations: Vec<(Vec<f32>, Vec<f32>)>,
    /// The step's row of each token.
    pub(crate) row_of: Vec<u32>,
}

/// What a product reads: the widest of hidden, heads × head_dim and ffn is its row.
#[derive(Debug, Default)]
pub(crate) struct InputBuffer {
    pub(crate) dense: Vec<f32>,
    pub(crate) quants: Vec<i16>,
    pub(crate) scales: Vec<f32>,
    pub(crate) sums: Vec<f32>,
}

impl InputBuffer {
    fn grow(&mut self, tokens: usize, width: usize) {
        self.dense.resize(tokens * width, 0.0);
        self.quants.resize(tokens * width, 0);
        self.scales.resize(tokens, 0.0);
        self.sums.resize(tokens * width.div_ceil(32), 0.0);
    }

    /// The first `rows` rows, `cols` wide.
    pub(crate) fn inputs(&self, rows: usize, cols: usize) -> Inputs<'_> {
        Inputs {
            rows,
            dense: &self.dense[..rows * cols],
            quantized: Acts {
                quants: &self.quants[..rows * cols],
                scales: &self.scales[..rows],
                sums: &self.sums[..rows * (cols / 32)],
                cols,
            },
        }
    }
}

impl Buffers {
    /// Makes room for a step of `tokens` tokens.
    pub(crate) fn grow(&mut self, config: &ModelConfig, tokens: usize) {
        if tokens <= self.tokens {
            return;
        }
        self.tokens = tokens;
        let qkv = (config.heads + 2 * config.kv_heads) * config.head_dim;
        self.x.resize(tokens * config.hidden, 0.0);
        self.qkv.resize(tokens * qkv, 0.0);
        self.block.resize(tokens * config.hidden, 0.0);
        self.up.resize(tokens * config.ffn, 0.0);
        let widest = config.hidden.max(config.heads * config.head_dim).max(config.ffn);
        self.gate.resize(tokens * widest, 0.0);
        self.input.grow(tokens, widest);
        self.rotations.resize(config.ropes.len(), Default::default());
        for (cos, sin) in &mut self.rotations {
            cos.resize(tokens * config.head_dim / 2, 0.0);
            sin.resize(tokens * config.head_dim / 2, 0.0);
        }
    }
}
