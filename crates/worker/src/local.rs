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
}

fn output_of(event: Event) -> Output {
    match event {
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
