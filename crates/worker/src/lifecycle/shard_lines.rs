//! The outcomes of one shard, from its segments: checked against their rows, a
//! later record of an item superseding the earlier one.
//!
//! A shard whose segments fit the memory allowed is held whole; of a larger one
//! only the footers are, and its records are read one by one. From a remote store,
//! where each read costs its way, a large shard is first copied to a scratch folder.

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use overnight_blobs::segment::{self, Footer, RecordMeta, RecordSpan};
use overnight_blobs::sha::Sha256;
use overnight_blobs::{Blobs, ObjectName, SegmentReader};
use overnight_store::{Job, Segment, Shard};

use crate::Error;

/// Most bytes of one shard's segments in memory.
const WHOLE_BYTES_MAX: u64 = 16 << 20;
/// Bytes that hold any segment's head.
const HEAD_BYTES: u64 = 4 << 10;
/// Segments of a shard that are read at once.
const READS: usize = 4;

/// Outcomes of one shard.
#[derive(Debug)]
pub struct ShardLines {
    segments: Vec<Loaded>,
    /// Where the records of a large shard are read, when not from their storage.
    scratch: Option<Blobs>,
    /// Per item of the shard: segment and record of its latest outcome.
    slots: Vec<Option<(u32, u32)>>,
}

#[derive(Debug)]
enum Loaded {
    Whole(Box<SegmentReader>),
    Ranged { name: ObjectName, spans: Vec<RecordSpan>, producer: String },
}

impl ShardLines {
    /// Reads and checks the segments of a shard, given by sequence.
    pub async fn load(blobs: &Blobs, job: &Job, shard: &Shard, segments: &[Segment]) -> Result<Self, Error> {
        Self::load_with(blobs, job, shard, segments, WHOLE_BYTES_MAX).await
    }

    /// The same with so many bytes of segments in memory.
    pub async fn load_with(
        blobs: &Blobs,
        job: &Job,
        shard: &Shard,
        segments: &[Segment],
        whole_bytes_max: u64,
    ) -> Result<Self, Error> {
        let whole = segments.iter().map(|segment| segment.new.byte_len).sum::<u64>() <= whole_bytes_max;
        let scratch = if whole || blobs.is_local() { None } else { Some(scratch()?) };
        let slots = vec![None; shard.cut.num_items as usize];
        let mut lines = Self { segments: Vec::new(), scratch, slots };
        let scratch = lines.scratch.clone();
        // Owned, because a future that borrows its row is not known to be sendable.
        let reads = stream::iter(segments.to_vec()).map(|row| {
            let (blobs, scratch) = (blobs.clone(), scratch.clone());
            async move {
                let loaded = match whole {
                    true => load_whole(&blobs, &row).await?,
                    false => load_ranged(&blobs, scratch.as_ref(), &row).await?,
                };
                Ok::<_, Error>((row, loaded))
            }
        });
        let mut reads = std::pin::pin!(reads.buffered(READS));
        while let Some((row, loaded)) = reads.try_next().await? {
            let number = u32::try_from(lines.segments.len()).expect("a shard has few segments");
            for (record, span) in (0..).zip(loaded.spans()) {
                let bit = span.item.0.checked_sub(shard.cut.first_item.0).and_then(|bit| u32::try_from(bit).ok());
                let Some(bit) = bit.filter(|bit| *bit < shard.cut.num_items && row.new.items.get(*bit)) else {
                    let what =
                        format!("segment {} holds item {}, which its row does not name", name_of(&row), span.item);
                    return Err(Error::Damaged { job: job.id, what });
                };
                lines.slots[bit as usize] = Some((number, record));
            }
            lines.segments.push(loaded);
        }
        match shard.done.ones().find(|bit| lines.slots[*bit as usize].is_none()) {
            None => Ok(lines),
            Some(bit) => {
                let item = shard.cut.first_item.0 + u64::from(bit);
                let what = format!("item {item} of shard {} is done, but no segment holds it", shard.cut.shard);
                Err(Error::Damaged { job: job.id, what })
            }
        }
    }

    /// The latest outcome of an item of the shard and its line. Panics when it has none.
    pub async fn outcome(&self, blobs: &Blobs, bit: u32) -> Result<(RecordMeta, Bytes), Error> {
        let (segment, record) = self.slots[bit as usize].expect("a done item has a record");
        match &self.segments[segment as usize] {
            Loaded::Whole(reader) => {
                let span = &reader.spans()[record as usize];
                let meta = reader.meta(span).map_err(Error::blobs("read an outcome"))?;
                Ok((meta, reader.line(span)))
            }
            Loaded::Ranged { name, spans, .. } => {
                let span = &spans[record as usize];
                let blobs = self.scratch.as_ref().unwrap_or(blobs);
                let bytes =
                    blobs.read_range(name, span.record_range()).await.map_err(Error::blobs("read an outcome"))?;
                let meta = segment::meta_of(name, &bytes, span).map_err(Error::blobs("read an outcome"))?;
                let (start, end) = (span.line.0 - span.record.0, span.line.1 - span.record.0);
                Ok((meta, bytes.slice(start as usize..end as usize)))
            }
        }
    }

    /// How many segments there are.
    pub fn num_segments(&self) -> u64 {
        self.segments.len() as u64
    }

    /// What made the outcomes.
    pub fn producers(&self) -> impl Iterator<Item = &str> {
        self.segments.iter().map(|segment| match segment {
            Loaded::Whole(reader) => reader.head.producer.as_str(),
            Loaded::Ranged { producer, .. } => producer.as_str(),
        })
    }
}

impl Loaded {
    fn spans(&self) -> &[RecordSpan] {
        match self {
            Loaded::Whole(reader) => reader.spans(),
            Loaded::Ranged { spans, .. } => spans,
        }
    }
}

/// The name of a segment's object.
pub fn name_of(row: &Segment) -> ObjectName {
    ObjectName::segment(row.job, row.new.shard, row.new.epoch, row.new.seq, &row.new.sha256)
}

async fn load_whole(blobs: &Blobs, row: &Segment) -> Result<Loaded, Error> {
    let name = name_of(row);
    let bytes = blobs.read(&name).await.map_err(Error::blobs("read a segment"))?;
    let reader = SegmentReader::open(name, bytes, row.new.items.count_ones(), &row.new.sha256);
    Ok(Loaded::Whole(Box::new(reader.map_err(Error::blobs("read a segment"))?)))
}

fn scratch() -> Result<Blobs, Error> {
    Blobs::scratch().map_err(Error::blobs("make room for a shard's segments"))
}

/// Checks a segment and reads its footer; copies it to `scratch` on the way.
async fn load_ranged(blobs: &Blobs, scratch: Option<&Blobs>, row: &Segment) -> Result<Loaded, Error> {
    let name = name_of(row);
    let failed = Error::blobs("read a segment");
    let copying = Error::blobs("copy a segment to the scratch folder");
    let byte_len = row.new.byte_len;
    let mut sha = Sha256::default();
    let mut copy = match scratch {
        Some(scratch) => Some(scratch.writer(&name).await.map_err(copying)?),
        None => None,
    };
    let mut pieces = blobs.stream(&name, 0..byte_len);
    while let Some(piece) = pieces.try_next().await.map_err(failed)? {
        sha.update(&piece);
        if let Some(copy) = &mut copy {
            copy.write(piece).await.map_err(copying)?;
        }
    }
    if let Some(copy) = copy {
        copy.finish().await.map_err(copying)?;
    }
    let blobs = scratch.unwrap_or(blobs);
    if sha.finish() != row.new.sha256 {
        return Err(Error::Damaged { job: row.job, what: format!("{name} does not match its recorded sha256") });
    }
    let range = Footer::range(byte_len, row.new.items.count_ones());
    let footer = blobs.read_range(&name, range).await.map_err(Error::blobs("read a segment's footer"))?;
    let spans = Footer::parse(&name, &footer, byte_len).map_err(failed)?.spans;
    let head = blobs.read_range(&name, 0..byte_len.min(HEAD_BYTES)).await.map_err(Error::blobs("read a segment"))?;
    let producer = segment::parse_head(&head).map(|head| head.producer).unwrap_or_default();
    Ok(Loaded::Ranged { name, spans, producer })
}
