//! Lone surrogates in JSON escapes, which other languages write and Rust's strings cannot hold.

use std::borrow::Cow;

use memchr::memmem;

/// Replaces the escape of every lone surrogate by that of U+FFFD, for this body only.
/// Borrows when there is nothing to replace. What is no JSON is left to the parser.
pub(super) fn replace_lone(body: &[u8]) -> Cow<'_, [u8]> {
    if memmem::find(body, b"\\ud").is_none() && memmem::find(body, b"\\uD").is_none() {
        return Cow::Borrowed(body);
    }
    let mut fixed = Cow::Borrowed(body);
    let mut at = 0;
    while let Some(found) = memchr::memchr(b'\\', &body[at..]) {
        at += found;
        match surrogate(body, at) {
            Some(Half::High) if matches!(surrogate(body, at + 6), Some(Half::Low)) => at += 12,
            Some(_) => {
                fixed.to_mut()[at..at + 6].copy_from_slice(b"\\ufffd");
                at += 6;
            }
            None => at += 2,
        }
        if at >= body.len() {
            break;
        }
    }
    fixed
}

#[derive(Clone, Copy)]
enum Half {
    High,
    Low,
}

fn surrogate(body: &[u8], at: usize) -> Option<Half> {
    let escape = body.get(at..at + 6)?;
    let hex = escape.strip_prefix(b"\\u").filter(|hex| hex.iter().all(u8::is_ascii_hexdigit))?;
    match u16::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()? {
        0xd800..=0xdbff => Some(Half::High),
        0xdc00..=0xdfff => Some(Half::Low),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn parsed(json: &str) -> String {
        serde_json::from_slice(&replace_lone(json.as_bytes())).unwrap()
    }

    #[test]
    fn lone_surrogates_become_replacement_characters_and_pairs_stay() {
        assert_eq!(parsed(r#""a\ud83d""#), "a\u{fffd}");
        assert_eq!(parsed(r#""\ude00a\ud83dA\ud83d""#), "\u{fffd}a\u{fffd}A\u{fffd}");
        assert_eq!(parsed(r#""\ud83d\ude00 \uD83D\uDE00""#), "😀 😀");
        assert_eq!(parsed(r#""\ud83d\ud83d\ude00""#), "\u{fffd}😀");
        // An escaped backslash before a "u" is no escape.
        assert_eq!(parsed(r#""\\ud83d \u0000 \\\ud83d""#), "\\ud83d \0 \\\u{fffd}");
    }

    #[test]
    fn cut_bodies_are_left_to_the_parser() {
        for body in ["\\", "\\u", "\\ud", "\\ud83d", "\\ud83d\\", "\\ud8", "\\udzzz"] {
            assert_eq!(replace_lone(body.as_bytes()).len(), body.len());
        }
    }
}
