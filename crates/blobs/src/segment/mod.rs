//! A segment: outcomes of items of one shard, as one immutable object.
//!
//! The object is text, one JSON value per line: a head, one record per outcome in
//! the order of pushing, a footer.
//! ```text
//! {"segment":{"job":"batch_…","shard":0,"epoch":1,"seq":0,"producer":"…"}}
//! {"meta":{"item":7,"outcome":"completed",…},"line":{…the finished output line…}}
//! {"footer":"<22 hexadecimal digits per record>"}
//! ```
//! A footer entry is item index (10 digits), record offset (8), offset of the
//! output line in the record (4). Its length follows from the number of records,
//! which the segment's row tells, so one record costs two range reads.
//! Invariants: the output line is embedded byte for byte; an item appears once.

mod reader;
#[cfg(test)]
mod tests;
mod writer;

use bytes::Bytes;
use overnight_types::{Bitmap, Epoch, FailedTry, ItemIndex, JobId, OutcomeKind, ShardIndex, Timestamp, Usage};
use serde::{Deserialize, Serialize};

use crate::layout::ObjectName;

pub use reader::{Footer, RecordSpan, SegmentReader, meta_of, parse_head, parse_record};
pub use writer::SegmentWriter;

const META: &[u8] = b"{\"meta\":";
const LINE: &[u8] = b",\"line\":";
const FOOTER: &[u8] = b"{\"footer\":\"";
const FOOTER_END: &[u8] = b"\"}\n";
const ENTRY_BYTES: usize = 22;

/// What a segment is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentHead {
    /// Its job.
    pub job: JobId,
    /// Its shard.
    pub shard: ShardIndex,
    /// The lease's epoch.
    pub epoch: Epoch,
    /// Its number within the shard.
    pub seq: u32,
    /// What made the outcomes: engine, version, model digest, in words.
    pub producer: String,
}

/// The outcome of one item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemRecord {
    /// Which item.
    pub item: ItemIndex,
    /// How it ended.
    pub outcome: OutcomeKind,
    /// Status of the HTTP answer, when there was one.
    pub http_status: Option<u16>,
    /// Stable code of the failure.
    pub error_code: Option<String>,
    /// Tries, the last one included; 0 for an item that never ran.
    pub attempts: u32,
    /// Tries before the last one, oldest first; the latest [`FailedTry::KEPT_MAX`] are written.
    pub failed_tries: Vec<FailedTry>,
    /// The seed that was used.
    pub seed: Option<u64>,
    /// Tokens of the final try.
    pub usage: Usage,
    /// Start of the final try.
    pub started_at: Timestamp,
    /// End of the final try.
    pub finished_at: Timestamp,
    /// As the engine said.
    pub finish_reason: Option<String>,
    /// The finished output line, a JSON object without a newline.
    pub line: Bytes,
}

/// A record without its line; what most readers need.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordMeta {
    /// Which item.
    pub item: ItemIndex,
    /// How it ended.
    pub outcome: OutcomeKind,
    /// Status of the HTTP answer, when there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// Stable code of the failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
    /// Tries, the last one included.
    pub attempts: u32,
    /// Tries before the last one, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_tries: Vec<FailedTry>,
    /// The seed that was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Tokens of the final try.
    pub usage: Usage,
    /// Start of the final try, microseconds since 1970.
    pub started_us: i64,
    /// End of the final try, microseconds since 1970.
    pub finished_us: i64,
    /// As the engine said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<String>,
}

impl RecordMeta {
    /// The code under which the outcome is counted: `ok`, or its error code.
    pub fn count_code(&self) -> &str {
        match self.outcome {
            OutcomeKind::Completed => "ok",
            _ => self.error_code.as_deref().unwrap_or("unknown"),
        }
    }

    fn with_line(self, line: Bytes) -> ItemRecord {
        ItemRecord {
            item: self.item,
            outcome: self.outcome,
            http_status: self.http_status,
            error_code: self.error_code,
            attempts: self.attempts,
            failed_tries: self.failed_tries,
            seed: self.seed,
            usage: self.usage,
            started_at: Timestamp::from_micros(self.started_us),
            finished_at: Timestamp::from_micros(self.finished_us),
            finish_reason: self.finish_reason,
            line,
        }
    }
}

/// What the database's row says of a finished segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentParts {
    /// The name under which the bytes must be written before the row.
    pub name: ObjectName,
    /// Bit per item of the shard: whose outcome it holds.
    pub items: Bitmap,
    /// Of them, those that did not complete: what a resume runs again.
    pub failed: Bitmap,
    /// Outcomes by `ok` or error code, as a JSON object of counts.
    pub code_counts: String,
    /// Over its completed outcomes: they alone never run again, so no later round counts
    /// a token twice.
    pub usage: Usage,
    /// The object's size.
    pub byte_len: u64,
    /// The object's hash.
    pub sha256: [u8; 32],
}
