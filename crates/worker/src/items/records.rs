//! Reads some records of a segment: its footer by one range, the records wanted by
//! one more, or by a few when they lie far apart.

use overnight_blobs::segment::{Footer, RecordSpan, parse_record};
use overnight_blobs::{Blobs, ItemRecord};
use overnight_store::{Segment, Store};
use overnight_types::{Bitmap, JobId, ShardIndex};

use crate::Error;
use crate::lifecycle::shard_lines::name_of;

/// Records nearer than this are read by one range.
const GAP_BYTES_MAX: u64 = 256 << 10;
/// Most bytes of one range, unless one record is larger.
const RANGE_BYTES_MAX: u64 = 8 << 20;

/// Where the records of a segment lie.
pub(crate) async fn spans(blobs: &Blobs, row: &Segment) -> Result<Vec<RecordSpan>, Error> {
    let name = name_of(row);
    let range = Footer::range(row.new.byte_len, row.new.items.count_ones());
    let bytes = blobs.read_range(&name, range).await.map_err(Error::blobs("read a segment's footer"))?;
    let footer = Footer::parse(&name, &bytes, row.new.byte_len).map_err(Error::blobs("read a segment's footer"))?;
    Ok(footer.spans)
}

/// Reads these records of a segment, which must be in its order.
pub(crate) async fn read(blobs: &Blobs, row: &Segment, spans: &[RecordSpan]) -> Result<Vec<ItemRecord>, Error> {
    let name = name_of(row);
    let mut records = Vec::with_capacity(spans.len());
    let mut rest = spans;
    while let Some(first) = rest.first() {
        let start = first.record.0;
        let near = |pair: &[RecordSpan]| {
            pair[1].record.0 - pair[0].record.1 <= GAP_BYTES_MAX && pair[1].record.1 - start <= RANGE_BYTES_MAX
        };
        let len = 1 + rest.windows(2).take_while(|pair| near(pair)).count();
        let (here, after) = rest.split_at(len);
        let end = here[len - 1].record.1;
        let bytes = blobs.read_range(&name, start..end).await.map_err(Error::blobs("read outcomes"))?;
        for span in here {
            let record = bytes.slice((span.record.0 - start) as usize..(span.record.1 - start) as usize);
            records.push(parse_record(&name, &record, span).map_err(Error::blobs("read outcomes"))?);
        }
        rest = after;
    }
    Ok(records)
}

/// The latest records of some items of a shard, by item. `segments` are all of the
/// shard's by sequence; items without a record are left out.
pub(crate) async fn latest(
    blobs: &Blobs,
    segments: &[Segment],
    first_item: u64,
    bits: &[u32],
) -> Result<Vec<ItemRecord>, Error> {
    let mut records = Vec::with_capacity(bits.len());
    for (number, row) in segments.iter().enumerate() {
        let later = &segments[number + 1..];
        let stands = |bit: u32| row.new.items.get(bit) && !later.iter().any(|later| later.new.items.get(bit));
        if !bits.iter().any(|bit| stands(*bit)) {
            continue;
        }
        let mut wanted = spans(blobs, row).await?;
        wanted.retain(|span| {
            let bit = span.item.0.checked_sub(first_item).and_then(|bit| u32::try_from(bit).ok());
            bit.is_some_and(|bit| bits.binary_search(&bit).is_ok() && stands(bit))
        });
        records.extend(read(blobs, row, &wanted).await?);
    }
    records.sort_by_key(|record| record.item);
    Ok(records)
}

/// Segments of one shard by sequence.
pub(crate) async fn segments_of(store: &dyn Store, job: JobId, shard: ShardIndex) -> Result<Vec<Segment>, Error> {
    store.list_segments_of_shard(job, shard).await.map_err(Error::store("list segments of a shard"))
}

/// The bits of `all` that stand in segment `number`: done, and in no later segment.
pub(crate) fn standing(done: &Bitmap, segments: &[Segment], number: usize) -> Bitmap {
    let mut bits = segments[number].new.items.clone();
    segments[number + 1..].iter().for_each(|later| bits.subtract(&later.new.items));
    let mut undone = Bitmap::new(done.num_bits());
    done.zeros().for_each(|bit| undone.set(bit));
    bits.subtract(&undone);
    bits
}
