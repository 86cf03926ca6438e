//! How trouble is classed and how an error chain is printed, for every crate.

use std::error::Error;

/// What the caller may do about an operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// May succeed when tried again (a lost connection, a full disk).
    Transient,
    /// Will fail the same way again (a damaged object, a refused request).
    Permanent,
    /// Was given up on purpose (shutdown, cancel, a lost lease).
    Cancelled,
}

/// Prints an error and its sources once each, joined by `: `.
///
/// Display of our errors never prints its source, so this is the only place
/// where the whole chain becomes text.
pub fn chain(err: &(dyn Error + 'static)) -> String {
    let mut text = err.to_string();
    let mut source = err.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
