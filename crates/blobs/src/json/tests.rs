use proptest::prelude::*;

use super::*;

fn accepts(text: &[u8]) -> bool {
    let mut scanner = Scanner::new(text);
    scanner.value().and_then(|_| scanner.end()).is_ok()
}

#[test]
fn scanner_agrees_with_the_grammar() {
    let good = [
        "0",
        "-0",
        "1e999",
        "9007199254740993",
        "-1.5E+3",
        "\"\"",
        "\"\\ud800\"",
        "[]",
        "{}",
        " [1, {\"a\" : [ ] } ] ",
        "{\"a\":1,\"a\":2}",
        "\"\u{7f}\u{2028}\"",
        "null",
        "true",
        "[[[[]]]]",
        "\"\\u0000\"",
    ];
    let bad = [
        "",
        " ",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "-",
        "NaN",
        "nul",
        "\"a",
        "\"\\x\"",
        "\"\\u12g4\"",
        "\"\\u12",
        "\"\n\"",
        "[1,]",
        "[,1]",
        "{\"a\":1,}",
        "{a:1}",
        "{\"a\"}",
        "[1}",
        "{\"a\":1]",
        "1 2",
        "[",
        "{",
        "{\"a\":",
        "'a'",
        "\u{feff}1",
    ];
    good.iter().for_each(|text| assert!(accepts(text.as_bytes()), "{text}"));
    bad.iter().for_each(|text| assert!(!accepts(text.as_bytes()), "{text}"));
}

#[test]
fn nesting_of_any_depth_needs_no_stack() {
    let deep = [vec![b'['; 1 << 20], vec![b']'; 1 << 20]].concat();
    assert!(accepts(&deep));
    assert!(!accepts(&deep[..deep.len() - 1]));
}

// Field report 3.
#[test]
fn byte_order_mark_outside_a_string_is_named() {
    let mut scanner = Scanner::new("{\"a\": \u{feff}1}".as_bytes());
    let fault = scanner.value().unwrap_err();
    assert_eq!(fault.at, 6);
    assert!(fault.what.contains("BOM"), "{}", fault.what);
}

#[test]
fn text_resolves_escapes_and_keeps_lone_surrogates_apart() {
    let text = |token: &'static str| Raw { token: token.as_bytes(), kind: Kind::String }.text().into_owned();
    assert_eq!(text(r#""a\u0041\n\ud83d\ude00\/\\""#), "aA\n\u{1f600}/\\".as_bytes());
    assert_eq!(text(r#""\ud800""#), [0xed, 0xa0, 0x80]);
    assert_eq!(text(r#""\ud800\u0041""#), [0xed, 0xa0, 0x80, b'A']);
    assert_ne!(text(r#""\ud800""#), text(r#""\ud801""#));
    assert_eq!(text(r#""\u0000""#), [0]);
}

proptest! {
    #[test]
    fn scanner_agrees_with_serde_json(text in r#"[\[\]{}:,"0-9a\\ .eE\-]{0,24}"#) {
        let theirs = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
        prop_assert_eq!(accepts(text.as_bytes()), theirs, "{}", text);
    }

    #[test]
    fn string_text_agrees_with_serde_json(text in any::<String>()) {
        let token = serde_json::to_string(&text).unwrap();
        let raw = Raw { token: token.as_bytes(), kind: Kind::String };
        prop_assert_eq!(&*raw.text(), text.as_bytes());
        prop_assert!(accepts(token.as_bytes()));
    }

    #[test]
    fn special_bytes_are_found_at_once(bytes in proptest::collection::vec(any::<u8>(), 0..40), at in 0usize..8) {
        let at = at.min(bytes.len());
        let wanted = bytes[at..].iter().position(|&b| b < 0x20 || b == b'"' || b == b'\\').map_or(bytes.len(), |i| at + i);
        prop_assert_eq!(find_special(&bytes, at), wanted);
    }
}
