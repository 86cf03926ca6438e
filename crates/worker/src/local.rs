//! The local engine behind [`Generate`].
//!
//! Only translates: what the engine refuses becomes a refusal of the item, what
//! breaks the engine becomes trouble that is not the item's.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use overnight_engine::request::FinishReason;
use overnight_engine::{EngineHandle, Event, RequestError, RequestId, Sink};
use tokio::sync::mpsc::WeakUnboundedSender;

use crate::generate::{
    EngineState, EngineStatus, Failure, Generate, Input, NotAccepting, Output, OutputSender, Request,
};

/// HTTP status of a request that the engine refuses.
const REFUSED_STATUS: u16 = 400;

/// An engine in this process.
pub struct LocalEngine {
    handle: EngineHandle,
    models: Vec<String>,
    /// The sink of the last submission, used again for the same outputs, so that a step's
    /// outputs stay one message.
    last: Mutex<Option<LastSink>>,
}

/// Weak, so that a channel closes when its last request ends.
struct LastSink {
    sender: WeakUnboundedSender<Vec<Output>>,
    sink: Weak<dyn Fn(Vec<Event>) -> bool + Send + Sync>,
}

impl std::fmt::Debug for LocalEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalEngine")
            .field("handle", &self.handle)
            .field("models", &self.models)
            .finish_non_exhaustive()
    }
}

impl LocalEngine {
    /// `models`: the names that it answers to.
    pub fn new(handle: EngineHandle, models: Vec<String>) -> Self {
        Self { handle, models, last: Mutex::new(None) }
    }

    /// The engine itself.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }

    fn sink(&self, outputs: &OutputSender) -> Sink {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = &*last
            && last.sender.upgrade().is_some_and(|sender| sender.same_channel(outputs))
            && let Some(sink) = last.sink.upgrade()
        {
            return sink;
        }
        let sender = outputs.clone();
        let sink: Sink =
            Arc::new(move |events: Vec<Event>| sender.send(events.into_iter().map(output_of).collect()).is_ok());
        *last = Some(LastSink { sender: outputs.downgrade(), sink: Arc::downgrade(&sink) });
        sink
    }
}

#[async_trait]
impl Generate for LocalEngine {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        let mut refused = Vec::new();
        let mut accepted = Vec::with_capacity(requests.len());
        for request in requests {
            match request.input {
                Input::Tokens(tokens) => accepted.push(*tokens),
                Input::Body { .. } => refused.push(Output::Failed { id: request.id, failure: no_bodies() }),
            }
        }
        let sink = self.sink(&outputs);
        self.handle.submit(accepted, sink).await.map_err(|error| NotAccepting(error.to_string()))?;
        if !refused.is_empty() {
            // Nobody listens any more when this fails.
            let _ = outputs.send(refused);
        }
        Ok(())
    }

    fn cancel(&self, ids: &[RequestId]) {
        self.handle.cancel(ids);
    }

    fn status(&self) -> EngineStatus {
        let status = self.handle.status();
        EngineStatus {
            state: match status.state {
                overnight_engine::EngineState::Ready => EngineState::Ready,
                overnight_engine::EngineState::Poisoned(why) => EngineState::Poisoned(why),
                overnight_engine::EngineState::Stopped => EngineState::Poisoned("the engine was shut down".to_owned()),
            },
            models: self.models.clone(),
            num_running: status.num_running,
            num_waiting: status.num_waiting,
            max_num_seqs: self.handle.limits().max_num_seqs,
            kv_cache_usage: status.kv_cache_usage,
            last_progress: status.last_progress,
            generation_tokens: status.generation_tokens,
            prompt_tokens: status.prompt_tokens,
        }
    }

    fn num_breakdowns(&self) -> u32 {
        u32::from(matches!(self.handle.status().state, overnight_engine::EngineState::Poisoned(_)))
    }
}

fn output_of(event: Event) -> Output {
    match event {
        Event::Begun { id } => Output::Begun { id },
        Event::Output(output) => {
            let aborted = output.finish.as_ref().is_some_and(|finish| finish.reason == FinishReason::Abort);
            if aborted {
                return Output::Failed { id: output.id, failure: Failure::Cancelled };
            }
            Output::Tokens(output)
        }
        Event::Failed { id, error } => Output::Failed { id, failure: failure_of(error) },
    }
}

fn failure_of(error: RequestError) -> Failure {
    if error.transient {
        return Failure::EngineTrouble { message: error.message };
    }
    if error.is_breakdown() {
        return Failure::Transient { code: error.code.to_owned(), message: error.message };
    }
    Failure::Refused {
        status: REFUSED_STATUS,
        code: error.code.to_owned(),
        param: error.param.map(str::to_owned),
        message: error.message,
    }
}

fn no_bodies() -> Failure {
    Failure::Refused {
        status: REFUSED_STATUS,
        code: "unsupported_input".to_owned(),
        param: None,
        message: "the local engine takes token ids; the mapper makes them of bodies".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use overnight_engine::model::{Forward, ModelShape, StepInput};
    use overnight_engine::request::Class;
    use overnight_engine::{Engine, EngineConfig, Error, SamplingParams, StopRules};
    use overnight_types::Endpoint;
    use tokio::sync::mpsc;

    use super::*;

    /// Says token 1 for ever; fails when asked with token 3.
    struct OneWord(ModelShape, Vec<f32>);

    impl Forward for OneWord {
        fn shape(&self) -> &ModelShape {
            &self.0
        }

        fn allocate_kv_cache(&mut self, _: u32, _: u32) -> Result<(), Error> {
            Ok(())
        }

        fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error> {
            if step.token_ids.contains(&3) {
                return Err(Error::Stopped("no device".to_owned()));
            }
            self.1 = step.logits_tokens.iter().flat_map(|_| [0.0, 1.0, 0.0, 0.0]).collect();
            Ok(&self.1)
        }
    }

    fn local() -> LocalEngine {
        let shape = ModelShape {
            architecture: "OneWord".to_owned(),
            vocab_size: 4,
            max_position: 1 << 20,
            eos_token_ids: vec![],
            kv_bytes_per_token: 1,
            weights_bytes: 0,
        };
        let config = EngineConfig { kv_cache_memory_bytes: Some(1 << 22), ..EngineConfig::default() };
        let handle = Engine::start(Box::new(OneWord(shape, Vec::new())), None, &config).expect("it starts");
        LocalEngine::new(handle, vec!["one-word".to_owned()])
    }

    fn tokens(prompt: &[u32], max_tokens: u32) -> Request {
        let id = RequestId::next();
        let tokens = overnight_engine::Request {
            id,
            class: Class::Job,
            prompt: prompt.to_vec(),
            sampling: SamplingParams::default(),
            stop: StopRules { max_tokens, ..StopRules::default() },
            logprobs: None,
            prompt_logprobs: None,
            skip_special_tokens: true,
            stream: false,
        };
        let tokens = overnight_engine::Request {
            sampling: SamplingParams { temperature: 0.0, ..tokens.sampling.clone() },
            ..tokens
        };
        Request { id, class: Class::Job, input: Input::Tokens(Box::new(tokens)) }
    }

    /// Outputs until the channel closes, which it does when the last request has ended.
    async fn all(mut receiver: mpsc::UnboundedReceiver<Vec<Output>>) -> Vec<Output> {
        let collect = async {
            let mut outputs = Vec::new();
            while let Some(message) = receiver.recv().await {
                outputs.extend(message);
            }
            outputs
        };
        tokio::time::timeout(Duration::from_secs(60), collect).await.expect("the channel closes")
    }

    fn failure(outputs: &[Output], wanted: RequestId) -> &Failure {
        let found = outputs.iter().find_map(|output| match output {
            Output::Failed { id, failure } if *id == wanted => Some(failure),
            _ => None,
        });
        found.expect("it failed")
    }

    #[tokio::test]
    async fn refused_and_unfit_inputs_fail_alone_and_the_channel_closes() {
        let local = local();
        let (sender, receiver) = mpsc::unbounded_channel();
        let good = tokens(&[0, 1], 3);
        let bad = tokens(&[9], 3);
        let id = RequestId::next();
        let input = Input::Body { endpoint: Endpoint::Completions, json: bytes::Bytes::from_static(b"{}") };
        let body = Request { id, class: Class::Job, input };
        local.submit(vec![bad.clone(), good.clone(), body], sender).await.expect("it takes requests");
        let outputs = all(receiver).await;
        assert_eq!(outputs.len(), 4);
        let refused = |id| match failure(&outputs, id) {
            Failure::Refused { status, code, .. } => (*status, code.clone()),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(bad.id), (400, "invalid_token_id".to_owned()));
        assert_eq!(refused(id), (400, "unsupported_input".to_owned()));
        let of_good: Vec<_> = outputs.iter().filter(|output| output.id() == good.id).collect();
        let [Output::Begun { .. }, Output::Tokens(said)] = of_good.as_slice() else { panic!("{of_good:?}") };
        assert_eq!(said.token_ids, [1, 1, 1]);
    }

    #[tokio::test]
    async fn cancelled_request_says_so() {
        let local = local();
        let (sender, receiver) = mpsc::unbounded_channel();
        let endless = tokens(&[0], 1 << 19);
        local.submit(vec![endless.clone()], sender).await.expect("it takes requests");
        assert_eq!(local.status().state, EngineState::Ready);
        assert_eq!(local.num_breakdowns(), 0);
        local.cancel(&[endless.id]);
        assert_eq!(failure(&all(receiver).await, endless.id), &Failure::Cancelled);
    }

    #[tokio::test]
    async fn broken_engine_is_trouble_that_is_not_the_items() {
        let local = local();
        let (sender, receiver) = mpsc::unbounded_channel();
        let requests = [tokens(&[0], 1 << 19), tokens(&[3], 2)];
        local.submit(requests.to_vec(), sender.clone()).await.expect("it takes requests");
        drop(sender);
        let outputs = all(receiver).await;
        for request in &requests {
            assert!(matches!(failure(&outputs, request.id), Failure::EngineTrouble { .. }));
        }
        assert!(matches!(local.status().state, EngineState::Poisoned(_)));
        assert_eq!(local.num_breakdowns(), 1);
        let (sender, _) = mpsc::unbounded_channel();
        assert!(local.submit(vec![tokens(&[0], 1)], sender).await.is_err());
    }
}
