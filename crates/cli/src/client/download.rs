//! Writing what is downloaded: under a temporary name that is renamed at the end,
//! with notes beside it so that an interrupted download goes on where it was.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use futures::StreamExt;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Client;
use crate::error::{Exit, Failure, Result};
use crate::output::{Ui, human, plain};

/// Where a download goes.
#[derive(Debug)]
pub(crate) struct Target {
    /// `None` is stdout.
    path: Option<PathBuf>,
    resume: bool,
    stdout: StdoutForm,
}

/// What stdout gets, when it is the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StdoutForm {
    /// The bytes as they come.
    Plain,
    /// The bytes all at once, when they turned out to be good.
    Held,
    /// The lines as elements of one JSON array.
    Array,
}

impl Target {
    /// `-` is stdout.
    pub(crate) fn new(path: &Path, resume: bool) -> Result<Self> {
        if path.as_os_str() != "-" {
            return Ok(Self { path: Some(path.to_owned()), resume, stdout: StdoutForm::Plain });
        }
        if resume {
            return Err(Failure::usage("--resume needs a file to go on with").hint("add -o PATH"));
        }
        Ok(Self { path: None, resume, stdout: StdoutForm::Plain })
    }

    /// Nothing reaches stdout before [`Sink::finish`]: a reader must not take the half
    /// of something that is refused at its end.
    pub(crate) fn held(self) -> Self {
        Self { stdout: StdoutForm::Held, ..self }
    }

    /// The lines of stdout become one JSON array. Each must be a JSON value.
    pub(crate) fn into_array(self) -> Self {
        Self { stdout: StdoutForm::Array, ..self }
    }

    /// Whether the bytes reach stdout as they are.
    fn is_plain_stdout(&self) -> bool {
        self.is_stdout() && self.stdout == StdoutForm::Plain
    }

    /// Whether it is stdout.
    pub(crate) fn is_stdout(&self) -> bool {
        self.path.is_none()
    }

    /// What to call it.
    pub(crate) fn label(&self) -> String {
        self.path.as_ref().map_or_else(|| "stdout".to_owned(), |path| path.display().to_string())
    }
}

/// An output being written.
#[derive(Debug)]
pub(crate) struct Sink {
    place: Place,
    label: String,
    written: u64,
}

#[derive(Debug)]
enum Place {
    Stdout,
    /// Copied to stdout at the end.
    Held(File),
    /// Elements written so far, and the line that is not whole yet.
    Array {
        count: u64,
        rest: Vec<u8>,
    },
    /// A device or pipe: nothing to rename.
    Direct(File),
    Partial {
        file: File,
        path: PathBuf,
        partial: PathBuf,
    },
}

impl Sink {
    /// Opens the output. With `resume` and notes beside it that `fits` accepts, goes on
    /// there; returns those notes.
    pub(crate) fn open(target: &Target, fits: impl Fn(&Value) -> bool) -> Result<(Self, Option<Value>)> {
        let label = target.label();
        let Some(path) = &target.path else {
            let place = match target.stdout {
                StdoutForm::Plain => Place::Stdout,
                StdoutForm::Held => Place::Held(tempfile::tempfile()?),
                StdoutForm::Array => Place::Array { count: 0, rest: Vec::new() },
            };
            return Ok((Self { place, label, written: 0 }, None));
        };
        let fail =
            |err: std::io::Error| Failure::new(Exit::Failure, format!("could not write {}: {err}", path.display()));
        // A device must be written to, never replaced by a file.
        if std::fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
            let file = File::options().write(true).open(path).map_err(fail)?;
            return Ok((Self { place: Place::Direct(file), label, written: 0 }, None));
        }
        let partial = beside(path, ".partial");
        let notes = if target.resume { read_notes(&partial).filter(|notes| fits(notes)) } else { None };
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).create(true).truncate(notes.is_none()).open(&partial).map_err(fail)?;
        let mut written = file.seek(SeekFrom::End(0)).map_err(fail)?;
        // Bytes past what the notes speak of were written without being noted.
        if let Some(noted) = notes.as_ref().and_then(|notes| notes["bytes"].as_u64()) {
            if noted > written {
                return Err(Failure::new(
                    Exit::Failure,
                    format!("{} is shorter than its notes say", partial.display()),
                )
                .hint("start over without --resume"));
            }
            file.set_len(noted).map_err(fail)?;
            written = file.seek(SeekFrom::Start(noted)).map_err(fail)?;
        }
        if notes.is_none() {
            // Notes of another download must not speak for this one.
            let _ = std::fs::remove_file(beside(&partial, ".json"));
        }
        let place = Place::Partial { file, path: path.clone(), partial };
        Ok((Self { place, label, written }, notes))
    }

    /// Bytes written so far, those of an earlier try included.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Writes more. Trouble leaves no half file behind.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result {
        let result = match &mut self.place {
            Place::Stdout => std::io::stdout().lock().write_all(bytes),
            Place::Array { count, rest } => write_elements(count, rest, bytes),
            Place::Held(file) | Place::Direct(file) | Place::Partial { file, .. } => file.write_all(bytes),
        };
        if let Err(err) = result {
            if err.kind() == std::io::ErrorKind::BrokenPipe {
                return Err(Failure::closed_pipe());
            }
            self.discard();
            return Err(Failure::new(Exit::Failure, format!("could not write {}: {err}", self.label)));
        }
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Notes where an interrupted download would go on; `bytes` is added.
    pub(crate) fn note(&mut self, mut notes: Value) -> Result {
        if let Place::Partial { file, partial, .. } = &mut self.place {
            file.flush()?;
            notes["bytes"] = Value::from(self.written);
            let fresh = beside(partial, ".json.new");
            std::fs::write(&fresh, notes.to_string())?;
            std::fs::rename(&fresh, beside(partial, ".json"))?;
        }
        Ok(())
    }

    /// Makes the output durable under its name.
    pub(crate) fn finish(self) -> Result {
        match self.place {
            Place::Stdout => std::io::stdout().lock().flush()?,
            Place::Held(mut file) => {
                file.seek(SeekFrom::Start(0))?;
                let mut stdout = std::io::stdout().lock();
                std::io::copy(&mut file, &mut stdout)?;
                stdout.flush()?;
            }
            Place::Array { mut count, mut rest } => {
                // A last line without its end is an element too.
                write_elements(&mut count, &mut rest, b"\n")?;
                let end: &[u8] = if count == 0 { b"[]\n" } else { b"]\n" };
                let mut stdout = std::io::stdout().lock();
                stdout.write_all(end)?;
                stdout.flush()?;
            }
            Place::Direct(_) => {}
            Place::Partial { file, path, partial } => {
                let fail = |err: std::io::Error| {
                    Failure::new(Exit::Failure, format!("could not write {}: {err}", path.display()))
                };
                file.sync_all().map_err(fail)?;
                std::fs::rename(&partial, &path).map_err(fail)?;
                let _ = std::fs::remove_file(beside(&partial, ".json"));
            }
        }
        Ok(())
    }

    /// Takes the half file away.
    pub(crate) fn discard(&self) {
        if let Place::Partial { partial, .. } = &self.place {
            let _ = std::fs::remove_file(partial);
            let _ = std::fs::remove_file(beside(partial, ".json"));
        }
    }

    /// What an earlier try wrote, for its hash.
    fn hash_written(&mut self, hash: &mut Sha256) -> Result {
        if let Place::Partial { file, .. } = &mut self.place {
            file.seek(SeekFrom::Start(0))?;
            let mut buffer = vec![0; 1 << 16];
            loop {
                let read = file.read(&mut buffer)?;
                if read == 0 {
                    break;
                }
                hash.update(&buffer[..read]);
            }
        }
        Ok(())
    }
}

/// Writes the lines that are whole by now as elements of an array that stays open.
fn write_elements(count: &mut u64, rest: &mut Vec<u8>, bytes: &[u8]) -> std::io::Result<()> {
    rest.extend_from_slice(bytes);
    let Some(end) = rest.iter().rposition(|&byte| byte == b'\n') else { return Ok(()) };
    let after = rest.split_off(end + 1);
    let whole = std::mem::replace(rest, after);
    let mut stdout = std::io::stdout().lock();
    for line in whole.split(|&byte| byte == b'\n').filter(|line| !line.trim_ascii().is_empty()) {
        stdout.write_all(if *count == 0 { b"[" } else { b",\n" })?;
        stdout.write_all(line)?;
        *count += 1;
    }
    Ok(())
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn read_notes(partial: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(beside(partial, ".json")).ok()?).ok()
}

/// Downloads a stored file whole and compares its hash.
pub(crate) async fn file(client: &Client, ui: &Ui, object: &Value, target: Target) -> Result {
    let id = plain(&object["id"]);
    let (mut sink, notes) = Sink::open(&target, |notes| notes["file_id"] == id.as_str())?;
    let mut hash = Sha256::new();
    let to_stdout_terminal = target.is_plain_stdout() && ui.stdout_is_terminal;
    if notes.is_some() {
        sink.hash_written(&mut hash)?;
        ui.say(format!("going on after {}", human::bytes(sink.written())));
    } else {
        sink.note(json!({"file_id": id}))?;
    }
    let size = object["bytes"].as_u64();
    if size.is_none_or(|size| sink.written() < size) {
        let response = client.stream(&format!("/v1/files/{id}/content"), &[], sink.written()).await?;
        let mut body = response.bytes_stream();
        let mut noted = sink.written();
        while let Some(piece) = body.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(err) => {
                    sink.note(json!({"file_id": id}))?;
                    return Err(Failure::from_error(&format!("download {id}"), &err)
                        .hint("the same command with --resume goes on where it was"));
                }
            };
            hash.update(&piece);
            if to_stdout_terminal {
                sink.write(for_terminal(&piece).as_bytes())?;
            } else {
                sink.write(&piece)?;
            }
            if sink.written() - noted > 4 << 20 {
                sink.note(json!({"file_id": id}))?;
                noted = sink.written();
            }
        }
    }
    let found = hex(&hash.finalize());
    if let Some(expected) = object["sha256"].as_str().filter(|expected| *expected != found) {
        sink.discard();
        return Err(Failure::new(Exit::Failure, format!("{id} arrived damaged: sha256 {found}, expected {expected}"))
            .hint("download it again"));
    }
    sink.finish()
}

/// Keeps line ends and makes other control characters of users visible.
pub(crate) fn for_terminal(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.split_inclusive('\n')
        .map(|line| match line.strip_suffix('\n') {
            Some(body) => crate::output::escape(body).into_owned() + "\n",
            None => crate::output::escape(line).into_owned(),
        })
        .collect()
}

/// The sha256 of a file of this machine, as the server writes it.
pub(crate) fn sha256_of(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    std::io::copy(&mut File::open(path)?, &mut hash)?;
    Ok(hex(&hash.finalize()))
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_written_output_is_not_seen_under_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let target = Target::new(&path, false).unwrap();
        let (mut sink, _) = Sink::open(&target, |_| false).unwrap();
        sink.write(b"one\n").unwrap();
        assert!(!path.exists());
        sink.finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn resumed_output_goes_on_at_the_noted_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let (mut sink, _) = Sink::open(&Target::new(&path, false).unwrap(), |_| false).unwrap();
        sink.write(b"one\n").unwrap();
        sink.note(json!({"cursor": "a"})).unwrap();
        sink.write(b"torn").unwrap();
        drop(sink);
        let (mut sink, notes) = Sink::open(&Target::new(&path, true).unwrap(), |notes| notes["cursor"] == "a").unwrap();
        assert_eq!(notes.unwrap()["bytes"], 4);
        sink.write(b"two\n").unwrap();
        sink.finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one\ntwo\n");
    }

    #[test]
    fn full_device_is_an_error_that_names_it_and_stays_a_device() {
        let target = Target::new(Path::new("/dev/full"), false).unwrap();
        let (mut sink, _) = Sink::open(&target, |_| false).unwrap();
        let failure = sink.write(b"x").unwrap_err();
        assert!(failure.message().contains("/dev/full"), "{}", failure.message());
        assert!(!std::fs::metadata("/dev/full").unwrap().is_file());
    }
}
