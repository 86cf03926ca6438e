//! A streaming write of one object in bounded memory, hashed on the way, and the
//! sweep of what a killed write leaves on a local folder.
//!
//! To a remote store what fits into one part goes by one call, more by an upload in
//! parts; see `remote/upload.rs`.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use object_store::{MultipartUpload, PutPayload};
use overnight_types::Timestamp;

use crate::layout::ObjectName;
use crate::remote::upload::{Upload, part_bytes};
use crate::sha::Sha256;
use crate::{Blobs, Error};

/// A disk that takes less than this while it syncs counts as hung, bytes per second.
const SYNC_BYTES_PER_S_MIN: u64 = 2 << 20;

/// What a finished write holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Its size.
    pub bytes: u64,
    /// Of all its bytes.
    pub sha256: [u8; 32],
}

/// A write in progress. Dropped without [`BlobWriter::finish`], nothing becomes visible.
#[derive(Debug)]
pub struct BlobWriter {
    name: ObjectName,
    upload: Way,
    buffer: BytesMut,
    piece_bytes: usize,
    limit: Duration,
    sha: Sha256,
}

/// How the pieces reach the storage.
#[derive(Debug)]
enum Way {
    Folder(Box<dyn MultipartUpload>),
    /// The upload begins with the first full part.
    Remote {
        blobs: Blobs,
        upload: Option<Upload>,
    },
}

impl BlobWriter {
    pub(crate) fn new(name: ObjectName, upload: Box<dyn MultipartUpload>, piece_bytes: u64, limit: Duration) -> Self {
        Self::over(name, Way::Folder(upload), piece_bytes, limit)
    }

    pub(crate) fn remote(name: ObjectName, blobs: Blobs, piece_bytes: u64) -> Self {
        let limit = blobs.limit();
        Self::over(name, Way::Remote { blobs, upload: None }, piece_bytes, limit)
    }

    fn over(name: ObjectName, upload: Way, piece_bytes: u64, limit: Duration) -> Self {
        let piece_bytes = usize::try_from(piece_bytes).expect("a piece fits into memory");
        Self { name, upload, buffer: BytesMut::new(), piece_bytes, limit, sha: Sha256::default() }
    }

    /// How many bytes were written.
    pub fn num_bytes(&self) -> u64 {
        self.sha.num_bytes()
    }

    /// Appends bytes. Returns once the storage has taken every full piece.
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.append(&bytes).await
    }

    /// Appends bytes that the caller keeps.
    pub async fn append(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        self.sha.update(bytes);
        loop {
            let piece_bytes = self.next_piece_bytes();
            if self.buffer.len() + bytes.len() < piece_bytes {
                break;
            }
            let (head, rest) = bytes.split_at(piece_bytes - self.buffer.len());
            self.buffer.extend_from_slice(head);
            bytes = rest;
            self.put_piece().await?;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Makes the object visible and durable.
    pub async fn finish(mut self) -> Result<Written, Error> {
        let is_one_piece = matches!(self.upload, Way::Remote { upload: None, .. });
        // An upload without a part is refused by some services.
        if !is_one_piece && (!self.buffer.is_empty() || self.sha.num_bytes() == 0) {
            self.put_piece().await?;
        }
        let limit = self.finish_limit();
        match self.upload {
            Way::Folder(mut upload) => {
                let done = tokio::time::timeout(limit, upload.complete()).await;
                settle(self.name, "finish writing", limit, done)?;
            }
            Way::Remote { blobs, upload: None } => blobs.put(&self.name, self.buffer.freeze()).await?,
            Way::Remote { blobs, upload: Some(upload) } => {
                upload.finish(blobs.remote().expect("a remote writer is of a remote store")).await?;
            }
        }
        Ok(Written { bytes: self.sha.num_bytes(), sha256: self.sha.finish() })
    }

    /// Gives up and removes what was stored so far.
    pub async fn abort(self) -> Result<(), Error> {
        match self.upload {
            Way::Folder(mut upload) => {
                let done = tokio::time::timeout(self.limit, upload.abort()).await;
                settle(self.name, "abort writing", self.limit, done)
            }
            Way::Remote { upload: None, .. } => Ok(()),
            Way::Remote { blobs, upload: Some(upload) } => {
                upload.abort(blobs.remote().expect("a remote writer is of a remote store")).await
            }
        }
    }

    fn next_piece_bytes(&self) -> usize {
        match &self.upload {
            Way::Remote { upload: Some(upload), .. } => {
                usize::try_from(part_bytes(self.piece_bytes as u64, upload.num_parts()))
                    .expect("a part fits into memory")
            }
            _ => self.piece_bytes,
        }
    }

    /// The end syncs whatever the system has not written of the object yet, which may
    /// be all of it: the time for that goes by its size. A limit that does not would
    /// cut every try of a large object, for ever.
    fn finish_limit(&self) -> Duration {
        self.limit + Duration::from_secs(self.sha.num_bytes() / SYNC_BYTES_PER_S_MIN)
    }

    async fn put_piece(&mut self) -> Result<(), Error> {
        let piece = std::mem::take(&mut self.buffer).freeze();
        match &mut self.upload {
            Way::Folder(upload) => {
                self.buffer.reserve(self.piece_bytes);
                let done = tokio::time::timeout(self.limit, upload.put_part(PutPayload::from_bytes(piece))).await;
                settle(self.name, "write", self.limit, done)
            }
            Way::Remote { blobs, upload } => {
                let remote = blobs.remote().expect("a remote writer is of a remote store");
                let upload = match upload {
                    Some(upload) => upload,
                    none => none.insert(Upload::begin(blobs, remote, self.name).await?),
                };
                upload.put(remote, piece).await
            }
        }
    }
}

fn settle<T>(
    name: ObjectName,
    doing: &'static str,
    limit: Duration,
    done: Result<object_store::Result<T>, tokio::time::error::Elapsed>,
) -> Result<T, Error> {
    match done {
        Ok(done) => done.map_err(|err| Error::from_driver(doing, name.to_string(), err)),
        Err(_) => Err(Error::TimedOut { doing, name: name.to_string(), limit }),
    }
}

/// Removes files named `name#N` under a folder, at any depth. Folders and files
/// that vanish meanwhile are skipped.
pub(crate) fn sweep_folder(root: &Path, now: Timestamp, older_than: Duration) -> io::Result<u32> {
    let mut num_removed = 0;
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Err(err) if err.kind() == io::ErrorKind::NotFound && folder != root => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() && is_leftover(&entry.file_name()) && is_old(&entry, now, older_than) {
                match std::fs::remove_file(entry.path()) {
                    Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
                    _ => num_removed += 1,
                }
            }
        }
    }
    Ok(num_removed)
}

fn is_leftover(name: &std::ffi::OsStr) -> bool {
    let digits = name.to_str().and_then(|name| name.rsplit_once('#')).map(|(_, digits)| digits);
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_old(entry: &std::fs::DirEntry, now: Timestamp, older_than: Duration) -> bool {
    let modified = entry.metadata().and_then(|meta| meta.modified());
    // A file from the future (a clock that was set back) is left alone.
    let now = SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(now.micros()).unwrap_or(0));
    modified.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age >= older_than))
}

#[cfg(test)]
mod tests {
    use object_store::{PutResult, UploadPart};
    use overnight_types::FileId;

    use super::*;

    /// Takes every part at once and needs so long for the end.
    #[derive(Debug)]
    struct SlowEnd(Duration);

    #[async_trait::async_trait]
    impl MultipartUpload for SlowEnd {
        fn put_part(&mut self, _: PutPayload) -> UploadPart {
            Box::pin(std::future::ready(Ok(())))
        }

        async fn complete(&mut self) -> object_store::Result<PutResult> {
            tokio::time::sleep(self.0).await;
            Ok(PutResult { e_tag: None, version: None, extensions: Default::default() })
        }

        async fn abort(&mut self) -> object_store::Result<()> {
            Ok(())
        }
    }

    async fn finish(bytes: usize, takes: Duration) -> Result<Written, Error> {
        let limit = Duration::from_millis(20);
        let mut writer = BlobWriter::new(ObjectName::file(FileId::new()), Box::new(SlowEnd(takes)), 1 << 20, limit);
        writer.append(&vec![b'x'; bytes]).await?;
        writer.finish().await
    }

    // Dirty pages of a large object go to disk in its one sync, minutes after the rest.
    #[tokio::test]
    async fn large_object_has_as_long_to_be_synced_as_its_size_takes() {
        let takes = Duration::from_millis(200);
        assert_eq!(finish(8 << 20, takes).await.unwrap().bytes, 8 << 20);
        let err = finish(1 << 20, takes).await.unwrap_err();
        assert!(matches!(err, Error::TimedOut { .. }), "a small one that takes as long hangs: {err}");
    }

    #[tokio::test]
    async fn end_that_hangs_is_cut_whatever_the_size() {
        let err = finish(3 << 20, Duration::from_secs(3_600)).await.unwrap_err();
        assert!(err.to_string().contains("1.02 s to finish writing"), "{err}");
    }
}
