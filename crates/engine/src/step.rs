//! One step: what the scheduler plans, as packed arrays, and what comes back.

use crate::model::{BlockId, Feedback, StepInput};
use crate::request::{Finish, RequestError, RequestId, TokenLogprobs};
use crate::sequence::{Sequence, SequenceId};

/// A row of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanRow {
    /// Whose.
    pub sequence: SequenceId,
    /// Tokens computed; 1 in a decode row.
    pub num_tokens: u32,
    /// Its first row among the step's logits.
    pub logits_start: u32,
    /// Its rows among the step's logits.
    pub num_logits: u32,
    /// A token is chosen from the last of them.
    pub samples: bool,
}

/// A step as the model takes it. Decode rows come first. Kept and refilled from step to step.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// The rows.
    pub rows: Vec<PlanRow>,
    /// Of `rows`, those that decode.
    pub num_decode_rows: u32,
    /// Sequences whose blocks were taken to make room.
    pub num_preempted: u32,
    /// Sequences that can never be placed; a fault of the door.
    pub unplaceable: Vec<SequenceId>,
    /// Requests that were let in for the first time.
    pub admitted: Vec<RequestId>,
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    slot_mapping: Vec<u32>,
    cu_seqlens: Vec<u32>,
    context_lens: Vec<u32>,
    block_tables: Vec<BlockId>,
    block_table_starts: Vec<u32>,
    logits_tokens: Vec<u32>,
    feedback: Vec<Feedback>,
}

impl StepPlan {
    /// Empties it.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.num_decode_rows = 0;
        self.num_preempted = 0;
        self.unplaceable.clear();
        self.admitted.clear();
        self.feedback.clear();
        for array in [
            &mut self.token_ids,
            &mut self.positions,
            &mut self.slot_mapping,
            &mut self.cu_seqlens,
            &mut self.context_lens,
            &mut self.block_tables,
            &mut self.block_table_starts,
            &mut self.logits_tokens,
        ] {
            array.clear();
        }
        self.cu_seqlens.push(0);
        self.block_table_starts.push(0);
    }

    /// Appends the scheduled tokens of a sequence as a row.
    pub fn push_row(&mut self, id: SequenceId, sequence: &Sequence, block_size: u32) {
        let first_token = len(&self.token_ids);
        let logits_start = len(&self.logits_tokens);
        let context_len = sequence.num_computed + sequence.num_scheduled;
        let samples = sequence.samples_after_step();
        for position in sequence.num_computed..context_len {
            let block = sequence.blocks[(position / block_size) as usize];
            if sequence.wants_prompt_logits(position) || (samples && position + 1 == context_len) {
                self.logits_tokens.push(first_token + position - sequence.num_computed);
            }
            let token = sequence.tokens.get(position as usize).copied().unwrap_or_else(|| {
                assert_eq!(sequence.num_pending, 1, "the one token that is not known is the last step's choice");
                self.feedback.push(Feedback { token: len(&self.token_ids), choice: sequence.last_choice });
                0
            });
            self.token_ids.push(token);
            self.positions.push(position);
            self.slot_mapping.push(block * block_size + position % block_size);
        }
        self.cu_seqlens.push(len(&self.token_ids));
        self.context_lens.push(context_len);
        self.block_tables.extend_from_slice(&sequence.blocks[..context_len.div_ceil(block_size) as usize]);
        self.block_table_starts.push(len(&self.block_tables));
        self.rows.push(PlanRow {
            sequence: id,
            num_tokens: sequence.num_scheduled,
            logits_start,
            num_logits: len(&self.logits_tokens) - logits_start,
            samples,
        });
    }

    /// All tokens of the step.
    pub fn num_tokens(&self) -> u32 {
        len(&self.token_ids)
    }

    /// The arrays.
    pub fn input(&self) -> StepInput<'_> {
        StepInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            slot_mapping: &self.slot_mapping,
            cu_seqlens: &self.cu_seqlens,
            context_lens: &self.context_lens,
            block_tables: &self.block_tables,
            block_table_starts: &self.block_table_starts,
            logits_tokens: &self.logits_tokens,
            feedback: &self.feedback,
        }
    }
}

fn len(array: &[u32]) -> u32 {
    u32::try_from(array.len()).expect("bounded by the token budget and the block pool")
}

/// What a step brought for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceOutput {
    /// Whose.
    pub id: RequestId,
    /// The token chosen; none when only the end is told.
    pub token: Option<u32>,
    /// Its logprobs, when asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Logprobs of the prompt, once, with the first output.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Prompt length.
    pub num_prompt_tokens: u32,
    /// Of it, found in the prefix cache.
    pub num_cached_tokens: u32,
    /// Set with the last output: how it ended.
    pub end: Option<Result<Finish, RequestError>>,
    /// Somebody must see it at once.
    pub is_watched: bool,
}

/// What a step brought.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Tokens computed in rows of more than one.
    pub num_prefill_tokens: u32,
    /// Rows of one token.
    pub num_decode_rows: u32,
    /// Sequences preempted while planning.
    pub num_preempted: u32,
    /// Requests that a step computes for the first time, of those whose caller is told.
    pub begun: Vec<RequestId>,
    /// Requests let in for the first time while planning.
    pub admitted: Vec<RequestId>,
    /// Per request whose state moved on visibly.
    pub outputs: Vec<SequenceOutput>,
}

impl SequenceOutput {
    /// Nothing new yet of this sequence.
    pub fn new(sequence: &Sequence) -> Self {
        Self {
            id: sequence.id,
            token: None,
            logprobs: None,
            prompt_logprobs: None,
            num_prompt_tokens: sequence.num_prompt_tokens,
            num_cached_tokens: sequence.num_cached_tokens.unwrap_or(0),
            end: None,
            is_watched: sequence.is_watched,
        }
    }
}
