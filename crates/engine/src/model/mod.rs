//! What the engine asks of a model on a device: one forward pass over a ragged step.
//!
//! The scheduler decides what is in a step; a [`Forward`] computes it. It owns the
//! weights and the KV cache memory, and knows nothing of requests or sampling.

pub(crate) mod check;
pub mod config;
pub mod rope;

use crate::Error;
use crate::sampler::{NotFinite, SampleRow, Sampled, Sampler, Task};

/// Index of a KV cache block.
pub type BlockId = u32;

/// What the scheduler and the door must know about a loaded model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    /// Architecture by its Hugging Face name, for example `Qwen3ForCausalLM`.
    pub architecture: String,
    /// Rows of the output head that are real tokens; ids from here on are padding and masked.
    pub vocab_size: u32,
    /// Longest sequence that the model was made for.
    pub max_position: u32,
    /// Tokens that end a sequence by themselves.
    pub eos_token_ids: Vec<u32>,
    /// Bytes of K and V that one token takes over all layers.
    pub kv_bytes_per_token: u64,
    /// Bytes of weights in memory.
    pub weights_bytes: u64,
}

/// One ragged step. A decode row is a row with one query token, a prefill chunk one with more.
#[derive(Debug, Clone, Copy)]
pub struct StepInput<'a> {
    /// `[num_tokens]`, rows after each other.
    pub token_ids: &'a [u32],
    /// `[num_tokens]`, position of each token in its sequence.
    pub positions: &'a [u32],
    /// `[num_tokens]`, where each token's K and V go: `block * block_size + offset`.
    pub slot_mapping: &'a [u32],
    /// `[num_rows + 1]`, exclusive prefix sum of query lengths.
    pub cu_seqlens: &'a [u32],
    /// `[num_rows]`, tokens in the cache after this step, the queries included.
    pub context_lens: &'a [u32],
    /// Block ids of all rows after each other, in token order.
    pub block_tables: &'a [BlockId],
    /// `[num_rows + 1]`, where each row's block table starts in `block_tables`.
    pub block_table_starts: &'a [u32],
    /// Tokens (indices into `token_ids`) whose logits are wanted, rising.
    pub logits_tokens: &'a [u32],
    /// Tokens that the step started before this one chooses; their `token_ids` hold 0.
    /// Empty where a step is collected before the next is started.
    pub feedback: &'a [Feedback],
}

/// A token of a step that is the choice of the step before it, not collected yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feedback {
    /// Index into `token_ids`.
    pub token: u32,
    /// Row of logits of the step before, whose choice it is.
    pub choice: u32,
}

/// A result per row of logits: the token chosen or scored.
pub type StepResults = Vec<Result<Sampled, NotFinite>>;

/// What to do with one row of logits.
#[derive(Debug, Clone, Copy)]
pub struct SampleSpec<'a> {
    /// Choose a token or score one.
    pub task: Task<'a>,
    /// Likeliest tokens to report beside the chosen one; `None`: no logprobs at all.
    pub num_logprobs: Option<u32>,
}

/// Settings that a device chooses where the operator has not; `None`: those of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceDefaults {
    /// Most sequences in a step.
    pub max_num_seqs: Option<u32>,
    /// Most tokens in a step.
    pub max_num_batched_tokens: Option<u32>,
    /// Bytes that are set aside for the KV cache.
    pub kv_cache_memory_bytes: Option<u64>,
}

/// A loaded model on a device.
pub trait Forward: Send {
    /// Its shape.
    fn shape(&self) -> &ModelShape;

    /// Allocates the KV cache. Called once, before the first step.
    fn allocate_kv_cache(&mut self, num_blocks: u32, block_size: u32) -> Result<(), Error>;

    /// Computes a step: writes K and V of every token at its slot, then returns
    /// logits `[logits_tokens.len(), vocab_size]`, f32, row-major, valid until the next call.
    /// A row's result does not depend on the rows beside it.
    fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error>;

    /// Computes a step as [`Forward::forward`] does and chooses or scores a token for each of its
    /// `logits_tokens`, among the first `vocab_size` ids; one spec and one result per row of
    /// logits, in order. A device that samples by itself leaves `sampler` alone.
    fn run(
        &mut self,
        step: StepInput<'_>,
        specs: &[SampleSpec<'_>],
        vocab_size: u32,
        sampler: &mut Sampler,
    ) -> Result<StepResults, Error> {
        let (width, num_rows) = (self.shape().vocab_size as usize, step.logits_tokens.len());
        let logits = self.forward(step)?;
        if logits.len() != num_rows * width || specs.len() != num_rows {
            let (got, specs) = (logits.len(), specs.len());
            let what =
                format!("the model gave {got} logits instead of {num_rows} rows of {width}, for {specs} choices");
            return Err(Error::Stopped(what));
        }
        let rows: Vec<_> = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| SampleRow {
                logits: &logits[index * width..index * width + vocab_size as usize],
                task: spec.task,
                num_logprobs: spec.num_logprobs,
            })
            .collect();
        Ok(sampler.sample(&rows))
    }

    /// Steps that may be started before the first of them is collected: 1 or 2.
    fn depth(&self) -> usize {
        1
    }

    /// Starts a step, as [`Forward::run`] computes it. Gives the results where they are there
    /// already; `None` where [`Forward::collect`] gives them. Work is done in the order of
    /// starting: a step reads what the one before wrote, also its choices (`feedback`).
    fn start(
        &mut self,
        step: StepInput<'_>,
        specs: &[SampleSpec<'_>],
        vocab_size: u32,
        sampler: &mut Sampler,
    ) -> Result<Option<StepResults>, Error> {
        self.run(step, specs, vocab_size, sampler).map(Some)
    }

    /// Waits for the oldest step that was started and not collected.
    fn collect(&mut self) -> Result<StepResults, Error> {
        Err(Error::Stopped("no step was started".to_owned()))
    }

    /// What the device sets where the operator has not.
    fn defaults(&self) -> DeviceDefaults {
        DeviceDefaults::default()
    }

    /// After a step whose logits are not finite: the first layer whose output was not, counted
    /// from 0; `None` where every layer's was finite or the back end does not look.
    fn first_bad_layer(&self) -> Option<u32> {
        None
    }
}
