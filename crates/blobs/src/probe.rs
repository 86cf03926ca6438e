//! Proves that a storage does what we need, and finds out what more it can do.

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::{PutMode, PutOptions, PutPayload};
use uuid::Uuid;

use crate::layout::{ObjectName, Prefix};
use crate::{Blobs, Error};

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Writes are synced to disk before they return.
    pub synced: bool,
    /// A second conditional create is refused. Reported, never relied on.
    pub conditional_create: bool,
    /// A listing shows an object that was just written. Reported: what a lagging one
    /// leaves out is swept later.
    pub listed_at_once: bool,
}

impl Blobs {
    /// Proves that objects can be written, read back by ranges, written over, listed
    /// and deleted, that a name that is not there is told as such, and on a remote
    /// store that an upload in parts can be begun and aborted. The error names the
    /// first of them that failed.
    pub async fn probe(&self) -> Result<Capabilities, Error> {
        let name = ObjectName::Probe(Uuid::now_v7());
        let bytes = Bytes::from_static(b"overnight probe");
        // With the key of a reader who may not list, S3 answers 403 for what is not there.
        if self.size(&name).await?.is_some() {
            return Err(Error::damaged(&name, "it is there before it was written"));
        }
        self.put(&name, Bytes::from_static(b"over")).await?;
        let probed = self.probe_object(&name, &bytes).await;
        let deleted = self.delete(&name).await;
        let found = probed?;
        deleted?;
        if self.size(&name).await?.is_some() {
            return Err(Error::damaged(&name, "it is still there after it was deleted"));
        }
        if self.remote().is_some() {
            self.probe_upload(&name).await?;
        }
        Ok(found)
    }

    async fn probe_object(&self, name: &ObjectName, bytes: &Bytes) -> Result<Capabilities, Error> {
        self.put(name, bytes.clone()).await?;
        if self.read(name).await? != bytes {
            return Err(Error::damaged(name, "read back other bytes than were written"));
        }
        if self.read_range(name, 3..9).await? != bytes.slice(3..9) {
            return Err(Error::damaged(name, "a range read back other bytes than were written"));
        }
        let create = PutOptions::from(PutMode::Create);
        let path = self.path(name);
        let again = self.driver().put_opts(&path, PutPayload::from_bytes(bytes.clone()), create);
        let conditional_create = match tokio::time::timeout(self.limit(), again).await {
            Ok(again) => matches!(again, Err(object_store::Error::AlreadyExists { .. })),
            Err(_) => return Err(Error::TimedOut { doing: "write", name: name.to_string(), limit: self.limit() }),
        };
        let listed: Vec<ObjectName> = self.list(Prefix::Probes).map_ok(|listed| listed.name).try_collect().await?;
        Ok(Capabilities { synced: self.root().is_some(), conditional_create, listed_at_once: listed.contains(name) })
    }

    /// One byte above a part, so that it is two.
    async fn probe_upload(&self, name: &ObjectName) -> Result<(), Error> {
        let mut writer = self.writer(name).await?;
        let part = vec![b'x'; crate::remote::upload::PART_BYTES as usize + 1];
        match writer.append(&part).await {
            Ok(()) => writer.abort().await,
            Err(err) => Err(err),
        }
    }
}
