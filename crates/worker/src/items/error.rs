//! Failures of item views.

use overnight_types::Class;

/// Items could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The database or the objects failed.
    #[error(transparent)]
    Worker(#[from] crate::Error),
    /// A cursor that is not one of ours, or of another order.
    #[error("not a cursor of these results: {text:?}")]
    BadCursor {
        /// As given, cut at 80 characters.
        text: String,
    },
    /// The job was re-opened since the cursor was given out.
    #[error("the cursor is of round {cursor}, the job is in round {now}; start again without a cursor")]
    EarlierRound {
        /// The cursor's round.
        cursor: u32,
        /// The job's.
        now: u32,
    },
}

impl Error {
    /// What the caller may do.
    pub fn class(&self) -> Class {
        match self {
            Error::Worker(err) => err.class(),
            Error::BadCursor { .. } | Error::EarlierRound { .. } => Class::Permanent,
        }
    }
}
