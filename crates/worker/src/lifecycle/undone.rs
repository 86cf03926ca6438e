//! Lines of items that never got an outcome: their custom ids are read from the
//! input.

use bytes::Bytes;
use overnight_blobs::envelope::Envelope;
use overnight_blobs::{Blobs, ObjectName, error_line, lines};
use overnight_store::{Job, NewShard};
use overnight_types::{BatchRequestId, Bitmap, Ending, ErrorCode, ItemIndex, OutcomeKind};

use crate::Error;

/// How an undone item of a job that ends this way is recorded; `None` for an
/// ending that leaves none undone.
pub fn undone_outcome(ending: Ending) -> Option<(OutcomeKind, ErrorCode, &'static str)> {
    match ending {
        Ending::Completed => None,
        Ending::Expired => Some((
            OutcomeKind::Expired,
            ErrorCode::BatchExpired,
            "this request could not be executed before the completion window expired",
        )),
        Ending::Cancelled => Some((
            OutcomeKind::Cancelled,
            ErrorCode::BatchCancelled,
            "this request was not executed because the batch was cancelled",
        )),
    }
}

/// Output lines of the items of a shard whose bit is set in `bits`, by item.
pub async fn undone_lines(
    blobs: &Blobs,
    job: &Job,
    cut: &NewShard,
    bits: &Bitmap,
    ending: Ending,
) -> Result<Vec<(ItemIndex, Bytes)>, Error> {
    let damaged = |what: String| Error::Damaged { job: job.id, what };
    let Some((_, code, message)) = undone_outcome(ending) else {
        return Err(damaged(format!("{} items of shard {} have no outcome", bits.count_ones(), cut.shard)));
    };
    let range = cut.byte_offset..cut.byte_offset + cut.byte_len;
    let name = ObjectName::file(job.input_file_id);
    let bytes = blobs.read_range(&name, range).await.map_err(Error::blobs("read the input of undone items"))?;
    let mut made = Vec::with_capacity(bits.count_ones() as usize);
    let mut num_lines = 0;
    for (bit, line) in (0..).zip(lines::items(&bytes, cut.byte_offset, cut.first_line)) {
        num_lines += 1;
        if bit >= cut.num_items || !bits.get(bit) {
            continue;
        }
        let envelope = line.content.and_then(|content| Envelope::parse(content).ok());
        let custom_id = envelope.and_then(|envelope| envelope.custom_id);
        let custom_id =
            custom_id.ok_or_else(|| damaged(format!("line {} of the input cannot be read", line.number)))?;
        let item = ItemIndex(cut.first_item.0 + u64::from(bit));
        made.push((item, error_line(BatchRequestId { job: job.id, item }, custom_id.token, code, message)));
    }
    if num_lines != cut.num_items {
        return Err(damaged(format!("shard {} has {num_lines} lines, recorded are {}", cut.shard, cut.num_items)));
    }
    Ok(made)
}
