//! Failures of the store. Names no driver type: a source is boxed.

use overnight_types::Class;

/// The driver's own error, opaque to callers.
pub type BoxedSource = Box<dyn std::error::Error + Send + Sync>;

/// A database operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The database did not answer, is locked, or ran out of room.
    #[error("database unavailable while trying to {doing}")]
    Unavailable {
        /// The operation, as words after "to".
        doing: &'static str,
        /// The driver's error.
        #[source]
        source: BoxedSource,
    },
    /// The database answered and refused the statement.
    #[error("database refused to {doing}")]
    Refused {
        /// The operation, as words after "to".
        doing: &'static str,
        /// The driver's error.
        #[source]
        source: BoxedSource,
    },
    /// A stored value is not one that we write.
    #[error("stored {what} is damaged: {value}")]
    Damaged {
        /// Table and column.
        what: &'static str,
        /// The value, shortened.
        value: String,
    },
    /// The schema is of another version than this binary.
    #[error("database schema is at version {found}, this binary needs {needed}; run `batch db migrate`")]
    Schema {
        /// Version in the database.
        found: i64,
        /// Version of this binary.
        needed: i64,
    },
    /// The schema is of a newer binary; this one would not keep its promises.
    #[error("database schema is at version {found}, newer than this binary knows ({needed}); run a newer `batch`")]
    NewerSchema {
        /// Version in the database.
        found: i64,
        /// Version of this binary.
        needed: i64,
    },
    /// A row that the call names is not there.
    #[error("no such {what}: {id}")]
    Missing {
        /// What was looked for.
        what: &'static str,
        /// Its id.
        id: String,
    },
}

impl Error {
    /// What the caller may do.
    pub fn class(&self) -> Class {
        match self {
            Error::Unavailable { .. } => Class::Transient,
            Error::Refused { .. }
            | Error::Damaged { .. }
            | Error::Schema { .. }
            | Error::NewerSchema { .. }
            | Error::Missing { .. } => Class::Permanent,
        }
    }
}
