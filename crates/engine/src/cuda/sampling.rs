//! Choosing and scoring tokens on the device: what goes there for a row, and what comes back.

use std::collections::VecDeque;

use overnight_kernels::memory::Pinned;
use overnight_kernels::sampling::{self, Adjustment, SampleParams};
use overnight_kernels::{Arena, Device, DeviceSlice, Error as DeviceError, Event};

use crate::cuda::packing::StepView;
use crate::cuda::{CudaModel, StepLimits};
use crate::model::{SampleSpec, StepResults};
use crate::request::{TokenLogprob, TokenLogprobs};
use crate::sampler::{NotFinite, Sampled, Task};

/// Adjusted ids of all rows that are sampled at once.
const ADJUSTMENTS_MAX: usize = 2 << 20;
/// Likeliest ids that the device reports.
pub(super) const TOP_MAX: u32 = sampling::TOP_MAX;

/// Buffers of choosing. A step's choices stay on the device until the next but one step's.
#[derive(Debug)]
pub(super) struct Sampling {
    params: DeviceSlice<SampleParams>,
    adjustments: DeviceSlice<Adjustment>,
    workspace: DeviceSlice<u8>,
    /// Tokens and states of all rows of a step; log probabilities of one chunk of them.
    outputs: sampling::Outputs,
    /// Two steps may be under way, and a side of the host that the device reads or writes is
    /// nobody else's.
    sides: [HostSide; 2],
    /// The side that the next chunk of rows takes.
    next: usize,
    /// Sides of chunks that were launched and not collected, the oldest first.
    launched: VecDeque<usize>,
}

/// What the host keeps of one chunk of rows.
#[derive(Debug)]
struct HostSide {
    params: Pinned<SampleParams>,
    adjustments: Pinned<Adjustment>,
    tokens: Pinned<u32>,
    status: Pinned<u32>,
    logprobs: LogprobBuffers,
    /// Per row, the likeliest tokens asked for.
    num_logprobs: Vec<Option<u32>>,
    scratch: Vec<Adjustment>,
    /// Stands for the end of the chunk's work.
    done: Event,
}

#[derive(Debug)]
struct LogprobBuffers {
    chosen: Pinned<f32>,
    ranks: Pinned<u32>,
    top_ids: Pinned<u32>,
    top: Pinned<f32>,
}

impl Sampling {
    pub(super) fn new(
        device: &Device,
        arena: &mut Arena,
        limits: &StepLimits,
        vocab: u32,
    ) -> Result<Self, DeviceError> {
        let (rows, all_rows) = (limits.logits_rows as usize, limits.num_tokens as usize);
        let top = rows * TOP_MAX as usize;
        let mut take = |len: usize| arena.take::<u32>("sampling", len);
        let outputs = sampling::Outputs {
            tokens: take(all_rows)?,
            status: take(all_rows)?,
            chosen_logprobs: take(rows)?.cast(),
            chosen_ranks: take(rows)?,
            top_ids: take(top)?,
            top_logprobs: take(top)?.cast(),
        };
        Ok(Self {
            params: arena.take("sampling", rows)?,
            adjustments: arena.take("sampling", ADJUSTMENTS_MAX)?,
            workspace: arena.take("sampling", sampling::workspace_bytes(limits.logits_rows, vocab) as usize)?,
            outputs,
            sides: [HostSide::new(device, rows)?, HostSide::new(device, rows)?],
            next: 0,
            launched: VecDeque::new(),
        })
    }

    /// What the step started last chooses, by row of logits.
    pub(super) fn choices(&self) -> DeviceSlice<u32> {
        self.outputs.tokens
    }
}

impl HostSide {
    fn new(device: &Device, rows: usize) -> Result<Self, DeviceError> {
        let top = rows * TOP_MAX as usize;
        Ok(Self {
            params: Pinned::new(device, rows)?,
            adjustments: Pinned::new(device, ADJUSTMENTS_MAX)?,
            tokens: Pinned::new(device, rows)?,
            status: Pinned::new(device, rows)?,
            logprobs: LogprobBuffers {
                chosen: Pinned::new(device, rows)?,
                ranks: Pinned::new(device, rows)?,
                top_ids: Pinned::new(device, top)?,
                top: Pinned::new(device, top)?,
            },
            num_logprobs: Vec::new(),
            scratch: Vec::new(),
            done: Event::new(device)?,
        })
    }

    /// Writes parameters of as many of `specs` as fit; gives how many.
    fn pack(&mut self, specs: &[SampleSpec<'_>], rows_max: usize) -> (usize, usize) {
        let (params, adjustments) = (self.params.as_mut_slice(), self.adjustments.as_mut_slice());
        let mut num_adjustments = 0;
        for (index, spec) in specs.iter().take(rows_max).enumerate() {
            adjustments_of(spec, &mut self.scratch);
            let end = num_adjustments + self.scratch.len();
            if end > adjustments.len() && index > 0 {
                return (index, num_adjustments);
            }
            // A single row has at most as many as the vocabulary, which is less than the buffer.
            adjustments[num_adjustments..end].copy_from_slice(&self.scratch);
            params[index] = params_of(spec, num_adjustments as u32, self.scratch.len() as u32);
            num_adjustments = end;
        }
        (specs.len().min(rows_max), num_adjustments)
    }
}

/// What a row asks for, as the kernels read it.
fn params_of(spec: &SampleSpec<'_>, adjustments_start: u32, num_adjustments: u32) -> SampleParams {
    let mut params = SampleParams {
        flags: if spec.num_logprobs.is_some() { sampling::FLAG_LOGPROBS } else { 0 },
        num_logprobs: spec.num_logprobs.unwrap_or(0),
        top_p: 1.0,
        repetition_penalty: 1.0,
        adjustments_start,
        num_adjustments,
        ..SampleParams::default()
    };
    match spec.task {
        Task::Score(token) => {
            params.flags |= sampling::FLAG_SCORE;
            params.score_token = token;
        }
        Task::Choose { sampling, position, .. } => {
            params.seed = sampling.seed;
            params.position = position;
            params.temperature = if sampling.is_greedy() { 0.0 } else { sampling.temperature };
            params.top_p = sampling.top_p;
            params.min_p = sampling.min_p;
            params.top_k = sampling.top_k.unwrap_or(0);
            params.presence_penalty = sampling.presence_penalty;
            params.frequency_penalty = sampling.frequency_penalty;
            params.repetition_penalty = sampling.repetition_penalty;
        }
    }
    params
}

/// The ids whose logits change before the choice: rising, each once.
fn adjustments_of(spec: &SampleSpec<'_>, adjustments: &mut Vec<Adjustment>) {
    adjustments.clear();
    let Task::Choose { sampling, penalties, masked, .. } = spec.task else { return };
    let uses = penalties.into_iter().flat_map(|penalties| penalties.uses());
    let penalized = |(id, num): (u32, u32)| Adjustment {
        id,
        use_: sampling::USE_PENALIZED | num.min(sampling::USE_PENALIZED - 1),
        bias: 0.0,
    };
    adjustments.extend(uses.map(penalized));
    adjustments.extend(sampling.logit_bias.iter().map(|&(id, bias)| Adjustment { id, use_: 0, bias }));
    adjustments.extend(masked.iter().map(|&id| Adjustment { id, use_: sampling::USE_MASKED, bias: 0.0 }));
    adjustments.sort_by_key(|adjustment| adjustment.id);
    adjustments.dedup_by(|later, kept| {
        let same = later.id == kept.id;
        if same {
            // An id has one penalty at most, so that the bits do not meet.
            kept.use_ |= later.use_;
            kept.bias += later.bias;
        }
        same
    });
}

impl CudaModel {
    /// Whether the choices of a step are one chunk, so that it can be collected later.
    pub(super) fn is_one_chunk(&self, specs: &[SampleSpec<'_>]) -> bool {
        let num_adjustments: usize = specs.iter().map(num_adjustments_max).sum();
        specs.len() <= self.limits.logits_rows as usize && num_adjustments <= ADJUSTMENTS_MAX
    }

    /// One result per row of logits, in order, chosen chunk by chunk, each waited for. A step
    /// started before may still be uncollected: all chunks take the one side that it has not.
    pub(super) fn sample(
        &mut self,
        view: &StepView,
        specs: &[SampleSpec<'_>],
        vocab_size: u32,
    ) -> Result<StepResults, DeviceError> {
        let mut results = Vec::with_capacity(specs.len());
        loop {
            let start = results.len();
            let side = self.launch_choices(view, specs, start, vocab_size)?;
            // Read here, so nobody collects it, and the next chunk takes the same side.
            self.sampling.launched.pop_back();
            self.sampling.next = side;
            self.read_choices(side, &mut results)?;
            if results.len() >= specs.len() {
                self.sampling.next = 1 - side;
                return Ok(results);
            }
        }
    }

    /// Starts the choices of the rows from `start` on, as many as one chunk holds; gives the side
    /// that they come back on.
    pub(super) fn launch_choices(
        &mut self,
        view: &StepView,
        specs: &[SampleSpec<'_>],
        start: usize,
        vocab_size: u32,
    ) -> Result<usize, DeviceError> {
        let index = self.sampling.next;
        let side = &mut self.sampling.sides[index];
        side.done.synchronize()?;
        let (num, num_adjustments) = side.pack(&specs[start..], self.limits.logits_rows as usize);
        let specs = &specs[start..start + num];
        side.num_logprobs.clear();
        side.num_logprobs.extend(specs.iter().map(|spec| spec.num_logprobs));
        if num > 0 && !view.has_logits {
            self.head(view, start as u32, num as u32)?;
        }
        if num > 0 {
            self.launch_kernels(view, specs, (index, start, num_adjustments), vocab_size)?;
        }
        let s = &mut self.sampling;
        s.sides[index].done.record(&self.stream)?;
        s.launched.push_back(index);
        s.next = 1 - index;
        Ok(index)
    }

    fn launch_kernels(
        &mut self,
        view: &StepView,
        specs: &[SampleSpec<'_>],
        (index, start, num_adjustments): (usize, usize, usize),
        vocab_size: u32,
    ) -> Result<(), DeviceError> {
        let (num, stride) = (specs.len(), self.weights.head_rows);
        // A graph has left the logits of all rows, the head those of this chunk.
        let first = if view.has_logits { start } else { 0 };
        let logits = self.buffers.logits.slice(first * stride, num * stride);
        let has_logprobs = specs.iter().any(|spec| spec.num_logprobs.is_some());
        let s = &mut self.sampling;
        let side = &mut s.sides[index];
        self.stream.upload(s.params, &side.params, num)?;
        self.stream.upload(s.adjustments, &side.adjustments, num_adjustments)?;
        let is_filtered = specs.iter().any(is_filtered);
        let outputs = sampling::Outputs {
            tokens: s.outputs.tokens.slice(start, num),
            status: s.outputs.status.slice(start, num),
            ..s.outputs
        };
        self.kernels.sampling.run(
            &self.stream,
            &outputs,
            logits,
            s.params,
            s.adjustments,
            s.workspace,
            sampling::Rows { num_rows: num as u32, row_stride: stride as u32, vocab_size, is_filtered, has_logprobs },
        )?;
        self.stream.download(&mut side.tokens, outputs.tokens)?;
        self.stream.download(&mut side.status, outputs.status)?;
        if has_logprobs {
            let top = num * TOP_MAX as usize;
            self.stream.download(&mut side.logprobs.chosen, outputs.chosen_logprobs.slice(0, num))?;
            self.stream.download(&mut side.logprobs.ranks, outputs.chosen_ranks.slice(0, num))?;
            self.stream.download(&mut side.logprobs.top_ids, outputs.top_ids.slice(0, top))?;
            self.stream.download(&mut side.logprobs.top, outputs.top_logprobs.slice(0, top))?;
        }
        Ok(())
    }

    /// Waits for the oldest step that was started and not collected; `None` without one.
    pub(super) fn collect_choices(&mut self) -> Result<Option<StepResults>, DeviceError> {
        let Some(index) = self.sampling.launched.pop_front() else { return Ok(None) };
        let mut results = Vec::new();
        self.read_choices(index, &mut results)?;
        Ok(Some(results))
    }

    fn read_choices(&self, index: usize, results: &mut StepResults) -> Result<(), DeviceError> {
        let side = &self.sampling.sides[index];
        side.done.synchronize()?;
        for (index, num_logprobs) in side.num_logprobs.iter().enumerate() {
            if side.status.as_slice()[index] != sampling::STATUS_OK {
                results.push(Err(NotFinite));
                continue;
            }
            let token = side.tokens.as_slice()[index];
            let logprobs = num_logprobs.map(|num| {
                let from = index * TOP_MAX as usize;
                let ids = &side.logprobs.top_ids.as_slice()[from..from + num as usize];
                let tops = &side.logprobs.top.as_slice()[from..from + num as usize];
                let top = ids.iter().zip(tops).zip(1..);
                TokenLogprobs {
                    chosen: TokenLogprob {
                        token,
                        logprob: side.logprobs.chosen.as_slice()[index],
                        rank: side.logprobs.ranks.as_slice()[index],
                    },
                    top: top.map(|((&token, &logprob), rank)| TokenLogprob { token, logprob, rank }).collect(),
                }
            });
            results.push(Ok(Sampled { token, logprobs }));
        }
        Ok(())
    }
}

/// No fewer than [`adjustments_of`] gives.
fn num_adjustments_max(spec: &SampleSpec<'_>) -> usize {
    let Task::Choose { sampling, penalties, masked, .. } = spec.task else { return 0 };
    let num_uses = penalties.map_or(0, |penalties| penalties.uses().count());
    num_uses + sampling.logit_bias.len() + masked.len()
}

fn is_filtered(spec: &SampleSpec<'_>) -> bool {
    match spec.task {
        Task::Choose { sampling, .. } => {
            !sampling.is_greedy() && (sampling.top_k.is_some() || sampling.top_p < 1.0 || sampling.min_p > 0.0)
        }
        Task::Score(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::SamplingParams;
    use crate::sampler::Penalties;

    #[test]
    fn adjustments_of_an_id_meet_in_one_entry_and_ids_rise() {
        let sampling = SamplingParams {
            presence_penalty: 1.0,
            repetition_penalty: 1.5,
            logit_bias: vec![(9, 2.0), (4, -1.0)],
            ..SamplingParams::default()
        };
        let mut penalties = Penalties::new(&sampling, &[7, 4]).expect("a penalty is on");
        penalties.count(4);
        penalties.count(4);
        let task = Task::Choose { sampling: &sampling, penalties: Some(&penalties), masked: &[9, 1], position: 3 };
        let mut found = Vec::new();
        adjustments_of(&SampleSpec { task, num_logprobs: None }, &mut found);
        let found: Vec<_> = found.iter().map(|a| (a.id, a.use_, a.bias)).collect();
        let penalized = sampling::USE_PENALIZED;
        let masked = sampling::USE_MASKED;
        assert_eq!(found, [(1, masked, 0.0), (4, penalized | 2, -1.0), (7, penalized, 0.0), (9, masked, 2.0)]);
    }

    #[test]
    fn a_greedy_row_has_no_temperature_and_a_scored_one_no_choice() {
        let sampling = SamplingParams { temperature: 1e-6, top_k: Some(3), seed: 5, ..SamplingParams::default() };
        let choose = Task::Choose { sampling: &sampling, penalties: None, masked: &[], position: 2 };
        let params = params_of(&SampleSpec { task: choose, num_logprobs: None }, 0, 0);
        assert_eq!((params.temperature, params.top_k, params.seed, params.position, params.flags), (0.0, 3, 5, 2, 0));
        let params = params_of(&SampleSpec { task: Task::Score(8), num_logprobs: Some(4) }, 0, 0);
        assert_eq!((params.score_token, params.num_logprobs), (8, 4));
        assert_eq!(params.flags, sampling::FLAG_SCORE | sampling::FLAG_LOGPROBS);
    }
}
