//! Folds sqlx's errors into the store's, by SQLite's result codes.

use overnight_store::Error;

/// For `map_err`: `doing` is words after "to".
pub(crate) fn failed(doing: &'static str) -> impl Fn(sqlx::Error) -> Error {
    move |source| {
        if is_unavailable(&source) {
            Error::Unavailable { doing, source: source.into() }
        } else {
            Error::Refused { doing, source: source.into() }
        }
    }
}

/// A refusal of ours: the caller asks for what would break an invariant.
pub(crate) fn refused(doing: &'static str, why: impl Into<String>) -> Error {
    Error::Refused { doing, source: why.into().into() }
}

/// A stored value that we do not write.
pub(crate) fn damaged(what: &'static str, value: impl std::fmt::Debug) -> Error {
    Error::Damaged { what, value: format!("{value:?}").chars().take(80).collect() }
}

/// Whether trying again may help: busy, locked, out of memory, input/output,
/// full, cannot open, or no connection.
fn is_unavailable(err: &sqlx::Error) -> bool {
    match err {
        sqlx::Error::Database(err) => {
            let code = err.code().and_then(|code| code.parse::<i32>().ok()).unwrap_or(0);
            matches!(code & 0xff, 5 | 6 | 7 | 10 | 13 | 14 | 15)
        }
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => true,
        _ => false,
    }
}
