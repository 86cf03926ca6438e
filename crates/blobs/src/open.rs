//! Opens storages: a local folder, a remote store by its URL, memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use object_store::client::ReqwestConnector;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;

use crate::mark::Mark;
use crate::remote::address::{Address, without_password};
use crate::remote::mark::RemoteMark;
use crate::remote::{Options, Remote, Unmarked, upload};
use crate::store::Inner;
use crate::{Blobs, Error, remote};

/// Time limit of one call on a local folder or in memory.
const LOCAL_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of one read of a stream, and of one part of a local write.
const LOCAL_PIECE_BYTES: u64 = 1 << 20;
/// Bytes of one read of a stream from a remote store, where a request costs its way.
const REMOTE_PIECE_BYTES: u64 = 2 << 20;

impl Blobs {
    /// Opens the storage at a URL: `file:///absolute/folder`, which is made when it is
    /// missing, or a remote store: `s3://bucket/prefix`, `gs://bucket/prefix`,
    /// `az://container/prefix`. A remote store is asked for its mark, so a wrong key, a
    /// wrong bucket and a store that does not answer are told here.
    pub async fn open(url: &str, options: &Options) -> Result<Self, Error> {
        let unsupported = |why: &str| Error::Unsupported { url: without_password(url), why: why.to_owned() };
        match url.split_once("://") {
            Some(("file", rest)) if rest.starts_with('/') && rest.len() > 1 => Self::local(Path::new(rest)),
            Some(("file", _)) => Err(unsupported("the folder must be absolute: file:///absolute/folder")),
            Some(_) => Self::open_remote(&Address::parse(url)?, options).await,
            None => {
                Err(unsupported("an address looks like file:///absolute/folder, s3://bucket/prefix, gs://… or az://…"))
            }
        }
    }

    /// What is wrong with a URL, without opening it; `None` when nothing is.
    pub fn check_url(url: &str) -> Option<Error> {
        match url.strip_prefix("file://") {
            Some(folder) if folder.starts_with('/') && folder.len() > 1 => None,
            Some(_) => Some(Error::Unsupported {
                url: url.to_owned(),
                why: "the folder must be absolute: file:///absolute/folder".to_owned(),
            }),
            None => Address::parse(url).err(),
        }
    }

    /// A URL as it may be shown: without a password or what follows `?`.
    pub fn shown_url(url: &str) -> String {
        without_password(url)
    }

    async fn open_remote(address: &Address, options: &Options) -> Result<Self, Error> {
        let (driver, remote) = remote::connect(address, options, Arc::new(ReqwestConnector::default()))?;
        Self::over_remote(driver, remote, options).await
    }

    /// Over any remote driver, which is asked for its mark.
    pub(crate) async fn over_remote(
        driver: Arc<dyn ObjectStore>,
        mut remote: Remote,
        options: &Options,
    ) -> Result<Self, Error> {
        let (limit, shown) = (remote::call_limit(options), remote.shown.clone());
        let found = RemoteMark::find_or_make(&*driver, &remote, options.unmarked);
        remote.mark = match tokio::time::timeout(limit, found).await {
            Ok(Ok(found)) => found,
            // An endpoint that answers 404 to a write is none.
            Ok(Err(err @ object_store::Error::NotFound { .. })) => {
                return Err(Error::Unavailable { doing: "open", name: shown, source: crate::error::words(&err) });
            }
            Ok(Err(err)) => return Err(Error::from_driver("open", shown, err)),
            Err(_) => return Err(Error::TimedOut { doing: "open", name: shown, limit }),
        };
        if remote.mark.is_none() && options.unmarked == Unmarked::IsWrong {
            return Err(Error::NotOurs { url: shown });
        }
        let inner = Inner {
            driver,
            root: None,
            mark: None,
            remote: Some(remote),
            limit,
            piece_bytes: REMOTE_PIECE_BYTES,
            part_bytes: upload::PART_BYTES,
            _scratch: None,
        };
        Ok(Self { inner: Arc::new(inner) })
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
        let blobs = Self::over(driver, None, None, None);
        Self { inner: Arc::new(Inner { limit, ..(*blobs.inner).clone() }) }
    }

    /// Storage in memory, used as a remote store is: for tests.
    pub async fn remote_memory(options: &Options) -> Result<Self, Error> {
        let driver = Arc::new(InMemory::new());
        let remote = Remote::new(driver.clone(), "some/prefix".into(), "memory".to_owned());
        Self::over_remote(driver, remote, options).await
    }

    /// The same storage, read and written in pieces of this size.
    pub fn with_piece_bytes(self, piece_bytes: u64) -> Self {
        let piece_bytes = piece_bytes.max(1);
        Self { inner: Arc::new(Inner { piece_bytes, part_bytes: piece_bytes, ..(*self.inner).clone() }) }
    }

    #[cfg(test)]
    pub(crate) fn with_limit(self, limit: Duration) -> Self {
        Self { inner: Arc::new(Inner { limit, ..(*self.inner).clone() }) }
    }

    fn over(
        driver: Arc<dyn ObjectStore>,
        root: Option<PathBuf>,
        mark: Option<Mark>,
        scratch: Option<tempfile::TempDir>,
    ) -> Self {
        let inner = Inner {
            driver,
            root,
            mark,
            remote: None,
            limit: LOCAL_LIMIT,
            piece_bytes: LOCAL_PIECE_BYTES,
            part_bytes: LOCAL_PIECE_BYTES,
            _scratch: scratch.map(Arc::new),
        };
        Self { inner: Arc::new(inner) }
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
