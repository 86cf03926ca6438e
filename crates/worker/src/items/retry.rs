//! What a selective retry runs again, and the lines of what it leaves out.
//!
//! Undone items that a retry leaves out get their `batch_expired` or
//! `batch_cancelled` line for good: one segment per shard that has such items,
//! written before the re-opening that names it, so that afterwards `done` alone
//! says what runs.

use std::collections::BTreeSet;

use overnight_blobs::{Blobs, ItemRecord, ObjectName, SegmentHead, SegmentWriter};
use overnight_store::{Job, NewSegment, ReopenItems, Shard, Store};
use overnight_types::{Bitmap, Ending, ItemIndex, JobId, OutcomeKind, ShardIndex, Timestamp, Usage};

use super::detail::{self, ItemRef};
use super::records;
use super::view::undone_bits;
use crate::Error;
use crate::lifecycle::undone::{undone_lines, undone_outcome};

/// Shards per read.
const SHARDS_PER_READ: u32 = 200;

/// Which items of an ended job run again; an empty list asks for nothing in
/// particular. An item must match every list that is not empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RetryFilter {
    /// Only these outcomes.
    pub outcomes: Vec<OutcomeKind>,
    /// Only these error codes.
    pub error_codes: Vec<String>,
    /// Only these custom ids, as decoded text.
    pub custom_ids: Vec<String>,
}

/// What [`plan_retry`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPlan {
    /// The items, by index; none of them completed.
    pub items: Vec<ItemIndex>,
    /// Segments of undone items that are left out, durable already; see [`discard_leftovers`].
    pub leftover_segments: Vec<NewSegment>,
    /// Custom ids that the job does not have.
    pub unknown_custom_ids: Vec<String>,
}

impl RetryPlan {
    /// For [`overnight_store::Reopen::items`].
    pub fn reopen_items(&self) -> ReopenItems {
        ReopenItems::Selected(self.items.clone())
    }
}

/// Selects the items of an ended job that run again, and writes the lines of the
/// undone ones that do not. Completed items never run again.
pub async fn plan_retry(store: &dyn Store, blobs: &Blobs, job: &Job, filter: &RetryFilter) -> Result<RetryPlan, Error> {
    let Choice { mut plan, left_out, ending } = choose(store, blobs, job, filter).await?;
    // Nothing to run again, or an item that is not there, is no re-opening, so nothing is written for it.
    if !plan.items.is_empty() && plan.unknown_custom_ids.is_empty() {
        for (shard, rest) in left_out {
            plan.leftover_segments.push(write_leftover(blobs, job, &shard, &rest, ending).await?);
        }
    }
    Ok(plan)
}

/// The same selection, and nothing is written: what a retry would run.
pub async fn preview_retry(
    store: &dyn Store,
    blobs: &Blobs,
    job: &Job,
    filter: &RetryFilter,
) -> Result<RetryPlan, Error> {
    Ok(choose(store, blobs, job, filter).await?.plan)
}

/// A selection before anything is written for it.
struct Choice {
    plan: RetryPlan,
    /// Undone items by shard that do not run again.
    left_out: Vec<(Shard, Bitmap)>,
    ending: Ending,
}

async fn choose(store: &dyn Store, blobs: &Blobs, job: &Job, filter: &RetryFilter) -> Result<Choice, Error> {
    let damaged = || Error::Damaged { job: job.id, what: "it has ended without an ending".to_owned() };
    let ending = job.ending.ok_or_else(damaged)?;
    let (named, unknown_custom_ids) = named_items(store, blobs, job, filter).await?;
    let mut plan = RetryPlan { items: Vec::new(), leftover_segments: Vec::new(), unknown_custom_ids };
    let mut left_out = Vec::new();
    let mut next = 0;
    while next < job.num_shards {
        let shards = store.list_shards(job.id, ShardIndex(next), SHARDS_PER_READ).await;
        let shards = shards.map_err(Error::store("list shards"))?;
        let Some(last) = shards.last() else { break };
        next = last.cut.shard.0 + 1;
        for shard in shards {
            let selected = select(store, blobs, job, &shard, ending, filter, named.as_ref()).await?;
            let item = |bit: u32| ItemIndex(shard.cut.first_item.0 + u64::from(bit));
            plan.items.extend(selected.ones().map(item));
            let mut rest = undone_bits(&shard);
            rest.subtract(&selected);
            if rest.count_ones() > 0 {
                left_out.push((shard, rest));
            }
        }
    }
    Ok(Choice { plan, left_out, ending })
}

/// Deletes the objects of a plan whose re-opening was refused, so that they do not
/// wait for the sweep. Only after [`overnight_store::Guarded::Lost`]: an error leaves
/// open whether the re-opening happened.
///
/// What a row names stays. After a refusal none of these can get a row any more: a
/// re-opening names only segments of a shard's current epoch and sequence, and the
/// one that won raised both wherever an item was undone; a deleted input or job does
/// not come back.
pub async fn discard_leftovers(
    store: &dyn Store,
    blobs: &Blobs,
    job: JobId,
    leftovers: &[NewSegment],
) -> Result<(), Error> {
    for new in leftovers {
        let recorded = store.list_segments_of_shard(job, new.shard).await.map_err(Error::store("list segments"))?;
        if recorded.iter().any(|segment| segment.new == *new) {
            continue;
        }
        let name = ObjectName::segment(job, new.shard, new.epoch, new.seq, &new.sha256);
        blobs.delete(&name).await.map_err(Error::blobs("delete the lines of items that were to be left out"))?;
    }
    Ok(())
}

/// Items of the filter's custom ids; `None` when it names none.
async fn named_items(
    store: &dyn Store,
    blobs: &Blobs,
    job: &Job,
    filter: &RetryFilter,
) -> Result<(Option<BTreeSet<u64>>, Vec<String>), Error> {
    if filter.custom_ids.is_empty() {
        return Ok((None, Vec::new()));
    }
    let (mut named, mut unknown) = (BTreeSet::new(), Vec::new());
    for custom_id in &filter.custom_ids {
        match detail::find(store, blobs, job, &ItemRef::CustomId(custom_id.clone())).await? {
            Some(found) => drop(named.insert(found.view.index)),
            None => unknown.push(custom_id.clone()),
        }
    }
    Ok((Some(named), unknown))
}

/// The bits of a shard that run again.
async fn select(
    store: &dyn Store,
    blobs: &Blobs,
    job: &Job,
    shard: &Shard,
    ending: Ending,
    filter: &RetryFilter,
    named: Option<&BTreeSet<u64>>,
) -> Result<Bitmap, Error> {
    let first_item = shard.cut.first_item.0;
    let wanted = |bit: u32| named.is_none_or(|named| named.contains(&(first_item + u64::from(bit))));
    let matches = |outcome: OutcomeKind, code: Option<&str>| {
        (filter.outcomes.is_empty() || filter.outcomes.contains(&outcome))
            && (filter.error_codes.is_empty() || filter.error_codes.iter().any(|wanted| Some(wanted.as_str()) == code))
    };
    let mut selected = Bitmap::new(shard.cut.num_items);
    if let Some((outcome, code, _)) = undone_outcome(ending)
        && matches(outcome, Some(code.as_str()))
    {
        shard.done.zeros().filter(|bit| wanted(*bit)).for_each(|bit| selected.set(bit));
    }
    let failed: Vec<u32> = shard.failed.ones().filter(|bit| shard.done.get(*bit) && wanted(*bit)).collect();
    if failed.is_empty() {
        return Ok(selected);
    }
    let segments = records::segments_of(store, job.id, shard.cut.shard).await?;
    for record in records::latest(blobs, &segments, first_item, &failed).await? {
        if matches(record.outcome, record.error_code.as_deref()) {
            selected.set((record.item.0 - first_item) as u32);
        }
    }
    Ok(selected)
}

async fn write_leftover(
    blobs: &Blobs,
    job: &Job,
    shard: &Shard,
    bits: &Bitmap,
    ending: Ending,
) -> Result<NewSegment, Error> {
    let (outcome, code, _) = undone_outcome(ending).expect("undone items were found for this ending");
    let head = SegmentHead {
        job: job.id,
        shard: shard.cut.shard,
        epoch: shard.epoch,
        seq: shard.next_seq,
        producer: "none: these items never ran".to_owned(),
    };
    let ended_at = job.expired_at.or(job.cancelled_at).unwrap_or_else(|| Timestamp::from_micros(0));
    // This moment makes the bytes, and so the object, this plan's own: an object that a
    // plan left behind is never named by a later one, so the sweep may take it.
    let planned_at = Timestamp::now();
    let mut writer = SegmentWriter::new(head, shard.cut.first_item, shard.cut.num_items);
    for (item, line) in undone_lines(blobs, job, &shard.cut, bits, ending).await? {
        writer.push(&ItemRecord {
            item,
            outcome,
            http_status: None,
            error_code: Some(code.as_str().to_owned()),
            attempts: 0,
            failed_tries: Vec::new(),
            seed: None,
            usage: Usage::default(),
            started_at: ended_at,
            finished_at: planned_at.max(ended_at),
            finish_reason: None,
            line,
        });
    }
    let (bytes, parts) = writer.finish();
    blobs.put(&parts.name, bytes).await.map_err(Error::blobs("write the lines of items that are left out"))?;
    Ok(NewSegment {
        shard: shard.cut.shard,
        seq: shard.next_seq,
        epoch: shard.epoch,
        items: parts.items,
        failed: parts.failed,
        code_counts: parts.code_counts,
        usage: parts.usage,
        byte_len: parts.byte_len,
        sha256: parts.sha256,
    })
}
