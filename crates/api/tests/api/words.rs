//! An engine that takes tokens and says `w0 w1 w2`, one word a token, and the mapper of a tiny tokenizer.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use overnight_engine::request::{Finish, FinishReason};
use overnight_engine::text::Text;
use overnight_testing::service::MODEL;
use overnight_testing::tiny_model::{TinyArch, TinyModel};
use overnight_worker::generate::{
    EngineState, EngineStatus, Failure, Generate, Input, NotAccepting, Output, OutputSender, Request, RequestId,
    TokenOutput,
};
use overnight_worker::mapper::{Mapper, ModelLimits};

/// Words that an answer has when `max_tokens` allows them.
const WORDS: u32 = 3;

/// The engine. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Words {
    /// Says only the first word and then nothing.
    stalls: bool,
    /// Says only the first word and then that it stopped.
    breaks: bool,
    cancelled: Arc<Mutex<Vec<RequestId>>>,
    /// Outputs of stalled requests, so that their channels stay open.
    stalled: Arc<Mutex<Vec<OutputSender>>>,
}

impl Words {
    /// One that says only the first word of a stream.
    pub(crate) fn stalling() -> Self {
        Self { stalls: true, ..Self::default() }
    }

    /// One that breaks after the first word of a stream, in words that are not the client's.
    pub(crate) fn breaking() -> Self {
        Self { breaks: true, ..Self::default() }
    }

    pub(crate) fn num_cancelled(&self) -> usize {
        self.cancelled.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn answer(&self, request: &overnight_engine::Request, outputs: &OutputSender) {
        let num_words = request.stop.max_tokens.min(WORDS);
        let reason = if request.stop.max_tokens <= WORDS { FinishReason::Length } else { FinishReason::Stop };
        let finish = Finish {
            reason,
            stop_reason: None,
            num_prompt_tokens: u32::try_from(request.prompt.len()).expect("prompts of tests are short"),
            num_cached_tokens: 0,
            num_output_tokens: num_words,
        };
        let said = |words: std::ops::Range<u32>, finish| {
            let text = words.clone().map(|word| format!("w{word} ")).collect();
            let token_ids = words.map(|word| word + 1).collect();
            let output =
                TokenOutput { id: request.id, token_ids, text, logprobs: Vec::new(), prompt_logprobs: None, finish };
            vec![Output::Tokens(output)]
        };
        // A reader that left is no error.
        if !request.stream {
            let _ = outputs.send(said(0..num_words, Some(finish)));
            return;
        }
        for word in 0..num_words {
            let last = (word + 1 == num_words && !self.stalls).then(|| finish.clone());
            let _ = outputs.send(said(word..word + 1, last));
            if self.breaks {
                let message = "the engine stopped: a step panicked: row 7 of /secret/weights".to_owned();
                let failure = Failure::EngineTrouble { message };
                let _ = outputs.send(vec![Output::Failed { id: request.id, failure }]);
                return;
            }
            if self.stalls {
                self.stalled.lock().unwrap_or_else(PoisonError::into_inner).push(outputs.clone());
                return;
            }
        }
    }
}

#[async_trait]
impl Generate for Words {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        for request in &requests {
            match &request.input {
                Input::Tokens(tokens) => self.answer(tokens, &outputs),
                Input::Body { .. } => panic!("the local mapper makes tokens"),
            }
        }
        Ok(())
    }

    fn cancel(&self, ids: &[RequestId]) {
        self.cancelled.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(ids);
    }

    fn status(&self) -> EngineStatus {
        EngineStatus {
            state: EngineState::Ready,
            models: vec![MODEL.to_owned()],
            num_running: 0,
            num_waiting: 0,
            max_num_seqs: 16,
            kv_cache_usage: 0.0,
            last_progress: Instant::now(),
            generation_tokens: 0,
            prompt_tokens: 0,
        }
    }
}

/// The mapper of a tiny checkpoint, known as [`MODEL`].
pub(crate) fn mapper() -> Mapper {
    static TEXT: OnceLock<Arc<Text>> = OnceLock::new();
    let text = TEXT.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        TinyModel::new(TinyArch::Qwen3).write(folder.path()).expect("the checkpoint can be written");
        Arc::new(Text::from_dir(folder.path()).expect("its tokenizer can be read"))
    });
    let limits = ModelLimits { max_model_len: 512, vocab_size: text.vocab_size(), max_logprobs: 20 };
    Mapper::local(Arc::clone(text), vec![MODEL.to_owned()], limits)
}
