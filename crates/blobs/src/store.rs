//! Reads and writes whole objects over one storage: a local folder whose writes
//! are synced, or memory for tests. Every call has a time limit. A folder that is
//! not the one that was opened (its disk is not mounted) is [`Error::Unavailable`]:
//! nothing in it counts as missing, and nothing is written to it.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use overnight_types::{JobId, Timestamp};

use crate::layout::{ObjectName, Prefix};
use crate::mark::Mark;
use crate::writer::BlobWriter;
use crate::{Error, lines};

/// Time limit of one call on a local folder or in memory.
const LOCAL_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of one read of a stream, and of one part of a local write.
const LOCAL_PIECE_BYTES: u64 = 1 << 20;

/// Object storage, behind a cheap handle.
#[derive(Clone, Debug)]
pub struct Blobs {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    driver: Arc<dyn ObjectStore>,
    /// The folder, when local.
    root: Option<PathBuf>,
    /// The folder's mark, when local and lasting.
    mark: Option<Mark>,
    /// Of one call.
    limit: Duration,
    piece_bytes: u64,
    /// Removed with the last handle.
    scratch: Option<Arc<tempfile::TempDir>>,
}

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Writes are synced to disk before they return.
    pub synced: bool,
    /// A second conditional create is refused. Reported, never relied on.
    pub conditional_create: bool,
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
    /// Opens the storage at a URL: `file:///absolute/folder`, which is made when
    /// it is missing. Other schemes are refused by name.
    pub fn open(url: &str) -> Result<Self, Error> {
        let unsupported = |why| Error::Unsupported { url: url.to_owned(), why };
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(unsupported("an object storage URL looks like file:///absolute/folder"));
        };
        match scheme {
            "file" if rest.starts_with('/') && rest.len() > 1 => Self::local(Path::new(rest)),
            "file" => Err(unsupported("the folder must be absolute: file:///absolute/folder")),
            "s3" | "gs" | "az" => {
                Err(unsupported("this build stores objects in a local folder: file:///absolute/folder"))
            }
            _ => Err(unsupported("unknown scheme; use file:///absolute/folder")),
        }
    }

    /// Opens a local folder, making it when it is missing. Writes are synced.
    pub fn local(root: &Path) -> Result<Self, Error> {
        let shown = root.display().to_string();
        make_durable(root).map_err(|err| Error::from_io("create folder", shown.clone(), err))?;
        let mark = Mark::find_or_make(root).map_err(|err| Error::from_io("mark folder", shown.clone(), err))?;
        let driver = LocalFileSystem::new_with_prefix(root)
            .map_err(|err| Error::from_driver("open folder", shown, err))?
            .with_fsync(true);
        Ok(Self::over(Arc::new(driver), Some(root.to_owned()), Some(mark), None))
    }

    /// Storage in memory, for tests.
    pub fn memory() -> Self {
        Self::over(Arc::new(InMemory::new()), None, None, None)
    }

    /// An unsynced folder of its own that goes away with the last handle: room
    /// for what does not fit into memory and outlives nothing.
    pub fn scratch() -> Result<Self, Error> {
        let failed = |err| Error::from_io("create folder", std::env::temp_dir().display().to_string(), err);
        let dir = tempfile::Builder::new().prefix("overnight-").tempdir().map_err(failed)?;
        let driver = LocalFileSystem::new_with_prefix(dir.path())
            .map_err(|err| Error::from_driver("open folder", dir.path().display().to_string(), err))?;
        Ok(Self::over(Arc::new(driver), Some(dir.path().to_owned()), None, Some(dir)))
    }

    /// Over any driver, for fault wrappers in tests. `limit` bounds each call.
    pub fn with_driver(driver: Arc<dyn ObjectStore>, limit: Duration) -> Self {
        let piece_bytes = LOCAL_PIECE_BYTES;
        Self { inner: Arc::new(Inner { driver, root: None, mark: None, limit, piece_bytes, scratch: None }) }
    }

    /// The same storage, read and written in pieces of this size.
    pub fn with_piece_bytes(self, piece_bytes: u64) -> Self {
        let Inner { driver, root, mark, limit, scratch, .. } = &*self.inner;
        let (driver, root, mark, scratch) = (driver.clone(), root.clone(), mark.clone(), scratch.clone());
        let piece_bytes = piece_bytes.max(1);
        Self { inner: Arc::new(Inner { driver, root, mark, limit: *limit, piece_bytes, scratch }) }
    }

    fn over(
        driver: Arc<dyn ObjectStore>,
        root: Option<PathBuf>,
        mark: Option<Mark>,
        scratch: Option<tempfile::TempDir>,
    ) -> Self {
        let (limit, piece_bytes) = (LOCAL_LIMIT, LOCAL_PIECE_BYTES);
        Self { inner: Arc::new(Inner { driver, root, mark, limit, piece_bytes, scratch: scratch.map(Arc::new) }) }
    }

    /// The storage's own id, for whoever must know it again; `None` in memory.
    pub fn id(&self) -> Option<uuid::Uuid> {
        self.inner.mark.as_ref().map(|mark| mark.id)
    }

    /// Whether objects are files of this machine (or memory): calls are cheap.
    pub fn is_local(&self) -> bool {
        true
    }

    /// The folder, when objects are files.
    pub fn root(&self) -> Option<&Path> {
        self.inner.root.as_deref()
    }

    /// Writes a whole object; durable on return. Overwrites, which is harmless:
    /// a name's bytes are a function of the name.
    pub async fn put(&self, name: &ObjectName, bytes: Bytes) -> Result<(), Error> {
        self.require_mounted("write", name).await?;
        let path = name.path();
        self.call("write", name, self.inner.driver.put(&path, PutPayload::from_bytes(bytes))).await.map(|_| ())
    }

    /// Starts a streaming write in bounded memory. Nothing is visible before
    /// [`BlobWriter::finish`] returns.
    pub async fn writer(&self, name: &ObjectName) -> Result<BlobWriter, Error> {
        self.require_mounted("start writing", name).await?;
        let path = name.path();
        let upload = self.call("start writing", name, self.inner.driver.put_multipart(&path)).await?;
        Ok(BlobWriter::new(*name, upload, self.inner.piece_bytes, self.inner.limit))
    }

    /// Reads a whole object.
    pub async fn read(&self, name: &ObjectName) -> Result<Bytes, Error> {
        let path = name.path();
        self.call("read", name, async { self.inner.driver.get(&path).await?.bytes().await }).await
    }

    /// Reads a range. An object that ends before the range does is [`Error::Damaged`].
    pub async fn read_range(&self, name: &ObjectName, range: Range<u64>) -> Result<Bytes, Error> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let path = name.path();
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

    /// Reads a range piece by piece, one piece ahead of the reader. The stream
    /// ends after the first error.
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
        // A failed piece ends the stream: what follows it must not be taken for its successor.
        reads
            .buffered(2)
            .take_while(move |read| std::future::ready(!std::mem::replace(&mut failed, read.is_err())))
            .boxed()
    }

    /// An object's size; `None` when it is not there.
    pub async fn size(&self, name: &ObjectName) -> Result<Option<u64>, Error> {
        let path = name.path();
        match self.call("look at", name, self.inner.driver.head(&path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(err) if err.is_missing() => Ok(None),
            Err(err) => Err(err),
        }
    }

    /// Deletes an object; one that is not there is fine.
    pub async fn delete(&self, name: &ObjectName) -> Result<(), Error> {
        let path = name.path();
        match self.call("delete", name, self.inner.driver.delete(&path)).await {
            Err(err) if err.is_missing() => Ok(()),
            other => other,
        }
    }

    /// Removes everything of a job, on a local folder with its folders: those of a job
    /// are thousands, and every later listing would walk them.
    pub async fn remove_job(&self, job: JobId) -> Result<(), Error> {
        let prefix = Prefix::Job(job);
        let mut listed = self.list(prefix);
        while let Some(object) = listed.try_next().await? {
            self.delete(&object.name).await?;
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

    /// Lists our objects under a prefix, in no particular order. Names that are
    /// not ours are left out.
    pub fn list(&self, prefix: Prefix) -> BoxStream<'static, Result<Listed, Error>> {
        let root = match prefix {
            Prefix::All => None,
            prefix => Some(object_store::path::Path::from(prefix.to_string())),
        };
        let listing = self.inner.driver.list(root.as_ref());
        listing
            .filter_map(move |listed| {
                std::future::ready(match listed {
                    Ok(meta) => meta.location.as_ref().parse().ok().map(|name| {
                        let modified = Timestamp::from_micros(meta.last_modified.timestamp_micros());
                        Ok(Listed { name, bytes: meta.size, modified })
                    }),
                    Err(err) => Some(Err(Error::from_driver("list", format!("{prefix}/"), err))),
                })
            })
            .boxed()
    }

    /// Removes what killed uploads left on a local folder: files named `name#N`,
    /// which no listing shows, last written more than `older_than` ago. Returns how many.
    pub async fn sweep_leftovers(&self, older_than: Duration) -> Result<u32, Error> {
        let Some(root) = self.inner.root.clone() else { return Ok(0) };
        let shown = root.display().to_string();
        let swept = tokio::task::spawn_blocking(move || crate::writer::sweep_folder(&root, older_than)).await;
        match swept {
            Ok(swept) => swept.map_err(|err| Error::from_io("sweep", shown, err)),
            Err(err) => Err(Error::Unavailable { doing: "sweep", name: shown, source: Box::new(err) }),
        }
    }

    /// Proves that objects can be written, read back and deleted, and finds out
    /// what the storage can do.
    pub async fn probe(&self) -> Result<Capabilities, Error> {
        let name = ObjectName::Probe(uuid::Uuid::now_v7());
        let bytes = Bytes::from_static(b"overnight probe");
        self.put(&name, bytes.clone()).await?;
        let read = self.read(&name).await;
        let ranged = self.read_range(&name, 3..9).await;
        let path = name.path();
        let create = PutOptions::from(PutMode::Create);
        let again = self.inner.driver.put_opts(&path, PutPayload::from_bytes(bytes.clone()), create).await;
        self.delete(&name).await?;
        if read? != bytes || ranged? != bytes.slice(3..9) {
            return Err(Error::damaged(&name, "read back other bytes than were written"));
        }
        let conditional_create = matches!(again, Err(object_store::Error::AlreadyExists { .. }));
        Ok(Capabilities { synced: self.inner.root.is_some(), conditional_create })
    }

    async fn call<T>(
        &self,
        doing: &'static str,
        name: &ObjectName,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(self.inner.limit, work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(err)) => {
                let err = Error::from_driver(doing, name.to_string(), err);
                if err.is_missing() {
                    self.require_mounted(doing, name).await?;
                }
                Err(err)
            }
            Err(_) => Err(Error::TimedOut { doing, name: name.to_string(), limit: self.inner.limit }),
        }
    }

    /// Proves that a local folder is still the one that was opened.
    async fn require_mounted(&self, doing: &'static str, name: &ObjectName) -> Result<(), Error> {
        let Some(mark) = self.inner.mark.clone() else { return Ok(()) };
        let looked = tokio::task::spawn_blocking(move || mark.check());
        let unavailable = |source| Error::Unavailable { doing, name: name.to_string(), source };
        match tokio::time::timeout(self.inner.limit, looked).await {
            Ok(Ok(found)) => found.map_err(|err| unavailable(Box::new(err))),
            Ok(Err(err)) => Err(unavailable(Box::new(err))),
            Err(_) => Err(Error::TimedOut { doing, name: name.to_string(), limit: self.inner.limit }),
        }
    }
}

/// Makes a folder and syncs the ones it was made in: a row that names an object must
/// not outlive the folder of all objects.
fn make_durable(root: &Path) -> std::io::Result<()> {
    let made: Vec<&Path> = root.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(root)?;
    // The root's own entry always: who made it may have died before it was synced.
    for folder in made.iter().copied().chain([root]) {
        let above = folder.parent().filter(|above| !above.as_os_str().is_empty());
        if cfg!(unix) {
            std::fs::File::open(above.unwrap_or(Path::new(".")))?.sync_all()?;
        }
    }
    Ok(())
}

fn short(name: &ObjectName, wanted: u64, size: u64) -> Error {
    Error::damaged(name, format!("it ends at byte {size}, bytes up to {wanted} were wanted"))
}
