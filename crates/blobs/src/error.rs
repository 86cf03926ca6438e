//! Failures of object storage, and the one place that reads the driver's errors.

use std::io;
use std::time::Duration;

use overnight_types::Class;

use crate::layout::ObjectName;
use crate::remote::answer::{Refusal, Silence};

/// The driver's own error, opaque to callers.
pub type BoxedSource = Box<dyn std::error::Error + Send + Sync>;

/// An operation on an object failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The storage did not answer, has no room, or refuses us; its source says what to do.
    #[error("object storage unavailable while trying to {doing} {name}")]
    Unavailable {
        /// The operation, as words after "to".
        doing: &'static str,
        /// The object or prefix.
        name: String,
        /// The driver's error.
        #[source]
        source: BoxedSource,
    },
    /// The storage took longer than the time limit of one call.
    #[error("object storage took longer than {} s to {doing} {name}", limit.as_secs_f32())]
    TimedOut {
        /// The operation, as words after "to".
        doing: &'static str,
        /// The object or prefix.
        name: String,
        /// The limit.
        limit: Duration,
    },
    /// We may not do this with our rights.
    #[error("no permission to {doing} {name}")]
    Denied {
        /// The operation, as words after "to".
        doing: &'static str,
        /// The object or prefix.
        name: String,
        /// The driver's error.
        #[source]
        source: BoxedSource,
    },
    /// The object is not there.
    #[error("no such object: {name}")]
    Missing {
        /// The object.
        name: String,
    },
    /// The object's bytes are not those that were written.
    #[error("object {name} is damaged: {why}")]
    Damaged {
        /// The object.
        name: String,
        /// What is wrong, in words.
        why: String,
    },
    /// A text is not the name of one of our objects.
    #[error("not the name of an object: {text:?}")]
    BadName {
        /// The text, cut at 80 characters.
        text: String,
    },
    /// The storage's address is one that this build does not serve.
    #[error("object storage {url:?} is not supported: {why}")]
    Unsupported {
        /// The address as given.
        url: String,
        /// Why, and what to use instead.
        why: String,
    },
    /// A remote store has no mark of ours although it should.
    #[error("{url} is not the object storage of this database: it has no mark; is it the right bucket and prefix?")]
    NotOurs {
        /// The store.
        url: String,
    },
}

impl Error {
    /// What the caller may do.
    pub fn class(&self) -> Class {
        match self {
            Error::Unavailable { .. } | Error::TimedOut { .. } => Class::Transient,
            Error::Denied { .. }
            | Error::Missing { .. }
            | Error::Damaged { .. }
            | Error::BadName { .. }
            | Error::NotOurs { .. }
            | Error::Unsupported { .. } => Class::Permanent,
        }
    }

    /// Whether the storage has no room left.
    pub fn is_full(&self) -> bool {
        let source = std::error::Error::source(self);
        source.is_some_and(|source| io_kind(source) == Some(io::ErrorKind::StorageFull))
    }

    /// Whether the object is not there.
    pub fn is_missing(&self) -> bool {
        matches!(self, Error::Missing { .. })
    }

    pub(crate) fn damaged(name: &ObjectName, why: impl Into<String>) -> Self {
        Error::Damaged { name: name.to_string(), why: why.into() }
    }

    pub(crate) fn unavailable(doing: &'static str, name: &ObjectName, why: String) -> Self {
        Error::Unavailable { doing, name: name.to_string(), source: Box::new(Words(why)) }
    }

    pub(crate) fn from_driver(doing: &'static str, name: String, source: object_store::Error) -> Self {
        use object_store::Error as Driver;
        // A remote store's refusal concerns the whole store: it mends, and then goes on.
        if let Some(source) = told(&source) {
            return Error::Unavailable { doing, name, source };
        }
        match source {
            Driver::NotFound { .. } => Error::Missing { name },
            Driver::PermissionDenied { .. } | Driver::Unauthenticated { .. } => {
                Error::Denied { doing, name, source: Box::new(source) }
            }
            _ => match io_kind(&source) {
                Some(io::ErrorKind::NotFound) => Error::Missing { name },
                Some(io::ErrorKind::PermissionDenied) => Error::Denied { doing, name, source: Box::new(source) },
                Some(_) => Error::Unavailable { doing, name, source: Box::new(source) },
                None => Error::Unavailable { doing, name, source: words(&source) },
            },
        }
    }

    pub(crate) fn from_io(doing: &'static str, name: String, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Error::Missing { name },
            io::ErrorKind::PermissionDenied => Error::Denied { doing, name, source: Box::new(source) },
            _ => Error::Unavailable { doing, name, source: Box::new(source) },
        }
    }
}

/// A cause that is only a text.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Words(String);

/// Most characters of a driver's text: some repeat a whole answer.
const WORDS_CHARS_MAX: usize = 400;

/// A driver's error as one text: each of its layers repeats the next.
pub(crate) fn words(err: &object_store::Error) -> BoxedSource {
    let text: String = err.to_string().chars().take(WORDS_CHARS_MAX).collect();
    Box::new(Words(text.split_whitespace().collect::<Vec<_>>().join(" ")))
}

/// What a remote store told, from under the driver's layers.
fn told(err: &(dyn std::error::Error + 'static)) -> Option<BoxedSource> {
    let mut next = Some(err);
    while let Some(err) = next {
        if let Some(refusal) = err.downcast_ref::<Refusal>() {
            return Some(Box::new(refusal.clone()));
        }
        if let Some(silence) = err.downcast_ref::<Silence>() {
            return Some(Box::new(silence.clone()));
        }
        next = err.source();
    }
    None
}

fn io_kind(err: &(dyn std::error::Error + 'static)) -> Option<io::ErrorKind> {
    let mut next = Some(err);
    while let Some(err) = next {
        if let Some(io) = err.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        next = err.source();
    }
    None
}
