//! Engines over the toy, requests, and running them to the end.

use std::collections::HashMap;

use overnight_engine::door::Limits;
use overnight_engine::model::Forward;
use overnight_engine::request::Class;
use overnight_engine::step::SequenceOutput;
use overnight_engine::{Engine, EngineConfig, Finish, Request, RequestError, RequestId, SamplingParams, StopRules};

use crate::ahead::Ahead;
use crate::toy::{Toy, VOCAB};

pub(crate) const BLOCK_SIZE: u32 = 8;
/// Steps after which a run counts as endless.
const STEPS_MAX: u32 = 20_000;

/// Settings of an engine over the toy.
#[derive(Debug, Clone)]
pub(crate) struct Bed {
    pub(crate) num_blocks: u32,
    pub(crate) max_num_seqs: u32,
    pub(crate) max_num_batched_tokens: u32,
    pub(crate) caching: bool,
    pub(crate) max_model_len: u32,
    /// Room kept for outputs at admission; small values make preemptions.
    pub(crate) expected_output_min: u32,
    /// A step is started before the one before it is collected.
    pub(crate) is_ahead: bool,
}

impl Default for Bed {
    fn default() -> Self {
        Self {
            num_blocks: 512,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            caching: true,
            max_model_len: 512,
            expected_output_min: 256,
            is_ahead: false,
        }
    }
}

impl Bed {
    pub(crate) fn config(&self) -> EngineConfig {
        EngineConfig {
            max_model_len: Some(self.max_model_len),
            max_num_seqs: Some(self.max_num_seqs),
            max_num_batched_tokens: Some(self.max_num_batched_tokens),
            block_size: BLOCK_SIZE,
            num_gpu_blocks_override: Some(self.num_blocks),
            enable_prefix_caching: self.caching,
            ..EngineConfig::default()
        }
    }

    pub(crate) fn engine(&self) -> Engine {
        self.engine_over(Toy::new(self.max_model_len))
    }

    pub(crate) fn engine_over(&self, toy: Toy) -> Engine {
        let mut limits = Limits::resolve(toy.shape(), &self.config(), Some(VOCAB), None).expect("good settings");
        limits.expected_output_min = self.expected_output_min;
        let model: Box<dyn Forward> = if self.is_ahead { Box::new(Ahead::new(toy)) } else { Box::new(toy) };
        Engine::new(model, limits, self.caching).expect("the toy starts")
    }
}

/// A greedy request that ignores EOS.
pub(crate) fn request(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request {
        id: RequestId::next(),
        class: Class::Job,
        prompt,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        stop: StopRules { max_tokens, ignore_eos: true, ..StopRules::default() },
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        stream: false,
    }
}

/// The same work under a fresh id.
pub(crate) fn again(request: &Request) -> Request {
    Request { id: RequestId::next(), ..request.clone() }
}

/// Everything one request got.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Got {
    pub(crate) tokens: Vec<u32>,
    pub(crate) outputs: Vec<SequenceOutput>,
    pub(crate) end: Option<Result<Finish, RequestError>>,
}

impl Got {
    #[track_caller]
    pub(crate) fn finish(&self) -> &Finish {
        self.end.as_ref().expect("it ended").as_ref().expect("it was not failed")
    }
}

/// Outputs by request.
#[derive(Debug, Default)]
pub(crate) struct Results(pub(crate) HashMap<RequestId, Got>);

impl Results {
    pub(crate) fn take(&mut self, output: SequenceOutput) {
        let got = self.0.entry(output.id).or_default();
        assert!(got.end.is_none(), "{:?} got something after its end", output.id);
        got.tokens.extend(output.token);
        got.end.clone_from(&output.end);
        got.outputs.push(output);
    }

    #[track_caller]
    pub(crate) fn of(&self, request: &Request) -> &Got {
        self.0.get(&request.id).expect("the request got something")
    }
}

/// Steps until nothing is left; all blocks must have come back.
#[track_caller]
pub(crate) fn run(engine: &mut Engine, results: &mut Results) {
    for _ in 0..STEPS_MAX {
        if engine.is_idle() {
            engine.scheduler().check();
            assert_eq!(engine.scheduler().num_free_blocks(), engine.limits().num_blocks, "all blocks come back");
            return;
        }
        for output in engine.step().expect("the toy works").outputs {
            results.take(output);
        }
    }
    panic!("{} sequences run and {} wait for ever", engine.scheduler().num_running(), engine.scheduler().num_waiting());
}

#[track_caller]
pub(crate) fn run_all(engine: &mut Engine, requests: &[Request]) -> Results {
    let mut results = Results::default();
    for request in requests {
        engine.add(request.clone()).expect("the door lets it in");
    }
    run(engine, &mut results);
    results
}

/// What the request gets from an engine of its own with room for everything and no cache.
pub(crate) fn alone(request: &Request) -> Got {
    let bed =
        Bed { max_num_seqs: 1, max_num_batched_tokens: 4096, caching: false, max_model_len: 4096, ..Bed::default() };
    run_all(&mut bed.engine(), std::slice::from_ref(request)).of(request).clone()
}

/// Pseudo-random prompt of plain tokens.
pub(crate) fn prompt(salt: u64, len: u32) -> Vec<u32> {
    (0..u64::from(len)).map(|at| (crate::toy::mix(salt << 32 | at) % u64::from(crate::toy::NUM_PLAIN)) as u32).collect()
}
