//! A tokenizer for the toy: an id per character, so that any text is several tokens.

use std::path::Path;
use std::sync::Arc;

use overnight_engine::text::Text;
use serde_json::json;

use crate::toy::{EOS, VOCAB};

pub(crate) fn text() -> Arc<Text> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_tokenizer(folder.path());
    Arc::new(Text::from_dir(folder.path()).expect("a good tokenizer"))
}

/// Ids 0…93 are `!` to `~`, 94 a space, 95 the first byte of `é`, 96 the end.
pub(crate) fn write_tokenizer(folder: &Path) {
    let mut vocab = serde_json::Map::new();
    for (id, character) in ('!'..='~').enumerate() {
        vocab.insert(character.to_string(), json!(id));
    }
    vocab.insert("Ġ".to_owned(), json!(94));
    vocab.insert("Ã".to_owned(), json!(95));
    vocab.insert("<eos>".to_owned(), json!(EOS));
    assert_eq!(vocab.len() as u32, VOCAB);
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let eos = json!({
        "id": EOS, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [eos], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []
        }
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("written");
}

/// The id of a printable character.
pub(crate) fn id(character: char) -> u32 {
    if character == ' ' { 94 } else { u32::from(character) - u32::from('!') }
}
