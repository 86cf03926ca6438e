//! Engines that answer every body with a fixed completion, for `batch bench`: at once, so
//! that it measures the durable path and nothing else, or at a fixed rate, so that it
//! measures how several workers share work.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use overnight_types::Endpoint;

use crate::generate::{
    EngineState, EngineStatus, Failure, Generate, Input, NotAccepting, Output, OutputSender, Request,
};

const CHAT_ANSWER: &[u8] = br#"{"id":"chatcmpl-instant","object":"chat.completion","created":0,"model":"instant","choices":[{"index":0,"message":{"role":"assistant","content":"positive"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":16,"completion_tokens":1,"total_tokens":17}}"#;
const TEXT_ANSWER: &[u8] = br#"{"id":"cmpl-instant","object":"text_completion","created":0,"model":"instant","choices":[{"index":0,"text":"positive","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":16,"completion_tokens":1,"total_tokens":17}}"#;

fn answer(request: &Request) -> Output {
    match &request.input {
        Input::Body { endpoint, .. } => {
            let body = match endpoint {
                Endpoint::ChatCompletions => CHAT_ANSWER,
                Endpoint::Completions => TEXT_ANSWER,
            };
            Output::Response { id: request.id, status: 200, body: Bytes::from_static(body), retry_after: None }
        }
        Input::Tokens(_) => {
            let message = "the instant engine answers bodies only".to_owned();
            Output::Failed { id: request.id, failure: Failure::EngineTrouble { message } }
        }
    }
}

/// Answers every [`Input::Body`] before `submit` returns; refuses [`Input::Tokens`].
#[derive(Debug, Default)]
pub struct InstantGenerate {
    num_answered: AtomicU64,
}

impl InstantGenerate {
    /// Requests "at once"; the window is a multiple of it.
    pub const MAX_NUM_SEQS: u32 = 2_048;
}

#[async_trait]
impl Generate for InstantGenerate {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        self.num_answered.fetch_add(requests.len() as u64, Ordering::Relaxed);
        // The receiver is gone when the shard was dropped; nobody waits for the answers then.
        let _ = outputs.send(requests.iter().map(answer).collect());
        Ok(())
    }

    fn cancel(&self, _ids: &[overnight_engine::RequestId]) {}

    fn status(&self) -> EngineStatus {
        EngineStatus {
            state: EngineState::Ready,
            models: vec!["*".to_owned()],
            num_running: 0,
            num_waiting: 0,
            max_num_seqs: Self::MAX_NUM_SEQS,
            kv_cache_usage: 0.0,
            last_progress: Instant::now(),
            generation_tokens: self.num_answered.load(Ordering::Relaxed),
            prompt_tokens: self.num_answered.load(Ordering::Relaxed) * 16,
        }
    }
}

/// Answers in the order of submission, so many a second. Time without work earns nothing:
/// an engine that was not fed has lost it.
#[derive(Debug)]
pub struct PacedGenerate {
    rate: u32,
    waiting: Arc<Mutex<VecDeque<(Request, OutputSender)>>>,
    num_answered: Arc<AtomicU64>,
}

impl PacedGenerate {
    /// Pause between answers; what is due by then is answered together.
    const PAUSE: Duration = Duration::from_millis(5);

    /// Answers `items_per_s` requests a second, at least 1. Must be called within a tokio runtime.
    pub fn new(items_per_s: u32) -> Self {
        let engine = Self { rate: items_per_s.max(1), waiting: Arc::default(), num_answered: Arc::default() };
        let (waiting, num_answered) = (Arc::downgrade(&engine.waiting), engine.num_answered.clone());
        let rate = f64::from(engine.rate);
        tokio::spawn(async move {
            let (mut last, mut credit) = (Instant::now(), 0.0);
            loop {
                tokio::time::sleep(Self::PAUSE).await;
                // The engine is gone, and with it who waits.
                let Some(waiting) = waiting.upgrade() else { return };
                credit += last.elapsed().as_secs_f64() * rate;
                last = Instant::now();
                let due: Vec<_> = {
                    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
                    let num = (credit as usize).min(waiting.len());
                    credit = if num == waiting.len() { 0.0 } else { credit - num as f64 };
                    waiting.drain(..num).collect()
                };
                num_answered.fetch_add(due.len() as u64, Ordering::Relaxed);
                for (request, outputs) in due {
                    let _ = outputs.send(vec![answer(&request)]);
                }
            }
        });
        engine
    }
}

#[async_trait]
impl Generate for PacedGenerate {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.extend(requests.into_iter().map(|request| (request, outputs.clone())));
        Ok(())
    }

    fn cancel(&self, ids: &[overnight_engine::RequestId]) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|(request, outputs)| {
            let stays = !ids.contains(&request.id);
            if !stays {
                let _ = outputs.send(vec![Output::Failed { id: request.id, failure: Failure::Cancelled }]);
            }
            stays
        });
    }

    fn status(&self) -> EngineStatus {
        let num_waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).len();
        let num_answered = self.num_answered.load(Ordering::Relaxed);
        EngineStatus {
            state: EngineState::Ready,
            models: vec!["*".to_owned()],
            num_running: num_waiting.min(1) as u32,
            num_waiting: u32::try_from(num_waiting).unwrap_or(u32::MAX),
            // A tenth of a second's work runs at once.
            max_num_seqs: (self.rate / 10).clamp(1, InstantGenerate::MAX_NUM_SEQS),
            kv_cache_usage: 0.0,
            // Its only step is a pause.
            last_progress: Instant::now(),
            generation_tokens: num_answered,
            prompt_tokens: num_answered * 16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Class;

    fn request(id: u64) -> Request {
        let json = Bytes::from_static(b"{}");
        let input = Input::Body { endpoint: Endpoint::Completions, json };
        Request { id: overnight_engine::RequestId(id), class: Class::Job, input }
    }

    #[tokio::test]
    async fn paced_engine_answers_in_order_and_cancels_what_waits() {
        let engine = PacedGenerate::new(1_000);
        let (sender, mut outputs) = tokio::sync::mpsc::unbounded_channel();
        engine.submit((0..40).map(request).collect(), sender).await.expect("it takes them");
        engine.cancel(&[overnight_engine::RequestId(39)]);
        let mut ids = Vec::new();
        while ids.len() < 40 {
            let outputs = outputs.recv().await.expect("every request is answered");
            ids.extend(outputs.iter().map(|output| match output {
                Output::Response { id, status: 200, .. } => (id.0, true),
                Output::Failed { id, failure: Failure::Cancelled } => (id.0, false),
                other => panic!("{other:?}"),
            }));
        }
        assert_eq!(ids[0], (39, false));
        assert_eq!(ids[1..], (0..39).map(|id| (id, true)).collect::<Vec<_>>());
        assert!(engine.status().is_idle());
    }
}
