//! One item as it is shown, and pages of items by index, state and code.
//!
//! Which items match is decided by rows (bits, faults, counts of codes) as far as
//! they tell, then by records; a shard's input is read once, and only for items
//! that are shown. So a page reads the input of the shards that it shows items of.

use std::collections::BTreeMap;

use bytes::Bytes;
use overnight_blobs::envelope::Envelope;
use overnight_blobs::{Blobs, ItemRecord, ObjectName, lines};
use overnight_store::{Fault, Job, Segment, Shard, Store};
use overnight_types::{
    BatchRequestId, Bitmap, ErrorCode, ItemIndex, ItemState, JobState, OutcomeKind, ShardIndex, ShardState, Timestamp,
    Usage,
};
use serde_json::value::RawValue;

use super::records;
use crate::Error;
use crate::lifecycle::undone::undone_outcome;

/// Shard rows per read.
const SHARDS_PER_READ: u32 = 200;
/// Most items of a page.
const PAGE_ITEMS_MAX: u32 = 1_000;
/// Records read in one go at least, however few are wanted.
const RECORDS_PER_READ: usize = 64;

/// One item.
#[derive(Debug, Clone)]
pub struct ItemView {
    /// Its wire id.
    pub id: BatchRequestId,
    /// From 0, blank lines not counted.
    pub index: u64,
    /// Physical line from 1; `None` once the input is deleted.
    pub line: Option<u64>,
    /// The JSON string of the input; `None` once the input is deleted and the item has no output.
    pub custom_id: Option<Box<RawValue>>,
    /// Where it stands.
    pub state: ItemState,
    /// Tries so far.
    pub attempts: u32,
    /// Of the outcome, or of the last try that failed.
    pub http_status: Option<u16>,
    /// Of the outcome, or of the last try that failed.
    pub error_code: Option<String>,
    /// Of the outcome.
    pub finish_reason: Option<String>,
    /// Of the outcome.
    pub usage: Option<Usage>,
    /// Start of the final try.
    pub started_at: Option<Timestamp>,
    /// End of the final try.
    pub finished_at: Option<Timestamp>,
}

/// Which items to list, by index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ItemQuery {
    /// Only this state.
    pub state: Option<ItemState>,
    /// Only outcomes with this error code.
    pub code: Option<String>,
    /// Start after this item.
    pub after: Option<ItemIndex>,
    /// Most items, 1…1,000.
    pub limit: u32,
}

/// A page of items.
#[derive(Debug, Clone, Default)]
pub struct ItemPage {
    /// By index.
    pub items: Vec<ItemView>,
    /// Whether more may match after the last one.
    pub has_more: bool,
}

/// Lists items of a job by index.
pub async fn list(store: &dyn Store, blobs: &Blobs, job: &Job, query: &ItemQuery) -> Result<ItemPage, Error> {
    let limit = query.limit.clamp(1, PAGE_ITEMS_MAX) as usize;
    let first = query.after.map_or(0, |after| after.0.saturating_add(1));
    if first >= job.num_items {
        return Ok(ItemPage::default());
    }
    let now = store.now().await.map_err(Error::store("read the clock"))?;
    let start = store.find_shard_of_item(job.id, ItemIndex(first)).await.map_err(Error::store("find a shard"))?;
    let mut next = start.map_or(0, |shard| shard.cut.shard.0);
    let mut items = Vec::new();
    while next < job.num_shards {
        let shards = store.list_shards(job.id, ShardIndex(next), SHARDS_PER_READ).await;
        let shards = shards.map_err(Error::store("list shards"))?;
        let Some(last) = shards.last() else { break };
        next = last.cut.shard.0 + 1;
        let may_have_faults = !asks_for_faults(job, query) || has_faults(store, job, &shards).await?;
        for shard in &shards {
            let bits = candidates(job, shard, query, first, may_have_faults);
            if bits.is_empty() {
                continue;
            }
            let look = ShardLook::load(store, job, shard, now).await?;
            let wanted = limit + 1 - items.len();
            items.extend(look.views(blobs, &bits, query, wanted).await?);
            if items.len() > limit {
                items.truncate(limit);
                return Ok(ItemPage { items, has_more: true });
            }
        }
    }
    Ok(ItemPage { items, has_more: false })
}

/// Whether an undone item matches only if it has a fault.
fn asks_for_faults(job: &Job, query: &ItemQuery) -> bool {
    ended_undone(job).is_none() && (query.state == Some(ItemState::Waiting) || query.code.is_some())
}

/// Whether any item of these shards, which follow one another, waits for a retry.
async fn has_faults(store: &dyn Store, job: &Job, shards: &[Shard]) -> Result<bool, Error> {
    let (Some(first), Some(last)) = (shards.first(), shards.last()) else { return Ok(false) };
    let end = ItemIndex(last.cut.first_item.0 + u64::from(last.cut.num_items));
    let faults = store.list_faults(job.id, first.cut.first_item, end, 1).await;
    Ok(!faults.map_err(Error::store("list faults"))?.is_empty())
}

/// Items of a shard that may match, by what its row alone tells.
fn candidates(job: &Job, shard: &Shard, query: &ItemQuery, first: u64, may_have_faults: bool) -> Vec<u32> {
    let ended = ended_undone(job);
    let is_leased = shard.state == ShardState::Leased;
    let may_match = |bit: u32| {
        let (done, failed) = (shard.done.get(bit), shard.done.get(bit) && shard.failed.get(bit));
        let by_state = match query.state {
            None => true,
            Some(ItemState::Completed) => done && !failed,
            Some(ItemState::Failed) => failed,
            Some(ItemState::Cancelled | ItemState::Expired) => failed || (!done && ended.is_some()),
            Some(ItemState::Pending) => !done && ended.is_none() && !is_leased,
            Some(ItemState::Running) => !done && ended.is_none() && is_leased,
            Some(ItemState::Waiting) => !done && ended.is_none() && may_have_faults,
        };
        let by_code = query.code.as_ref().is_none_or(|code| match ended {
            _ if done => failed,
            Some((_, of_undone)) => code == of_undone,
            None => may_have_faults,
        });
        by_state && by_code
    };
    let from = first.saturating_sub(shard.cut.first_item.0).min(u64::from(shard.cut.num_items));
    (from as u32..shard.cut.num_items).filter(|bit| may_match(*bit)).collect()
}

/// How undone items of a job that is ending or over are shown.
pub(crate) fn ended_undone(job: &Job) -> Option<(OutcomeKind, &'static str)> {
    let over = matches!(job.state, JobState::Finalizing | JobState::Expired | JobState::Cancelled);
    let (outcome, code, _) = job.ending.filter(|_| over).and_then(undone_outcome)?;
    Some((outcome, code.as_str()))
}

/// One shard, looked at once for several items.
pub(crate) struct ShardLook<'a> {
    job: &'a Job,
    shard: &'a Shard,
    now: Timestamp,
    segments: Vec<Segment>,
    faults: Vec<Fault>,
}

/// An item with what it was read from.
pub(crate) struct Shown {
    pub(crate) view: ItemView,
    pub(crate) record: Option<ItemRecord>,
    /// Its line of the input; `None` once the input is deleted.
    pub(crate) input: Option<Bytes>,
}

/// An item by bit with its record, when it has one.
type Found = (u32, Option<ItemRecord>);

impl<'a> ShardLook<'a> {
    pub(crate) async fn load(store: &dyn Store, job: &'a Job, shard: &'a Shard, now: Timestamp) -> Result<Self, Error> {
        let cut = &shard.cut;
        let segments = records::segments_of(store, job.id, cut.shard).await?;
        let (from, to) = (cut.first_item, ItemIndex(cut.first_item.0 + u64::from(cut.num_items)));
        let faults = match shard.done.is_full() {
            true => Vec::new(),
            false => {
                let faults = store.list_faults(job.id, from, to, cut.num_items).await;
                faults.map_err(Error::store("list faults"))?
            }
        };
        Ok(Self { job, shard, now, segments, faults })
    }

    /// The first `wanted` items of these that match.
    async fn views(
        &self,
        blobs: &Blobs,
        bits: &[u32],
        query: &ItemQuery,
        wanted: usize,
    ) -> Result<Vec<ItemView>, Error> {
        let bits: Vec<u32> = bits.iter().copied().filter(|bit| self.may_match(*bit, query)).collect();
        let mut found = Vec::new();
        // A piece is not small either, since each reads the footers of its segments.
        for piece in bits.chunks(wanted.clamp(RECORDS_PER_READ, PAGE_ITEMS_MAX as usize)) {
            let read = self.find(blobs, piece).await?.into_iter();
            found.extend(read.filter(|(bit, record)| self.matches(*bit, record.as_ref(), query)));
            if found.len() >= wanted {
                break;
            }
        }
        found.truncate(wanted);
        Ok(self.show(blobs, found).await?.into_iter().map(|shown| shown.view).collect())
    }

    /// Whether an item may match by the rows of its shard.
    fn may_match(&self, bit: u32, query: &ItemQuery) -> bool {
        if !self.shard.done.get(bit) {
            return self.matches(bit, None, query);
        }
        let code_of_state = match query.state {
            Some(ItemState::Cancelled) => Some(ErrorCode::BatchCancelled.as_str()),
            Some(ItemState::Expired) => Some(ErrorCode::BatchExpired.as_str()),
            _ => None,
        };
        let codes = [query.code.as_deref(), code_of_state];
        codes.into_iter().flatten().all(|code| self.segments.iter().any(|segment| counts_code(segment, code)))
    }

    fn matches(&self, bit: u32, record: Option<&ItemRecord>, query: &ItemQuery) -> bool {
        let (state, code) = match record {
            Some(record) => (state_of(record.outcome), record.error_code.as_deref()),
            None => self.state_of_undone(self.item(bit)),
        };
        query.state.is_none_or(|wanted| wanted == state)
            && query.code.as_deref().is_none_or(|wanted| code == Some(wanted))
    }

    /// State and code of an item without an outcome.
    fn state_of_undone(&self, item: ItemIndex) -> (ItemState, Option<&str>) {
        let fault = self.fault(item);
        match ended_undone(self.job) {
            Some((outcome, code)) => (state_of(outcome), Some(code)),
            None => {
                let state = match fault {
                    Some(fault) if fault.not_before > self.now => ItemState::Waiting,
                    _ if self.shard.state == ShardState::Leased => ItemState::Running,
                    _ => ItemState::Pending,
                };
                (state, fault.map(|fault| fault.code.as_str()))
            }
        }
    }

    fn item(&self, bit: u32) -> ItemIndex {
        ItemIndex(self.shard.cut.first_item.0 + u64::from(bit))
    }

    /// Items with their records and input lines, in order of the bits.
    pub(crate) async fn read(&self, blobs: &Blobs, bits: &[u32]) -> Result<Vec<Shown>, Error> {
        let found = self.find(blobs, bits).await?;
        self.show(blobs, found).await
    }

    /// The records of these items.
    async fn find(&self, blobs: &Blobs, bits: &[u32]) -> Result<Vec<Found>, Error> {
        let done: Vec<u32> = bits.iter().copied().filter(|bit| self.shard.done.get(*bit)).collect();
        let first_item = self.shard.cut.first_item.0;
        let mut records = records::latest(blobs, &self.segments, first_item, &done).await?.into_iter().peekable();
        let mut found = Vec::with_capacity(bits.len());
        for bit in bits {
            let item = self.item(*bit);
            let record = records.next_if(|record| record.item == item);
            if record.is_none() && self.shard.done.get(*bit) {
                let what = format!("item {item} is done, but no segment holds it");
                return Err(Error::Damaged { job: self.job.id, what });
            }
            found.push((*bit, record));
        }
        Ok(found)
    }

    /// Reads the shard's input, once for all of these.
    async fn show(&self, blobs: &Blobs, found: Vec<Found>) -> Result<Vec<Shown>, Error> {
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let cut = &self.shard.cut;
        let range = cut.byte_offset..cut.byte_offset + cut.byte_len;
        let input = match blobs.read_range(&ObjectName::file(self.job.input_file_id), range).await {
            Ok(bytes) => Some(bytes),
            Err(overnight_blobs::Error::Missing { .. }) => None,
            Err(err) => return Err(Error::blobs("read the input")(err)),
        };
        let bits: Vec<u32> = found.iter().map(|(bit, _)| *bit).collect();
        let inputs = self.input_lines(input.as_ref(), &bits);
        let shown = found.into_iter().zip(inputs).map(|((bit, record), input)| Shown {
            view: self.view(self.item(bit), input.as_ref(), record.as_ref()),
            record,
            input: input.map(|(_, line)| line),
        });
        Ok(shown.collect())
    }

    /// Physical line and bytes of these items' lines.
    fn input_lines(&self, input: Option<&Bytes>, bits: &[u32]) -> Vec<Option<(u64, Bytes)>> {
        let mut found = vec![None; bits.len()];
        let Some(input) = input else { return found };
        let cut = &self.shard.cut;
        let mut next = 0;
        for (bit, line) in (0..).zip(lines::items(input, cut.byte_offset, cut.first_line)) {
            match bits.get(next) {
                None => break,
                Some(wanted) if *wanted == bit => {
                    found[next] = line.content.map(|content| (line.number, input.slice_ref(content)));
                    next += 1;
                }
                Some(_) => {}
            }
        }
        found
    }

    fn view(&self, item: ItemIndex, input: Option<&(u64, Bytes)>, record: Option<&ItemRecord>) -> ItemView {
        let line = input.map(|(number, _)| *number);
        let custom_id = custom_id(input.map(|(_, line)| line).or(record.map(|record| &record.line)));
        let id = BatchRequestId { job: self.job.id, item };
        match record {
            Some(record) => ItemView {
                id,
                index: item.0,
                line,
                custom_id,
                state: state_of(record.outcome),
                attempts: record.attempts,
                http_status: record.http_status,
                error_code: record.error_code.clone(),
                finish_reason: record.finish_reason.clone(),
                usage: Some(record.usage),
                started_at: Some(record.started_at),
                finished_at: Some(record.finished_at),
            },
            None => {
                let fault = self.fault(item);
                let has_ended = ended_undone(self.job).is_some();
                let (state, code) = self.state_of_undone(item);
                ItemView {
                    id,
                    index: item.0,
                    line,
                    custom_id,
                    state,
                    attempts: fault.map_or(0, |fault| fault.attempts),
                    http_status: fault.filter(|_| !has_ended).and_then(|fault| fault.http_status),
                    error_code: code.map(str::to_owned),
                    finish_reason: None,
                    usage: None,
                    started_at: None,
                    finished_at: None,
                }
            }
        }
    }

    /// The fault of an item that waits for a retry.
    pub(crate) fn fault(&self, item: ItemIndex) -> Option<&Fault> {
        self.faults.iter().find(|fault| fault.item == item)
    }
}

/// The custom id's token of an input or output line.
fn custom_id(line: Option<&Bytes>) -> Option<Box<RawValue>> {
    let token = Envelope::parse(line?).ok()?.custom_id?.token;
    RawValue::from_string(String::from_utf8(token.to_vec()).ok()?).ok()
}

/// Whether a segment holds an outcome with this error code, by its row.
fn counts_code(segment: &Segment, code: &str) -> bool {
    let counts: BTreeMap<String, u64> = serde_json::from_str(&segment.new.code_counts).unwrap_or_default();
    counts.contains_key(code)
}

fn state_of(outcome: OutcomeKind) -> ItemState {
    match outcome {
        OutcomeKind::Completed => ItemState::Completed,
        OutcomeKind::Failed => ItemState::Failed,
        OutcomeKind::Cancelled => ItemState::Cancelled,
        OutcomeKind::Expired => ItemState::Expired,
    }
}

/// All items of a shard that are undone.
pub(crate) fn undone_bits(shard: &Shard) -> Bitmap {
    let mut bits = Bitmap::new(shard.cut.num_items);
    shard.done.zeros().for_each(|bit| bits.set(bit));
    bits
}
