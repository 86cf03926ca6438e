//! Output lines of a job while it runs, and after.
//!
//! Two orders. By completion: in commit order, each line once and none skipped,
//! whenever it is read on. By input: the lines up to the first item without an
//! outcome. The cursor names the round; a re-opened job starts a new one.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use overnight_blobs::Blobs;
use overnight_store::{Job, Segment, SegmentCursor, SegmentSelection, Shard, Store};
use overnight_types::{Bitmap, ItemIndex, ShardIndex};

use super::{Error, records};
use crate::items::view::{ended_undone, undone_bits};
use crate::lifecycle::undone::undone_lines;

/// Segment rows per read.
const SEGMENTS_PER_READ: u32 = 64;
/// Shards per read.
const SHARDS_PER_READ: u32 = 16;
/// A page ends at so many bytes, with at least one line.
const PAGE_BYTES_MAX: usize = 8 << 20;
/// Most lines of a page.
const PAGE_LINES_MAX: usize = 10_000;

/// In which order lines come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResultsOrder {
    /// As they were committed.
    #[default]
    Completion,
    /// As in the input.
    Input,
}

/// Where a reader stands; its text is opaque to clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultsCursor {
    /// By completion: these many lines of this segment were given out, and all of those before it.
    Completion {
        /// The job's round.
        round: u32,
        /// The segment.
        segment: SegmentCursor,
        /// Records of it that were passed.
        line: u32,
    },
    /// By input: items before this one were given out.
    Input {
        /// The job's round.
        round: u32,
        /// The next item.
        item: u64,
    },
}

impl fmt::Display for ResultsCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completion { round, segment, line } => {
                write!(f, "c.{round}.{}.{}.{line}", segment.committed, segment.shard)
            }
            Self::Input { round, item } => write!(f, "i.{round}.{item}"),
        }
    }
}

impl FromStr for ResultsCursor {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let mut parts = text.split('.');
            let kind = parts.next()?;
            let mut number = || parts.next()?.parse::<u64>().ok();
            let cursor = match kind {
                "c" => {
                    let round = u32::try_from(number()?).ok()?;
                    let segment = SegmentCursor { committed: number()?, shard: u32::try_from(number()?).ok()? };
                    Self::Completion { round, segment, line: u32::try_from(number()?).ok()? }
                }
                "i" => Self::Input { round: u32::try_from(number()?).ok()?, item: number()? },
                _ => return None,
            };
            parts.next().is_none().then_some(cursor)
        };
        parse().ok_or_else(|| Error::BadCursor { text: text.chars().take(80).collect() })
    }
}

/// Which lines to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResultsQuery {
    /// Go on from here.
    pub after: Option<ResultsCursor>,
    /// Most lines, 1…10,000.
    pub limit: u32,
    /// In which order; a cursor of the other order is refused.
    pub order: ResultsOrder,
}

/// Some lines.
#[derive(Debug, Clone, PartialEq)]
pub struct ResultsPage {
    /// Byte for byte as they will be published, without newlines.
    pub lines: Vec<Bytes>,
    /// To read on from.
    pub next: ResultsCursor,
    /// Whether more lines may come: the job is not over, or the page was full.
    pub incomplete: bool,
}

/// Reads output lines of a job.
pub async fn results(store: &dyn Store, blobs: &Blobs, job: &Job, query: &ResultsQuery) -> Result<ResultsPage, Error> {
    let limit = (query.limit as usize).clamp(1, PAGE_LINES_MAX);
    let bad = |cursor: ResultsCursor| Error::BadCursor { text: cursor.to_string() };
    match (query.order, query.after) {
        (ResultsOrder::Completion, Some(ResultsCursor::Completion { round, segment, line })) => {
            check_round(job, round)?;
            by_completion(store, blobs, job, segment, line, limit).await
        }
        (ResultsOrder::Input, Some(ResultsCursor::Input { round, item })) => {
            check_round(job, round)?;
            by_input(store, blobs, job, item, limit).await
        }
        (ResultsOrder::Completion, None) => by_completion(store, blobs, job, SegmentCursor::default(), 0, limit).await,
        (ResultsOrder::Input, None) => by_input(store, blobs, job, 0, limit).await,
        (_, Some(cursor)) => Err(bad(cursor)),
    }
}

fn check_round(job: &Job, cursor: u32) -> Result<(), Error> {
    if cursor == job.round { Ok(()) } else { Err(Error::EarlierRound { cursor, now: job.round }) }
}

/// Lines and how many bytes they have.
#[derive(Debug, Default)]
struct Collected {
    lines: Vec<Bytes>,
    num_bytes: usize,
}

impl Collected {
    fn push(&mut self, line: Bytes) {
        self.num_bytes += line.len();
        self.lines.push(line);
    }

    /// How many lines more fit, given their sizes: at least one on an empty page.
    fn room(&self, limit: usize, sizes: impl Iterator<Item = u64>) -> usize {
        let mut num_bytes = self.num_bytes;
        let fit = sizes.take(limit - self.lines.len()).take_while(|size| {
            num_bytes = num_bytes.saturating_add(*size as usize);
            num_bytes <= PAGE_BYTES_MAX
        });
        let fit = fit.count();
        if self.lines.is_empty() { fit.max(1) } else { fit }
    }
}

async fn by_completion(
    store: &dyn Store,
    blobs: &Blobs,
    job: &Job,
    mut at: SegmentCursor,
    mut line: u32,
    limit: usize,
) -> Result<ResultsPage, Error> {
    let mut page = Collected::default();
    let next = |segment, line| ResultsCursor::Completion { round: job.round, segment, line };
    loop {
        // The segment at the cursor again: some of its lines may be left.
        let after = if line == 0 { at } else { before(at) };
        let selection = SegmentSelection { job: job.id, round: None, after, limit: SEGMENTS_PER_READ };
        let rows = store.list_segments_committed(selection).await;
        let rows = rows.map_err(crate::Error::store("list segments in commit order"))?;
        let full_page = rows.len() == SEGMENTS_PER_READ as usize;
        for row in rows {
            let here = SegmentCursor { committed: row.committed, shard: row.new.shard.0 };
            let skip = if here == at { line } else { 0 };
            let spans = records::spans(blobs, &row).await?;
            let shown = shown_bits(store, job, &row).await?;
            let rest = &spans[(skip as usize).min(spans.len())..];
            let room = page.room(limit, rest.iter().map(|span| span.line.1 - span.line.0));
            let (now, later) = rest.split_at(room.min(rest.len()));
            if now.is_empty() && !later.is_empty() {
                return Ok(ResultsPage { lines: page.lines, next: next(at, line), incomplete: true });
            }
            let first = first_item_of(store, job, &row, shown.is_some()).await?;
            let mut wanted = now.to_vec();
            if let Some(shown) = &shown {
                wanted.retain(|span| {
                    let bit = span.item.0.checked_sub(first).and_then(|bit| u32::try_from(bit).ok());
                    bit.is_some_and(|bit| bit < shown.num_bits() && shown.get(bit))
                });
            }
            let read = records::read(blobs, &row, &wanted).await?;
            read.into_iter().for_each(|record| page.push(record.line));
            (at, line) = (here, skip + now.len() as u32);
            if !later.is_empty() || page.lines.len() >= limit || page.num_bytes >= PAGE_BYTES_MAX {
                return Ok(ResultsPage { lines: page.lines, next: next(at, line), incomplete: true });
            }
        }
        if !full_page {
            let incomplete = !job.state.is_terminal();
            return Ok(ResultsPage { lines: page.lines, next: next(at, line), incomplete });
        }
    }
}

/// The position just before a segment's.
fn before(at: SegmentCursor) -> SegmentCursor {
    match at.shard.checked_sub(1) {
        Some(shard) => SegmentCursor { committed: at.committed, shard },
        None => SegmentCursor { committed: at.committed.saturating_sub(1), shard: u32::MAX },
    }
}

/// Which records of a segment stand; `None` for all, as in a first round.
async fn shown_bits(store: &dyn Store, job: &Job, row: &Segment) -> Result<Option<Bitmap>, Error> {
    if job.round == 1 {
        return Ok(None);
    }
    let shard = shard_of(store, job, row.new.shard).await?;
    let segments = records::segments_of(store, job.id, row.new.shard).await?;
    let number = segments.iter().position(|segment| segment.new.seq == row.new.seq);
    Ok(number.map(|number| records::standing(&shard.done, &segments, number)))
}

async fn first_item_of(store: &dyn Store, job: &Job, row: &Segment, needed: bool) -> Result<u64, Error> {
    Ok(if needed { shard_of(store, job, row.new.shard).await?.cut.first_item.0 } else { 0 })
}

async fn shard_of(store: &dyn Store, job: &Job, index: ShardIndex) -> Result<Shard, Error> {
    let shard = store.find_shard(job.id, index).await.map_err(crate::Error::store("find a shard"))?;
    let missing = || crate::Error::Damaged { job: job.id, what: format!("shard {index} has segments and no row") };
    Ok(shard.ok_or_else(missing)?)
}

async fn by_input(store: &dyn Store, blobs: &Blobs, job: &Job, first: u64, limit: usize) -> Result<ResultsPage, Error> {
    let mut page = Collected::default();
    let next = |item| ResultsCursor::Input { round: job.round, item };
    let mut item = first;
    let start = store.find_shard_of_item(job.id, ItemIndex(first)).await;
    let mut shard_index = start.map_err(crate::Error::store("find a shard"))?.map(|shard| shard.cut.shard.0);
    while let Some(from) = shard_index.filter(|_| item < job.num_items) {
        let shards = store.list_shards(job.id, ShardIndex(from), SHARDS_PER_READ).await;
        let shards = shards.map_err(crate::Error::store("list shards"))?;
        shard_index = shards.last().map(|last| last.cut.shard.0 + 1);
        for shard in &shards {
            let gave = input_lines(store, blobs, job, shard, item, limit - page.lines.len(), &mut page).await?;
            item += gave;
            let end = shard.cut.first_item.0 + u64::from(shard.cut.num_items);
            if item < end || page.lines.len() >= limit || page.num_bytes >= PAGE_BYTES_MAX {
                let incomplete = !job.state.is_terminal() || item < job.num_items;
                return Ok(ResultsPage { lines: page.lines, next: next(item), incomplete });
            }
        }
    }
    Ok(ResultsPage { lines: page.lines, next: next(item), incomplete: !job.state.is_terminal() })
}

/// Gives out a shard's lines from an item on, up to one without an outcome.
/// Returns how many items that was.
async fn input_lines(
    store: &dyn Store,
    blobs: &Blobs,
    job: &Job,
    shard: &Shard,
    item: u64,
    limit: usize,
    page: &mut Collected,
) -> Result<u64, Error> {
    let first_item = shard.cut.first_item.0;
    let from = (item - first_item) as u32;
    let undone_end = ended_undone(job).is_some();
    let bits: Vec<u32> =
        (from..shard.cut.num_items).take_while(|bit| shard.done.get(*bit) || undone_end).take(limit).collect();
    let done: Vec<u32> = bits.iter().copied().filter(|bit| shard.done.get(*bit)).collect();
    let segments = records::segments_of(store, job.id, shard.cut.shard).await?;
    let mut undone = match (undone_end && !shard.done.is_full(), job.ending) {
        (true, Some(ending)) => undone_lines(blobs, job, &shard.cut, &undone_bits(shard), ending).await?,
        _ => Vec::new(),
    }
    .into_iter()
    .peekable();
    let mut gave = 0;
    // In pieces, so that a page of large lines does not read the whole shard first.
    for piece in bits.chunks(64) {
        let wanted: Vec<u32> = piece.iter().copied().filter(|bit| done.binary_search(bit).is_ok()).collect();
        let mut records = records::latest(blobs, &segments, first_item, &wanted).await?.into_iter();
        for bit in piece {
            let index = ItemIndex(first_item + u64::from(*bit));
            let line = if shard.done.get(*bit) {
                records.next().filter(|record| record.item == index).map(|record| record.line)
            } else {
                while undone.next_if(|(item, _)| *item < index).is_some() {}
                undone.next_if(|(item, _)| *item == index).map(|(_, line)| line)
            };
            let damaged = || crate::Error::Damaged { job: job.id, what: format!("item {index} has no line") };
            page.push(line.ok_or_else(damaged)?);
            gave += 1;
            if page.num_bytes >= PAGE_BYTES_MAX {
                return Ok(gave);
            }
        }
    }
    Ok(gave)
}
