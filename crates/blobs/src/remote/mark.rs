//! The mark of a remote store: an object with the store's id, made at its first use.
//!
//! A bucket that is not there, one that was made anew, and a mistyped prefix all look
//! like a store from which every object has gone. The mark tells them apart: without it
//! nothing is called missing. Marks are told apart by name, so that two first users at
//! once need no conditional write: each sees both, and takes the first.

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use uuid::Uuid;

use super::{Remote, Unmarked};

/// No name of ours starts with a dot, so no listing shows it.
const FOLDER: &str = ".overnight-marks";
/// A local folder's mark, which comes along when the folder was copied here.
const COPIED: &str = crate::mark::FILE;
/// Marks that are looked at: more than processes that first use a store at once.
const MARKS_MAX: usize = 1_000;

/// The mark as it was found or made when the store was opened.
#[derive(Debug, Clone)]
pub(crate) struct RemoteMark {
    pub(crate) path: Path,
    pub(crate) id: Uuid,
}

impl RemoteMark {
    /// Finds the store's mark, or makes one where it may be new. `None` when there is none.
    pub(crate) async fn find_or_make(
        driver: &dyn ObjectStore,
        remote: &Remote,
        unmarked: Unmarked,
    ) -> object_store::Result<Option<Self>> {
        if let Some(found) = Self::find(driver, remote).await? {
            return Ok(Some(found));
        }
        if unmarked != Unmarked::IsNew {
            return Ok(None);
        }
        let id = Uuid::now_v7();
        let path = remote.path(&format!("{FOLDER}/{}", id.simple()));
        driver.put(&path, PutPayload::from(format!("{id}\n"))).await?;
        // Another process may have made one too; a listing that lags shows neither.
        Ok(Some(Self::find(driver, remote).await?.unwrap_or(Self { path, id })))
    }

    /// Whether a store with this id is marked here: one of several marks will do.
    pub(crate) async fn known(
        driver: &dyn ObjectStore,
        remote: &Remote,
        id: Uuid,
    ) -> object_store::Result<Option<Self>> {
        let path = remote.path(&format!("{FOLDER}/{}", id.simple()));
        match driver.get(&path).await {
            Ok(_) => Ok(Some(Self { path, id })),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(err) => Err(err),
        }
    }

    async fn find(driver: &dyn ObjectStore, remote: &Remote) -> object_store::Result<Option<Self>> {
        let path = remote.path(COPIED);
        match driver.get(&path).await {
            Ok(copied) => {
                let text = copied.bytes().await?;
                let id = std::str::from_utf8(&text).ok().and_then(|text| Uuid::try_parse(text.trim()).ok());
                if let Some(id) = id {
                    return Ok(Some(Self { path, id }));
                }
            }
            Err(object_store::Error::NotFound { .. }) => {}
            Err(err) => return Err(err),
        }
        let mut listed = driver.list(Some(&remote.path(FOLDER)));
        let mut first: Option<Self> = None;
        for _ in 0..MARKS_MAX {
            let Some(meta) = listed.try_next().await? else { break };
            let Some(id) = meta.location.filename().and_then(|name| Uuid::try_parse(name).ok()) else { continue };
            if first.as_ref().is_none_or(|first| id < first.id) {
                first = Some(Self { path: meta.location, id });
            }
        }
        Ok(first)
    }

    /// Proves that the store is still the one that was opened.
    pub(crate) async fn check(&self, driver: &dyn ObjectStore) -> object_store::Result<bool> {
        // GET, because an answer to HEAD does not tell a lost bucket from a lost object.
        match driver.get(&self.path).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(err) => Err(err),
        }
    }
}
