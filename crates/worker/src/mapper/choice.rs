//! The choices of one answer while their tokens arrive.

use std::sync::Arc;

use overnight_engine::request::{Finish, RequestId, TokenLogprobs, TokenOutput};
use overnight_engine::text::Text;
use overnight_types::{Endpoint, Usage};

use super::answer::common_reason;

/// What a body says about its answer's form.
#[derive(Debug)]
pub(super) struct AnswerRules {
    pub(super) endpoint: Endpoint,
    /// With its prefix.
    pub(super) id: String,
    pub(super) created: i64,
    /// As the body named it.
    pub(super) model: String,
    pub(super) logprobs: Option<u32>,
    /// Asked for by the body, not only by `echo`.
    pub(super) prompt_logprobs: bool,
    pub(super) echo: bool,
    pub(super) skip_special_tokens: bool,
    pub(super) return_token_ids: bool,
    pub(super) tokens_as_ids: bool,
    pub(super) include_usage: bool,
    /// `n`; choices of one prompt stand together.
    pub(super) samples_per_prompt: u32,
}

/// One choice.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) request: RequestId,
    pub(super) num_prompt_tokens: u32,
    /// The prompt's ids when the answer shows them.
    pub(super) prompt: Vec<u32>,
    pub(super) echoed: Option<String>,
    pub(super) text: String,
    pub(super) token_ids: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    pub(super) finish: Option<Finish>,
    /// A stream has shown its first chunk.
    pub(super) begun: bool,
    /// Characters shown by a stream, for `text_offset`.
    pub(super) text_offset: u32,
}

impl Choice {
    pub(super) fn new(request: RequestId, num_prompt_tokens: u32, prompt: Vec<u32>, echoed: Option<String>) -> Self {
        Self {
            request,
            num_prompt_tokens,
            prompt,
            echoed,
            text: String::new(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: None,
            finish: None,
            begun: false,
            text_offset: 0,
        }
    }

    fn take(&mut self, output: TokenOutput) {
        if self.text.is_empty() {
            self.text = output.text;
        } else {
            self.text.push_str(&output.text);
        }
        self.token_ids.extend(output.token_ids);
        self.logprobs.extend(output.logprobs);
        if output.prompt_logprobs.is_some() {
            self.prompt_logprobs = output.prompt_logprobs;
        }
        self.finish = output.finish.or(self.finish.take());
    }
}

/// All choices of a body, in order of prompt, then sample.
#[derive(Debug)]
pub(super) struct Choices {
    pub(super) text: Arc<Text>,
    pub(super) rules: AnswerRules,
    pub(super) all: Vec<Choice>,
    num_open: usize,
}

impl Choices {
    pub(super) fn new(text: Arc<Text>, rules: AnswerRules, all: Vec<Choice>) -> Self {
        let num_open = all.len();
        Self { text, rules, all, num_open }
    }

    /// Adds an output to its choice and returns the choice's index. Strangers and outputs after an end are dropped.
    pub(super) fn take(&mut self, output: TokenOutput) -> Option<usize> {
        // Ids of one body rise in steps of its own making.
        let index = self.all.iter().position(|choice| choice.request == output.id)?;
        let choice = &mut self.all[index];
        if choice.finish.is_some() {
            return None;
        }
        choice.take(output);
        self.num_open -= usize::from(choice.finish.is_some());
        Some(index)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.num_open == 0
    }

    /// Prompts count once, however many samples they have.
    pub(super) fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for (index, choice) in self.all.iter().enumerate() {
            let finish = choice.finish.as_ref();
            usage.output_tokens += finish.map_or(0, |finish| u64::from(finish.num_output_tokens));
            if index % self.rules.samples_per_prompt as usize == 0 {
                usage.input_tokens += u64::from(choice.num_prompt_tokens);
                usage.cached_tokens += finish.map_or(0, |finish| u64::from(finish.num_cached_tokens));
            }
        }
        usage
    }

    pub(super) fn finish_reason(&self) -> Option<String> {
        common_reason(self.all.iter().map(|choice| choice.finish.as_ref().map(|finish| finish.reason.as_str())))
    }
}
