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

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use overnight_types::{Bitmap, Epoch, FailedTry, ItemIndex, JobId, OutcomeKind, ShardIndex, Timestamp, Usage};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::layout::ObjectName;
use crate::sha::Sha256;

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

/// Where one record lies in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordSpan {
    /// Which item.
    pub item: ItemIndex,
    /// The whole record with its newline, bytes of the segment.
    pub record: (u64, u64),
    /// The output line without a newline, bytes of the segment.
    pub line: (u64, u64),
}

impl RecordSpan {
    /// The record's range in the object.
    pub fn record_range(&self) -> Range<u64> {
        self.record.0..self.record.1
    }

    /// The output line's range in the object.
    pub fn line_range(&self) -> Range<u64> {
        self.line.0..self.line.1
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

/// A segment's footer: where each record lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    /// In the order of the segment.
    pub spans: Vec<RecordSpan>,
}

impl Footer {
    /// Where the footer lies in an object of this size with this many records.
    /// Empty at 0 when they do not fit together.
    pub fn range(byte_len: u64, num_records: u32) -> Range<u64> {
        let len = FOOTER.len() + FOOTER_END.len() + num_records as usize * ENTRY_BYTES;
        byte_len.checked_sub(len as u64).map_or(0..0, |start| start..byte_len)
    }

    /// Reads the bytes of [`Footer::range`].
    pub fn parse(name: &ObjectName, bytes: &[u8], byte_len: u64) -> Result<Self, Error> {
        parse_footer(bytes, byte_len).ok_or_else(|| Error::damaged(name, "its footer cannot be read"))
    }
}

fn parse_footer(bytes: &[u8], byte_len: u64) -> Option<Footer> {
    let hex = std::str::from_utf8(bytes.strip_prefix(FOOTER)?.strip_suffix(FOOTER_END)?).ok()?;
    let footer_start = byte_len.checked_sub(bytes.len() as u64)?;
    if hex.len() % ENTRY_BYTES != 0 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let number = |range: Range<usize>| u64::from_str_radix(&hex[range], 16).ok();
    let mut spans = Vec::with_capacity(hex.len() / ENTRY_BYTES);
    for at in (0..hex.len()).step_by(ENTRY_BYTES) {
        let start = number(at + 10..at + 18)?;
        let end = if at + ENTRY_BYTES < hex.len() { number(at + 32..at + 40)? } else { footer_start };
        let line = (start + number(at + 18..at + 22)?, end.checked_sub(2)?);
        if line.0 >= line.1 || end > footer_start {
            return None;
        }
        spans.push(RecordSpan { item: ItemIndex(number(at..at + 10)?), record: (start, end), line });
    }
    Some(Footer { spans })
}

/// A whole segment whose hash and footer are checked.
#[derive(Debug, Clone)]
pub struct SegmentReader {
    name: ObjectName,
    bytes: Bytes,
    footer: Footer,
    /// What it is of.
    pub head: SegmentHead,
}

impl SegmentReader {
    /// Checks an object's bytes against the hash in its row. Errors with
    /// [`Error::Damaged`] when they differ or cannot be read.
    pub fn open(name: ObjectName, bytes: Bytes, num_records: u32, sha256: &[u8; 32]) -> Result<Self, Error> {
        if Sha256::of(&bytes) != *sha256 {
            return Err(Error::damaged(&name, format!("its {} bytes do not match the recorded sha256", bytes.len())));
        }
        let byte_len = bytes.len() as u64;
        let range = Footer::range(byte_len, num_records);
        let footer = Footer::parse(&name, slice(&bytes, range), byte_len)?;
        let head = parse_head(&bytes).ok_or_else(|| Error::damaged(&name, "its head cannot be read"))?;
        Ok(Self { name, bytes, footer, head })
    }

    /// Where each record lies, in the order of the segment.
    pub fn spans(&self) -> &[RecordSpan] {
        &self.footer.spans
    }

    /// An output line, byte for byte.
    pub fn line(&self, span: &RecordSpan) -> Bytes {
        self.bytes.slice(span.line.0 as usize..span.line.1 as usize)
    }

    /// A record without its line.
    pub fn meta(&self, span: &RecordSpan) -> Result<RecordMeta, Error> {
        meta_of(&self.name, slice(&self.bytes, span.record_range()), span)
    }

    /// Every record, in the order of the segment.
    pub fn records(&self) -> impl Iterator<Item = Result<ItemRecord, Error>> + '_ {
        self.footer.spans.iter().map(|span| Ok(self.meta(span)?.with_line(self.line(span))))
    }
}

/// Reads one record from its bytes, as cut out by [`RecordSpan::record_range`].
pub fn parse_record(name: &ObjectName, bytes: &Bytes, span: &RecordSpan) -> Result<ItemRecord, Error> {
    let meta = meta_of(name, bytes, span)?;
    let (start, end) = (span.line.0 - span.record.0, span.line.1 - span.record.0);
    Ok(meta.with_line(bytes.slice(start as usize..end as usize)))
}

/// Reads one record's meta from the record's bytes.
pub fn meta_of(name: &ObjectName, record: &[u8], span: &RecordSpan) -> Result<RecordMeta, Error> {
    let head = record.get(..(span.line.0 - span.record.0) as usize).unwrap_or_default();
    let meta = head.strip_prefix(META).and_then(|meta| meta.strip_suffix(LINE));
    let closed = record.len() as u64 == span.record.1 - span.record.0 && record.ends_with(b"}\n");
    meta.filter(|_| closed)
        .and_then(|meta| serde_json::from_slice::<RecordMeta>(meta).ok())
        .filter(|meta| meta.item == span.item)
        .ok_or_else(|| Error::damaged(name, format!("the record of item {} cannot be read", span.item)))
}

/// Reads the head from a segment's first bytes.
pub fn parse_head(bytes: &[u8]) -> Option<SegmentHead> {
    let line = &bytes[..memchr::memchr(b'\n', bytes)?];
    serde_json::from_slice(line.strip_prefix(b"{\"segment\":")?.strip_suffix(b"}")?).ok()
}

fn slice(bytes: &[u8], range: Range<u64>) -> &[u8] {
    bytes.get(range.start as usize..range.end as usize).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(item: u64, outcome: OutcomeKind, line: &'static [u8]) -> ItemRecord {
        ItemRecord {
            item: ItemIndex(item),
            outcome,
            http_status: Some(200),
            error_code: (outcome != OutcomeKind::Completed).then(|| "batch_expired".to_owned()),
            attempts: 2,
            failed_tries: vec![FailedTry {
                number: 1,
                http_status: Some(503),
                code: "busy".to_owned(),
                message: "\u{2028}later".to_owned(),
            }],
            seed: Some(u64::MAX),
            usage: Usage { input_tokens: 3, cached_tokens: 1, output_tokens: 2, reasoning_tokens: 0 },
            started_at: Timestamp::from_micros(1),
            finished_at: Timestamp::from_micros(2),
            finish_reason: Some("stop".to_owned()),
            line: Bytes::from_static(line),
        }
    }

    fn sample() -> (Bytes, SegmentParts, Vec<ItemRecord>) {
        let head = SegmentHead {
            job: JobId::new(),
            shard: ShardIndex(2),
            epoch: Epoch(5),
            seq: 1,
            producer: "test \"engine\"".into(),
        };
        let mut writer = SegmentWriter::new(head, ItemIndex(100), 30);
        let records = vec![
            record(107, OutcomeKind::Completed, b"{\"s\":\"\\ud800 \xe2\x80\xa8 \\u0000\",\"n\":1e999}"),
            record(100, OutcomeKind::Failed, b"{\"b\":2}"),
            record(129, OutcomeKind::Expired, b"{}"),
        ];
        records.iter().for_each(|record| writer.push(record));
        let (bytes, parts) = writer.finish();
        (bytes, parts, records)
    }

    #[test]
    fn records_read_back_whole_and_by_two_ranges() {
        let (bytes, parts, records) = sample();
        let reader = SegmentReader::open(parts.name, bytes.clone(), 3, &parts.sha256).unwrap();
        let read: Vec<_> = reader.records().map(Result::unwrap).collect();
        assert_eq!(read, records);
        assert_eq!(reader.head.producer, "test \"engine\"");
        let range = Footer::range(parts.byte_len, parts.items.count_ones());
        let tail = bytes.slice(range.start as usize..range.end as usize);
        let footer = Footer::parse(&parts.name, &tail, parts.byte_len).unwrap();
        for (span, wanted) in footer.spans.iter().zip(&records) {
            let one = bytes.slice(span.record.0 as usize..span.record.1 as usize);
            assert_eq!(&parse_record(&parts.name, &one, span).unwrap(), wanted);
        }
    }

    #[test]
    fn every_line_of_a_segment_is_json_and_the_row_tells_its_sums() {
        let (bytes, parts, _) = sample();
        for line in bytes.strip_suffix(b"\n").unwrap().split(|&byte| byte == b'\n') {
            assert!(crate::json::is_object(line), "{}", String::from_utf8_lossy(line));
        }
        assert_eq!(parts.items.ones().collect::<Vec<_>>(), [0, 7, 29]);
        assert_eq!(parts.failed.ones().collect::<Vec<_>>(), [0, 29], "an expired item may run again too");
        assert_eq!(parts.code_counts, r#"{"batch_expired":2,"ok":1}"#);
        assert_eq!(parts.usage.input_tokens, 3, "of the completed one");
    }

    #[test]
    fn any_changed_byte_is_found() {
        let (bytes, parts, _) = sample();
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1;
            assert!(SegmentReader::open(parts.name, changed.into(), 3, &parts.sha256).is_err(), "byte {at}");
        }
        assert!(SegmentReader::open(parts.name, bytes.slice(..bytes.len() - 1), 3, &parts.sha256).is_err());
        assert!(SegmentReader::open(parts.name, bytes, 4, &parts.sha256).is_err(), "another number of records");
    }
}
