//! SentencePiece's greedy bigram merge over a vocabulary with scores, as llama.cpp
//! runs it for GGUF files of `tokenizer.ggml.model = "llama"` (llama-vocab.cpp,
//! `llm_tokenizer_spm`): of all neighbours whose joined text is a token, the pair
//! with the best score is joined first, the leftmost of equals.
//!
//! Owns the vocabulary's lookup tables. Invariants: what is cut at a blank before
//! merging is only what no token spans, so the cut never changes an id; outside tokens
//! that are taken whole, a blank and a written out `▁` are the same.
//! Knows nothing of BOS or templates.

mod hash;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BinaryHeap, HashMap, HashSet};

use aho_corasick::{AhoCorasick, MatchKind};

use super::TextError;
use super::huggingface::byte_token;
use hash::FastHash;

/// SentencePiece's visible blank.
pub(super) const BLANK: char = '\u{2581}';
/// A character that is no token and in no token.
const NO_ID: u32 = u32::MAX;

/// `tokenizer.ggml.token_type`, as far as encoding tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    pub(super) fn from_code(code: i64) -> Self {
        match code {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }

    /// Taken whole wherever it is written out.
    pub(super) fn is_matched_whole(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }
}

/// Encoder over one vocabulary.
#[derive(Debug)]
pub(super) struct SentencePiece {
    /// Id of each single character; ids from `num_tokens` on are characters that only occur inside tokens.
    ascii: [u32; 128],
    chars: HashMap<char, u32, FastHash>,
    merges: HashMap<u64, Merge, FastHash>,
    num_tokens: u32,
    bytes: [Option<u32>; 256],
    unknown: Option<u32>,
    whole: AhoCorasick,
    whole_ids: Vec<u32>,
    /// Length and id of tokens taken whole that are nothing but blanks, the longest first.
    blank_runs: Vec<(usize, u32)>,
    add_space_prefix: bool,
    /// Characters that some token has before an inner blank: no cut after them.
    before_inner_blank: HashSet<char>,
}

#[derive(Debug, Clone, Copy)]
struct Merge {
    id: u32,
    /// Of the joined token, as an integer of the same order.
    score: u32,
}

impl SentencePiece {
    /// `tokens`, `scores` and `kinds` by id, of equal length.
    pub(super) fn new(
        tokens: &[String],
        scores: &[f32],
        kinds: &[TokenKind],
        unknown: Option<u32>,
        add_space_prefix: bool,
    ) -> Result<Self, TextError> {
        let num_tokens = id(tokens.len());
        let mut ids: HashMap<&str, u32, FastHash> =
            HashMap::with_capacity_and_hasher(tokens.len(), FastHash::default());
        let mut bytes = [None; 256];
        for (token_id, token) in (0u32..).zip(tokens) {
            ids.insert(token, token_id);
            if let Some(byte) = byte_token(token).filter(|_| kinds[token_id as usize] == TokenKind::Byte) {
                bytes[byte as usize] = Some(token_id);
            }
        }
        let mut table = Self {
            ascii: [NO_ID; 128],
            chars: HashMap::default(),
            merges: HashMap::with_capacity_and_hasher(tokens.len() * 2, FastHash::default()),
            num_tokens,
            bytes,
            unknown,
            whole: whole_matcher(&[])?,
            whole_ids: Vec::new(),
            blank_runs: Vec::new(),
            add_space_prefix,
            before_inner_blank: HashSet::new(),
        };
        table.add_chars(tokens, &ids);
        table.add_merges(tokens, scores, &ids);
        table.add_whole(tokens, kinds)?;
        Ok(table)
    }

    /// Tokens that are taken whole. The reference looks for them in the text as it is written, in
    /// which only `▁` spells a run of blanks, then turns blanks into `▁` and takes runs of both.
    fn add_whole(&mut self, tokens: &[String], kinds: &[TokenKind]) -> Result<(), TextError> {
        let mut texts = Vec::new();
        for ((token_id, token), kind) in (0u32..).zip(tokens).zip(kinds) {
            if !kind.is_matched_whole() || token.is_empty() {
                continue;
            }
            self.whole_ids.push(token_id);
            if token.chars().all(is_blank) {
                let num_blanks = token.chars().count();
                self.blank_runs.push((num_blanks, token_id));
                texts.push(Cow::Owned(BLANK.to_string().repeat(num_blanks)));
            } else {
                texts.push(Cow::Borrowed(token.as_str()));
            }
        }
        self.blank_runs.sort_unstable_by(|a, b| b.cmp(a));
        self.whole = whole_matcher(&texts)?;
        Ok(())
    }

    fn add_chars(&mut self, tokens: &[String], ids: &HashMap<&str, u32, FastHash>) {
        let mut next = self.num_tokens;
        let mut buffer = [0u8; 4];
        for token in tokens {
            let mut previous = None;
            for char in token.chars() {
                if char == BLANK && previous.is_some_and(|previous| previous != BLANK) {
                    self.before_inner_blank.extend(previous);
                }
                previous = Some(char);
                if self.char_id(char) != NO_ID {
                    continue;
                }
                let char_id = ids.get(&*char.encode_utf8(&mut buffer)).copied().unwrap_or_else(|| {
                    next += 1;
                    next - 1
                });
                match self.ascii.get_mut(char as usize) {
                    Some(slot) => *slot = char_id,
                    None => _ = self.chars.insert(char, char_id),
                }
            }
        }
    }

    /// Every way to make a token out of two parts that are tokens or single characters.
    fn add_merges(&mut self, tokens: &[String], scores: &[f32], ids: &HashMap<&str, u32, FastHash>) {
        for (token_id, token) in (0u32..).zip(tokens) {
            // Of two tokens with one text the map names the later; only that one is ever found.
            if ids.get(token.as_str()) != Some(&token_id) {
                continue;
            }
            let merge = Merge { id: token_id, score: ordered(scores[token_id as usize]) };
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(left), Some(right)) = (self.part_id(left, ids), self.part_id(right, ids)) {
                    self.merges.insert(pair(left, right), merge);
                }
            }
        }
    }

    fn part_id(&self, part: &str, ids: &HashMap<&str, u32, FastHash>) -> Option<u32> {
        ids.get(part).copied().or_else(|| {
            let mut chars = part.chars();
            let only = chars.next().filter(|_| chars.next().is_none())?;
            Some(self.char_id(only))
        })
    }

    fn char_id(&self, char: char) -> u32 {
        match self.ascii.get(char as usize) {
            Some(found) => *found,
            None => self.chars.get(&char).copied().unwrap_or(NO_ID),
        }
    }

    /// Ids of a text without BOS or EOS; special tokens written out in it are taken as such.
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        let mut scratch = Scratch::default();
        let mut at = 0;
        let mut after_special = true;
        for found in self.whole.find_iter(text) {
            if found.start() > at {
                self.encode_raw(&text[at..found.start()], after_special, &mut scratch, &mut out);
            }
            out.push(self.whole_ids[found.pattern().as_usize()]);
            after_special = true;
            at = found.end();
        }
        if at < text.len() {
            self.encode_raw(&text[at..], after_special, &mut scratch, &mut out);
        }
        out
    }

    fn encode_raw(&self, text: &str, after_special: bool, scratch: &mut Scratch, out: &mut Vec<u32>) {
        scratch.clear();
        let mut wants_prefix = self.add_space_prefix && after_special;
        let mut previous = BLANK;
        let mut chars = text.chars();
        loop {
            let rest = chars.as_str();
            let Some(char) = chars.next() else { break };
            let char = if is_blank(char) { BLANK } else { char };
            if char == BLANK
                && let Some((num_blanks, token_id)) = self.blank_run(rest)
            {
                self.merge_word(scratch, out);
                scratch.clear();
                out.push(token_id);
                chars.by_ref().take(num_blanks - 1).for_each(drop);
                wants_prefix = self.add_space_prefix;
                previous = BLANK;
                continue;
            }
            if std::mem::take(&mut wants_prefix) {
                scratch.push(BLANK, self.char_id(BLANK));
            }
            if char == BLANK && previous != BLANK && !self.before_inner_blank.contains(&previous) {
                self.merge_word(scratch, out);
                scratch.clear();
            }
            scratch.push(char, self.char_id(char));
            previous = char;
        }
        self.merge_word(scratch, out);
    }

    /// The longest token of nothing but blanks that the text begins with, and its length.
    fn blank_run(&self, text: &str) -> Option<(usize, u32)> {
        let (longest, _) = self.blank_runs.first()?;
        let num_blanks = text.chars().take(*longest).take_while(|char| is_blank(*char)).count();
        self.blank_runs.iter().find(|(len, _)| *len <= num_blanks).copied()
    }

    fn merge_word(&self, scratch: &mut Scratch, out: &mut Vec<u32>) {
        let Scratch { symbols, heap } = scratch;
        for left in 1..symbols.len() {
            self.offer(symbols, heap, left - 1, left);
        }
        while let Some(Candidate { left, right, left_id, right_id, merged, .. }) = heap.pop() {
            let (left, right) = (left as usize, right as usize);
            // A neighbour that was joined in the meantime has another id or none.
            if symbols[left].id != left_id || symbols[right].id != right_id || symbols[left].next != id(right) {
                continue;
            }
            symbols[left].id = merged;
            symbols[left].next = symbols[right].next;
            symbols[right].id = NO_ID;
            symbols[right].joined = true;
            let next = symbols[left].next as usize;
            if next < symbols.len() {
                symbols[next].previous = id(left);
                self.offer(symbols, heap, left, next);
            }
            if left > 0 {
                self.offer(symbols, heap, symbols[left].previous as usize, left);
            }
        }
        for symbol in symbols.iter().filter(|symbol| !symbol.joined) {
            self.emit(symbol, out);
        }
    }

    fn offer(&self, symbols: &[Symbol], heap: &mut BinaryHeap<Candidate>, left: usize, right: usize) {
        let (left_id, right_id) = (symbols[left].id, symbols[right].id);
        if left_id == NO_ID || right_id == NO_ID {
            return;
        }
        if let Some(merge) = self.merges.get(&pair(left_id, right_id)) {
            let order = (u64::from(merge.score) << 32) | u64::from(u32::MAX - id(left));
            heap.push(Candidate { order, left: id(left), right: id(right), left_id, right_id, merged: merge.id });
        }
    }

    fn emit(&self, symbol: &Symbol, out: &mut Vec<u32>) {
        if symbol.id < self.num_tokens {
            out.push(symbol.id);
            return;
        }
        let mut buffer = [0u8; 4];
        for byte in symbol.char.encode_utf8(&mut buffer).bytes() {
            out.extend(self.bytes[byte as usize].or(self.unknown));
        }
    }
}

fn is_blank(char: char) -> bool {
    char == ' ' || char == BLANK
}

fn whole_matcher(texts: &[Cow<'_, str>]) -> Result<AhoCorasick, TextError> {
    AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostLongest)
        .build(texts.iter().map(|text| text.as_bytes()))
        .map_err(|err| TextError::Load { from: "a GGUF vocabulary".to_owned(), what: err.to_string() })
}

#[derive(Debug, Clone, Copy)]
struct Symbol {
    char: char,
    id: u32,
    previous: u32,
    next: u32,
    joined: bool,
}

/// Buffers of one call.
#[derive(Debug, Default)]
struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Candidate>,
}

impl Scratch {
    fn clear(&mut self) {
        self.symbols.clear();
        self.heap.clear();
    }

    fn push(&mut self, char: char, char_id: u32) {
        let at = id(self.symbols.len());
        self.symbols.push(Symbol { char, id: char_id, previous: at.wrapping_sub(1), next: at + 1, joined: false });
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// Score, then leftmost.
    order: u64,
    left: u32,
    right: u32,
    left_id: u32,
    right_id: u32,
    merged: u32,
}

fn id(index: usize) -> u32 {
    u32::try_from(index).expect("a text is far below 4 Gi characters")
}

fn pair(left: u32, right: u32) -> u64 {
    (u64::from(left) << 32) | u64::from(right)
}

/// An integer in the same order as the float.
fn ordered(score: f32) -> u32 {
    let bits = score.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | (1 << 31) }
}
