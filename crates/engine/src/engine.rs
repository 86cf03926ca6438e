//! The loop you can see: a step is plan, run, commit.
//!
//! Owns the model, the scheduler and the sampler. Synchronous and deterministic: no
//! clock, no channel, no text. [`crate::handle`] runs it on a thread.

use std::collections::VecDeque;

use crate::Error;
use crate::door::Limits;
use crate::model::{Forward, SampleSpec, StepResults};
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
    /// Steps under way, the oldest first; at most the model's depth.
    started: VecDeque<Started>,
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
        Ok(Self {
            model,
            limits,
            scheduler,
            sampler: Sampler::default(),
            plan: StepPlan::default(),
            started: VecDeque::new(),
            num_arrived: 0,
        })
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

    /// Starts the next step, if there is one, and brings the oldest one under way to its end
    /// when as many are under way as the model takes, or none was started. An error is the
    /// device's, not a request's: the engine is of no use after it.
    pub fn step(&mut self) -> Result<StepOutput, Error> {
        let mut output = StepOutput::default();
        let has_started = self.start_step(&mut output)?;
        if !has_started || self.started.len() >= self.model.depth() {
            self.finish_step(&mut output)?;
        }
        Ok(output)
    }

    /// Plans a step and starts it. False when nothing can be computed now.
    fn start_step(&mut self, output: &mut StepOutput) -> Result<bool, Error> {
        self.scheduler.plan(&mut self.plan);
        output.num_preempted = self.plan.num_preempted;
        output.admitted = std::mem::take(&mut self.plan.admitted);
        self.refuse_unplaceable(output);
        if self.plan.rows.is_empty() {
            return Ok(false);
        }
        let specs = sample_specs(&self.plan, &self.scheduler);
        let results = self.model.start(self.plan.input(), &specs, self.limits.vocab_size, &mut self.sampler)?;
        let rows = self.plan.rows.iter().map(|&row| {
            let choice = row.samples.then(|| row.logits_start + row.num_logits - 1);
            self.scheduler.note_started(row.sequence, choice);
            let sequence = self.scheduler.sequence_mut(row.sequence);
            if std::mem::take(&mut sequence.tells_begin) {
                output.begun.push(sequence.id);
            }
            StartedRow { row, arrival: sequence.arrival, num_computed: sequence.num_computed }
        });
        self.started.push_back(Started {
            rows: rows.collect(),
            results,
            num_decode_rows: self.plan.num_decode_rows,
            num_prefill_tokens: self.plan.num_tokens() - self.plan.num_decode_rows,
        });
        Ok(true)
    }

    /// Moves each row's sequence on by what the oldest started step computed and chose. Rows
    /// whose sequence has left meanwhile were computed for nothing.
    fn finish_step(&mut self, output: &mut StepOutput) -> Result<(), Error> {
        let Some(started) = self.started.pop_front() else { return Ok(()) };
        let results = match started.results {
            Some(results) => results,
            None => self.model.collect()?,
        };
        output.num_decode_rows = started.num_decode_rows;
        output.num_prefill_tokens = started.num_prefill_tokens;
        let mut results = results.into_iter();
        for StartedRow { row, arrival, num_computed } in started.rows {
            let of_row: Vec<_> = results.by_ref().take(row.num_logits as usize).collect();
            if self.scheduler.sequence_of(row.sequence, arrival).is_none() {
                continue;
            }
            let moved = match of_row.into_iter().collect() {
                Ok(of_row) => {
                    let moved = self.commit_row(row, num_computed, of_row);
                    self.scheduler.publish(row.sequence, num_computed);
                    self.remove_ended(row, moved)
                }
                Err(NotFinite) => self.fail_row(row, num_computed),
            };
            output.outputs.extend(moved);
        }
        Ok(())
    }

    fn remove_ended(&mut self, row: PlanRow, moved: Option<SequenceOutput>) -> Option<SequenceOutput> {
        if moved.as_ref().is_some_and(|moved| moved.end.is_some()) {
            self.scheduler.remove(row.sequence);
        }
        moved
    }

    /// `results` has one entry per logits row: scored prompt tokens, then the chosen token when there is one.
    fn commit_row(&mut self, row: PlanRow, num_computed: u32, mut results: Vec<Sampled>) -> Option<SequenceOutput> {
        let chosen = if row.samples { results.pop() } else { None };
        let sequence = self.scheduler.sequence_mut(row.sequence);
        let is_whole = num_computed == sequence.num_tokens();
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
        } else if sequence.max_tokens == 0 && is_whole {
            moved.end = Some(Ok(sequence.finish(FinishReason::Length, None)));
        } else {
            return None;
        }
        if sequence.num_known_output_tokens() <= 1 && sequence.num_prompt_logprobs.is_some() {
            moved.prompt_logprobs = Some(sequence.prompt_logprobs.clone());
        }
        Some(moved)
    }

    /// Ends a sequence whose logits are of no use. What the step computed of it is not
    /// offered to the prefix cache: another try must not find it again.
    fn fail_row(&mut self, row: PlanRow, num_tokens: u32) -> Option<SequenceOutput> {
        let sequence = self.scheduler.remove(row.sequence);
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
        self.scheduler.num_running() == 0 && self.scheduler.num_waiting() == 0 && self.started.is_empty()
    }
}

/// A step that was started: its rows, and its results where they are there already.
struct Started {
    rows: Vec<StartedRow>,
    results: Option<StepResults>,
    num_decode_rows: u32,
    num_prefill_tokens: u32,
}

struct StartedRow {
    row: PlanRow,
    /// Whose: `row.sequence` may be another's by the end.
    arrival: u64,
    /// Tokens of the sequence in the cache after the step.
    num_computed: u32,
}

/// What is wanted of each row of logits, in order.
fn sample_specs<'a>(plan: &StepPlan, scheduler: &'a Scheduler) -> Vec<SampleSpec<'a>> {
    let mut specs = Vec::with_capacity(plan.input().logits_tokens.len());
    for row in &plan.rows {
        let sequence = scheduler.sequence(row.sequence);
        let num_scored = row.num_logits - u32::from(row.samples);
        // The first of these positions that wants logits, plus one: a logits row scores the next token.
        let first_scored = (sequence.num_computed as usize + 1).max(sequence.prompt_logprobs.len());
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
