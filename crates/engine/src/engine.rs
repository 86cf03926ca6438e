//! The loop you can see: a step is plan, run, commit.
//!
//! Owns the model, the scheduler and the sampler. Synchronous and deterministic: no
//! clock, no channel, no text. [`crate::handle`] runs it on a thread.

use crate::Error;
use crate::door::Limits;
use crate::model::{Forward, SampleSpec};
use crate::request::{FinishReason, Request, RequestError, RequestId};
use crate::sampler::{NotFinite, Sampled, Sampler, Task};
use crate::scheduler::{Scheduler, SchedulerLimits};
use crate::sequence::Sequence;
use crate::step::{PlanRow, SequenceOutput, StepOutput, StepPlan};

/// Continuous batching over one model.
pub struct Engine {
    model: Box<dyn Forward>,
    limits: Limits,
    scheduler: Scheduler,
    sampler: Sampler,
    plan: StepPlan,
    num_arrived: u64,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Engine {
    /// An idle engine; allocates the KV cache. `limits` come from [`Limits::resolve`] for this model.
    pub fn new(mut model: Box<dyn Forward>, limits: Limits, enable_prefix_caching: bool) -> Result<Self, Error> {
        model.allocate_kv_cache(limits.num_blocks, limits.block_size)?;
        let scheduler = Scheduler::new(SchedulerLimits {
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            block_size: limits.block_size,
            num_blocks: limits.num_blocks,
            enable_prefix_caching,
            expected_output_min: limits.expected_output_min,
        });
        Ok(Self { model, limits, scheduler, sampler: Sampler::default(), plan: StepPlan::default(), num_arrived: 0 })
    }

    /// Takes a request, or refuses it for good.
    pub fn add(&mut self, request: Request) -> Result<(), RequestError> {
        self.limits.check(&request)?;
        if self.scheduler.contains(request.id) {
            return Err(RequestError::duplicate_id(request.id));
        }
        let sequence = Sequence::new(request, self.num_arrived, self.limits.max_model_len, &self.limits.eos_token_ids);
        self.num_arrived += 1;
        self.scheduler.add(sequence);
        Ok(())
    }

    /// Takes a request out; its end with what it has. An unknown or finished id gives `None` and changes nothing.
    pub fn cancel(&mut self, id: RequestId) -> Option<SequenceOutput> {
        let sequence = self.scheduler.remove(self.scheduler.find(id)?);
        let finish = sequence.finish(FinishReason::Abort, None);
        Some(SequenceOutput { end: Some(Ok(finish)), ..SequenceOutput::new(&sequence) })
    }

    /// Computes one step. An error is the device's, not a request's: the engine is of no use after it.
    pub fn step(&mut self) -> Result<StepOutput, Error> {
        self.scheduler.plan(&mut self.plan);
        let mut output = StepOutput {
            num_decode_rows: self.plan.num_decode_rows,
            num_prefill_tokens: self.plan.num_tokens() - self.plan.num_decode_rows,
            num_preempted: self.plan.num_preempted,
            outputs: Vec::new(),
        };
        self.refuse_unplaceable(&mut output);
        if self.plan.rows.is_empty() {
            return Ok(output);
        }
        let specs = sample_specs(&self.plan, &self.scheduler);
        let sampled = self.model.run(self.plan.input(), &specs, self.limits.vocab_size, &mut self.sampler)?;
        self.commit(sampled, &mut output);
        Ok(output)
    }

    /// Moves each row's sequence on by what the step computed and chose.
    fn commit(&mut self, sampled: Vec<Result<Sampled, NotFinite>>, output: &mut StepOutput) {
        let mut sampled = sampled.into_iter();
        for index in 0..self.plan.rows.len() {
            let row = self.plan.rows[index];
            let results = sampled.by_ref().take(row.num_logits as usize);
            let results: Result<Vec<Sampled>, NotFinite> = results.collect::<Vec<_>>().into_iter().collect();
            let moved = match results {
                Ok(results) => {
                    self.scheduler.commit_computed(row.sequence);
                    self.commit_row(row, results)
                }
                Err(NotFinite) => self.fail_row(row),
            };
            output.outputs.extend(moved);
        }
    }

    /// `results` has one entry per logits row: scored prompt tokens, then the chosen token when there is one.
    fn commit_row(&mut self, row: PlanRow, mut results: Vec<Sampled>) -> Option<SequenceOutput> {
        let chosen = if row.samples { results.pop() } else { None };
        let sequence = self.scheduler.sequence_mut(row.sequence);
        if sequence.misses_prompt_logprobs() {
            if sequence.prompt_logprobs.is_empty() {
                sequence.prompt_logprobs.push(None);
            }
            sequence.prompt_logprobs.extend(results.into_iter().map(|scored| scored.logprobs));
        }
        let mut moved = SequenceOutput::new(sequence);
        if let Some(chosen) = chosen {
            moved.token = Some(chosen.token);
            moved.logprobs = chosen.logprobs;
            moved.end = sequence.push_token(chosen.token, &self.limits.eos_token_ids).map(Ok);
        } else if sequence.max_tokens == 0 && sequence.num_uncomputed() == 0 {
            moved.end = Some(Ok(sequence.finish(FinishReason::Length, None)));
        } else {
            return None;
        }
        if sequence.num_output_tokens() <= 1 && sequence.num_prompt_logprobs.is_some() {
            moved.prompt_logprobs = Some(sequence.prompt_logprobs.clone());
        }
        if moved.end.is_some() {
            self.scheduler.remove(row.sequence);
        }
        Some(moved)
    }

    /// Ends a sequence whose logits are of no use. What the step computed of it is not
    /// offered to the prefix cache: another try must not find it again.
    fn fail_row(&mut self, row: PlanRow) -> Option<SequenceOutput> {
        let sequence = self.scheduler.remove(row.sequence);
        let num_tokens = sequence.num_computed + row.num_tokens;
        let mut message = format!("{NotFinite} after {num_tokens} tokens of this sequence");
        if let Some(layer) = self.model.first_bad_layer() {
            message.push_str(&format!("; layer {layer} was the first of the step to give others"));
        }
        let error = RequestError { transient: false, code: RequestError::LOGITS_NOT_FINITE, param: None, message };
        Some(SequenceOutput { end: Some(Err(error)), ..SequenceOutput::new(&sequence) })
    }

    /// The door lets nothing in that cannot be placed; should it, the request ends instead of waiting for ever.
    fn refuse_unplaceable(&mut self, output: &mut StepOutput) {
        for id in std::mem::take(&mut self.plan.unplaceable) {
            let sequence = self.scheduler.remove(id);
            let error = self.limits.kv_cache_exceeded(sequence.num_tokens(), sequence.num_prompt_tokens);
            output.outputs.push(SequenceOutput { end: Some(Err(error)), ..SequenceOutput::new(&sequence) });
        }
    }

    /// The limits that requests are held to.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The queues, for counts.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.scheduler.num_running() == 0 && self.scheduler.num_waiting() == 0
    }
}

/// What is wanted of each row of logits, in order.
fn sample_specs<'a>(plan: &StepPlan, scheduler: &'a Scheduler) -> Vec<SampleSpec<'a>> {
    let mut specs = Vec::with_capacity(plan.input().logits_tokens.len());
    for row in &plan.rows {
        let sequence = scheduler.sequence(row.sequence);
        let num_scored = row.num_logits - u32::from(row.samples);
        let first_scored = sequence.prompt_logprobs.len().max(1);
        for at in 0..num_scored as usize {
            let task = Task::Score(sequence.tokens[first_scored + at]);
            specs.push(SampleSpec { task, num_logprobs: sequence.num_prompt_logprobs });
        }
        if row.samples {
            specs.push(choice(sequence));
        }
    }
    specs
}

fn choice(sequence: &Sequence) -> SampleSpec<'_> {
    let position = sequence.num_output_tokens();
    let masked = if position < sequence.stop.min_tokens { sequence.ending_ids.as_slice() } else { &[] };
    let penalties = sequence.penalties.as_ref();
    SampleSpec {
        task: Task::Choose { sampling: &sequence.sampling, penalties, masked, position },
        num_logprobs: sequence.num_logprobs,
    }
}
