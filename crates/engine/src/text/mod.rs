//! Text to token ids and back: tokenizer, chat template, incremental detokenizer,
//! stop-string matcher.
//!
//! Invariants: text is never split inside a character, ids and text are cut at the
//! same place, and a BOS token stands at most once at the start of a prompt.
//! Pure and free of any device; used on caller threads, never on the engine's.
//! Start with [`Text`], then [`OutputText`] for the way back.

mod detokenizer;
mod error;
mod folder;
mod huggingface;
mod output;
mod pieces;
mod sentencepiece;
mod stop;
mod template;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::path::Path;
use std::sync::Arc;

pub use detokenizer::Detokenizer;
pub use error::{TemplateError, TextError};
pub use output::{OutputRules, OutputStep, OutputText, StopHit};
pub use stop::{StopMatcher, StopStep};
pub use template::ChatPrompt;

use huggingface::HuggingFace;
use pieces::Pieces;
use sentencepiece::SentencePiece;
use template::Template;

use crate::gguf::Gguf;

/// A model's tokenizer and chat template.
pub struct Text {
    encoder: Encoder,
    pieces: Pieces,
    decoding: Decoding,
    special: SpecialTokens,
    template: Option<Template>,
}

impl std::fmt::Debug for Text {
    /// A vocabulary has hundreds of thousands of entries: only its size is written.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Text")
            .field("vocab_size", &self.vocab_size())
            .field("decoding", &self.decoding)
            .field("has_chat_template", &self.has_chat_template())
            .finish_non_exhaustive()
    }
}

enum Encoder {
    HuggingFace(Box<HuggingFace>),
    SentencePiece(Box<SentencePiece>),
}

/// How ids become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decoding {
    /// Every id stands for fixed bytes.
    Bytes {
        /// One space at the start of a whole text is the tokenizer's own and is left out.
        strip_leading_space: bool,
    },
    /// A token's text depends on its neighbours: only the tokenizer itself can tell.
    Whole,
}

/// The tokens that stand for no text, by id and as templates name them.
#[derive(Debug, Clone, Default)]
struct SpecialTokens {
    bos: Option<(u32, String)>,
    eos_text: Option<String>,
    unk_text: Option<String>,
    pad_text: Option<String>,
    /// Every token that ends a turn or a text.
    eos_ids: Vec<u32>,
    /// The model's files ask for a BOS on raw text.
    add_bos: bool,
    add_eos: Option<u32>,
}

impl Text {
    /// Reads `tokenizer.json` and, when there, `tokenizer_config.json`, `chat_template.jinja`,
    /// `generation_config.json` and `config.json` of a model folder.
    pub fn from_dir(folder: &Path) -> Result<Text, TextError> {
        folder::load(folder)
    }

    /// Takes the vocabulary, flags and template that a GGUF file carries itself.
    pub fn from_gguf(gguf: &Gguf) -> Result<Text, TextError> {
        vocabulary::load(gguf)
    }

    /// Whether the model at this path, a folder or a GGUF file, has a chat template. A look
    /// at its head alone, for what is made before a model is loaded.
    pub fn has_template_at(path: &Path) -> Result<bool, TextError> {
        if path.is_dir() {
            return folder::has_chat_template(path);
        }
        let gguf = Gguf::open(path)
            .map_err(|err| TextError::Load { from: path.display().to_string(), what: err.to_string() })?;
        Ok(vocabulary::has_chat_template(&gguf))
    }

    /// Whether a chat template parses; for a check before a model is loaded.
    pub fn check_chat_template(source: &str) -> Result<(), TemplateError> {
        Template::parse(source.to_owned()).map(drop)
    }

    /// Replaces the model's chat template. Errors when it does not parse.
    pub fn with_chat_template(mut self, source: String) -> Result<Text, TemplateError> {
        self.template = Some(Template::parse(source)?);
        Ok(self)
    }

    /// Token ids of a text. Special tokens written out in it are taken as such. With
    /// `add_special`, what the model puts around raw text (BOS, some models' EOS) is
    /// added; a BOS that the text already begins with is not doubled.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let mut ids = match &self.encoder {
            Encoder::HuggingFace(tokenizer) => tokenizer.encode(text, add_special)?,
            Encoder::SentencePiece(encoder) => encoder.encode(text),
        };
        if let Some((bos, _)) = self.special.bos.as_ref().filter(|_| add_special) {
            if self.special.add_bos && ids.first() != Some(bos) {
                ids.insert(0, *bos);
            }
            if ids.starts_with(&[*bos, *bos]) {
                ids.remove(0);
            }
        }
        if let Some(eos) = self.special.add_eos.filter(|eos| add_special && ids.last() != Some(eos)) {
            ids.push(eos);
        }
        Ok(ids)
    }

    /// The text of a whole sequence of ids; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let strip_leading_space = match self.decoding {
            Decoding::Bytes { strip_leading_space } => strip_leading_space,
            Decoding::Whole => match &self.encoder {
                Encoder::HuggingFace(tokenizer) => return tokenizer.decode(ids, skip_special),
                Encoder::SentencePiece(_) => false,
            },
        };
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            let piece = self.piece(id)?;
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(piece);
            }
        }
        let text = String::from_utf8(bytes).unwrap_or_else(|err| String::from_utf8_lossy(err.as_bytes()).into_owned());
        Ok(match text.strip_prefix(' ').filter(|_| strip_leading_space) {
            Some(rest) => rest.to_owned(),
            None => text,
        })
    }

    /// A detokenizer for the output that follows `prompt`.
    pub fn detokenizer(self: &Arc<Self>, prompt: &[u32], skip_special: bool) -> Detokenizer {
        Detokenizer::new(Arc::clone(self), prompt, skip_special)
    }

    /// Renders a chat as the model's template writes it, special tokens included.
    /// Encode the result with `add_special` false.
    pub fn render_chat(&self, prompt: &ChatPrompt<'_>) -> Result<String, TemplateError> {
        self.template.as_ref().ok_or(TemplateError::Missing)?.render(prompt, &self.special)
    }

    /// Whether chats can be rendered.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Ids are below this. The model's output head may have more rows: those are padding.
    pub fn vocab_size(&self) -> u32 {
        u32::try_from(self.pieces.len()).unwrap_or(u32::MAX)
    }

    /// The text of one id by itself, special tokens written out; bytes that are no UTF-8
    /// become U+FFFD. `None` outside the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<String> {
        Some(String::from_utf8_lossy(self.pieces.get(id)?).into_owned())
    }

    /// The bytes of one id; `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id)
    }

    /// Whether the id is a control token, which text leaves out by default.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// The token that begins a sequence, for models that have one.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.special.bos.as_ref().map(|(id, _)| *id)
    }

    /// Every token that ends a text or a turn by the model's own files, rising.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.special.eos_ids
    }

    fn piece(&self, id: u32) -> Result<&[u8], TextError> {
        self.pieces.get(id).ok_or(TextError::UnknownToken { id, vocab_size: self.vocab_size() })
    }

    fn check(&self, id: u32) -> Result<(), TextError> {
        self.piece(id).map(|_| ())
    }

    fn decodes_whole(&self) -> bool {
        self.decoding == Decoding::Whole
    }
}
