//! Object first, row second, as the kernel sees it: a file and its folders are synced
//! before the database's log says their hash for the first time.
//!
//! Method: `batch run` under strace, which records each sync, rename and write with
//! its bytes. A row names a segment or a file by its sha256, so the first write to the
//! log that holds the hash is the first that could survive a power loss without it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::backend::{self, Backend};
use crate::harness::{batch_binary, missing};
use crate::kill::{FAST, input, tiny_model};

/// Bytes of a hash that are looked for; no other bytes of a small log are the same by chance.
const HASH_BYTES: usize = 8;

/// A call that the kernel answered.
#[derive(Debug)]
struct Call {
    /// Line of the trace where it began, and where it had ended.
    began: usize,
    ended: usize,
    name: String,
    /// Arguments, as strace writes them: every string in hexadecimal.
    arguments: String,
}

/// Calls of all threads. A call that another thread's interrupts stands on two lines.
fn parse(trace: &str) -> Vec<Call> {
    let mut calls = Vec::new();
    let mut open: HashMap<&str, Call> = HashMap::new();
    for (number, line) in trace.lines().enumerate() {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let rest = rest.trim_start();
        if rest.starts_with("<... ") {
            if let Some(call) = open.remove(thread) {
                calls.push(Call { ended: number, ..call });
            }
            continue;
        }
        let Some((name, arguments)) = rest.split_once('(') else { continue };
        let call = Call { began: number, ended: number, name: name.to_owned(), arguments: arguments.to_owned() };
        if arguments.ends_with("<unfinished ...>") {
            open.insert(thread, call);
        } else {
            calls.push(call);
        }
    }
    calls.sort_by_key(|call| call.began);
    calls
}

/// Bytes as strace writes them.
fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect()
}

/// A path as an argument, or behind a descriptor.
fn quoted(path: &Path, (before, after): (&str, &str)) -> String {
    format!("{before}{}{after}", escaped(path.to_str().expect("test paths are UTF-8").as_bytes()))
}

const ARGUMENT: (&str, &str) = ("\"", "\"");
const DESCRIPTOR: (&str, &str) = ("<", ">");

/// End of the first sync of `path` that began after line `from`.
#[track_caller]
fn synced_after(calls: &[Call], path: &Path, from: usize, why: &str) -> usize {
    let descriptor = quoted(path, DESCRIPTOR);
    let is_sync = |call: &&Call| call.name == "fsync" || call.name == "fdatasync";
    let mut syncs = calls.iter().filter(is_sync).filter(|call| call.arguments.contains(&descriptor));
    let found = syncs.find(|call| call.began > from);
    found.unwrap_or_else(|| panic!("{} is not synced {why}", path.display())).ended
}

/// Checks one object; the folders made on the way to it included.
#[track_caller]
fn assert_synced_before_named(calls: &[Call], data_dir: &Path, object: &Path) {
    let shown = object.display();
    let hash = Sha256::digest(std::fs::read(object).expect("an object can be read"));
    let hash = escaped(&hash[..HASH_BYTES]);
    let named = calls.iter().find(|call| call.name == "pwrite64" && call.arguments.contains(&hash));
    let named = named.unwrap_or_else(|| panic!("no row names {shown}")).began;

    let target = quoted(object, ARGUMENT);
    let renamed = calls.iter().find(|call| call.name.starts_with("rename") && call.arguments.contains(&target));
    let renamed = renamed.unwrap_or_else(|| panic!("{shown} is not moved into its place"));
    let staged = renamed.arguments.split('"').nth(1).expect("a rename has two paths");
    let staged = quoted_bytes(staged);
    let content = synced_after(calls, &staged, 0, "before it gets its name");
    assert!(content < renamed.began, "{shown} gets its name before its bytes are synced");
    let parent = object.parent().expect("an object lies in a folder");
    let entry = synced_after(calls, parent, renamed.ended, "after an object came into it");
    assert!(entry < named, "a row names {shown} before its folder is synced");

    let folders = parent.ancestors().take_while(|folder| *folder != data_dir);
    for folder in folders {
        let argument = quoted(folder, ARGUMENT);
        let is_made = |call: &&Call| call.name.starts_with("mkdir") && call.arguments.contains(&argument);
        let Some(made) = calls.iter().find(|call| is_made(call) && call.arguments.contains("= 0")) else { continue };
        let above = folder.parent().expect("a folder below the data folder");
        let entry = synced_after(calls, above, made.began, "after a folder was made in it");
        assert!(entry < named, "a row names {shown} before {} is synced", above.display());
    }
}

/// The path that strace wrote in hexadecimal.
fn quoted_bytes(text: &str) -> PathBuf {
    let bytes = text.split("\\x").skip(1).map(|hex| u8::from_str_radix(hex, 16).expect("two hexadecimal digits"));
    String::from_utf8(bytes.collect()).expect("test paths are UTF-8").into()
}

pub(crate) fn files_below(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder can be listed") {
        let path = entry.expect("an entry can be read").path();
        if path.is_dir() { files_below(&path, into) } else { into.push(path) }
    }
}

#[test]
fn object_and_folder_are_synced_before_the_commit_that_names_them() {
    if backend::is_without("syncs of SQLite and of a folder", |backend| backend == Backend::Sqlite) {
        return;
    }
    let works = Command::new("strace").args(["-f", "--seccomp-bpf", "-o", "/dev/null", "true"]).output();
    if !works.is_ok_and(|output| output.status.success()) {
        return missing("strace", "strace 5.3 or later and the right to trace a child (apt install strace)");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path().canonicalize().expect("it is there");
    tiny_model(&folder);
    std::fs::write(folder.join("input.jsonl"), input(300, 2)).expect("input is written");
    let trace = folder.join("trace");
    let status = Command::new("strace")
        .current_dir(&folder)
        .args(["-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "5000", "-o", trace.to_str().expect("UTF-8")])
        .args(["-e", "trace=fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,pwrite64"])
        .arg(batch_binary())
        .args(["--data-dir", "data", "run", "input.jsonl", "-o", "out.jsonl", "--model", "tiny"])
        .args(["--served-model-name", "tiny"])
        .envs(FAST.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("strace starts");
    assert_eq!(status.code(), Some(3), "some lines fail, so the run says 3");
    let calls = parse(&std::fs::read_to_string(&trace).expect("strace wrote its trace"));

    let data_dir = folder.join("data");
    let mut objects = Vec::new();
    files_below(&data_dir.join("objects"), &mut objects);
    // Indexes and manifests are found by their names, not named by a row.
    let by_row = |path: &PathBuf| ["files", "segments"].iter().any(|part| path.iter().any(|name| name == *part));
    objects.retain(by_row);
    let num_segments = objects.iter().filter(|path| path.iter().any(|name| name == "segments")).count();
    assert!(num_segments >= 5, "{num_segments} segments");
    assert!(objects.len() >= num_segments + 3, "input, output and error file: {objects:?}");
    for object in &objects {
        assert_synced_before_named(&calls, &data_dir, object);
    }
}
