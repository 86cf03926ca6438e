//! Failures of the worker's operations. A single item's failure is data, not one of these.

use std::path::PathBuf;

use overnight_types::{Class, JobId};

/// A worker operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is out of range.
    #[error("invalid worker setting {key}: {what}")]
    Config {
        /// The key in `[worker]`.
        key: &'static str,
        /// Value, allowed range, remedy.
        what: String,
    },
    /// The database failed.
    #[error("could not {doing}")]
    Store {
        /// The operation, as words after "could not".
        doing: &'static str,
        /// The cause.
        #[source]
        source: overnight_store::Error,
    },
    /// The object store failed.
    #[error("could not {doing}")]
    Blobs {
        /// The operation, as words after "could not".
        doing: &'static str,
        /// The cause.
        #[source]
        source: overnight_blobs::Error,
    },
    /// A file of the data folder cannot be used.
    #[error("could not {doing} {}", path.display())]
    DataDir {
        /// The operation, as a verb.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Another process holds the data folder.
    #[error("data folder {} is in use: {what}", path.display())]
    DataDirInUse {
        /// The folder.
        path: PathBuf,
        /// By whom and what to do.
        what: String,
    },
    /// A stored object does not hold what its row says.
    #[error("stored data of {job} is damaged: {what}")]
    Damaged {
        /// The job.
        job: JobId,
        /// Which object, and what is wrong.
        what: String,
    },
    /// The remote engine's settings cannot be used.
    #[error("invalid remote engine: {0}")]
    Remote(String),
    /// Given up because the lease was lost or the worker stops.
    #[error("stopped: {0}")]
    Stopped(&'static str),
}

impl Error {
    /// What the caller may do.
    pub fn class(&self) -> Class {
        match self {
            Error::Store { source, .. } => source.class(),
            Error::Blobs { source, .. } => source.class(),
            Error::Stopped(_) => Class::Cancelled,
            Error::DataDir { .. } => Class::Transient,
            Error::Config { .. } | Error::DataDirInUse { .. } | Error::Damaged { .. } | Error::Remote(_) => {
                Class::Permanent
            }
        }
    }

    /// Wraps a store failure; `doing` reads after "could not".
    pub fn store(doing: &'static str) -> impl Fn(overnight_store::Error) -> Error + Copy {
        move |source| Error::Store { doing, source }
    }

    /// Wraps an object store failure; `doing` reads after "could not".
    pub fn blobs(doing: &'static str) -> impl Fn(overnight_blobs::Error) -> Error + Copy {
        move |source| Error::Blobs { doing, source }
    }
}
