//! One item as it is shown, and pages of items by index, state and code.

use bytes::Bytes;
use overnight_blobs::envelope::Envelope;
use overnight_blobs::{Blobs, ItemRecord, ObjectName, lines};
use overnight_store::{Fault, Job, Segment, Shard, Store};
use overnight_types::{
    BatchRequestId, Bitmap, ItemIndex, ItemState, JobState, OutcomeKind, ShardIndex, ShardState, Timestamp, Usage,
};
use serde_json::value::RawValue;

use super::records;
use crate::Error;
use crate::lifecycle::undone::undone_outcome;

/// Shard rows per read.
const SHARDS_PER_READ: u32 = 200;
/// Most items of a page.
const PAGE_ITEMS_MAX: u32 = 1_000;

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
        for shard in &shards {
            let bits = candidates(job, shard, query, first);
            if bits.is_empty() {
                continue;
            }
            let look = ShardLook::load(store, blobs, job, shard, now).await?;
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

/// Items of a shard that may match, by what its row alone tells.
fn candidates(job: &Job, shard: &Shard, query: &ItemQuery, first: u64) -> Vec<u32> {
    let ended = ended_undone(job);
    let may_match = |bit: u32| {
        let (done, failed) = (shard.done.get(bit), shard.done.get(bit) && shard.failed.get(bit));
        let by_state = match query.state {
            None => true,
            Some(ItemState::Completed) => done && !failed,
            Some(ItemState::Failed) => failed,
            Some(ItemState::Cancelled | ItemState::Expired) => failed || (!done && ended.is_some()),
            Some(ItemState::Pending | ItemState::Running | ItemState::Waiting) => !done && ended.is_none(),
        };
        by_state && (query.code.is_none() || failed || !done)
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
    pub(crate) segments: Vec<Segment>,
    faults: Vec<Fault>,
    /// All its input bytes; `None` once the input is deleted.
    input: Option<Bytes>,
}

impl<'a> ShardLook<'a> {
    pub(crate) async fn load(
        store: &dyn Store,
        blobs: &Blobs,
        job: &'a Job,
        shard: &'a Shard,
        now: Timestamp,
    ) -> Result<Self, Error> {
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
        let range = cut.byte_offset..cut.byte_offset + cut.byte_len;
        let input = match blobs.read_range(&ObjectName::file(job.input_file_id), range).await {
            Ok(bytes) => Some(bytes),
            Err(overnight_blobs::Error::Missing { .. }) => None,
            Err(err) => return Err(Error::blobs("read the input")(err)),
        };
        Ok(Self { job, shard, now, segments, faults, input })
    }

    /// The first `wanted` items of these that match.
    async fn views(
        &self,
        blobs: &Blobs,
        bits: &[u32],
        query: &ItemQuery,
        wanted: usize,
    ) -> Result<Vec<ItemView>, Error> {
        let matches = |view: &ItemView| {
            query.state.is_none_or(|state| state == view.state)
                && query.code.as_ref().is_none_or(|code| view.error_code.as_ref() == Some(code))
        };
        let mut views = Vec::new();
        for piece in bits.chunks(wanted.clamp(1, PAGE_ITEMS_MAX as usize)) {
            views.extend(self.read(blobs, piece).await?.into_iter().map(|(view, _)| view).filter(&matches));
            if views.len() >= wanted {
                break;
            }
        }
        views.truncate(wanted);
        Ok(views)
    }

    /// Items with their records, in order of the bits.
    pub(crate) async fn read(&self, blobs: &Blobs, bits: &[u32]) -> Result<Vec<(ItemView, Option<ItemRecord>)>, Error> {
        let first_item = self.shard.cut.first_item.0;
        let done: Vec<u32> = bits.iter().copied().filter(|bit| self.shard.done.get(*bit)).collect();
        let mut records = records::latest(blobs, &self.segments, first_item, &done).await?.into_iter().peekable();
        let inputs = self.input_lines(bits);
        let mut items = Vec::with_capacity(bits.len());
        for (bit, input) in bits.iter().zip(inputs) {
            let item = ItemIndex(first_item + u64::from(*bit));
            let record = records.next_if(|record| record.item == item);
            if record.is_none() && self.shard.done.get(*bit) {
                let what = format!("item {item} is done, but no segment holds it");
                return Err(Error::Damaged { job: self.job.id, what });
            }
            items.push((self.view(item, input, record.as_ref()), record));
        }
        Ok(items)
    }

    /// Physical line and bytes of these items' lines.
    fn input_lines(&self, bits: &[u32]) -> Vec<Option<(u64, Bytes)>> {
        let mut found = vec![None; bits.len()];
        let Some(input) = &self.input else { return found };
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

    /// The line of one item.
    pub(crate) fn input_line(&self, bit: u32) -> Option<Bytes> {
        self.input_lines(&[bit]).pop().flatten().map(|(_, line)| line)
    }

    fn view(&self, item: ItemIndex, input: Option<(u64, Bytes)>, record: Option<&ItemRecord>) -> ItemView {
        let line = input.as_ref().map(|(number, _)| *number);
        let custom_id = custom_id(input.as_ref().map(|(_, line)| line).or(record.map(|record| &record.line)));
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
                let ended = ended_undone(self.job);
                let waits = fault.is_some_and(|fault| fault.not_before > self.now);
                let state = match ended {
                    Some((outcome, _)) => state_of(outcome),
                    None if waits => ItemState::Waiting,
                    None if self.shard.state == ShardState::Leased => ItemState::Running,
                    None => ItemState::Pending,
                };
                let fault_code = fault.map(|fault| fault.code.clone());
                ItemView {
                    id,
                    index: item.0,
                    line,
                    custom_id,
                    state,
                    attempts: fault.map_or(0, |fault| fault.attempts),
                    http_status: fault.filter(|_| ended.is_none()).and_then(|fault| fault.http_status),
                    error_code: ended.map(|(_, code)| code.to_owned()).or(fault_code),
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
