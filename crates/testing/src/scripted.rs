//! A `Generate` that answers as a script says: by rule, held back until told,
//! failing, stalled, or poisoned. It remembers what it was asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use overnight_engine::request::Class;
use overnight_engine::{Finish, FinishReason, RequestId, TokenOutput};
use overnight_worker::generate::{
    EngineState, EngineStatus, Failure, Generate, Input, NotAccepting, Output, OutputSender, Request,
};

/// What a rule sees of a request.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The item's body; of a token request its prompt as JSON.
    pub body: Bytes,
    /// How often this body was asked for before.
    pub tries: u32,
    /// How many requests came before.
    pub order: usize,
    /// The seed of a token request.
    pub seed: Option<u64>,
}

impl Ask {
    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("bodies of tests are UTF-8")
    }
}

/// What a rule answers.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A completion with this text.
    Text(String),
    /// An HTTP answer.
    Response(u16, String, Option<Duration>),
    /// No answer.
    Failed(Failure),
    /// Nothing until [`ScriptedGenerate::release_all`], then a completion with this text.
    Hold(String),
    /// Nothing, ever.
    Silence,
    /// The engine panics while it takes the request.
    Panic,
}

type Rule = Box<dyn Fn(&Ask) -> Reply + Send + Sync>;

#[derive(Debug)]
struct Held {
    id: RequestId,
    class: Class,
    output: Option<Output>,
    outputs: OutputSender,
    has_begun: bool,
}

#[derive(Debug)]
struct State {
    asked: Vec<Bytes>,
    tries: HashMap<Bytes, u32>,
    held: Vec<Held>,
    cancelled: Vec<RequestId>,
    engine: EngineState,
    last_progress: Option<Instant>,
    is_hung: bool,
    in_flight_max: usize,
}

/// The scripted engine. Clones are the same engine.
#[derive(Clone)]
pub struct ScriptedGenerate {
    rule: Arc<Rule>,
    state: Arc<Mutex<State>>,
    max_num_seqs: u32,
    running_max: usize,
    models: Vec<String>,
}

impl std::fmt::Debug for ScriptedGenerate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScriptedGenerate").field("state", &*self.lock()).finish_non_exhaustive()
    }
}

impl ScriptedGenerate {
    /// Answers by `rule`, for any model, with 16 sequences at once.
    pub fn new(rule: impl Fn(&Ask) -> Reply + Send + Sync + 'static) -> Self {
        let state = State {
            asked: Vec::new(),
            tries: HashMap::new(),
            held: Vec::new(),
            cancelled: Vec::new(),
            engine: EngineState::Ready,
            last_progress: None,
            is_hung: false,
            in_flight_max: 0,
        };
        let rule: Rule = Box::new(rule);
        Self {
            rule: Arc::new(rule),
            state: Arc::new(Mutex::new(state)),
            max_num_seqs: 16,
            running_max: usize::MAX,
            models: vec!["*".to_owned()],
        }
    }

    /// Answers every request at once with its own body's text.
    pub fn echo() -> Self {
        Self::new(|ask| Reply::Text(echo_of(ask.text())))
    }

    /// The same engine for these models and this many sequences.
    pub fn serving(mut self, models: &[&str], max_num_seqs: u32) -> Self {
        self.models = models.iter().map(|&model| model.to_owned()).collect();
        self.max_num_seqs = max_num_seqs;
        self
    }

    /// The same engine, which begins only so many of the requests that it holds, the oldest
    /// first, whatever it says of its sequences: the others wait in it.
    pub fn running_at_most(mut self, running_max: usize) -> Self {
        self.running_max = running_max;
        self
    }

    /// Bodies asked for, in order.
    pub fn asked(&self) -> Vec<Bytes> {
        self.lock().asked.clone()
    }

    /// How many requests came.
    pub fn num_asked(&self) -> usize {
        self.lock().asked.len()
    }

    /// Most requests that were held at once.
    pub fn in_flight_max(&self) -> usize {
        self.lock().in_flight_max
    }

    /// Requests held now.
    pub fn num_held(&self) -> usize {
        self.lock().held.len()
    }

    /// Requests that were cancelled.
    pub fn num_cancelled(&self) -> usize {
        self.lock().cancelled.len()
    }

    /// Answers up to `count` held requests, oldest first.
    pub fn release(&self, count: usize) {
        let released: Vec<Held> = {
            let mut state = self.lock();
            let count = count.min(state.held.len());
            state.held.drain(..count).collect()
        };
        for held in released {
            if let Some(output) = held.output {
                let _ = held.outputs.send(vec![output]);
            }
        }
        self.begin_next();
    }

    /// Answers everything held.
    pub fn release_all(&self) {
        self.release(usize::MAX);
    }

    /// Fails everything held.
    pub fn fail_all(&self, failure: &Failure) {
        self.fail_held(usize::MAX, failure);
    }

    /// Fails up to `count` held requests, oldest first.
    pub fn fail_held(&self, count: usize, failure: &Failure) {
        let failed: Vec<Held> = {
            let mut state = self.lock();
            let count = count.min(state.held.len());
            state.held.drain(..count).collect()
        };
        for held in failed {
            let _ = held.outputs.send(vec![Output::Failed { id: held.id, failure: failure.clone() }]);
        }
        self.begin_next();
    }

    /// Sets where the engine stands. Poisoned, it fails what it holds and takes nothing.
    pub fn set_state(&self, engine: EngineState) {
        let mut state = self.lock();
        state.engine = engine.clone();
        let held = match engine {
            EngineState::Poisoned(_) => std::mem::take(&mut state.held),
            _ => Vec::new(),
        };
        drop(state);
        for held in held {
            let failure = Failure::EngineTrouble { message: "poisoned".to_owned() };
            let _ = held.outputs.send(vec![Output::Failed { id: held.id, failure }]);
        }
    }

    /// Makes the engine look as if its last step ended at `at`.
    pub fn stall_since(&self, at: Instant) {
        self.lock().last_progress = Some(at);
    }

    /// Hangs the engine in the step that it is in: nothing makes progress, and what
    /// is cancelled stays in it.
    pub fn hang(&self) {
        let mut state = self.lock();
        (state.is_hung, state.last_progress) = (true, Some(Instant::now()));
    }

    /// Lets a hung engine go on. What was cancelled meanwhile leaves it.
    pub fn recover(&self) {
        let cancelled = {
            let mut state = self.lock();
            (state.is_hung, state.last_progress) = (false, None);
            state.cancelled.clone()
        };
        self.drop_held(&cancelled);
    }

    fn drop_held(&self, ids: &[RequestId]) {
        let mut state = self.lock();
        let (gone, kept): (Vec<Held>, _) =
            std::mem::take(&mut state.held).into_iter().partition(|held| ids.contains(&held.id));
        state.held = kept;
        drop(state);
        for held in gone {
            let _ = held.outputs.send(vec![Output::Failed { id: held.id, failure: Failure::Cancelled }]);
        }
        self.begin_next();
    }

    /// Begins what is held, as far as there is room, and tells jobs of it.
    fn begin_next(&self) {
        let mut state = self.lock();
        if state.is_hung {
            return;
        }
        let room = self.running_max.saturating_sub(num_begun(&state.held));
        for held in state.held.iter_mut().filter(|held| !held.has_begun).take(room) {
            held.has_begun = true;
            if held.class == Class::Job {
                let _ = held.outputs.send(vec![Output::Begun { id: held.id }]);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, request: &Request) -> Reply {
        let (body, seed) = match &request.input {
            Input::Body { json, .. } => (json.clone(), None),
            Input::Tokens(tokens) => (Bytes::from(format!("{:?}", tokens.prompt)), Some(tokens.sampling.seed)),
        };
        let ask = {
            let mut state = self.lock();
            let order = state.asked.len();
            state.asked.push(body.clone());
            let tries = state.tries.entry(body.clone()).or_default();
            let ask = Ask { body, tries: *tries, order, seed };
            *tries += 1;
            ask
        };
        (self.rule)(&ask)
    }
}

fn num_begun(held: &[Held]) -> usize {
    held.iter().filter(|held| held.has_begun).count()
}

/// What [`ScriptedGenerate::echo`] answers to a body.
pub fn echo_of(body: &str) -> String {
    format!("echo {body}")
}

/// A chat completion that says `text`.
pub fn completion(text: &str) -> Bytes {
    let content = serde_json::Value::from(text);
    Bytes::from(format!(
        r#"{{"id":"x","object":"chat.completion","created":0,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":{content}}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}}}"#
    ))
}

/// The whole answer of a token request: one token that reads `text`.
fn tokens(id: RequestId, text: &str) -> TokenOutput {
    let finish = Finish {
        reason: FinishReason::Stop,
        stop_reason: None,
        num_prompt_tokens: 3,
        num_cached_tokens: 0,
        num_output_tokens: 1,
    };
    TokenOutput {
        id,
        token_ids: vec![0],
        text: text.to_owned(),
        logprobs: Vec::new(),
        prompt_logprobs: None,
        finish: Some(finish),
    }
}

#[async_trait]
impl Generate for ScriptedGenerate {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        if let EngineState::Poisoned(why) = &self.lock().engine {
            return Err(NotAccepting(why.clone()));
        }
        let mut answers = Vec::new();
        for request in requests {
            let id = request.id;
            let is_body = matches!(request.input, Input::Body { .. });
            let text = |text: &str| match is_body {
                true => Output::Response { id, status: 200, body: completion(text), retry_after: None },
                false => Output::Tokens(tokens(id, text)),
            };
            let (output, is_held) = match self.take(&request) {
                Reply::Text(answer) => (Some(text(&answer)), false),
                Reply::Hold(answer) => (Some(text(&answer)), true),
                Reply::Silence => (None, true),
                Reply::Panic => panic!("scripted death of the engine"),
                Reply::Failed(failure) => (Some(Output::Failed { id, failure }), false),
                Reply::Response(status, body, retry_after) => {
                    (Some(Output::Response { id, status, body: Bytes::from(body), retry_after }), false)
                }
            };
            if is_held {
                let mut state = self.lock();
                let (class, outputs) = (request.class, outputs.clone());
                state.held.push(Held { id, class, output, outputs, has_begun: false });
                state.in_flight_max = state.in_flight_max.max(state.held.len());
            } else {
                answers.extend(output);
            }
        }
        self.begin_next();
        let _ = outputs.send(answers);
        Ok(())
    }

    fn cancel(&self, ids: &[RequestId]) {
        let is_hung = {
            let mut state = self.lock();
            state.cancelled.extend_from_slice(ids);
            state.is_hung
        };
        if !is_hung {
            self.drop_held(ids);
        }
    }

    fn status(&self) -> EngineStatus {
        let state = self.lock();
        let count = |num: usize| u32::try_from(num).expect("tests hold few requests");
        let num_running = num_begun(&state.held);
        EngineStatus {
            state: state.engine.clone(),
            models: self.models.clone(),
            num_running: count(num_running),
            num_waiting: count(state.held.len() - num_running),
            max_num_seqs: self.max_num_seqs,
            kv_cache_usage: 0.0,
            last_progress: state.last_progress.unwrap_or_else(Instant::now),
            generation_tokens: 0,
            prompt_tokens: 0,
        }
    }
}
