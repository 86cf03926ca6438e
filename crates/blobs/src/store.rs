//! Reads and writes whole objects over one storage: a local folder whose writes are
//! synced, a remote store, or memory for tests. Every call has a time limit. A storage
//! that is not the one that was opened (its disk is not mounted, its bucket was made
//! anew) is [`Error::Unavailable`]: nothing in it counts as missing.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use overnight_types::{JobId, Timestamp};

use crate::layout::{ObjectName, Prefix};
use crate::mark::Mark;
use crate::remote::{Remote, upload};
use crate::writer::BlobWriter;
use crate::{Error, lines};

/// Pieces of a stream that are read ahead of its reader, with the one under way.
const LOCAL_READS: usize = 2;
const REMOTE_READS: usize = 3;
/// Names that are deleted by one call.
const DELETE_NAMES: usize = 1_000;

/// Object storage, behind a cheap handle.
#[derive(Clone, Debug)]
pub struct Blobs {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug, Clone)]
pub(crate) struct Inner {
    pub(crate) driver: Arc<dyn ObjectStore>,
    /// The folder, when local.
    pub(crate) root: Option<PathBuf>,
    /// The folder's mark, when local and lasting.
    pub(crate) mark: Option<Mark>,
    /// What a remote store has beside its driver.
    pub(crate) remote: Option<Remote>,
    /// Of one call.
    pub(crate) limit: Duration,
    /// Of one read of a stream.
    pub(crate) piece_bytes: u64,
    /// Of one write of a writer; on a remote store of its first parts.
    pub(crate) part_bytes: u64,
    /// Removed with the last handle.
    pub(crate) _scratch: Option<Arc<tempfile::TempDir>>,
}

/// One object of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: ObjectName,
    /// Its size.
    pub bytes: u64,
    /// By the storage's clock.
    pub modified: Timestamp,
}

impl Blobs {
    /// The storage's own id, for whoever must know it again; `None` in memory.
    pub fn id(&self) -> Option<uuid::Uuid> {
        let remote = || self.remote()?.mark.as_ref().map(|mark| mark.id);
        self.inner.mark.as_ref().map(|mark| mark.id).or_else(remote)
    }

    /// Whether objects are files of this machine (or memory): calls are cheap.
    pub fn is_local(&self) -> bool {
        self.inner.remote.is_none()
    }

    /// The folder, when objects are files.
    pub fn root(&self) -> Option<&Path> {
        self.inner.root.as_deref()
    }

    pub(crate) fn driver(&self) -> &dyn ObjectStore {
        &*self.inner.driver
    }

    pub(crate) fn remote(&self) -> Option<&Remote> {
        self.inner.remote.as_ref()
    }

    pub(crate) fn limit(&self) -> Duration {
        self.inner.limit
    }

    pub(crate) fn path(&self, name: &ObjectName) -> object_store::path::Path {
        match &self.inner.remote {
            Some(remote) => remote.path(&name.to_string()),
            None => name.path(),
        }
    }

    /// Writes a whole object; durable on return. Overwrites, which is harmless:
    /// a name's bytes are a function of the name.
    pub async fn put(&self, name: &ObjectName, bytes: Bytes) -> Result<(), Error> {
        self.require_folder("write", name).await?;
        let path = self.path(name);
        self.call("write", name, self.inner.driver.put(&path, PutPayload::from_bytes(bytes))).await.map(|_| ())
    }

    /// Starts a streaming write in bounded memory. Nothing is visible before
    /// [`BlobWriter::finish`] returns.
    pub async fn writer(&self, name: &ObjectName) -> Result<BlobWriter, Error> {
        if self.remote().is_some() {
            // What fits into one part is written by one call, so nothing is started yet.
            return Ok(BlobWriter::remote(*name, self.clone(), self.inner.part_bytes));
        }
        self.require_folder("start writing", name).await?;
        let path = self.path(name);
        let upload = self.call("start writing", name, self.inner.driver.put_multipart(&path)).await?;
        Ok(BlobWriter::new(*name, upload, self.inner.part_bytes, self.inner.limit))
    }

    /// Reads a whole object.
    pub async fn read(&self, name: &ObjectName) -> Result<Bytes, Error> {
        let path = self.path(name);
        self.call("read", name, async { self.inner.driver.get(&path).await?.bytes().await }).await
    }

    /// Reads a range. An object that ends before the range does is [`Error::Damaged`].
    pub async fn read_range(&self, name: &ObjectName, range: Range<u64>) -> Result<Bytes, Error> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let path = self.path(name);
        let wanted = range.end - range.start;
        let bytes = match self.call("read", name, self.inner.driver.get_range(&path, range.clone())).await {
            Ok(bytes) => bytes,
            // Drivers report a range past the end as a general failure.
            Err(err @ Error::Unavailable { .. }) => match self.size(name).await {
                Ok(Some(size)) if size < range.end => return Err(short(name, range.end, size)),
                _ => return Err(err),
            },
            Err(err) => return Err(err),
        };
        match bytes.len() as u64 == wanted {
            true => Ok(bytes),
            false => Err(short(name, range.end, range.start + bytes.len() as u64)),
        }
    }

    /// Reads a range piece by piece, one piece ahead of the reader (two from a remote
    /// store). The stream ends after the first error.
    pub fn stream(&self, name: &ObjectName, range: Range<u64>) -> BoxStream<'static, Result<Bytes, Error>> {
        self.stream_by(name, range, self.inner.piece_bytes)
    }

    pub(crate) fn stream_by(
        &self,
        name: &ObjectName,
        range: Range<u64>,
        piece_bytes: u64,
    ) -> BoxStream<'static, Result<Bytes, Error>> {
        let (blobs, name, end) = (self.clone(), *name, range.end);
        let pieces = lines::pieces(range, piece_bytes);
        let reads = stream::iter(pieces).map(move |piece| {
            debug_assert!(piece.end <= end);
            let blobs = blobs.clone();
            async move { blobs.read_range(&name, piece).await }
        });
        let mut failed = false;
        let num_reads = if self.is_local() { LOCAL_READS } else { REMOTE_READS };
        // A failed piece ends the stream: what follows it must not be taken for its successor.
        reads
            .buffered(num_reads)
            .take_while(move |read| std::future::ready(!std::mem::replace(&mut failed, read.is_err())))
            .boxed()
    }

    /// An object's size; `None` when it is not there.
    pub async fn size(&self, name: &ObjectName) -> Result<Option<u64>, Error> {
        let path = self.path(name);
        match self.call("look at", name, self.inner.driver.head(&path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(err) if err.is_missing() => Ok(None),
            Err(err) => Err(err),
        }
    }

    /// Deletes an object; one that is not there is fine.
    pub async fn delete(&self, name: &ObjectName) -> Result<(), Error> {
        let path = self.path(name);
        match self.call("delete", name, self.inner.driver.delete(&path)).await {
            Err(err) if err.is_missing() => Ok(()),
            other => other,
        }
    }

    /// Deletes objects; those that are not there are fine. One call for many of them
    /// where the store has one.
    pub async fn delete_all(&self, names: &[ObjectName]) -> Result<(), Error> {
        if self.is_local() {
            for name in names {
                self.delete(name).await?;
            }
            return Ok(());
        }
        for names in names.chunks(DELETE_NAMES) {
            let [first, ..] = names else { continue };
            let paths: Vec<_> = names.iter().map(|name| Ok(self.path(name))).collect();
            let deleted = self.inner.driver.delete_stream(stream::iter(paths).boxed());
            let all = deleted.try_for_each(|_| std::future::ready(Ok(())));
            match self.call("delete", first, all).await {
                // Some services tell a name that is not there, and then not the rest.
                Err(err) if err.is_missing() => {
                    for name in names {
                        self.delete(name).await?;
                    }
                }
                done => done?,
            }
        }
        Ok(())
    }

    /// Removes everything of a job, on a local folder with its folders: those of a job
    /// are thousands, and every later listing would walk them.
    pub async fn remove_job(&self, job: JobId) -> Result<(), Error> {
        let prefix = Prefix::Job(job);
        let mut pieces = self.list(prefix).map_ok(|listed| listed.name).try_chunks(DELETE_NAMES);
        while let Some(names) = pieces.try_next().await.map_err(|err| err.1)? {
            self.delete_all(&names).await?;
        }
        let Some(folder) = self.inner.root.as_ref().map(|root| root.join(prefix.to_string())) else { return Ok(()) };
        let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(folder)).await;
        match removed {
            Ok(Err(err)) if err.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::from_io("delete the folder", prefix.to_string(), err))
            }
            Ok(_) => Ok(()),
            Err(err) => {
                Err(Error::Unavailable { doing: "delete the folder", name: prefix.to_string(), source: Box::new(err) })
            }
        }
    }

    /// Lists our objects under a prefix, in the order of names on a remote store and in
    /// none on a folder. Names that are not ours are left out.
    pub fn list(&self, prefix: Prefix) -> BoxStream<'static, Result<Listed, Error>> {
        let root = match (prefix, self.remote()) {
            (Prefix::All, None) => None,
            (Prefix::All, Some(remote)) => Some(remote.prefix.clone()),
            (prefix, None) => Some(object_store::path::Path::from(prefix.to_string())),
            (prefix, Some(remote)) => Some(remote.path(&prefix.to_string())),
        };
        let remote = self.inner.remote.clone();
        let listing = self.inner.driver.list(root.as_ref());
        listing
            .filter_map(move |listed| {
                std::future::ready(match listed {
                    Ok(meta) => {
                        let name = match &remote {
                            Some(remote) => remote.name_of(&meta.location),
                            None => Some(meta.location.as_ref()),
                        };
                        name.and_then(|name| name.parse().ok()).map(|name| {
                            let modified = Timestamp::from_micros(meta.last_modified.timestamp_micros());
                            Ok(Listed { name, bytes: meta.size, modified })
                        })
                    }
                    Err(err) => Some(Err(Error::from_driver("list", format!("{prefix}/"), err))),
                })
            })
            .boxed()
    }

    /// Removes what killed uploads left, last written more than `older_than` before `now`: on a
    /// folder files named `name#N`, on a remote store uploads that never ended; no
    /// listing shows either. Returns how many.
    pub async fn sweep_leftovers(&self, now: Timestamp, older_than: Duration) -> Result<u32, Error> {
        if let Some(remote) = self.remote() {
            return upload::sweep(self, remote, now, older_than).await;
        }
        let Some(root) = self.inner.root.clone() else { return Ok(0) };
        let shown = root.display().to_string();
        let swept = tokio::task::spawn_blocking(move || crate::writer::sweep_folder(&root, now, older_than)).await;
        match swept {
            Ok(swept) => swept.map_err(|err| Error::from_io("sweep", shown, err)),
            Err(err) => Err(Error::Unavailable { doing: "sweep", name: shown, source: Box::new(err) }),
        }
    }
}

fn short(name: &ObjectName, wanted: u64, size: u64) -> Error {
    Error::damaged(name, format!("it ends at byte {size}, bytes up to {wanted} were wanted"))
}
