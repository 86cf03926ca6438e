//! Files that a test needs and the repository does not hold.

use std::path::PathBuf;

/// A file or folder below what a variable names. Without it the test has nothing to run
/// on and says so; it fails when `OVERNIGHT_TEST_REQUIRE` lists `what`.
#[track_caller]
#[expect(clippy::disallowed_methods, reason = "a test takes fetched files from where its runner put them")]
pub(crate) fn fetched(what: &str, variable: &str, below: &str) -> Option<PathBuf> {
    let mut path = std::env::var_os(variable).map(PathBuf::from);
    // Joined to nothing, the path of a file would end in a slash and not exist.
    if let Some(path) = path.as_mut().filter(|_| !below.is_empty()) {
        path.push(below);
    }
    let found = path.filter(|path| path.exists());
    if found.is_none() {
        let required = std::env::var("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
        let detail = format!("{variable}, set to where `make test` put {what} {below}");
        assert!(!required.split(',').any(|word| word == what), "this test needs {detail}");
        eprintln!("skipped: this test needs {detail}");
    }
    found
}
