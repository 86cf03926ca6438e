//! Failures of the engine as a whole; a single request's are [`crate::RequestError`].

use std::path::PathBuf;

/// The engine could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model file cannot be read.
    #[error("could not read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A model file is not what it should be; `what` says what, where and what to do.
    #[error("model file {} is not usable: {what}", path.display())]
    Model {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The model needs something that is not built.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// A setting is out of range or contradicts another.
    #[error("invalid engine setting {key}: {what}")]
    Config {
        /// The key in `[engine]`.
        key: &'static str,
        /// Value, allowed range, remedy.
        what: String,
    },
    /// The tokenizer of a model cannot be used.
    #[error("could not read the tokenizer of {}", path.display())]
    Text {
        /// The model.
        path: PathBuf,
        /// The cause.
        #[source]
        source: crate::text::TextError,
    },
    /// The GPU cannot be used, or failed; `stage` says when.
    #[error("{stage}")]
    Device {
        /// What was being done, and what the operator can do.
        stage: String,
        /// The cause.
        #[source]
        source: overnight_kernels::Error,
    },
    /// Other programs hold the GPU's memory; how much, and what to do.
    #[error("the GPU's memory is in use: {0}")]
    Busy(String),
    /// The GPU computes with no type that this model can be computed in; what to do.
    #[error("the GPU has no type for this model: {0}")]
    NoDtype(String),
    /// A step contradicts itself or the memory it names; a fault of the scheduler.
    #[error("malformed step: {0}")]
    Step(String),
    /// The engine thread is gone or poisoned.
    #[error("engine stopped: {0}")]
    Stopped(String),
}

/// An error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
