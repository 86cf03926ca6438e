//! Memory maps of model files and the tensors in them.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::Error;

/// A read-only memory map of a whole file, shared by everything that points into it.
#[derive(Debug, Clone)]
pub struct Mapped(Arc<memmap2::Mmap>);

impl Mapped {
    /// Maps a file. Errors with [`Error::Read`]; an empty file is [`Error::Model`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let read = |source| Error::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        if !metadata.is_file() || metadata.len() == 0 {
            let what = if metadata.is_file() { "it is empty" } else { "it is not a file" };
            return Err(Error::Model { path: path.to_owned(), what: what.to_owned() });
        }
        // SAFETY: the map is read-only and private. Model files are immutable by contract (they
        // are fetched to a temporary name and renamed); a file that somebody truncates under us
        // ends the process with SIGBUS, as for every program that maps its weights.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(read)?;
        Ok(Self(Arc::new(map)))
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}
