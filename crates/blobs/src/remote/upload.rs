//! An upload in parts, and the records by which what a killed one leaves is found.
//!
//! A service keeps the parts of an unfinished upload, unseen and for money, until
//! somebody aborts it, and not every service lists them. So each upload's id is written
//! to a record before its first part, and deleted after its end; the sweep aborts the
//! uploads of records that nobody refreshed for a day.
//! Invariants: at most two parts of an upload are in memory, at most [`super::PARTS_MAX`] of all
//! uploads together on their way; a failed, dropped or timed-out upload is aborted, some
//! times if need be; nothing is visible before [`Upload::finish`] returns.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{MultipartId, ObjectStoreExt, PutPayload};
use overnight_types::{Timestamp, chain};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::Remote;
use crate::layout::ObjectName;
use crate::{Blobs, Error};

/// Smallest part that every service takes, except for the last one.
pub(crate) const PART_BYTES: u64 = 5 << 20;
/// Services take 10,000 parts; after so many of one size the next are twice as large,
/// which makes room for 310 GiB. Equal ones as long as possible: one service wants that.
const PARTS_OF_ONE_SIZE: usize = 2_000;
/// Parts of one upload on their way.
const PARTS_IN_FLIGHT: usize = 2;
/// How long parts on their way may take to arrive before their upload is aborted.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// Tries to abort an upload; the sweep tries again a day later.
const ABORTS_MAX: u32 = 4;
/// A record is written anew after this time, so that no upload under way looks left.
const REFRESH_EVERY: Duration = Duration::from_secs(3_600);
/// Records that one sweep looks at.
const RECORDS_MAX: usize = 10_000;
/// Uploads that one sweep fails to abort before it leaves the rest to the next.
const FAILURES_MAX: u32 = 3;
/// A record this many times older than need be goes although its upload was not aborted.
const GIVEN_UP_AFTER: u32 = 7;
/// No name of ours starts with a dot, so no listing shows it.
const FOLDER: &str = ".overnight-uploads";

/// What a record says.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    name: String,
    upload: MultipartId,
}

/// Bytes of the part with this number, given those of the first.
pub(crate) fn part_bytes(first: u64, index: usize) -> u64 {
    first << (index / PARTS_OF_ONE_SIZE).min(20)
}

/// An upload under way.
#[derive(Debug)]
pub(crate) struct Upload {
    blobs: Blobs,
    name: ObjectName,
    path: Path,
    /// `None` once it has ended.
    begun: Option<Begun>,
}

#[derive(Debug)]
struct Begun {
    id: MultipartId,
    record: Option<(Path, Instant)>,
    on_their_way: JoinSet<(usize, Result<PartId, Error>)>,
    done: Vec<Option<PartId>>,
    bytes: u64,
}

impl Upload {
    /// Starts an upload and records it.
    pub(crate) async fn begin(blobs: &Blobs, remote: &Remote, name: ObjectName) -> Result<Self, Error> {
        let path = remote.path(&name.to_string());
        let id = blobs.call("start writing", &name, remote.multipart.create_multipart(&path)).await?;
        let begun = Begun { id, record: None, on_their_way: JoinSet::new(), done: Vec::new(), bytes: 0 };
        let mut upload = Self { blobs: blobs.clone(), name, path, begun: Some(begun) };
        upload.refresh_record(remote).await?;
        Ok(upload)
    }

    /// How many parts were given.
    pub(crate) fn num_parts(&self) -> usize {
        self.begun.as_ref().map_or(0, |begun| begun.done.len())
    }

    /// Takes a part and sends it; waits while too many are on their way.
    pub(crate) async fn put(&mut self, remote: &Remote, part: Bytes) -> Result<(), Error> {
        self.refresh_record(remote).await?;
        while self.under_way().on_their_way.len() >= PARTS_IN_FLIGHT {
            self.settle_one().await?;
        }
        // Held until the part is sent, so the parts of all uploads are bounded.
        let permit = std::sync::Arc::clone(&remote.parts).acquire_owned().await.expect("the semaphore is never closed");
        let (blobs, name, path, multipart) =
            (self.blobs.clone(), self.name, self.path.clone(), remote.multipart.clone());
        let begun = self.under_way();
        let (index, id) = (begun.done.len(), begun.id.clone());
        begun.done.push(None);
        begun.bytes += part.len() as u64;
        begun.on_their_way.spawn(async move {
            let _permit = permit;
            let sent = multipart.put_part(&path, &id, index, PutPayload::from_bytes(part));
            (index, blobs.call("write", &name, sent).await)
        });
        Ok(())
    }

    /// Makes the object visible, and looks at its size.
    pub(crate) async fn finish(mut self, remote: &Remote) -> Result<(), Error> {
        while !self.under_way().on_their_way.is_empty() {
            self.settle_one().await?;
        }
        let (id, bytes) = (self.under_way().id.clone(), self.under_way().bytes);
        let parts: Vec<PartId> = self.under_way().done.iter().flatten().cloned().collect();
        debug_assert_eq!(parts.len(), self.num_parts(), "every part has been settled");
        let completed = self
            .blobs
            .call("finish writing", &self.name, remote.multipart.complete_multipart(&self.path, &id, parts))
            .await;
        // An end whose answer was lost is asked for again, and then there is no such upload
        // any more. The object decides: its bytes are a function of its name.
        let size = self.blobs.size(&self.name).await?;
        match (completed, size) {
            (_, Some(size)) if size == bytes => {}
            (Err(err), _) if !err.is_missing() => return Err(err),
            (_, size) => {
                let found = size.map_or("nothing".to_owned(), |size| format!("{size} bytes"));
                let why = format!(
                    "the store holds {found} after {bytes} were written; the upload may have been aborted by a rule of the bucket"
                );
                return Err(Error::unavailable("finish writing", &self.name, why));
            }
        }
        let record = self.begun.take().and_then(|begun| begun.record);
        if let Some((record, _)) = record {
            self.blobs.forget_record(&record).await;
        }
        Ok(())
    }

    /// Gives up and removes what was stored so far.
    pub(crate) async fn abort(mut self, remote: &Remote) -> Result<(), Error> {
        let Some(begun) = self.begun.take() else { return Ok(()) };
        abandon(&self.blobs, remote, self.name, &self.path, begun).await
    }

    fn under_way(&mut self) -> &mut Begun {
        self.begun.as_mut().expect("an upload that has ended is not used again")
    }

    async fn settle_one(&mut self) -> Result<(), Error> {
        let name = self.name;
        let begun = self.under_way();
        match begun.on_their_way.join_next().await {
            Some(Ok((index, sent))) => begun.done[index] = Some(sent?),
            Some(Err(err)) => return Err(Error::unavailable("write", &name, err.to_string())),
            None => {}
        }
        Ok(())
    }

    async fn refresh_record(&mut self, remote: &Remote) -> Result<(), Error> {
        let name = self.name;
        let blobs = self.blobs.clone();
        let begun = self.under_way();
        // A service that names no uploads (Azure) drops unfinished ones by itself.
        if begun.id.is_empty() || begun.record.as_ref().is_some_and(|(_, at)| at.elapsed() < REFRESH_EVERY) {
            return Ok(());
        }
        let path = match &begun.record {
            Some((path, _)) => path.clone(),
            None => remote.path(&format!("{FOLDER}/{}", Uuid::now_v7().simple())),
        };
        let record = Record { name: name.to_string(), upload: begun.id.clone() };
        let bytes = serde_json::to_vec(&record).expect("a record is plain data");
        blobs.call("record the upload of", &name, blobs.driver().put(&path, PutPayload::from(bytes))).await?;
        self.under_way().record = Some((path, Instant::now()));
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(begun) = self.begun.take() else { return };
        // Without a runtime the process ends, and the sweep finds the record.
        let (Ok(runtime), Some(remote)) = (tokio::runtime::Handle::try_current(), self.blobs.remote().cloned()) else {
            return;
        };
        let (blobs, name, path) = (self.blobs.clone(), self.name, self.path.clone());
        runtime.spawn(async move {
            if let Err(err) = abandon(&blobs, &remote, name, &path, begun).await {
                tracing::warn!(object = %name, cause = chain(&err), "an upload that was given up stays for the sweep");
            }
        });
    }
}

/// Aborts an upload whose parts are ours, and forgets its record.
async fn abandon(blobs: &Blobs, remote: &Remote, name: ObjectName, path: &Path, mut begun: Begun) -> Result<(), Error> {
    // A part that arrives after the abort would be kept, so those on their way may end.
    let settled = async { while begun.on_their_way.join_next().await.is_some() {} };
    let was_cut = tokio::time::timeout(SETTLE_MAX, settled).await.is_err();
    begun.on_their_way.shutdown().await;
    abort(blobs, remote, name, path, &begun.id).await?;
    match begun.record {
        // One that was cut may still arrive: the record stays, and the sweep aborts once more.
        Some(_) if was_cut => {}
        Some((record, _)) => blobs.forget_record(&record).await,
        None => {}
    }
    Ok(())
}

async fn abort(blobs: &Blobs, remote: &Remote, name: ObjectName, path: &Path, id: &MultipartId) -> Result<(), Error> {
    let mut tries = 0;
    loop {
        tries += 1;
        match blobs.call_unproved("abort writing", &name, remote.multipart.abort_multipart(path, id)).await {
            Err(err) if err.is_missing() => return Ok(()),
            Err(_) if tries < ABORTS_MAX => tokio::time::sleep(Duration::from_millis(100 << tries)).await,
            done => return done,
        }
    }
}

/// Aborts the uploads of records older than this. Returns how many.
pub(crate) async fn sweep(blobs: &Blobs, remote: &Remote, now: Timestamp, older_than: Duration) -> Result<u32, Error> {
    let failed = |err| Error::from_driver("list", format!("{FOLDER}/"), err);
    let mut listed = blobs.driver().list(Some(&remote.path(FOLDER)));
    let (mut num_swept, mut num_failed) = (0, 0);
    for _ in 0..RECORDS_MAX {
        let Some(meta) = listed.try_next().await.map_err(failed)? else { break };
        let modified = Timestamp::from_micros(meta.last_modified.timestamp_micros());
        if now.since(modified) < older_than {
            continue;
        }
        let shown = remote.name_of(&meta.location).unwrap_or_default().to_owned();
        let read = async { blobs.driver().get(&meta.location).await?.bytes().await };
        let bytes = match tokio::time::timeout(blobs.limit(), read).await {
            Ok(Ok(bytes)) => bytes,
            // Another sweep was quicker.
            Ok(Err(object_store::Error::NotFound { .. })) => continue,
            Ok(Err(err)) => return Err(Error::from_driver("read", shown, err)),
            Err(_) => return Err(Error::TimedOut { doing: "read", name: shown, limit: blobs.limit() }),
        };
        let record: Option<Record> = serde_json::from_slice(&bytes).ok();
        let aborted = match record.and_then(|record| Some((record.name.parse::<ObjectName>().ok()?, record.upload))) {
            Some((name, upload)) => abort(blobs, remote, name, &blobs.path(&name), &upload).await,
            None => {
                tracing::warn!(object = shown, "a record of an upload cannot be read; it is removed");
                Ok(())
            }
        };
        // Some stores refuse (403) to abort what is not there any more: that must not keep
        // the sweep from what comes after it, nor the record for ever.
        match aborted {
            Err(err) if now.since(modified) < older_than * GIVEN_UP_AFTER => {
                tracing::warn!(object = shown, cause = chain(&err), "an upload that was left could not be aborted");
                num_failed += 1;
                if num_failed >= FAILURES_MAX {
                    break;
                }
            }
            _ => {
                blobs.forget_record(&meta.location).await;
                num_swept += 1;
            }
        }
    }
    Ok(num_swept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousand_parts_hold_every_size_that_services_take() {
        let total: u64 = (0..10_000).map(|index| part_bytes(PART_BYTES, index)).sum();
        assert_eq!(total, 310_000 << 20);
        assert!((0..10_000).all(|index| part_bytes(PART_BYTES, index) <= 80 << 20));
        assert_eq!(part_bytes(PART_BYTES, 1_999), PART_BYTES, "equal as long as possible");
    }
}
