//! One output's way from ids to text, with stop strings and the place to cut both.

use std::sync::Arc;

use super::detokenizer::Detokenizer;
use super::stop::StopMatcher;
use super::{Text, TextError};

/// Where a stop string was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopHit {
    /// Which of the stop strings.
    pub index: usize,
    /// Tokens of this output to keep: those that hold the kept text, and the ones without
    /// text among and right behind them. Never below the last `num_ready`.
    pub num_tokens: usize,
}

/// What one token led to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OutputStep {
    /// Text that may be given out now.
    pub text: String,
    /// Tokens of this output, from its start, whose text has been given out whole;
    /// a stream gives out ids up to here.
    pub num_ready: usize,
    /// Set when a stop string was found; nothing further may be pushed.
    pub stop: Option<StopHit>,
}

/// Settings of one output.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutputRules<'a> {
    /// Texts that end it.
    pub stop: &'a [String],
    /// The stop text stays in the output.
    pub include_stop: bool,
    /// Stop strings are looked for only in text of later tokens.
    pub min_tokens: u32,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
}

/// Detokenizer, stop strings and the cut of ids, together. Cost per token does not
/// grow with the output's length.
#[derive(Debug)]
pub struct OutputText {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    min_tokens: u32,
    /// Per token: bytes of text, an unfinished character's included, up to its end.
    ends: Vec<usize>,
    /// Bytes of text decoded and given out.
    decoded: usize,
    released: usize,
    num_ready: usize,
}

impl OutputText {
    /// `prompt` is needed for its last bytes only: a character that it left unfinished.
    pub fn new(text: &Arc<Text>, prompt: &[u32], rules: OutputRules<'_>) -> Self {
        Self {
            detokenizer: text.detokenizer(prompt, rules.skip_special_tokens),
            matcher: StopMatcher::new(rules.stop, rules.include_stop),
            min_tokens: rules.min_tokens,
            ends: Vec::new(),
            decoded: 0,
            released: 0,
            num_ready: 0,
        }
    }

    /// Takes the next token. Fails on an id outside the vocabulary.
    pub fn push(&mut self, token: u32) -> Result<OutputStep, TextError> {
        let piece = self.detokenizer.push(token)?;
        self.decoded += piece.len();
        self.ends.push(self.decoded + self.detokenizer.num_pending());
        if self.ends.len() <= self.min_tokens as usize {
            return Ok(self.release(piece));
        }
        let found = self.matcher.push(&piece);
        let mut step = self.release(found.text);
        step.stop = found.hit.map(|index| {
            // Tokens without text have their predecessor's end: a stream has given them out already.
            let whole = self.ends.partition_point(|end| *end <= self.released);
            let holds_all = whole.checked_sub(1).map_or(0, |last| self.ends[last]) == self.released;
            StopHit { index, num_tokens: (whole + usize::from(!holds_all)).min(self.ends.len()) }
        });
        Ok(step)
    }

    /// The output has ended without a stop string: the text held back.
    pub fn finish(&mut self) -> String {
        let rest = self.detokenizer.finish();
        let found = self.matcher.push(&rest);
        let mut text = found.text;
        if found.hit.is_none() {
            text += &self.matcher.flush();
        }
        self.num_ready = self.ends.len();
        self.released += text.len();
        text
    }

    fn release(&mut self, text: String) -> OutputStep {
        self.released += text.len();
        let ready = self.ends[self.num_ready..].iter().take_while(|end| **end <= self.released).count();
        self.num_ready += ready;
        OutputStep { text, num_ready: self.num_ready, stop: None }
    }
}
