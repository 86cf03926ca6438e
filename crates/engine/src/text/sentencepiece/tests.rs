//! Merges, bytes, tokens taken whole, blanks.

use super::*;

fn toy(tokens: &[(&str, f32, TokenKind)], add_space_prefix: bool) -> SentencePiece {
    let texts: Vec<String> = tokens.iter().map(|(text, ..)| (*text).to_owned()).collect();
    let scores: Vec<f32> = tokens.iter().map(|(_, score, _)| *score).collect();
    let kinds: Vec<TokenKind> = tokens.iter().map(|(.., kind)| *kind).collect();
    SentencePiece::new(&texts, &scores, &kinds, Some(0), add_space_prefix).unwrap()
}

use TokenKind::{Byte, Control, Normal, Unknown, UserDefined};

#[test]
fn best_score_is_joined_first_and_the_leftmost_of_equals() {
    let tokens = [
        ("<unk>", 0.0, Unknown),
        ("a", -9.0, Normal),
        ("b", -9.0, Normal),
        ("aa", -1.0, Normal),
        ("ab", -0.5, Normal),
        ("aab", -3.0, Normal),
    ];
    let table = toy(&tokens, false);
    assert_eq!(table.encode("aab"), [5]);
    assert_eq!(table.encode("aaa"), [3, 1]);
    assert_eq!(table.encode("aaab"), [3, 4]);
}

#[test]
fn characters_that_are_no_token_become_bytes_or_the_unknown_token() {
    let tokens = [
        ("<unk>", 0.0, Unknown),
        ("é!", -1.0, Normal),
        ("<0xC3>", 0.0, Byte),
        ("<0xA9>", 0.0, Byte),
        ("<0x0A>", 0.0, Byte),
    ];
    let table = toy(&tokens, false);
    // "é" and "!" are no tokens by themselves, yet their join is.
    assert_eq!(table.encode("é!é"), [1, 2, 3]);
    assert_eq!(table.encode("\n✓"), [4, 0, 0, 0]);
}

#[test]
fn special_tokens_are_taken_whole_and_the_longest_wins() {
    let tokens = [
        ("<unk>", 0.0, Unknown),
        ("▁", -1.0, Normal),
        ("x", -1.0, Normal),
        ("▁x", -0.5, Normal),
        ("<s>", 0.0, Control),
        ("  ", 0.0, UserDefined),
        ("   ", 0.0, UserDefined),
    ];
    let table = toy(&tokens, true);
    assert_eq!(table.encode("x<s>x x"), [3, 4, 3, 3]);
    assert_eq!(table.encode("x   x"), [3, 6, 3]);
    assert_eq!(toy(&tokens, false).encode("x   x<s>x"), [2, 6, 2, 4, 2]);
}

#[test]
fn written_out_blank_is_a_blank_wherever_it_stands() {
    // A run is in the file as blanks or as `▁`, by who made it.
    for (two, three) in [("  ", "   "), ("▁▁", "▁▁▁")] {
        let tokens = [
            ("<unk>", 0.0, Unknown),
            ("▁", -9.0, Normal),
            ("x", -9.0, Normal),
            ("▁x", -1.0, Normal),
            (two, -1000.0, UserDefined),
            (three, -1000.0, UserDefined),
        ];
        let table = toy(&tokens, false);
        for text in ["▁ x", " ▁x", "  x"] {
            assert_eq!(table.encode(text), [4, 2], "{text:?}");
        }
        assert_eq!(table.encode("▁x x▁x"), [3, 3, 3]);
        assert_eq!(table.encode(" ▁ ▁x"), [5, 3]);
        assert_eq!(table.encode("x ▁ ▁ "), [2, 5, 4]);
        // As the reference does: a run that is written out is a token before blanks are looked at.
        assert_eq!(table.encode("▁▁ x"), [4, 3]);
        assert_eq!(toy(&tokens, true).encode("x ▁"), [3, 4]);
    }
}

#[test]
fn token_with_an_inner_blank_is_found() {
    let tokens = [
        ("<unk>", 0.0, Unknown),
        (">", -9.0, Normal),
        ("▁", -9.0, Normal),
        ("<", -9.0, Normal),
        ("▁<", -2.0, Normal),
        (">▁<", -3.0, Normal),
        ("a", -9.0, Normal),
    ];
    assert_eq!(toy(&tokens, false).encode("a> <a <"), [6, 5, 6, 4]);
}
