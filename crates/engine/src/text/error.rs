//! What can go wrong with a tokenizer, its text or its chat template.

use std::path::PathBuf;

/// A tokenizer cannot be loaded or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A tokenizer file cannot be read.
    #[error("could not read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A tokenizer file or GGUF vocabulary is not usable; `what` says why.
    #[error("tokenizer of {from} is not usable: {what}")]
    Load {
        /// The file or folder.
        from: String,
        /// What is wrong and what to do.
        what: String,
    },
    /// The tokenizer failed on this text.
    #[error("could not tokenize the text: {0}")]
    Encode(String),
    /// The tokenizer failed on these ids.
    #[error("could not turn token ids into text: {0}")]
    Decode(String),
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Ids are below this.
        vocab_size: u32,
    },
}

/// A chat cannot be rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The model came without a template.
    #[error(
        "the model has no chat template: send a rendered prompt to /v1/completions, or start with --chat-template FILE"
    )]
    Missing,
    /// The template does not parse.
    #[error("the chat template does not parse: {0}")]
    Parse(String),
    /// The template itself refused the messages (`raise_exception`).
    #[error("the chat template refuses the messages: {0}")]
    Raised(String),
    /// The template failed on these messages.
    #[error("the chat template cannot render the messages: {0}")]
    Render(String),
    /// `continue_final_message` with a template that changes the final message.
    #[error("the chat template does not end with the final message, so it cannot be continued")]
    FinalMessageNotLast,
}
