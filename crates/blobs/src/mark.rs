//! The mark of an object folder: a file with the folder's id, made at its first use.
//!
//! A mount point stays behind as an empty folder when its disk goes away, so that a
//! folder is there proves nothing. The mark does: without it nothing is called
//! missing and nothing is written.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// No name of ours starts with a dot, so no listing shows it.
pub(crate) const FILE: &str = ".overnight-objects";

/// The mark as it was found or made when the folder was opened.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    path: PathBuf,
    pub(crate) id: Uuid,
}

impl Mark {
    /// Reads the mark of a folder, or makes one where there is none.
    pub(crate) fn find_or_make(root: &Path) -> io::Result<Self> {
        let path = root.join(FILE);
        match read(&path) {
            Ok(id) => Ok(Self { path, id }),
            Err(err) if err.kind() == io::ErrorKind::NotFound => {
                make(root, &path)?;
                // Another process may have been quicker: its mark stands.
                Ok(Self { id: read(&path)?, path })
            }
            Err(err) => Err(err),
        }
    }

    /// Proves that the folder is still the one that was opened.
    pub(crate) fn check(&self) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(&self.path).display();
        match read(&self.path) {
            Ok(id) if id == self.id => Ok(()),
            Ok(_) => Err(io::Error::other(format!("{folder} is another object folder than before: what is mounted?"))),
            Err(err) if err.kind() == io::ErrorKind::NotFound => {
                Err(io::Error::other(format!("{folder} has lost its mark {FILE}: is its disk mounted?")))
            }
            Err(err) => Err(err),
        }
    }
}

fn read(path: &Path) -> io::Result<Uuid> {
    let text = std::fs::read_to_string(path)?;
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, format!("{} holds no id: {text:?}", path.display()));
    Uuid::try_parse(text.trim()).map_err(|_| damaged())
}

/// Whole and durable, or not there at all.
fn make(root: &Path, path: &Path) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix(FILE).tempfile_in(root)?;
    writeln!(file, "{}", Uuid::now_v7())?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(path) {
        Err(err) if err.error.kind() != io::ErrorKind::AlreadyExists => return Err(err.error),
        _ => {}
    }
    std::fs::File::open(root)?.sync_all()
}
