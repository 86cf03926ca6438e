//! Reading a segment, as a whole or one record by two ranges.

use std::ops::Range;

use bytes::Bytes;
use overnight_types::ItemIndex;

use super::{ENTRY_BYTES, FOOTER, FOOTER_END, ItemRecord, LINE, META, RecordMeta, SegmentHead};
use crate::Error;
use crate::layout::ObjectName;
use crate::sha::Sha256;

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
