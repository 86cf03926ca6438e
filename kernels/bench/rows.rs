//! Kernels that go over rows: norms, activation, embedding, sampling.

use super::{Bench, Case, Measured, scattered};
use crate::activation::Activation;
use crate::embedding::Embedding;
use crate::memory::{Buffer, DeviceSlice};
use crate::rms_norm::RmsNorm;
use crate::sampling::{Adjustment, Outputs, Rows, SampleParams, Sampling, workspace_bytes};
use crate::{Error, Stream};

/// Added to the mean of squares.
const EPS: f32 = 1e-6;
/// Standard deviation of logits.
const LOGITS_STD: f32 = 2.0;

/// Bytes of a number.
const HALF: u64 = 2;

/// One of the gated activations.
type Gated = fn(&Activation, &Stream, DeviceSlice<u16>, DeviceSlice<u16>, u32, u32) -> Result<(), Error>;

impl Bench {
    pub(super) fn rows(&self, case: Case) -> Result<Measured, Error> {
        match case {
            Case::RmsNorm { rows, hidden } => self.rms_norm(rows, hidden),
            Case::PostAddRmsNorm { rows, hidden } => self.post_add_rms_norm(rows, hidden),
            Case::SiluMul { rows, intermediate } => self.activation(rows, intermediate, Activation::silu_mul),
            Case::GeluTanhMul { rows, intermediate } => self.activation(rows, intermediate, Activation::gelu_tanh_mul),
            Case::EmbeddingGather { rows, hidden, vocab_size } => self.embedding(rows, hidden, vocab_size),
            Case::Sampling { rows, vocab_size, temperature, top_p } => {
                self.sampling(rows, vocab_size, temperature, top_p)
            }
            other => Err(Error::shape("bench", format!("{other:?} does not go over rows"))),
        }
    }

    fn rms_norm(&self, rows: u32, hidden: u32) -> Result<Measured, Error> {
        let len = len(rows, hidden);
        let bytes = 2 * HALF * len as u64;
        let kernel = RmsNorm::load(&self.modules)?;
        let weight = self.normal(hidden as usize, 1, 1.0)?;
        let turns = self.turns(bytes, |seed| Ok((self.empty(len)?, self.normal(len, seed, 1.0)?)))?;
        self.time(bytes, 0, turns.len(), |turn| {
            let (out, x) = (turns[turn].0.slice(), turns[turn].1.slice());
            kernel.rms_norm(&self.stream, out, x, weight.slice(), None, rows, hidden, EPS, 0.0)
        })
    }

    fn post_add_rms_norm(&self, rows: u32, hidden: u32) -> Result<Measured, Error> {
        let len = len(rows, hidden);
        let bytes = 4 * HALF * len as u64;
        let kernel = RmsNorm::load(&self.modules)?;
        let weights = [self.normal(hidden as usize, 1, 1.0)?, self.normal(hidden as usize, 2, 1.0)?];
        let [post, weight] = weights.each_ref().map(Buffer::slice);
        let turns = self.turns(bytes, |seed| {
            Ok([self.empty(len)?, self.normal(len, seed, 1.0)?, self.normal(len, seed + 1000, 1.0)?])
        })?;
        self.time(bytes, 0, turns.len(), |turn| {
            let [out, residual, x] = turns[turn].each_ref().map(Buffer::slice);
            kernel.post_add_rms_norm(&self.stream, out, residual, x, post, weight, rows, hidden, EPS, 0.0)
        })
    }

    fn activation(&self, rows: u32, intermediate: u32, run: Gated) -> Result<Measured, Error> {
        let len = len(rows, intermediate);
        let bytes = 3 * HALF * len as u64;
        let kernel = Activation::load(&self.modules)?;
        let turns = self.turns(bytes, |seed| Ok((self.empty(len)?, self.normal(2 * len, seed, 1.0)?)))?;
        self.time(bytes, 0, turns.len(), |turn| {
            run(&kernel, &self.stream, turns[turn].0.slice(), turns[turn].1.slice(), rows, intermediate)
        })
    }

    fn embedding(&self, rows: u32, hidden: u32, vocab_size: u32) -> Result<Measured, Error> {
        let bytes = 2 * HALF * len(rows, hidden) as u64;
        let kernel = Embedding::load(&self.modules)?;
        let table = self.normal(len(vocab_size, hidden), 1, 1.0)?;
        // One table for all turns: each takes other rows of it.
        let num_turns = self.num_turns(bytes);
        let ids = scattered(rows * num_turns as u32, vocab_size);
        let ids = self.upload(&ids)?;
        let outs = self.turns(bytes, |_| self.empty(len(rows, hidden)))?;
        self.time(bytes, 0, num_turns, |turn| {
            let ids = ids.slice().slice(turn * rows as usize, rows as usize);
            kernel.gather(&self.stream, outs[turn].slice(), table.slice(), ids, rows, hidden, 1.0)
        })
    }

    fn sampling(&self, rows: u32, vocab_size: u32, temperature: f32, top_p: f32) -> Result<Measured, Error> {
        let row_stride = vocab_size.next_multiple_of(8);
        let bytes = HALF * u64::from(rows) * u64::from(vocab_size);
        let kernel = Sampling::load(&self.modules)?;
        let params: Vec<SampleParams> = (0..rows)
            .map(|row| SampleParams {
                seed: u64::from(row),
                temperature,
                top_p,
                repetition_penalty: 1.0,
                ..SampleParams::default()
            })
            .collect();
        let params = self.upload(&params)?;
        let adjustments = self.empty::<Adjustment>(1)?;
        let workspace = self.empty::<u8>(workspace_bytes(rows, vocab_size) as usize)?;
        let (tokens, status) = (self.empty::<u32>(rows as usize)?, self.empty::<u32>(rows as usize)?);
        // Without log probabilities nothing is written to these.
        let (words, numbers) = (self.empty::<u32>(1)?, self.empty::<f32>(1)?);
        let outputs = Outputs {
            tokens: tokens.slice(),
            status: status.slice(),
            chosen_logprobs: numbers.slice(),
            chosen_ranks: words.slice(),
            top_ids: words.slice(),
            top_logprobs: numbers.slice(),
        };
        let is_filtered = temperature >= 1e-5 && top_p < 1.0;
        let dims = Rows { num_rows: rows, row_stride, vocab_size, is_filtered, has_logprobs: false };
        let logits = self.turns(bytes, |seed| self.normal(len(rows, row_stride), seed, LOGITS_STD))?;
        self.time(bytes, 0, logits.len(), |turn| {
            let logits = logits[turn].slice();
            kernel.run(&self.stream, &outputs, logits, params.slice(), adjustments.slice(), workspace.slice(), dims)
        })
    }

    /// Operands of `bytes` for each turn; `make` gets a seed of its own.
    pub(super) fn turns<T>(&self, bytes: u64, make: impl Fn(u64) -> Result<T, Error>) -> Result<Vec<T>, Error> {
        (0..self.num_turns(bytes) as u64).map(|turn| make(turn + 2)).collect()
    }
}

fn len(rows: u32, width: u32) -> usize {
    rows as usize * width as usize
}
