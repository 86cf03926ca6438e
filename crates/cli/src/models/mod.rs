//! Models by name: the catalogue, the folder where pulled ones are kept, and finding
//! the folder or file that a name means. Pulling is in [`pull`].
//!
//! Invariant: a model's folder appears under its name only when it is whole and its
//! hashes were compared; what is half pulled lies under `.partial-NAME`.

pub(crate) mod fetch;
mod hub;
mod pip;
pub(crate) mod pull;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::{Config, ModelEntry, ModelFile};
use crate::error::{Exit, Failure, Result};

const CATALOGUE: &str = include_str!("../../../../config/models.toml");
/// Written last into a pulled model's folder.
const MANIFEST: &str = "overnight-model.json";

/// What was pulled, and from where.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PulledModel {
    pub(crate) name: String,
    pub(crate) source: String,
    pub(crate) pulled_at: i64,
    pub(crate) files: Vec<ModelFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Catalogue {
    models: Vec<ModelEntry>,
}

/// Every known entry: the configured ones, then those of the built-in catalogue that
/// they do not replace.
pub(crate) fn entries(config: &Config) -> Vec<ModelEntry> {
    let built_in: Catalogue = toml::from_str(CATALOGUE).expect("the built-in catalogue is valid: a test reads it");
    let mut all = config.models.clone();
    for entry in built_in.models {
        if all.iter().all(|known| known.name != entry.name) {
            all.push(entry);
        }
    }
    all
}

/// A model that is here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// What it is called unless `--served-model-name` says otherwise.
    pub(crate) name: String,
    /// A folder, or a GGUF file.
    pub(crate) path: PathBuf,
}

/// The folder of a pulled model; `/` cannot stand in its name.
pub(crate) fn folder(config: &Config, name: &str) -> PathBuf {
    config.model_dir().join(name.replace('/', "--"))
}

/// What was pulled under a name, when its folder is whole.
pub(crate) fn pulled(config: &Config, name: &str) -> Option<PulledModel> {
    let folder = folder(config, name);
    let model: PulledModel = serde_json::from_slice(&std::fs::read(folder.join(MANIFEST)).ok()?).ok()?;
    let whole = model.files.iter().all(|file| {
        let size = std::fs::metadata(folder.join(&file.name)).map(|meta| meta.len()).ok();
        size.is_some() && (file.bytes.is_none() || file.bytes == size)
    });
    whole.then_some(model)
}

/// Every pulled model.
pub(crate) fn all_pulled(config: &Config) -> Vec<PulledModel> {
    let Ok(entries) = std::fs::read_dir(config.model_dir()) else { return Vec::new() };
    let mut found: Vec<PulledModel> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| !name.starts_with('.'))
        .filter_map(|name| pulled(config, &name))
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Finds the folder or file that `model` means: a configured or catalogued name, a
/// path, or a Hugging Face id that was pulled.
pub(crate) fn find(config: &Config, model: &str) -> Result<Found> {
    let looks_like_path = model.starts_with(['.', '/', '~']) || model.ends_with(".gguf");
    let entry = entries(config).into_iter().find(|entry| entry.name == model && !looks_like_path);
    if let Some(path) = entry.as_ref().and_then(|entry| entry.path.clone()) {
        if !path.exists() {
            return Err(Failure::new(
                Exit::NotFound,
                format!("the model {model} is not at its path: {}", path.display()),
            ));
        }
        return Ok(Found { name: model.to_owned(), path });
    }
    if !looks_like_path && let Some(here) = pulled(config, model) {
        return Ok(Found { name: model.to_owned(), path: load_path(&folder(config, model), &here) });
    }
    let path = Path::new(model);
    if path.exists() {
        refuse_pickle(path)?;
        let name = path.canonicalize().ok().and_then(|path| {
            let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
            name.map(|name| name.to_string_lossy().into_owned())
        });
        return Ok(Found { name: name.unwrap_or_else(|| model.to_owned()), path: path.to_owned() });
    }
    let missing = format!("the model is not here: {model}");
    let failure = Failure::new(Exit::NotFound, missing).code("model_not_found");
    if entry.is_some() || (!looks_like_path && model.split('/').count() == 2) {
        return Err(failure.hint(format!("fetch it with `batch models pull {model}`")));
    }
    Err(failure.hint("give a folder of safetensors, a GGUF file, or a name that `batch models list` shows"))
}

/// Whether chats can be rendered for a model: by its own template, or by that of
/// `engine.chat_template`. `None` when the model is not here, or does not tell.
pub(crate) fn has_chat_template(config: &Config, model: &str) -> Option<bool> {
    if config.engine.source.chat_template.is_some() {
        return Some(true);
    }
    overnight_engine::text::Text::has_template_at(&find(config, model).ok()?.path).ok()
}

/// Why the engine here cannot run the model in this folder; `None` when it can, or when
/// only loading tells.
pub(crate) fn not_served(path: &Path) -> Option<String> {
    let config = std::fs::read(path.join("config.json")).ok()?;
    let config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&config).ok()?;
    overnight_engine::model::config::ModelConfig::from_json(&config).err().map(|err| err.to_string())
}

/// A model of one GGUF file is loaded from that file, any other from its folder.
fn load_path(folder: &Path, model: &PulledModel) -> PathBuf {
    match model.files.as_slice() {
        [one] if one.name.ends_with(".gguf") => folder.join(&one.name),
        _ => folder.to_owned(),
    }
}

fn refuse_pickle(path: &Path) -> Result {
    let pickle = path.extension().is_some_and(|extension| matches!(extension.to_str(), Some("bin" | "pth" | "pt")));
    if path.is_file() && pickle {
        return Err(Failure::new(
            Exit::InvalidInput,
            format!("pickle weights are refused, because loading them runs code from the file: {}", path.display()),
        )
        .hint("use the model's safetensors or GGUF form"));
    }
    Ok(())
}

/// Whether a model's text names a Hugging Face repository.
pub(crate) fn is_hub_id(text: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    matches!(text.split_once('/'), Some((owner, name)) if part(owner) && part(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_catalogue_is_valid_and_fetches_by_hash() {
        let all = entries(&Config::default());
        let names: Vec<&str> = all.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["gemma-3-270m", "all-minilm-l6-v2", "qwen3-0.6b"]);
        for entry in &all {
            assert!(entry.licence.is_some() && !entry.mirrors.is_empty() && !entry.files.is_empty(), "{}", entry.name);
            assert!(entry.files.iter().all(|file| file.sha256.as_ref().is_none_or(|hash| hash.len() == 64)));
        }
    }

    #[test]
    fn name_that_is_not_here_says_how_to_fetch_it() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config { model_dir: Some(folder.path().to_owned()), ..Config::default() };
        let failure = find(&config, "gemma-3-270m").unwrap_err();
        assert!(failure.to_text(false).contains("batch models pull gemma-3-270m"));
        assert!(find(&config, "./nowhere").unwrap_err().to_text(false).contains("batch models list"));
    }

    #[test]
    fn pickle_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pytorch_model.bin");
        std::fs::write(&path, b"x").unwrap();
        let failure = find(&Config::default(), path.to_str().unwrap()).unwrap_err();
        assert!(failure.message().contains("runs code"), "{}", failure.message());
    }

    #[test]
    fn hub_ids_are_told_from_paths() {
        for (text, is) in [("Qwen/Qwen3-0.6B", true), ("a/b/c", false), ("../x", false), ("x", false), ("a/", false)] {
            assert_eq!(is_hub_id(text), is, "{text}");
        }
    }
}
