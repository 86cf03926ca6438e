//! A tokenizer out of a GGUF file's own metadata, `tokenizer.ggml.*`.

use std::collections::{BTreeSet, HashMap};

use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer};

use super::huggingface::{Alphabet, HuggingFace};
use super::pieces::Pieces;
use super::sentencepiece::{BLANK, SentencePiece, TokenKind};
use super::template::Template;
use super::{Decoding, Encoder, SpecialTokens, Text, TextError};
use crate::gguf::{Gguf, Value};

/// Texts that end a turn in one model family or another, whatever the file says of its EOS.
const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "<|EOT|>",
    "</s>",
];

/// Whether a token ends a turn by its name. Only a control token does: Gemma's vocabulary
/// has `</s>` as a tag of HTML, which is text.
pub(super) fn ends_turn(kind: TokenKind, token: &str) -> bool {
    kind == TokenKind::Control && END_OF_TURN.contains(&token)
}

/// The bytes that a token stands for. Only a byte token spells a byte: a user-defined one is its
/// own text, in which a SentencePiece vocabulary may have `▁` for a blank.
pub(super) fn piece(alphabet: Alphabet, kind: TokenKind, token: &str) -> Vec<u8> {
    match (alphabet, kind) {
        (Alphabet::SentencePiece, TokenKind::Byte) | (_, TokenKind::Normal) => alphabet.bytes(token),
        (Alphabet::SentencePiece, TokenKind::UserDefined) => token.replace(BLANK, " ").into_bytes(),
        _ => token.as_bytes().to_vec(),
    }
}

struct Vocabulary<'a> {
    gguf: &'a Gguf,
    from: String,
    tokens: &'a [String],
    kinds: Vec<TokenKind>,
}

/// The key of a chat template.
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Whether the file carries a chat template.
pub(super) fn has_chat_template(gguf: &Gguf) -> bool {
    gguf.get(CHAT_TEMPLATE).and_then(Value::as_str).is_some()
}

pub(super) fn load(gguf: &Gguf) -> Result<Text, TextError> {
    let from = gguf.path().display().to_string();
    let missing = |key: &str| TextError::Load { from: from.clone(), what: format!("it has no {key}") };
    let tokens = gguf
        .get("tokenizer.ggml.tokens")
        .and_then(Value::as_strings)
        .ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
    let codes = gguf.get("tokenizer.ggml.token_type").and_then(Value::as_integers).unwrap_or_default();
    let kinds: Vec<TokenKind> = match codes.len() {
        0 => vec![TokenKind::Normal; tokens.len()],
        _ => codes.iter().map(|code| TokenKind::from_code(*code)).collect(),
    };
    if kinds.len() != tokens.len() {
        let what = format!("{} token types for {} tokens", kinds.len(), tokens.len());
        return Err(TextError::Load { from, what });
    }
    let model =
        gguf.get("tokenizer.ggml.model").and_then(Value::as_str).ok_or_else(|| missing("tokenizer.ggml.model"))?;
    let vocabulary = Vocabulary { gguf, from: from.clone(), tokens, kinds };
    let (encoder, alphabet, strip_leading_space) = match model {
        "llama" => vocabulary.sentencepiece()?,
        "gpt2" => vocabulary.byte_level()?,
        other => {
            let what = format!("tokenizer.ggml.model = {other:?} is not supported; supported: llama, gpt2");
            return Err(TextError::Load { from, what });
        }
    };
    let template = match gguf.get(CHAT_TEMPLATE).and_then(Value::as_str) {
        Some(source) => Some(
            Template::parse(source.to_owned())
                .map_err(|err| TextError::Load { from: from.clone(), what: format!("chat template: {err}") })?,
        ),
        None => None,
    };
    Ok(Text {
        encoder,
        pieces: vocabulary.pieces(alphabet),
        decoding: Decoding::Bytes { strip_leading_space },
        special: vocabulary.special_tokens(model == "llama"),
        template,
    })
}

impl Vocabulary<'_> {
    fn sentencepiece(&self) -> Result<(Encoder, Alphabet, bool), TextError> {
        let scores = self.gguf.get("tokenizer.ggml.scores").and_then(Value::as_floats).unwrap_or_default();
        if scores.len() != self.tokens.len() {
            return Err(self.unusable(format!("{} scores for {} tokens", scores.len(), self.tokens.len())));
        }
        let add_space_prefix = self.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
        let unknown = self.id("tokenizer.ggml.unknown_token_id").or(Some(0));
        let encoder = SentencePiece::new(self.tokens, scores, &self.kinds, unknown, add_space_prefix)?;
        Ok((Encoder::SentencePiece(Box::new(encoder)), Alphabet::SentencePiece, add_space_prefix))
    }

    /// Byte-level BPE, built as the `tokenizers` model that the file was made from.
    fn byte_level(&self) -> Result<(Encoder, Alphabet, bool), TextError> {
        let merges = self.gguf.get("tokenizer.ggml.merges").and_then(Value::as_strings).unwrap_or_default();
        let merges: Option<Vec<(String, String)>> =
            merges.iter().map(|merge| merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()))).collect();
        let merges = merges.filter(|merges| !merges.is_empty());
        let merges = merges.ok_or_else(|| self.unusable("tokenizer.ggml.merges is missing or damaged".to_owned()))?;
        let pre = self.gguf.get("tokenizer.ggml.pre").and_then(Value::as_str).unwrap_or("default");
        let rules = PreRules::of(pre).ok_or_else(|| {
            let known = PreRules::KNOWN.join(", ");
            self.unusable(format!(
                "tokenizer.ggml.pre = {pre:?} is not supported (supported: {known}); use a model folder with tokenizer.json"
            ))
        })?;
        let vocabulary: HashMap<String, u32> =
            (0u32..).zip(self.tokens).map(|(id, token)| (token.clone(), id)).collect();
        let model = BPE::builder()
            .vocab_and_merges(vocabulary.into_iter().collect::<tokenizers::models::bpe::Vocab>(), merges)
            .ignore_merges(rules.ignore_merges)
            .build()
            .map_err(|err| self.unusable(err.to_string()))?;
        let mut tokenizer = Tokenizer::new(model);
        if rules.nfc {
            tokenizer.with_normalizer(Some(NFC));
        }
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        for regex in rules.regexes {
            let split = Split::new(SplitPattern::Regex((*regex).to_owned()), SplitDelimiterBehavior::Isolated, false)
                .map_err(|err| self.unusable(err.to_string()))?;
            steps.push(split.into());
        }
        steps.push(ByteLevel::new(false, true, false).into());
        tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        let added: Vec<AddedToken> = self
            .whole()
            .map(|(kind, token)| AddedToken::from(token.clone(), kind == TokenKind::Control).normalized(false))
            .collect();
        tokenizer.add_tokens(&added);
        Ok((Encoder::HuggingFace(Box::new(HuggingFace::new(tokenizer))), Alphabet::ByteLevel, false))
    }

    fn pieces(&self, alphabet: Alphabet) -> Pieces {
        let mut pieces = Pieces::with_capacity(self.tokens.len());
        for (token, kind) in self.tokens.iter().zip(&self.kinds) {
            let special = matches!(kind, TokenKind::Control | TokenKind::Unused);
            pieces.push(&piece(alphabet, *kind, token), special);
        }
        pieces
    }

    fn special_tokens(&self, add_bos_default: bool) -> SpecialTokens {
        let text = |id: u32| self.tokens.get(id as usize).cloned();
        let named = |key: &str| self.id(key).and_then(text);
        let bos = self.id("tokenizer.ggml.bos_token_id").and_then(|id| Some((id, text(id)?)));
        let eos = self.id("tokenizer.ggml.eos_token_id");
        let keys = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
        let mut eos_ids: BTreeSet<u32> = keys.iter().filter_map(|key| self.id(key)).collect();
        let tokens = (0u32..).zip(self.kinds.iter().zip(self.tokens));
        eos_ids.extend(tokens.filter(|(_, (kind, token))| ends_turn(**kind, token)).map(|(id, _)| id));
        SpecialTokens {
            add_bos: bos.is_some() && self.flag("tokenizer.ggml.add_bos_token").unwrap_or(add_bos_default),
            add_eos: eos.filter(|_| self.flag("tokenizer.ggml.add_eos_token") == Some(true)),
            bos,
            eos_text: eos.and_then(text),
            unk_text: named("tokenizer.ggml.unknown_token_id"),
            pad_text: named("tokenizer.ggml.padding_token_id"),
            eos_ids: eos_ids.into_iter().collect(),
        }
    }

    fn whole(&self) -> impl Iterator<Item = (TokenKind, &String)> {
        self.kinds.iter().copied().zip(self.tokens).filter(|(kind, _)| kind.is_matched_whole())
    }

    /// An id that the file names and its vocabulary has.
    fn id(&self, key: &str) -> Option<u32> {
        let id = self.gguf.get(key).and_then(Value::as_u64)?;
        u32::try_from(id).ok().filter(|id| (*id as usize) < self.tokens.len())
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.gguf.get(key).and_then(Value::as_bool)
    }

    fn unusable(&self, what: String) -> TextError {
        TextError::Load { from: self.from.clone(), what }
    }
}

/// How a byte-level vocabulary cuts text before merging, by `tokenizer.ggml.pre`
/// (llama.cpp, llama-vocab.cpp and the models' own tokenizer.json).
struct PreRules {
    regexes: &'static [&'static str],
    ignore_merges: bool,
    nfc: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl PreRules {
    const KNOWN: &'static [&'static str] =
        &["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "smollm"];

    fn of(pre: &str) -> Option<Self> {
        let rules = |regexes, ignore_merges, nfc| Some(Self { regexes, ignore_merges, nfc });
        match pre {
            "gpt-2" => rules(&[GPT2], false, false),
            "llama-bpe" | "llama3" | "llama-v3" => rules(&[LLAMA3], true, false),
            "qwen2" | "deepseek-r1-qwen" => rules(&[QWEN2], false, true),
            "smollm" => rules(&[r"\p{N}", GPT2], false, false),
            _ => None,
        }
    }
}
