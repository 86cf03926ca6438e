//! Where a command writes, looked at before anything is read, sent or computed.
//!
//! Invariant: no output is one of the command's inputs, whatever the two are called,
//! and the folder of every output takes a new file. So an input is never replaced by
//! its answers, and no night of work ends at a name that cannot be written.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Exit, Failure, Result};
use crate::output::{Ui, escape};

/// What a download or a run writes beside its output before the rename.
const ON_THE_WAY: [&str; 3] = ["", ".partial", ".partial.json"];

/// Addresses that a person might give for a file.
const REMOTE: [&str; 5] = ["s3://", "gs://", "az://", "http://", "https://"];

/// Refuses outputs that are an input or cannot be written. `-` is stdin or stdout.
pub(crate) fn check(outputs: &[&Path], inputs: &[&OsStr]) -> Result {
    let inputs: Vec<(&OsStr, (u64, u64))> =
        inputs.iter().filter_map(|input| Some((*input, identity_of_input(input)?))).collect();
    for output in outputs.iter().filter(|output| output.as_os_str() != "-") {
        for suffix in ON_THE_WAY {
            let path = with_suffix(output, suffix);
            let Some(identity) = identity(&path) else { continue };
            if let Some((input, _)) = inputs.iter().find(|(_, known)| *known == identity) {
                return Err(is_input(&path, input));
            }
        }
        check_writable(output)?;
    }
    Ok(())
}

fn is_input(path: &Path, input: &OsStr) -> Failure {
    let (shown, input) = (path.display().to_string(), input.to_string_lossy());
    let what = match shown == input {
        true => format!("{} is the input and the output", escape(&shown)),
        false if input == "-" => format!("the output {} is the file that stdin is", escape(&shown)),
        false => format!("the output {} is the same file as the input {}", escape(&shown), escape(&input)),
    };
    Failure::usage(format!("{what}: it would be replaced"))
        .code("output_is_input")
        .hint("give the output another name; nothing was read or written")
}

/// Device and inode of a regular file, links followed.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((meta.dev(), meta.ino()))
}

fn identity_of_input(input: &OsStr) -> Option<(u64, u64)> {
    if input != "-" {
        return identity(Path::new(input));
    }
    // A file that a shell opened as stdin is found there by its descriptor.
    identity(Path::new("/dev/stdin"))
}

/// A device is written to as it is; any other output needs a folder that takes a file.
fn check_writable(output: &Path) -> Result {
    let refused = |what: String, hint: &str| {
        Err(Failure::new(Exit::Usage, format!("could not write {}: {what}", escape(&output.to_string_lossy())))
            .code("output_not_writable")
            .hint(hint))
    };
    if output.to_str().is_some_and(|text| REMOTE.iter().any(|scheme| text.starts_with(scheme))) {
        let hint = "write to a file and copy it there; a server keeps its own objects there with objects.url";
        return refused("results are written to files of this machine".to_owned(), hint);
    }
    match std::fs::metadata(output) {
        Ok(meta) if meta.is_dir() => return refused("it is a folder".to_owned(), "add the name of a file to it"),
        Ok(meta) if !meta.is_file() => return Ok(()),
        _ => {}
    }
    let folder = match output.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Asking for rights is not enough: a full or read-only file system gives them.
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(err) => refused(
            match err.kind() {
                std::io::ErrorKind::NotFound => format!("there is no folder {}", folder.display()),
                _ => overnight_types::chain(&err),
            },
            "make the folder, or choose another one; nothing was computed",
        ),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// How each line of a file of failures begins, in every version.
const FAILURE_BEGINS: &[u8] = b"{\"id\":\"batch_req_";

/// Removes the failures of an earlier round from beside an output, all of which have an answer
/// now. What somebody else wrote under that name stays, and is named.
pub(crate) fn remove_failures(path: &Path, ui: &Ui) -> Result {
    // Looked at before it is opened: a pipe under that name would keep the reader waiting.
    if !path.is_file() {
        return Ok(());
    }
    let mut start = Vec::new();
    std::fs::File::open(path)?.take(FAILURE_BEGINS.len() as u64).read_to_end(&mut start)?;
    if start == FAILURE_BEGINS {
        std::fs::remove_file(path)?;
    } else {
        ui.summary(format!("{} is no file of failures and was left alone; no request failed", path.display()));
    }
    Ok(())
}

/// `out.jsonl` → `out.KIND.jsonl`; other names get `.KIND.jsonl` added.
pub(crate) fn beside(path: &Path, kind: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    if path.extension().is_some_and(|extension| extension == "jsonl") {
        name = path.file_stem().unwrap_or_default().to_owned();
    }
    name.push(format!(".{kind}.jsonl"));
    path.with_file_name(name)
}

/// Where lines go that no answer is for (`errors`, `invalid`): beside the output. Without
/// an output file, into the current folder under the input's name: the input's own folder
/// may be anybody's.
pub(crate) fn beside_output(output: Option<&Path>, input_label: &str, kind: &str) -> PathBuf {
    match output.filter(|output| output.as_os_str() != "-") {
        Some(output) => beside(output, kind),
        None => beside(Path::new(Path::new(input_label).file_name().unwrap_or(OsStr::new("stdin"))), kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_lines_go_beside_the_output() {
        for (path, found) in
            [("out.jsonl", "out.errors.jsonl"), ("a/b.txt", "a/b.txt.errors.jsonl"), ("x", "x.errors.jsonl")]
        {
            assert_eq!(beside(Path::new(path), "errors"), PathBuf::from(found));
        }
        assert_eq!(beside_output(Some(Path::new("-")), "far/in.jsonl", "invalid"), PathBuf::from("in.invalid.jsonl"));
        assert_eq!(beside_output(None, "stdin", "invalid"), PathBuf::from("stdin.invalid.jsonl"));
    }

    #[test]
    fn input_is_known_by_any_name_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("in"), "x").unwrap();
        std::fs::hard_link(at("in"), at("hard")).unwrap();
        std::os::unix::fs::symlink(at("in"), at("soft")).unwrap();
        std::fs::write(at("out.partial"), "x").unwrap();
        let round_about = folder.path().join("..").join(folder.path().file_name().unwrap()).join("in");
        for output in [at("in"), at("hard"), at("soft"), round_about] {
            let failure = check(&[&output], &[at("in").as_os_str()]).unwrap_err();
            assert!(failure.has_code("output_is_input") && failure.exit == Exit::Usage, "{output:?}");
        }
        assert!(check(&[&at("out")], &[at("out.partial").as_os_str()]).is_err(), "its first name is the input's");
        assert!(check(&[&at("new"), Path::new("-"), Path::new("/dev/null")], &[at("in").as_os_str()]).is_ok());
    }

    #[test]
    fn folder_that_takes_no_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for output in [folder.path().to_owned(), folder.path().join("no/out"), PathBuf::from("/proc/out")] {
            let failure = check(&[&output], &[]).unwrap_err();
            assert!(failure.has_code("output_not_writable"), "{output:?}: {}", failure.message());
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "looking leaves nothing");
    }
}
