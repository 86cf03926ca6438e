//! Token ids against goldens of the reference tokenizers (goldens/text/make_tokens.py).

mod fetched;

use std::path::PathBuf;
use std::sync::Arc;

use overnight_engine::gguf::Gguf;
use overnight_engine::text::{OutputRules, OutputText, Text};
use serde::Deserialize;

use fetched::fetched;

#[derive(Deserialize)]
struct Golden {
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

fn goldens(family: &str) -> Vec<Golden> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/goldens/text/{family}_tokens.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn from_folder(family: &str) -> Option<Arc<Text>> {
    Some(Arc::new(Text::from_dir(&fetched("tokenizers", "OVERNIGHT_TEST_TOKENIZERS", family)?).unwrap()))
}

#[track_caller]
fn assert_matches_goldens(text: &Arc<Text>, family: &str) {
    for golden in goldens(family) {
        assert_eq!(text.encode(&golden.text, false).unwrap(), golden.ids, "{:?}", golden.text);
        assert_eq!(text.decode(&golden.ids, false).unwrap(), golden.decoded, "{:?}", golden.text);
        let mut output = OutputText::new(text, &[], OutputRules::default());
        let mut pieces: String = golden.ids.iter().map(|id| output.push(*id).unwrap().text).collect();
        pieces += &output.finish();
        assert_eq!(pieces, golden.decoded, "piece by piece");
    }
}

#[test]
fn gemma3_ids_equal_the_reference() {
    let Some(text) = from_folder("gemma3") else { return };
    assert_matches_goldens(&text, "gemma3");
    assert_eq!(text.eos_token_ids(), [106]);
}

#[test]
fn qwen3_ids_equal_the_reference() {
    let Some(text) = from_folder("qwen3") else { return };
    assert_matches_goldens(&text, "qwen3");
}

#[test]
fn llama3_ids_equal_the_reference() {
    let Some(text) = from_folder("llama3") else { return };
    assert_matches_goldens(&text, "llama3");
}

#[test]
fn gguf_vocabulary_gives_the_ids_of_the_tokenizer_file() {
    let Some(path) = fetched("model", "OVERNIGHT_TEST_GGUF", "") else { return };
    let text = Arc::new(Text::from_gguf(&Gguf::open(&path).unwrap()).unwrap());
    assert_matches_goldens(&text, "gemma3");
    // Field report 42: without its BOS, Gemma's output is garbage.
    assert_eq!(text.encode("Hi", true).unwrap()[0], 2);
    assert_eq!(text.encode("<bos>Hi", true).unwrap(), text.encode("Hi", true).unwrap());
    // `</s>` (212) is a tag of HTML in this vocabulary, not an end.
    assert_eq!(text.eos_token_ids(), [1, 106]);
}
