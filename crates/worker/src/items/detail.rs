//! One item with its input, output and tries, found by index or custom id.

use bytes::Bytes;
use overnight_blobs::envelope::Envelope;
use overnight_blobs::{Blobs, index};
use overnight_store::{Attempt, Fault, Job, Shard, Store};
use overnight_types::{FailedTry, ItemIndex};

use super::view::{ItemView, ShardLook, Shown};
use crate::Error;

/// Tries shown of an item's shard, the latest first.
const ATTEMPTS_SHOWN: u32 = 50;

/// Names one item of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ItemRef {
    /// By index, from 0.
    Index(ItemIndex),
    /// By custom id, as decoded text.
    CustomId(String),
}

/// One item with everything known of it.
#[derive(Debug, Clone)]
pub struct ItemDetail {
    /// As in a listing.
    pub view: ItemView,
    /// Its line of the input, byte for byte; `None` once the input is deleted.
    pub input: Option<Bytes>,
    /// Its line of the published files, byte for byte; `None` before its outcome.
    pub output: Option<Bytes>,
    /// What it waits for.
    pub fault: Option<Fault>,
    /// Its tries that failed and were followed by another, or will be; oldest first. Only
    /// the latest are known of an item with many.
    pub failed_tries: Vec<FailedTry>,
    /// Tries at its shard, the latest first.
    pub attempts: Vec<Attempt>,
}

/// Finds one item; `None` when the job has no such item (yet).
pub async fn find(store: &dyn Store, blobs: &Blobs, job: &Job, item: &ItemRef) -> Result<Option<ItemDetail>, Error> {
    if job.num_items == 0 {
        return Ok(None);
    }
    match item {
        ItemRef::Index(item) => by_index(store, blobs, job, *item).await,
        ItemRef::CustomId(text) => {
            let candidates = match index::find(blobs, job.id, text.as_bytes()).await {
                Ok(candidates) => candidates,
                Err(overnight_blobs::Error::Missing { .. }) => return Ok(None),
                Err(err) => return Err(Error::blobs("look a custom id up")(err)),
            };
            for candidate in candidates {
                let found = by_index(store, blobs, job, candidate).await?;
                if found.as_ref().is_some_and(|found| has_custom_id(found, text)) {
                    return Ok(found);
                }
            }
            Ok(None)
        }
    }
}

fn has_custom_id(found: &ItemDetail, text: &str) -> bool {
    let line = found.input.as_ref().or(found.output.as_ref());
    let envelope = line.and_then(|line| Envelope::parse(line).ok());
    envelope.and_then(|envelope| envelope.custom_id).is_some_and(|id| *id.text() == *text.as_bytes())
}

async fn by_index(store: &dyn Store, blobs: &Blobs, job: &Job, item: ItemIndex) -> Result<Option<ItemDetail>, Error> {
    let shard = store.find_shard_of_item(job.id, item).await.map_err(Error::store("find a shard"))?;
    let Some(shard) = shard.filter(|shard| holds(shard, item)) else { return Ok(None) };
    let now = store.now().await.map_err(Error::store("read the clock"))?;
    let look = ShardLook::load(store, job, &shard, now).await?;
    let bit = (item.0 - shard.cut.first_item.0) as u32;
    let Some(Shown { view, record, input }) = look.read(blobs, &[bit]).await?.pop() else { return Ok(None) };
    let attempts = store.list_attempts(job.id, shard.cut.shard, ATTEMPTS_SHOWN).await;
    let fault = look.fault(item).cloned();
    let of_record = record.as_ref().map(|record| record.failed_tries.clone());
    Ok(Some(ItemDetail {
        view,
        input,
        failed_tries: of_record.or_else(|| fault.as_ref().map(Fault::tries)).unwrap_or_default(),
        output: record.map(|record| record.line),
        fault,
        attempts: attempts.map_err(Error::store("list attempts"))?,
    }))
}

fn holds(shard: &Shard, item: ItemIndex) -> bool {
    let first = shard.cut.first_item.0;
    (first..first + u64::from(shard.cut.num_items)).contains(&item.0)
}
