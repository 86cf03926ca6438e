//! Failures of a job grouped by code, with one example of each.

use std::collections::BTreeMap;

use overnight_blobs::{Blobs, ItemRecord};
use overnight_store::{Job, Segment, Shard, Store};
use overnight_types::{ItemIndex, OutcomeKind, ShardIndex};

use super::records;
use super::view::{ItemView, ShardLook, ended_undone};
use crate::Error;

/// Shards per read.
const SHARDS_PER_READ: u32 = 200;
/// Most groups; the rest is summed under `other`.
const GROUPS_MAX: usize = 100;
/// Longest message of an example, characters.
const MESSAGE_CHARS_MAX: usize = 300;

/// Items that failed with one code.
#[derive(Debug, Clone)]
pub struct ErrorGroup {
    /// The code.
    pub code: String,
    /// How many items.
    pub count: u64,
    /// One of them.
    pub example: Option<ErrorExample>,
}

/// One item that failed.
#[derive(Debug, Clone)]
pub struct ErrorExample {
    /// The item.
    pub item: ItemView,
    /// The reason in words, when its line tells one.
    pub message: Option<String>,
}

/// Groups the outcomes that did not complete, the most frequent first.
pub async fn error_groups(store: &dyn Store, blobs: &Blobs, job: &Job) -> Result<Vec<ErrorGroup>, Error> {
    let mut groups: BTreeMap<String, (u64, Option<ItemIndex>)> = BTreeMap::new();
    let mut next = 0;
    while next < job.num_shards && job.num_items > 0 {
        let shards = store.list_shards(job.id, ShardIndex(next), SHARDS_PER_READ).await;
        let shards = shards.map_err(Error::store("list shards"))?;
        let Some(last) = shards.last() else { break };
        next = last.cut.shard.0 + 1;
        for shard in &shards {
            count_shard(store, blobs, job, shard, &mut groups).await?;
        }
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
    let mut shown = Vec::new();
    for (code, (count, item)) in groups {
        let example = match item {
            Some(item) => example(store, blobs, job, item).await?,
            None => None,
        };
        shown.push(ErrorGroup { code, count, example });
    }
    Ok(shown)
}

async fn count_shard(
    store: &dyn Store,
    blobs: &Blobs,
    job: &Job,
    shard: &Shard,
    groups: &mut BTreeMap<String, (u64, Option<ItemIndex>)>,
) -> Result<(), Error> {
    let item = |bit: u32| ItemIndex(shard.cut.first_item.0 + u64::from(bit));
    let mut add = |code: &str, count: u64, item: Option<ItemIndex>| {
        let code = if groups.len() >= GROUPS_MAX && !groups.contains_key(code) { "other" } else { code };
        let group = groups.entry(code.to_owned()).or_default();
        group.0 += count;
        group.1 = group.1.or(item);
        group.1.is_none()
    };
    if let Some((_, code)) = ended_undone(job).filter(|_| !shard.done.is_full()) {
        let num_undone = shard.done.num_bits() - shard.done.count_ones();
        add(code, u64::from(num_undone), shard.done.zeros().next().map(item));
    }
    if !shard.done.intersects(&shard.failed) {
        return Ok(());
    }
    let segments = records::segments_of(store, job.id, shard.cut.shard).await?;
    let failed: Vec<u32> = shard.failed.ones().filter(|bit| shard.done.get(*bit)).collect();
    // With one round no record supersedes another, so the rows' counts are exact
    // and only a code without an example makes its records be read.
    let one_round = segments.iter().all(|segment| segment.round == job.round) && job.round == 1;
    if one_round {
        let mut lacks_example = false;
        for (code, count) in segments.iter().flat_map(code_counts) {
            lacks_example |= add(&code, count, None);
        }
        if lacks_example {
            for record in records::latest(blobs, &segments, shard.cut.first_item.0, &failed).await? {
                add(code_of(&record), 0, Some(record.item));
            }
        }
    } else {
        for record in records::latest(blobs, &segments, shard.cut.first_item.0, &failed).await? {
            add(code_of(&record), 1, Some(record.item));
        }
    }
    Ok(())
}

fn code_counts(segment: &Segment) -> Vec<(String, u64)> {
    let counts: BTreeMap<String, u64> = serde_json::from_str(&segment.new.code_counts).unwrap_or_default();
    counts.into_iter().filter(|(code, _)| code != "ok").collect()
}

fn code_of(record: &ItemRecord) -> &str {
    match record.outcome {
        OutcomeKind::Completed => "ok",
        _ => record.error_code.as_deref().unwrap_or("unknown"),
    }
}

async fn example(store: &dyn Store, blobs: &Blobs, job: &Job, item: ItemIndex) -> Result<Option<ErrorExample>, Error> {
    let shard = store.find_shard_of_item(job.id, item).await.map_err(Error::store("find a shard"))?;
    let Some(shard) = shard else { return Ok(None) };
    let now = store.now().await.map_err(Error::store("read the clock"))?;
    let look = ShardLook::load(store, job, &shard, now).await?;
    let bit = (item.0 - shard.cut.first_item.0) as u32;
    let found = look.read(blobs, &[bit]).await?.pop();
    Ok(found.map(|found| ErrorExample {
        item: found.view,
        message: found.record.and_then(|record| message_of(&record.line)),
    }))
}

/// The message of a line's error object, wherever it stands.
fn message_of(line: &[u8]) -> Option<String> {
    let line: serde_json::Value = serde_json::from_slice(line).ok()?;
    let places = ["/error/message", "/response/body/error/message"];
    let message = places.iter().find_map(|place| line.pointer(place)?.as_str())?;
    Some(message.chars().take(MESSAGE_CHARS_MAX).collect())
}
