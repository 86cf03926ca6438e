//! Lines of items that never got an outcome: their custom ids are read from the
//! input. Input that is gone for good, or other than it was validated, delays no
//! job's end: the lines then say so and carry no custom id, as those of a running
//! job do. A storage that does not answer is another matter, and is waited for.

use bytes::Bytes;
use overnight_blobs::envelope::Envelope;
use overnight_blobs::{Blobs, ObjectName, error_line, lines};
use overnight_store::{Job, NewShard};
use overnight_types::{BatchRequestId, Bitmap, Ending, ErrorCode, ItemIndex, OutcomeKind, chain};

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
    let bytes = match blobs.read_range(&name, range).await {
        Ok(bytes) => bytes,
        Err(err @ (overnight_blobs::Error::Missing { .. } | overnight_blobs::Error::Damaged { .. })) => {
            tracing::error!(
                job.id = %job.id, shard.index = cut.shard.0, error = %chain(&err),
                "the input of items without an outcome is gone: their lines carry no custom id"
            );
            Bytes::new()
        }
        Err(err) => return Err(Error::blobs("read the input of undone items")(err)),
    };
    let mut read = lines::items(&bytes, cut.byte_offset, cut.first_line);
    let lines: Vec<_> = read.by_ref().take(cut.num_items as usize).collect();
    // With more or fewer lines than were cut, no line is known to be any item's.
    let as_cut = lines.len() == cut.num_items as usize && read.next().is_none();
    let line_of = |bit: u32| {
        let item = ItemIndex(cut.first_item.0 + u64::from(bit));
        let line = lines.get(bit as usize).filter(|_| as_cut);
        let envelope = line.and_then(|line| Envelope::parse(line.content?).ok());
        let custom_id = envelope.and_then(|envelope| envelope.custom_id);
        let id = BatchRequestId { job: job.id, item };
        let line = match custom_id {
            Some(custom_id) => error_line(id, custom_id.token, code, message),
            None => error_line(id, b"null", code, &format!("{message}; its line of the input cannot be read any more")),
        };
        (item, line)
    };
    Ok(bits.ones().map(line_of).collect())
}
