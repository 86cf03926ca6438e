//! SentencePiece's greedy bigram merge over a vocabulary with scores, as llama.cpp
//! runs it for GGUF files of `tokenizer.ggml.model = "llama"` (llama-vocab.cpp,
//! `llm_tokenizer_spm`): of all neighbours whose joined text is a token, the pair
//! with the best score is joined first, the leftmost of equals.
//!
//! Owns the vocabulary's lookup tables. Invariant: what is cut at a blank before
//! merging is only what no token spans, so the cut never changes an id.
//! Knows nothing of BOS or templates.

use std::collections::{BinaryHeap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use aho_corasick::{AhoCorasick, MatchKind};

use super::TextError;
use super::huggingface::byte_token;

/// SentencePiece's visible blank.
const BLANK: char = '\u{2581}';
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
            add_space_prefix,
            before_inner_blank: HashSet::new(),
        };
        table.add_chars(tokens, &ids);
        table.add_merges(tokens, scores, &ids);
        let whole = (0u32..).zip(kinds).filter(|(_, kind)| kind.is_matched_whole());
        table.whole_ids =
            whole.map(|(token_id, _)| token_id).filter(|token_id| !tokens[*token_id as usize].is_empty()).collect();
        let texts: Vec<&str> = table.whole_ids.iter().map(|token_id| tokens[*token_id as usize].as_str()).collect();
        table.whole = whole_matcher(&texts)?;
        Ok(table)
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
        if self.add_space_prefix && after_special {
            scratch.push(BLANK, self.char_id(BLANK));
        }
        let mut previous = BLANK;
        for char in text.chars() {
            let char = if char == ' ' { BLANK } else { char };
            if char == BLANK && previous != BLANK && !self.before_inner_blank.contains(&previous) {
                self.merge_word(scratch, out);
                scratch.clear();
            }
            scratch.push(char, self.char_id(char));
            previous = char;
        }
        self.merge_word(scratch, out);
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

fn whole_matcher(texts: &[&str]) -> Result<AhoCorasick, TextError> {
    AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostLongest)
        .build(texts)
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

/// Multiplicative hash (Knuth, The Art of Computer Programming 3, 6.4); keys come from the
/// model's own vocabulary, not from clients.
type FastHash = BuildHasherDefault<Multiplicative>;

#[derive(Debug, Default, Clone, Copy)]
struct Multiplicative(u64);

const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Multiplicative {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(FACTOR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toy(tokens: &[(&str, f32, TokenKind)], add_space_prefix: bool) -> SentencePiece {
        let texts: Vec<String> = tokens.iter().map(|(text, ..)| (*text).to_owned()).collect();
        let scores: Vec<f32> = tokens.iter().map(|(_, score, _)| *score).collect();
        let kinds: Vec<TokenKind> = tokens.iter().map(|(.., kind)| *kind).collect();
        SentencePiece::new(&texts, &scores, &kinds, Some(0), add_space_prefix).unwrap()
    }

    use TokenKind::{Byte, Control, Normal, Unknown, UserDefined};

    #[test]
    fn best_score_is_joined_first_and_the_leftmost_of_equals() {
        let tokens = [
            ("<unk>", 0.0, Unknown),
            ("a", -9.0, Normal),
            ("b", -9.0, Normal),
            ("aa", -1.0, Normal),
            ("ab", -0.5, Normal),
            ("aab", -3.0, Normal),
        ];
        let table = toy(&tokens, false);
        assert_eq!(table.encode("aab"), [5]);
        assert_eq!(table.encode("aaa"), [3, 1]);
        assert_eq!(table.encode("aaab"), [3, 4]);
    }

    #[test]
    fn characters_that_are_no_token_become_bytes_or_the_unknown_token() {
        let tokens = [
            ("<unk>", 0.0, Unknown),
            ("é!", -1.0, Normal),
            ("<0xC3>", 0.0, Byte),
            ("<0xA9>", 0.0, Byte),
            ("<0x0A>", 0.0, Byte),
        ];
        let table = toy(&tokens, false);
        // "é" and "!" are no tokens by themselves, yet their join is.
        assert_eq!(table.encode("é!é"), [1, 2, 3]);
        assert_eq!(table.encode("\n✓"), [4, 0, 0, 0]);
    }

    #[test]
    fn special_tokens_are_taken_whole_and_the_longest_wins() {
        let tokens = [
            ("<unk>", 0.0, Unknown),
            ("▁", -1.0, Normal),
            ("x", -1.0, Normal),
            ("▁x", -0.5, Normal),
            ("<s>", 0.0, Control),
            ("  ", 0.0, UserDefined),
            ("   ", 0.0, UserDefined),
        ];
        let table = toy(&tokens, true);
        assert_eq!(table.encode("x<s>x x"), [3, 4, 3, 3]);
        assert_eq!(table.encode("x   x"), [3, 6, 3]);
        assert_eq!(toy(&tokens, false).encode("x   x<s>x"), [2, 6, 2, 4, 2]);
    }

    #[test]
    fn token_with_an_inner_blank_is_found() {
        let tokens = [
            ("<unk>", 0.0, Unknown),
            (">", -9.0, Normal),
            ("▁", -9.0, Normal),
            ("<", -9.0, Normal),
            ("▁<", -2.0, Normal),
            (">▁<", -3.0, Normal),
            ("a", -9.0, Normal),
        ];
        assert_eq!(toy(&tokens, false).encode("a> <a <"), [6, 5, 6, 4]);
    }
}
