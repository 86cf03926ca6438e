//! One call on a storage: admitted, limited in time, its error proved.

use object_store::ObjectStoreExt;

use crate::layout::ObjectName;
use crate::remote::mark::RemoteMark;
use crate::{Blobs, Error};

impl Blobs {
    /// Whether the storage is the one with this id. A remote store that several processes
    /// marked at its first use has several, each of which will do from then on.
    pub async fn is_known_as(&self, id: uuid::Uuid) -> Result<bool, Error> {
        let Some(remote) = self.remote().filter(|_| self.id() != Some(id)) else { return Ok(self.id() == Some(id)) };
        let known = RemoteMark::known(self.driver(), remote, id);
        match tokio::time::timeout(self.inner.limit, known).await {
            Ok(Ok(known)) => Ok(known.is_some()),
            Ok(Err(err)) => Err(Error::from_driver("look at the mark of", remote.shown.clone(), err)),
            Err(_) => {
                let name = remote.shown.clone();
                Err(Error::TimedOut { doing: "look at the mark of", name, limit: self.inner.limit })
            }
        }
    }

    /// One call within its limit. A name that is not there in a storage that is not the
    /// one that was opened is the storage's trouble, and so is one that is there at a second
    /// look: a gateway says 404 while what stands behind it starts.
    pub(crate) async fn call<T>(
        &self,
        doing: &'static str,
        name: &ObjectName,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Error> {
        match self.call_unproved(doing, name, work).await {
            Err(err) if err.is_missing() => {
                self.require_mounted(doing, name).await?;
                let path = self.path(name);
                match self.call_unproved(doing, name, self.driver().head(&path)).await {
                    Err(again) if again.is_missing() => Err(err),
                    Err(again) => Err(again),
                    Ok(_) => Err(Error::unavailable(doing, name, "it was told missing and is there".to_owned())),
                }
            }
            done => done,
        }
    }

    pub(crate) async fn call_unproved<T>(
        &self,
        doing: &'static str,
        name: &ObjectName,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Error> {
        let admitted = async {
            let _permit = match self.remote() {
                Some(remote) => Some(remote.calls.acquire().await),
                None => None,
            };
            work.await
        };
        match tokio::time::timeout(self.inner.limit, admitted).await {
            Ok(done) => done.map_err(|err| Error::from_driver(doing, name.to_string(), err)),
            Err(_) => Err(Error::TimedOut { doing, name: name.to_string(), limit: self.inner.limit }),
        }
    }

    /// Removes a record of an upload; one that stays is swept.
    pub(crate) async fn forget_record(&self, path: &object_store::path::Path) {
        let deleted = tokio::time::timeout(self.inner.limit, self.inner.driver.delete(path)).await;
        match deleted {
            Ok(Ok(()) | Err(object_store::Error::NotFound { .. })) => {}
            Ok(Err(err)) => {
                let err = Error::from_driver("delete", path.to_string(), err);
                tracing::debug!(
                    cause = overnight_types::chain(&err),
                    "the record of an ended upload stays for the sweep"
                );
            }
            Err(_) => tracing::debug!("the record of an ended upload stays for the sweep: no answer in time"),
        }
    }

    /// Proves that the storage is still the one that was opened.
    async fn require_mounted(&self, doing: &'static str, name: &ObjectName) -> Result<(), Error> {
        let Some((remote, mark)) = self.remote().and_then(|remote| Some((remote, remote.mark.clone()?))) else {
            return self.require_folder(doing, name).await;
        };
        match tokio::time::timeout(self.inner.limit, mark.check(self.driver())).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => {
                let why =
                    format!("{} has lost its mark {}: was its bucket emptied or made anew?", remote.shown, mark.path);
                Err(Error::unavailable(doing, name, why))
            }
            Ok(Err(err)) => Err(Error::from_driver(doing, name.to_string(), err)),
            Err(_) => Err(Error::TimedOut { doing, name: name.to_string(), limit: self.inner.limit }),
        }
    }

    /// Proves that a local folder is still the one that was opened.
    pub(crate) async fn require_folder(&self, doing: &'static str, name: &ObjectName) -> Result<(), Error> {
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
