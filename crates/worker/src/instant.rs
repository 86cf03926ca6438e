//! An engine that answers every body at once with a fixed completion: it makes
//! `batch bench durable` measure the durable path and nothing else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use overnight_types::Endpoint;

use crate::generate::{
    EngineState, EngineStatus, Failure, Generate, Input, NotAccepting, Output, OutputSender, Request,
};

const CHAT_ANSWER: &[u8] = br#"{"id":"chatcmpl-instant","object":"chat.completion","created":0,"model":"instant","choices":[{"index":0,"message":{"role":"assistant","content":"positive"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":16,"completion_tokens":1,"total_tokens":17}}"#;
const TEXT_ANSWER: &[u8] = br#"{"id":"cmpl-instant","object":"text_completion","created":0,"model":"instant","choices":[{"index":0,"text":"positive","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":16,"completion_tokens":1,"total_tokens":17}}"#;

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
        let answers = requests.into_iter().map(|request| match request.input {
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
        });
        // The receiver is gone when the shard was dropped; nobody waits for the answers then.
        let _ = outputs.send(answers.collect());
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
