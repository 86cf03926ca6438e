//! Text handling on a vocabulary of the 256 bytes: every character of more than one byte is cut.

use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::*;

const BOS: u32 = 256;
const EOS: u32 = 257;

/// GPT-2's stand-in of a byte.
fn stand_in(byte: u8) -> char {
    let mut next = 0x100;
    for candidate in 0..=255u8 {
        let printable = matches!(candidate, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { u32::from(candidate) } else { next };
        next += u32::from(!printable);
        if candidate == byte {
            return char::from_u32(code).unwrap();
        }
    }
    unreachable!("every byte is a candidate")
}

fn write_folder(folder: &Path, adds_bos: bool, config: serde_json::Value) {
    let vocabulary: serde_json::Map<_, _> = (0..=255u8).map(|b| (stand_in(b).to_string(), json!(b))).collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let post_processor = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}}});
    let tokenizer = json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "normalizer": null,
        "added_tokens": [special(BOS, "<bos>"), special(EOS, "<eos>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "post_processor": if adds_bos { post_processor } else { serde_json::Value::Null },
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

fn load(adds_bos: bool, config: serde_json::Value) -> Arc<Text> {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), adds_bos, config);
    Arc::new(Text::from_dir(folder.path()).unwrap())
}

fn bytes() -> Arc<Text> {
    load(false, json!({"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}))
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Feeds ids and returns the pieces of text, the end's included.
fn pieces(text: &Arc<Text>, prompt: &[u32], output: &[u32]) -> Vec<String> {
    let mut detokenizer = text.detokenizer(prompt, true);
    let mut pieces: Vec<String> = output.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
    pieces.push(detokenizer.finish());
    pieces
}

// Field reports 16 and 17: sglang#31598, dynamo#12630, PR 2413, exllamav3#171, exo PR 1691, ferrox#124.
#[test]
fn characters_arrive_whole_and_once() {
    let text = bytes();
    for sample in ["日本語テキスト", "👨‍👩‍👧‍👦 and 👍🏽 🇯🇵 1️⃣", "e\u{301} żółć", "\0\u{7f}\u{200d}"]
    {
        let pieces = pieces(&text, &[], &ids(sample));
        assert_eq!(pieces.concat(), sample);
        assert!(pieces.iter().all(|piece| piece.chars().count() <= 1), "{pieces:?}");
    }
}

// Field report 17: what is kept between two tokens is at most one character, so the cost cannot grow.
#[test]
fn detokenizer_keeps_less_than_a_character() {
    let text = bytes();
    let mut detokenizer = text.detokenizer(&[], true);
    for id in ids(&"日👍é".repeat(2_000)) {
        detokenizer.push(id).unwrap();
        assert!(detokenizer.num_pending() < 4);
    }
}

#[test]
fn bytes_that_are_no_text_become_replacement_characters() {
    let text = bytes();
    let output = [0xff, 0xc3, u32::from(b'x'), 0xe6, 0x97];
    assert_eq!(pieces(&text, &[], &output).concat(), "\u{fffd}\u{fffd}x\u{fffd}");
    assert_eq!(text.decode(&output, true).unwrap(), "\u{fffd}\u{fffd}x\u{fffd}");
}

// Field report 15: vllm#48853.
#[test]
fn prompt_that_ends_inside_a_character_does_not_leak() {
    let text = bytes();
    let prompt: Vec<u32> = ids("secret 日").into_iter().take(9).collect();
    // The model finishes the character: it is given out whole, nothing before it is.
    assert_eq!(pieces(&text, &prompt, &[0xa5, u32::from(b'!')]).concat(), "日!");
    // The model goes on with something else: the prompt's half is the prompt's.
    assert_eq!(pieces(&text, &prompt, &ids("ok")).concat(), "ok");
    assert_eq!(pieces(&text, &prompt, &[]).concat(), "");
    assert_eq!(pieces(&text, &ids("whole 日"), &ids("ok")).concat(), "ok");
}

fn run(stop: &[&str], include_stop: bool, min_tokens: u32, output: &str) -> (String, Vec<u32>, Option<usize>) {
    let text = bytes();
    let stop: Vec<String> = stop.iter().map(|stop| (*stop).to_owned()).collect();
    let rules = OutputRules { stop: &stop, include_stop, min_tokens, skip_special_tokens: true };
    let mut state = OutputText::new(&text, &[], rules);
    let (mut shown, mut given) = (String::new(), Vec::new());
    for id in ids(output) {
        given.push(id);
        let step = state.push(id).unwrap();
        shown += &step.text;
        // What a stream has shown and its ids are one and the same at every step.
        let ready = text.decode(&given[..step.num_ready], true).unwrap();
        assert!(step.stop.is_some() || ready == shown, "{ready:?} {shown:?}");
        if let Some(hit) = step.stop {
            given.truncate(hit.num_tokens);
            return (shown, given, Some(hit.index));
        }
    }
    shown += &state.finish();
    (shown, given, None)
}

// Field reports 12 and 13: vllm#3574, #2577, #11089, #57052.
#[test]
fn ids_are_cut_at_the_same_place_as_the_text() {
    for (stop, include, expected) in
        [("END", false, "日本 "), ("END", true, "日本 END"), ("本", false, "日"), ("日", false, "")]
    {
        let (text, kept, hit) = run(&[stop], include, 0, "日本 END after");
        assert_eq!((text.as_str(), hit), (expected, Some(0)));
        assert_eq!(kept, ids(expected), "{stop}");
    }
    let (text, kept, hit) = run(&["END"], false, 0, "日本 EN");
    assert_eq!((text.as_str(), kept, hit), ("日本 EN", ids("日本 EN"), None));
}

#[test]
fn stop_strings_are_looked_for_after_min_tokens() {
    assert_eq!(run(&["a"], false, 2, "aaXa").0, "aaX");
    assert_eq!(run(&["ab"], false, 1, "abXab").0, "abX");
}

// Field report 18: vllm PR 15137, PR 18840.
#[test]
fn decoder_that_is_no_table_of_bytes_is_exact_too() {
    let folder = tempfile::tempdir().unwrap();
    let vocabulary = json!({"[UNK]": 0, "un": 1, "##aff": 2, "##able": 3, "day": 4, ",": 5});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let text = Arc::new(Text::from_dir(folder.path()).unwrap());
    let prompt = text.encode("day unaffable", false).unwrap();
    let output = text.encode("unaffable, day unaffable", false).unwrap();
    let all: Vec<u32> = prompt.iter().chain(&output).copied().collect();
    let whole = text.decode(&all, true).unwrap();
    let shown = pieces(&text, &prompt, &output).concat();
    assert_eq!(text.decode(&prompt, true).unwrap() + &shown, whole);
    assert!(matches!(text.detokenizer(&[], true).push(6), Err(TextError::UnknownToken { id: 6, .. })));
}

// Field report 41: vllm PR 16976, #27486, PR 27515, PR 55288, #55197; sglang PR 888; InfiniLM#388.
#[test]
fn bos_stands_exactly_once_whoever_adds_it() {
    let named = json!({"bos_token": "<bos>"});
    let flagged = json!({"bos_token": "<bos>", "add_bos_token": true});
    for text in [load(true, named.clone()), load(false, flagged.clone()), load(true, flagged)] {
        assert_eq!(text.encode("a", true).unwrap(), [BOS, 97]);
        assert_eq!(text.encode("<bos>a", true).unwrap(), [BOS, 97]);
        assert_eq!(text.encode("<bos>a", false).unwrap(), [BOS, 97]);
        assert_eq!(text.encode("a", false).unwrap(), [97]);
        // Two that the caller wrote are the caller's, further in.
        assert_eq!(text.encode("a<bos><bos>", true).unwrap(), [BOS, 97, BOS, BOS]);
    }
    assert_eq!(load(false, named).encode("a", true).unwrap(), [97]);
}

#[test]
fn truncation_of_a_tokenizer_file_never_cuts_a_prompt() {
    assert_eq!(bytes().encode("abcdefgh", false).unwrap(), ids("abcdefgh"));
}

#[test]
fn special_tokens_are_left_out_of_text_only_when_asked() {
    let text = bytes();
    assert_eq!(text.decode(&[97, EOS, 98], true).unwrap(), "ab");
    assert_eq!(text.decode(&[97, EOS, 98], false).unwrap(), "a<eos>b");
    assert_eq!(text.eos_token_ids(), [EOS]);
    assert!(matches!(text.decode(&[258], false), Err(TextError::UnknownToken { id: 258, vocab_size: 258 })));
}

#[test]
fn eos_ids_come_from_every_file_that_names_them() {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), false, json!({"eos_token": "<eos>"}));
    std::fs::write(folder.path().join("config.json"), r#"{"eos_token_id": 9}"#).unwrap();
    assert_eq!(Text::from_dir(folder.path()).unwrap().eos_token_ids(), [9, EOS]);
    std::fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [3, 1]}"#).unwrap();
    assert_eq!(Text::from_dir(folder.path()).unwrap().eos_token_ids(), [1, 3, EOS]);
}

// `<s>` and `</s>` are tags of HTML in Gemma's vocabulary, of kind "user defined".
#[test]
fn only_control_tokens_end_a_turn_by_their_name() {
    use super::sentencepiece::TokenKind::{Control, Normal, UserDefined};
    use super::vocabulary::ends_turn;
    assert!(ends_turn(Control, "</s>") && ends_turn(Control, "<end_of_turn>"));
    assert!(!ends_turn(UserDefined, "</s>") && !ends_turn(Normal, "</s>") && !ends_turn(Control, "<s>"));
}

#[test]
fn pieces_of_a_sentencepiece_vocabulary_have_blanks_and_bytes() {
    use super::huggingface::Alphabet::SentencePiece;
    use super::sentencepiece::TokenKind::{Byte, Control, Normal, UserDefined};
    use super::vocabulary::piece;
    let piece = |kind, token| String::from_utf8(piece(SentencePiece, kind, token)).unwrap();
    assert_eq!((piece(Normal, "▁x"), piece(UserDefined, "▁▁")), (" x".to_owned(), "  ".to_owned()));
    assert_eq!((piece(Byte, "<0x41>"), piece(UserDefined, "<0x41>")), ("A".to_owned(), "<0x41>".to_owned()));
    assert_eq!(piece(Control, "<a▁b>"), "<a▁b>");
}

#[test]
fn damaged_tokenizer_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Text::from_dir(folder.path()).unwrap_err().to_string();
    assert!(missing.contains("no tokenizer.json"), "{missing}");
    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let damaged = Text::from_dir(folder.path()).unwrap_err().to_string();
    assert!(damaged.contains("tokenizer.json is not usable"), "{damaged}");
    write_folder(folder.path(), false, json!({"chat_template": "{% if %}"}));
    let template = Text::from_dir(folder.path()).unwrap_err().to_string();
    assert!(template.contains("chat template"), "{template}");
}
