//! Writing a segment: records one after another, then the footer.

use std::collections::BTreeMap;

use bytes::Bytes;
use overnight_types::{Bitmap, FailedTry, ItemIndex, OutcomeKind, Usage};

use super::{FOOTER, FOOTER_END, ItemRecord, LINE, META, RecordMeta, SegmentHead, SegmentParts};
use crate::layout::ObjectName;
use crate::sha::Sha256;

/// Collects records into a segment.
#[derive(Debug)]
pub struct SegmentWriter {
    head: SegmentHead,
    first_item: ItemIndex,
    bytes: Vec<u8>,
    footer: String,
    items: Bitmap,
    failed: Bitmap,
    code_counts: BTreeMap<String, u64>,
    usage: Usage,
    num_records: u32,
}

impl SegmentWriter {
    /// For a shard that holds `num_items` items from `first_item` on.
    pub fn new(head: SegmentHead, first_item: ItemIndex, num_items: u32) -> Self {
        let mut bytes = b"{\"segment\":".to_vec();
        serde_json::to_writer(&mut bytes, &head).expect("a head is plain data");
        bytes.extend_from_slice(b"}\n");
        let (items, failed) = (Bitmap::new(num_items), Bitmap::new(num_items));
        let (code_counts, usage) = (BTreeMap::new(), Usage::default());
        Self { head, first_item, bytes, footer: String::new(), items, failed, code_counts, usage, num_records: 0 }
    }

    /// Adds an outcome. Panics when the item is not the shard's or came before, and
    /// when the line holds a newline: both would be our fault.
    #[track_caller]
    pub fn push(&mut self, record: &ItemRecord) {
        let bit = record.item.0.checked_sub(self.first_item.0).and_then(|bit| u32::try_from(bit).ok());
        let bit = bit.unwrap_or_else(|| panic!("item {} before the shard's first {}", record.item, self.first_item));
        assert!(!self.items.get(bit), "item {} has an outcome in this segment already", record.item);
        assert!(memchr::memchr(b'\n', &record.line).is_none(), "the line of item {} holds a newline", record.item);
        self.items.set(bit);
        if record.outcome != OutcomeKind::Completed {
            self.failed.set(bit);
        }
        let meta = RecordMeta {
            item: record.item,
            outcome: record.outcome,
            http_status: record.http_status,
            error_code: record.error_code.as_deref().map(|code| code.chars().take(200).collect()),
            attempts: record.attempts,
            failed_tries: kept_tries(&record.failed_tries),
            seed: record.seed,
            usage: record.usage,
            started_us: record.started_at.micros(),
            finished_us: record.finished_at.micros(),
            finish_reason: record.finish_reason.as_deref().map(|reason| reason.chars().take(200).collect()),
        };
        match self.code_counts.get_mut(meta.count_code()) {
            Some(count) => *count += 1,
            None => drop(self.code_counts.insert(meta.count_code().to_owned(), 1)),
        }
        // What did not complete may run again, and would be counted twice.
        if record.outcome == OutcomeKind::Completed {
            self.usage.add(record.usage);
        }
        self.num_records += 1;
        self.push_bytes(&meta, &record.line);
    }

    fn push_bytes(&mut self, meta: &RecordMeta, line: &[u8]) {
        use std::fmt::Write;
        let start = self.bytes.len();
        self.bytes.extend_from_slice(META);
        serde_json::to_writer(&mut self.bytes, meta).expect("a record is plain data");
        self.bytes.extend_from_slice(LINE);
        let line_start = self.bytes.len() - start;
        assert!(line_start <= 0xffff, "record head of {line_start} bytes");
        assert!(u32::try_from(start).is_ok(), "segment of {start} bytes");
        self.bytes.extend_from_slice(line);
        self.bytes.extend_from_slice(b"}\n");
        write!(self.footer, "{:010x}{start:08x}{line_start:04x}", meta.item.0)
            .expect("writing to a string cannot fail");
    }

    /// How many outcomes it holds.
    pub fn num_records(&self) -> u32 {
        self.num_records
    }

    /// How large the object is so far.
    pub fn num_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The object's bytes and what its row says.
    pub fn finish(mut self) -> (Bytes, SegmentParts) {
        self.bytes.extend_from_slice(FOOTER);
        self.bytes.extend_from_slice(self.footer.as_bytes());
        self.bytes.extend_from_slice(FOOTER_END);
        let sha256 = Sha256::of(&self.bytes);
        let SegmentHead { job, shard, epoch, seq, .. } = self.head;
        let parts = SegmentParts {
            name: ObjectName::segment(job, shard, epoch, seq, &sha256),
            items: self.items,
            failed: self.failed,
            code_counts: serde_json::to_string(&self.code_counts).expect("counts are plain data"),
            usage: self.usage,
            byte_len: self.bytes.len() as u64,
            sha256,
        };
        (Bytes::from(self.bytes), parts)
    }
}

/// The latest tries, each within its bounds, so that a record's head stays small.
fn kept_tries(tries: &[FailedTry]) -> Vec<FailedTry> {
    let latest = &tries[tries.len().saturating_sub(FailedTry::KEPT_MAX)..];
    let short = |text: &str| text.chars().take(FailedTry::MESSAGE_CHARS_MAX).collect::<String>();
    let kept = latest.iter().map(|tried| FailedTry {
        code: short(&tried.code),
        message: short(&tried.message),
        ..tried.clone()
    });
    kept.collect()
}
