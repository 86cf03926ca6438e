//! Reads a model folder's tokenizer files.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::huggingface::HuggingFace;
use super::template::Template;
use super::{Encoder, SpecialTokens, Text, TextError};

pub(super) fn load(folder: &Path) -> Result<Text, TextError> {
    let path = folder.join("tokenizer.json");
    let from = path.display().to_string();
    let bytes = read(&path)?.ok_or_else(|| TextError::Load {
        from: folder.display().to_string(),
        what: "there is no tokenizer.json; copy it from the model's repository".to_owned(),
    })?;
    let tokenizer = HuggingFace::from_bytes(&bytes, &from)?;
    let config = read_json(folder, "tokenizer_config.json")?;
    let special = special_tokens(folder, &tokenizer, &config)?;
    let template = match chat_template(folder, &config)? {
        Some((source, from)) => Some(
            Template::parse(source).map_err(|err| TextError::Load { from, what: format!("chat template: {err}") })?,
        ),
        None => None,
    };
    let (pieces, decoding) = tokenizer.pieces();
    Ok(Text { encoder: Encoder::HuggingFace(Box::new(tokenizer)), pieces, decoding, special, template })
}

fn special_tokens(folder: &Path, tokenizer: &HuggingFace, config: &Value) -> Result<SpecialTokens, TextError> {
    let map = read_json(folder, "special_tokens_map.json")?;
    let named = |key: &str| token_content(&config[key]).or_else(|| token_content(&map[key]));
    let bos = named("bos_token").and_then(|text| Some((tokenizer.token_to_id(&text)?, text)));
    let eos_text = named("eos_token");
    let mut eos_ids: BTreeSet<u32> = BTreeSet::new();
    // A model's generation_config lists every end of turn; config.json is the older place.
    let generation = read_json(folder, "generation_config.json")?;
    let listed = token_ids(&generation["eos_token_id"]);
    eos_ids.extend(if listed.is_empty() {
        token_ids(&read_json(folder, "config.json")?["eos_token_id"])
    } else {
        listed
    });
    eos_ids.extend(eos_text.as_deref().and_then(|text| tokenizer.token_to_id(text)));
    let add_bos = bos.as_ref().is_some_and(|(id, _)| tokenizer.adds_first(*id))
        || config["add_bos_token"].as_bool() == Some(true);
    let add_eos = (config["add_eos_token"].as_bool() == Some(true))
        .then(|| eos_text.as_deref().and_then(|text| tokenizer.token_to_id(text)))
        .flatten();
    Ok(SpecialTokens {
        bos,
        unk_text: named("unk_token"),
        pad_text: named("pad_token"),
        eos_text,
        eos_ids: eos_ids.into_iter().collect(),
        add_bos,
        add_eos,
    })
}

/// Whether a model folder has a chat template; its vocabulary is not read.
pub(super) fn has_chat_template(folder: &Path) -> Result<bool, TextError> {
    Ok(chat_template(folder, &read_json(folder, "tokenizer_config.json")?)?.is_some())
}

/// `chat_template.jinja` before the entry of `tokenizer_config.json`; of several named ones, `default`.
fn chat_template(folder: &Path, config: &Value) -> Result<Option<(String, String)>, TextError> {
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read(&path)? {
        let from = path.display().to_string();
        let source = String::from_utf8(bytes)
            .map_err(|_| TextError::Load { from: from.clone(), what: "it is not UTF-8".to_owned() })?;
        return Ok(Some((source, from)));
    }
    let from = folder.join("tokenizer_config.json").display().to_string();
    let source = match &config["chat_template"] {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        _ => None,
    };
    Ok(source.map(|source| (source, from)))
}

fn token_content(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn token_ids(value: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(ids) => ids.iter().filter_map(id).collect(),
        one => id(one).into_iter().collect(),
    }
}

fn read_json(folder: &Path, name: &str) -> Result<Value, TextError> {
    let path = folder.join(name);
    let Some(bytes) = read(&path)? else { return Ok(Value::Null) };
    serde_json::from_slice(&bytes)
        .map_err(|err| TextError::Load { from: path.display().to_string(), what: err.to_string() })
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path: path.to_owned(), source }),
    }
}
