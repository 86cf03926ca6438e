//! Where intake reads from: a stored object, a file of this machine, or bytes.

use std::ops::Range;
use std::path::PathBuf;

use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use overnight_blobs::{Blobs, ObjectName};

/// Bytes of one read of a file.
const PIECE_BYTES: u64 = 1 << 20;

/// An input.
#[derive(Debug, Clone)]
pub enum Source {
    /// A stored object.
    Object(Blobs, ObjectName),
    /// A file of this machine.
    Path(PathBuf),
    /// Bytes in memory.
    Memory(Bytes),
}

/// Reading an input failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The input is gone, shorter or other than recorded.
    #[error("the input is not what was recorded: {what}")]
    Changed {
        /// In words.
        what: String,
    },
    /// We may not read it.
    #[error("no permission to read the input")]
    Denied {
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file of this machine cannot be read.
    #[error("could not read {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Object storage failed.
    #[error("could not read objects")]
    Blobs(#[source] overnight_blobs::Error),
}

impl From<overnight_blobs::Error> for SourceError {
    fn from(err: overnight_blobs::Error) -> Self {
        use overnight_blobs::Error;
        match err {
            Error::Missing { .. } => SourceError::Changed { what: "its bytes are not there any more".to_owned() },
            Error::Damaged { why, .. } => SourceError::Changed { what: why },
            Error::Denied { .. } => SourceError::Denied { source: Box::new(err) },
            other => SourceError::Blobs(other),
        }
    }
}

impl Source {
    /// Its size.
    pub async fn size(&self) -> Result<u64, SourceError> {
        match self {
            Source::Object(blobs, name) => match blobs.size(name).await? {
                Some(size) => Ok(size),
                None => Err(SourceError::Changed { what: "its bytes are not there any more".to_owned() }),
            },
            Source::Path(path) => match tokio::fs::metadata(path).await {
                Ok(meta) => Ok(meta.len()),
                Err(err) => Err(file_error(path.clone(), err)),
            },
            Source::Memory(bytes) => Ok(bytes.len() as u64),
        }
    }

    /// Its bytes in a range, in pieces.
    pub fn stream(&self, range: Range<u64>) -> BoxStream<'static, Result<Bytes, SourceError>> {
        match self {
            Source::Object(blobs, name) => blobs.stream(name, range).map(|read| Ok(read?)).boxed(),
            Source::Path(path) => file_stream(path.clone(), range),
            Source::Memory(bytes) => {
                let bytes = bytes.slice(range.start as usize..range.end as usize);
                stream::iter([Ok(bytes)]).boxed()
            }
        }
    }

    /// Its bytes in a range, at once.
    pub async fn read_range(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let mut stream = self.stream(range);
        while let Some(piece) = stream.next().await {
            bytes.extend_from_slice(&piece?);
        }
        Ok(bytes.into())
    }
}

fn file_stream(path: PathBuf, range: Range<u64>) -> BoxStream<'static, Result<Bytes, SourceError>> {
    stream::unfold(Some((None, range)), move |state| {
        let path = path.clone();
        async move {
            let (file, range) = state?;
            if range.is_empty() {
                return None;
            }
            let read = {
                let path = path.clone();
                tokio::task::spawn_blocking(move || read_piece(file, &path, range)).await
            };
            match read.unwrap_or_else(|err| Err(std::io::Error::other(err))) {
                Ok((file, range, piece)) => Some((Ok(piece), Some((Some(file), range)))),
                Err(err) => Some((Err(file_error(path, err)), None)),
            }
        }
    })
    .boxed()
}

type FilePiece = (std::fs::File, Range<u64>, Bytes);

fn read_piece(file: Option<std::fs::File>, path: &std::path::Path, range: Range<u64>) -> std::io::Result<FilePiece> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = match file {
        Some(file) => file,
        None => {
            let mut file = std::fs::File::open(path)?;
            file.seek(SeekFrom::Start(range.start))?;
            file
        }
    };
    let wanted = PIECE_BYTES.min(range.end - range.start);
    let mut piece = vec![0; wanted as usize];
    file.read_exact(&mut piece)?;
    Ok((file, range.start + wanted..range.end, piece.into()))
}

fn file_error(path: PathBuf, err: std::io::Error) -> SourceError {
    match err.kind() {
        std::io::ErrorKind::PermissionDenied => SourceError::Denied { source: Box::new(err) },
        std::io::ErrorKind::UnexpectedEof => {
            SourceError::Changed { what: format!("{} became shorter while it was read", path.display()) }
        }
        _ => SourceError::File { path, source: err },
    }
}
