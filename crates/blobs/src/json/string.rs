//! The inside of a JSON string: where it stops being plain, and what its escapes say.

/// First byte from `at` on that is a quote, a backslash or a control character.
#[inline]
pub(super) fn find_special(text: &[u8], mut at: usize) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    // Marks with its high bit each zero byte of `x`; bytes above the first mark may be marked wrongly.
    let zero = |x: u64| x.wrapping_sub(ONES) & !x & HIGH;
    while let Some(word) = text.get(at..at + 8) {
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        let control = word.wrapping_sub(ONES * 0x20) & !word & HIGH;
        let marks = zero(word ^ (ONES * u64::from(b'"'))) | zero(word ^ (ONES * u64::from(b'\\'))) | control;
        if marks != 0 {
            return at + marks.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    while text.get(at).is_some_and(|&byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        at += 1;
    }
    at
}

/// Resolves the escapes of a string's inside, which must be well formed.
pub(super) fn decode(inside: &[u8]) -> std::borrow::Cow<'_, [u8]> {
    let Some(first) = memchr::memchr(b'\\', inside) else { return std::borrow::Cow::Borrowed(inside) };
    let mut out = Vec::with_capacity(inside.len());
    out.extend_from_slice(&inside[..first]);
    let mut rest = &inside[first..];
    while let [byte, after @ ..] = rest {
        if *byte != b'\\' {
            let end = memchr::memchr(b'\\', rest).unwrap_or(rest.len());
            out.extend_from_slice(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        let (plain, used) = match after.first() {
            Some(b'b') => (Some(8), 1),
            Some(b'f') => (Some(12), 1),
            Some(b'n') => (Some(b'\n'), 1),
            Some(b'r') => (Some(b'\r'), 1),
            Some(b't') => (Some(b'\t'), 1),
            Some(b'u') => (None, decode_unit(after, &mut out)),
            other => (other.copied(), 1),
        };
        out.extend(plain);
        rest = after.get(used..).unwrap_or(&[]);
    }
    std::borrow::Cow::Owned(out)
}

/// Writes the character of `u….` (with the `\u….` that follows, if both make a
/// pair) and says how many bytes it took.
fn decode_unit(after: &[u8], out: &mut Vec<u8>) -> usize {
    let unit = |text: Option<&[u8]>| -> Option<u32> { u32::from_str_radix(std::str::from_utf8(text?).ok()?, 16).ok() };
    let first = unit(after.get(1..5)).unwrap_or(0xfffd);
    if (0xd800..0xdc00).contains(&first)
        && after.get(5..7) == Some(b"\\u")
        && let Some(second) = unit(after.get(7..11)).filter(|second| (0xdc00..0xe000).contains(second))
    {
        push_code_point(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00), out);
        return 11;
    }
    push_code_point(first, out);
    5
}

/// UTF-8, extended to surrogates in the obvious way.
fn push_code_point(code: u32, out: &mut Vec<u8>) {
    match char::from_u32(code) {
        Some(char) => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        None => out.extend([0xe0 | (code >> 12) as u8, 0x80 | (code >> 6 & 0x3f) as u8, 0x80 | (code & 0x3f) as u8]),
    }
}
