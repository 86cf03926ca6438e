//! Splits input bytes into lines: at `\n` only, a `\r` before it dropped, one
//! leading UTF-8 byte order mark stripped, blank lines counted.
//!
//! Chunk edges may fall anywhere, also inside a character. A line longer than the
//! limit is reported and passed over in constant memory. Line numbers are physical,
//! from 1; offsets are bytes of the whole input.

use std::ops::{ControlFlow, Range};

/// The UTF-8 byte order mark.
pub const BOM: &[u8] = b"\xef\xbb\xbf";
/// Bytes beside a line's content that may be held: mark and `\r`.
const SLACK: u64 = 4;

/// One physical line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line<'a> {
    /// From 1.
    pub number: u64,
    /// Of its first byte in the input, a byte order mark included.
    pub offset: u64,
    /// Of the byte after its newline, or of the input's end.
    pub end: u64,
    /// Without newline, the `\r` before it and a leading byte order mark;
    /// `None` when longer than the limit.
    pub content: Option<&'a [u8]>,
}

impl Line<'_> {
    /// Whether it holds only spaces, tabs or `\r`: counted, but no item.
    pub fn is_blank(&self) -> bool {
        self.content.is_some_and(is_blank)
    }

    /// Where the content starts in the input.
    pub fn content_offset(&self) -> u64 {
        match self.content {
            Some(content) if self.number == 1 && self.end - self.offset >= content.len() as u64 + BOM.len() as u64 => {
                self.offset + BOM.len() as u64
            }
            _ => self.offset,
        }
    }
}

/// Whether content holds only spaces, tabs or `\r`.
pub fn is_blank(content: &[u8]) -> bool {
    // Nearly every line starts with a brace, so this looks at one byte.
    content.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r'))
}

/// Splits bytes that come in chunks.
#[derive(Debug)]
pub struct LineSplitter {
    line_bytes_max: u64,
    /// Number and offset of the line that comes next or is under way.
    number: u64,
    offset: u64,
    /// Of the next byte to be fed.
    at: u64,
    /// Head of the line under way, when a chunk ended inside it.
    held: Vec<u8>,
    /// The line under way is over the limit: its bytes are passed over.
    too_long: bool,
}

impl LineSplitter {
    /// From the start of the input.
    pub fn new(line_bytes_max: u64) -> Self {
        Self::starting_at(0, 1, line_bytes_max)
    }

    /// From a line's first byte in mid-input.
    pub fn starting_at(offset: u64, number: u64, line_bytes_max: u64) -> Self {
        Self { line_bytes_max, number, offset, at: offset, held: Vec::new(), too_long: false }
    }

    /// Offset and number of the line that follows the last one that was given out.
    pub fn position(&self) -> (u64, u64) {
        (self.offset, self.number)
    }

    /// Takes a chunk and gives out each line that ends in it, until `on_line`
    /// breaks. Returns how many bytes were taken: after a break they end with the
    /// line that was given out last.
    pub fn feed(&mut self, chunk: &[u8], mut on_line: impl FnMut(Line<'_>) -> ControlFlow<()>) -> usize {
        let mut taken = 0;
        while let Some(newline) = memchr::memchr(b'\n', &chunk[taken..]) {
            let head = &chunk[taken..taken + newline];
            taken += newline + 1;
            self.at += newline as u64 + 1;
            if self.end_line(head, &mut on_line).is_break() {
                return taken;
            }
        }
        self.at += (chunk.len() - taken) as u64;
        self.hold(&chunk[taken..]);
        chunk.len()
    }

    /// Gives out the last line when it lacks its newline.
    pub fn finish(&mut self, mut on_line: impl FnMut(Line<'_>)) {
        if self.at > self.offset {
            let _ = self.end_line(&[], &mut |line: Line<'_>| {
                on_line(line);
                ControlFlow::Continue(())
            });
        }
    }

    fn end_line(&mut self, head: &[u8], on_line: &mut impl FnMut(Line<'_>) -> ControlFlow<()>) -> ControlFlow<()> {
        let whole = if self.held.is_empty() && !self.too_long {
            Some(head)
        } else {
            self.hold(head);
            (!self.too_long).then_some(self.held.as_slice())
        };
        let content = whole.map(|whole| trim(whole, self.number == 1));
        let content = content.filter(|content| content.len() as u64 <= self.line_bytes_max);
        let flow = on_line(Line { number: self.number, offset: self.offset, end: self.at, content });
        self.held.clear();
        self.too_long = false;
        self.number += 1;
        self.offset = self.at;
        flow
    }

    fn hold(&mut self, bytes: &[u8]) {
        if self.too_long || (self.held.len() + bytes.len()) as u64 > self.line_bytes_max.saturating_add(SLACK) {
            self.too_long = true;
            // The room of a huge line is not kept for the small ones after it.
            self.held = Vec::new();
        } else {
            self.held.extend_from_slice(bytes);
        }
    }
}

fn trim(line: &[u8], first: bool) -> &[u8] {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if first { line.strip_prefix(BOM).unwrap_or(line) } else { line }
}

/// The items of a shard, given all its bytes: its lines that are not blank.
///
/// `byte_offset` and `first_line` are the shard's. A BOM is stripped only at the
/// start of the input.
pub fn items(bytes: &[u8], byte_offset: u64, first_line: u64) -> impl Iterator<Item = Line<'_>> {
    let mut rest = bytes;
    let (mut offset, mut number) = (byte_offset, first_line);
    let next_line = move || {
        if rest.is_empty() {
            return None;
        }
        let (head, used) = match memchr::memchr(b'\n', rest) {
            Some(newline) => (&rest[..newline], newline + 1),
            None => (rest, rest.len()),
        };
        rest = &rest[used..];
        let content = Some(trim(head, number == 1 && offset == 0));
        let line = Line { number, offset, end: offset + used as u64, content };
        (number, offset) = (number + 1, line.end);
        Some(line)
    };
    std::iter::from_fn(next_line).filter(|line| !line.is_blank())
}

/// Cuts a range into pieces of at most `piece_bytes`.
pub(crate) fn pieces(range: Range<u64>, piece_bytes: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let mut next = range.start;
    std::iter::from_fn(move || {
        let start = next;
        next = range.end.min(start.saturating_add(piece_bytes));
        (start < next).then_some(start..next)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Owned = (u64, u64, u64, Option<Vec<u8>>);

    fn split(input: &[u8], edges: &[usize], max: u64) -> Vec<Owned> {
        let mut lines = Vec::new();
        let mut splitter = LineSplitter::new(max);
        let mut keep =
            |line: Line<'_>| lines.push((line.number, line.offset, line.end, line.content.map(<[u8]>::to_vec)));
        let mut start = 0;
        for &edge in edges.iter().chain([&input.len()]) {
            let mut chunk = &input[start..edge];
            while !chunk.is_empty() {
                // Breaks after each line: the rest of the chunk is fed again.
                let taken = splitter.feed(chunk, |line| {
                    keep(line);
                    ControlFlow::Break(())
                });
                chunk = &chunk[taken..];
            }
            start = edge;
        }
        splitter.finish(&mut keep);
        lines
    }

    fn contents(input: &[u8]) -> Vec<Vec<u8>> {
        split(input, &[], 100).into_iter().map(|line| line.3.unwrap()).collect()
    }

    // Field reports 1, 4 and 17.
    #[test]
    fn only_newline_ends_a_line() {
        assert_eq!(contents(b"\xef\xbb\xbfa\r\n\nb\rc\n"), [&b"a"[..], b"", b"b\rc"]);
        assert_eq!(contents("x\u{2028}y\u{2029}z\u{85}\u{c}\u{b}w".as_bytes()).len(), 1);
        assert_eq!(contents(b"a\n\xef\xbb\xbfb"), [&b"a"[..], b"\xef\xbb\xbfb"], "a mark in mid-file is a character");
        assert_eq!(contents(b"a\r\r\n"), [b"a\r"], "one carriage return is dropped");
        assert!(contents(b"").is_empty());
        assert_eq!(contents(b"\n\n").len(), 2);
    }

    #[test]
    fn line_at_the_limit_is_whole_and_one_byte_more_is_not() {
        for (len, whole) in [(7, true), (8, true), (9, false), (30, false)] {
            for prefix in [&b""[..], BOM] {
                let input = [prefix, &vec![b'x'; len], b"\r\nnext"].concat();
                for edge in 0..input.len() {
                    let lines = split(&input, &[edge], 8);
                    assert_eq!(lines[0].3.is_some(), whole, "{len} bytes, chunk edge {edge}");
                    assert_eq!(lines[1], (2, input.len() as u64 - 4, input.len() as u64, Some(b"next".to_vec())));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn chunk_edges_change_nothing(
            input in proptest::collection::vec(prop_oneof![
                Just(b'\n'), Just(b'\r'), Just(b'a'), Just(0xef), Just(0xbb), Just(0xbf), Just(b' ')
            ], 0..60),
            edges in proptest::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut edges: Vec<usize> = edges.iter().map(|edge| edge.index(input.len() + 1)).collect();
            edges.sort_unstable();
            let whole = split(&input, &[], 5);
            prop_assert_eq!(&split(&input, &edges, 5), &whole);
            let ends: Vec<u64> = whole.iter().map(|line| line.2).collect();
            prop_assert_eq!(ends.last().copied().unwrap_or(0), input.len() as u64);
            let unlimited = split(&input, &edges, 1_000);
            let items: Vec<Owned> =
                items(&input, 0, 1).map(|line| (line.number, line.offset, line.end, line.content.map(<[u8]>::to_vec))).collect();
            let wanted: Vec<Owned> = unlimited.into_iter().filter(|line| !is_blank(line.3.as_ref().unwrap())).collect();
            prop_assert_eq!(items, wanted);
        }
    }
}
