//! A `tokenizer.json` through the `tokenizers` crate.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;
use tokenizers::Tokenizer;

use super::pieces::Pieces;
use super::{Decoding, TextError};

/// The tokenizer and nothing beside it.
#[derive(Debug)]
pub(super) struct HuggingFace {
    tokenizer: Tokenizer,
}

impl HuggingFace {
    /// Reads a `tokenizer.json`; `from` names it in errors.
    pub(super) fn from_bytes(bytes: &[u8], from: &str) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_bytes(bytes)
            .map_err(|err| TextError::Load { from: from.to_owned(), what: err.to_string() })?;
        Ok(Self::new(tokenizer))
    }

    pub(super) fn new(mut tokenizer: Tokenizer) -> Self {
        // Cutting and padding belong to the callers of embedding models; a prompt is never cut in silence.
        tokenizer.with_padding(None);
        if tokenizer.get_truncation().is_some() {
            tokenizer.with_truncation(None).expect("no truncation is always valid");
        }
        Self { tokenizer }
    }

    pub(super) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        // A tokenizer file is outside input: what panics on it fails this text and nothing else.
        let encoded = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_fast(text, add_special)));
        match encoded {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(err)) => Err(TextError::Encode(err.to_string())),
            Err(_) => Err(TextError::Encode("the tokenizer panicked".to_owned())),
        }
    }

    pub(super) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        match catch_unwind(AssertUnwindSafe(|| self.tokenizer.decode(ids, skip_special))) {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(err)) => Err(TextError::Decode(err.to_string())),
            Err(_) => Err(TextError::Decode("the tokenizer panicked".to_owned())),
        }
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Whether the file itself puts this id before raw text.
    pub(super) fn adds_first(&self, id: u32) -> bool {
        self.encode("a", true).is_ok_and(|ids| ids.first() == Some(&id))
            && self.encode("a", false).is_ok_and(|ids| ids.first() != Some(&id))
    }

    /// Each id's bytes as the file's decoder gives them, and whether that is the whole story.
    pub(super) fn pieces(&self) -> (Pieces, Decoding) {
        let decoder = self.tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
        let (alphabet, decoding) = alphabet_of(decoder.as_ref());
        let added = self.tokenizer.get_added_tokens_decoder();
        let vocabulary = self.tokenizer.get_vocab(true);
        let num_ids = vocabulary.values().copied().max().map_or(0, |max| max as usize + 1);
        let mut tokens: Vec<&str> = vec![""; num_ids];
        vocabulary.iter().for_each(|(token, id)| tokens[*id as usize] = token);
        let mut pieces = Pieces::with_capacity(num_ids);
        for (id, token) in (0u32..).zip(&tokens) {
            let special = added.get(&id).is_some_and(|token| token.special);
            pieces.push(&alphabet.bytes(token), special);
        }
        (pieces, decoding)
    }
}

/// How a token of the vocabulary spells bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// GPT-2's printable stand-ins for the 256 bytes.
    ByteLevel,
    /// SentencePiece: U+2581 for a space, and `<0x0A>` for a byte.
    SentencePiece,
    /// As written.
    Plain,
}

impl Alphabet {
    pub(super) fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => {
                // A token with a character outside the alphabet (an added one) stands for itself.
                let bytes: Option<Vec<u8>> = token.chars().map(byte_of_stand_in).collect();
                bytes.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Self::SentencePiece => match byte_token(token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
            Self::Plain => token.as_bytes().to_vec(),
        }
    }
}

/// The byte that a `<0x0A>` token stands for.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let exact = hex.len() == 2 && hex.bytes().all(|digit| digit.is_ascii_hexdigit());
    if exact { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Inverse of GPT-2's `bytes_to_unicode` (Radford et al., 2019, encoder.py).
fn byte_of_stand_in(stand_in: char) -> Option<u8> {
    let code = u32::from(stand_in);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

fn alphabet_of(decoder: Option<&Value>) -> (Alphabet, Decoding) {
    let kind = |value: &Value| value.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let Some(decoder) = decoder else {
        // Without a decoder the crate joins tokens with spaces.
        return (Alphabet::Plain, Decoding::Whole);
    };
    let steps: Vec<&Value> = match decoder.get("decoders").and_then(Value::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![decoder],
    };
    let kinds: Vec<String> = steps.iter().map(|step| kind(step)).collect();
    let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
    let replaces_blank = |step: &Value| step.to_string().contains('\u{2581}');
    match kinds.as_slice() {
        ["ByteLevel"] => (Alphabet::ByteLevel, Decoding::Bytes { strip_leading_space: false }),
        ["Replace", "ByteFallback", "Fuse"] if replaces_blank(steps[0]) => {
            (Alphabet::SentencePiece, Decoding::Bytes { strip_leading_space: false })
        }
        ["Replace", "ByteFallback", "Fuse", "Strip"] if replaces_blank(steps[0]) => {
            (Alphabet::SentencePiece, Decoding::Bytes { strip_leading_space: true })
        }
        _ => (Alphabet::Plain, Decoding::Whole),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_stand_in() {
        let mut seen = [0u32; 256];
        for code in 0..0x200u32 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of_stand_in) {
                seen[byte as usize] += 1;
            }
        }
        assert!(seen.iter().all(|times| *times == 1), "{seen:?}");
        assert_eq!(byte_of_stand_in('Ġ'), Some(b' '));
        assert_eq!(byte_of_stand_in('Ċ'), Some(b'\n'));
    }

    #[test]
    fn byte_tokens_are_read_only_in_their_exact_form() {
        assert_eq!(byte_token("<0x0A>"), Some(0x0a));
        assert_eq!(byte_token("<0xA>"), None);
        assert_eq!(byte_token("<0x+A>"), None);
        assert_eq!(Alphabet::SentencePiece.bytes("▁de▁"), b" de ");
    }
}
