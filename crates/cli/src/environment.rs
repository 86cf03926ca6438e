//! The only place that reads the process environment.

use std::ffi::OsString;
use std::path::PathBuf;

/// A variable as text; `None` when unset, empty or not UTF-8.
#[expect(clippy::disallowed_methods, reason = "cli reads the environment for everybody else, here alone")]
pub(crate) fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// A variable as a path; `None` when unset or empty.
#[expect(clippy::disallowed_methods, reason = "cli reads the environment for everybody else, here alone")]
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Every variable whose name is UTF-8 and starts with `prefix`.
pub(crate) fn with_prefix(prefix: &str) -> Vec<(String, OsString)> {
    let mut found: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| name.starts_with(prefix))
        .collect();
    found.sort();
    found
}

/// `$HOME`.
pub(crate) fn home() -> Option<PathBuf> {
    path("HOME")
}

/// An XDG base folder: the variable when absolute, else the default below home.
pub(crate) fn xdg(variable: &str, below_home: &str) -> Option<PathBuf> {
    path(variable).filter(|path| path.is_absolute()).or_else(|| home().map(|home| home.join(below_home)))
}
