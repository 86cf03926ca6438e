//! The log in files: a service starts a new one when the last is large, and the oldest
//! go, so that all of them together stay below a limit of bytes and of files. Services that
//! share a folder may pass the limit of bytes by a piece for each of them but one.
//!
//! Invariant: trouble with these files never stops the service or its log on stderr.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use overnight_types::Timestamp;

/// All files together are at most this many pieces.
const PIECES: u64 = 8;
/// And at most this many files: each start begins one, and a service that a supervisor
/// starts again every second would leave ever more small ones.
const FILES_MAX: usize = 64;

/// A writer of lines into files of one folder.
#[derive(Debug)]
pub(super) struct LogFiles {
    folder: PathBuf,
    role: &'static str,
    bytes_max: u64,
    number: u32,
    /// The file that is written to, and its size.
    current: Option<(File, u64)>,
}

impl LogFiles {
    /// Nothing is written or made before the first line.
    pub(super) fn new(folder: PathBuf, role: &'static str, bytes_max: u64) -> Self {
        Self { folder, role, bytes_max, number: 0, current: None }
    }

    fn piece_max(&self) -> u64 {
        (self.bytes_max / PIECES).max(1)
    }

    fn add(&mut self, line: &[u8]) -> io::Result<()> {
        let added = line.len() as u64;
        if self.current.as_ref().is_none_or(|(_, size)| *size > 0 && size + added > self.piece_max()) {
            self.current = None;
            fs::create_dir_all(&self.folder)?;
            remove_oldest(&self.folder, self.bytes_max - self.piece_max());
            self.number += 1;
            let at = Timestamp::now().datetime().format("%Y%m%dT%H%M%SZ");
            let name = format!("{}-{at}-{}-{:04}.jsonl", self.role, std::process::id(), self.number);
            self.current = Some((File::options().create(true).append(true).open(self.folder.join(name))?, 0));
        }
        let Some((file, size)) = &mut self.current else { return Ok(()) };
        file.write_all(line)?;
        *size += added;
        Ok(())
    }
}

impl Write for LogFiles {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // What cannot be written here stands on stderr; the next line tries again.
        if self.add(line).is_err() {
            self.current = None;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Log files of a folder, oldest first.
pub(crate) fn list(folder: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            let meta = match entry.metadata() {
                Ok(meta) => meta,
                // Its service has just thrown it away.
                Err(err) if err.kind() == io::ErrorKind::NotFound => continue,
                Err(err) => return Err(err),
            };
            files.push((meta.modified()?, path, meta.len()));
        }
    }
    files.sort();
    Ok(files.into_iter().map(|(_, path, size)| (path, size)).collect())
}

fn remove_oldest(folder: &Path, kept_max: u64) {
    let Ok(files) = list(folder) else { return };
    let mut total: u64 = files.iter().map(|(_, size)| size).sum();
    let mut num_files = files.len();
    for (path, size) in files {
        // Below the limit of files by one: the next is about to be made.
        if total <= kept_max && num_files < FILES_MAX {
            break;
        }
        let removed = fs::remove_file(path);
        // Another service of this folder may have been quicker.
        if removed.is_ok() || removed.is_err_and(|err| err.kind() == io::ErrorKind::NotFound) {
            total -= size;
            num_files -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(folder: &Path) -> Vec<u64> {
        list(folder).unwrap().into_iter().map(|(_, size)| size).collect()
    }

    #[test]
    fn all_files_together_stay_below_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let logs = folder.path().join("logs");
        let mut files = LogFiles::new(logs.clone(), "serve", 800);
        let line = [&[b'x'; 29][..], b"\n"].concat();
        for _ in 0..200 {
            files.write_all(&line).unwrap();
            let sizes = sizes(&logs);
            assert!(sizes.iter().sum::<u64>() <= 800 && sizes.iter().all(|size| *size <= 100), "{sizes:?}");
        }
        assert!(sizes(&logs).iter().sum::<u64>() > 600, "and little is thrown away early");
    }

    #[test]
    fn service_that_starts_again_and_again_leaves_few_files() {
        let folder = tempfile::tempdir().unwrap();
        for start in 0..3 * FILES_MAX {
            // Each start is a process of its own; here a role stands for its number.
            let role: &'static str = Box::leak(format!("serve-{start}").into_boxed_str());
            let mut files = LogFiles::new(folder.path().to_owned(), role, 64 << 20);
            files.write_all(format!("start {start}\n").as_bytes()).unwrap();
            assert!(list(folder.path()).unwrap().len() <= FILES_MAX);
        }
        let texts = list(folder.path()).unwrap().into_iter().map(|(path, _)| fs::read_to_string(path).unwrap());
        assert!(texts.into_iter().any(|text| text == format!("start {}\n", 3 * FILES_MAX - 1)), "the newest stays");
    }

    // A reader lists while a service throws files away: names that `read_dir` has given already.
    #[test]
    fn file_that_goes_while_the_folder_is_read_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let gone = |path: &Path| fs::write(path, "x").and_then(|()| fs::remove_file(path));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    (0..50).for_each(|n| gone(&folder.path().join(format!("{n}.jsonl"))).unwrap());
                }
            });
            let faults: Vec<_> = (0..2_000).filter_map(|_| list(folder.path()).err()).collect();
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(faults.is_empty(), "{faults:?}");
        });
    }

    #[test]
    fn folder_that_is_no_folder_stops_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join("logs");
        fs::write(&taken, "").unwrap();
        let mut files = LogFiles::new(taken.clone(), "serve", 800);
        files.write_all(b"one\n").unwrap();
        fs::remove_file(&taken).unwrap();
        files.write_all(b"two\n").unwrap();
        let (path, _) = list(&taken).unwrap().remove(0);
        assert_eq!(fs::read_to_string(path).unwrap(), "two\n");
    }
}
