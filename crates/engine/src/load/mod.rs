//! From a folder or file to a model that can compute.
//!
//! Rules: safetensors, single or sharded with an index, and GGUF are read; pickle files never
//! are, because opening one runs the code in it. `tie_word_embeddings` decides whether the
//! embedding is the head, also where a `lm_head` is there. Tensors may carry the prefix
//! `model.`, `model.language_model.`, `language_model.model.` or none. Whatever else is
//! missing, double, left over or of a wrong shape is an error that names file and tensor.

mod assemble;
mod dummy;
mod folder;
mod gguf_weights;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::Error;
use crate::config::EngineConfig;
use crate::cpu::{CacheType, CpuModel, Weights};
use crate::gguf::Gguf;
use crate::model::Forward;
use crate::model::config::{ConfigError, ModelConfig, token_ids};
use crate::text::Text;

/// Where a model lies and how to read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSource {
    /// A folder of safetensors or a GGUF file.
    pub path: PathBuf,
    /// How to read it.
    pub load_format: LoadFormat,
}

/// `--load-format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadFormat {
    /// By what is there: a file is GGUF, a folder safetensors.
    #[default]
    Auto,
    /// A folder of safetensors.
    Safetensors,
    /// A GGUF file.
    Gguf,
    /// Seeded random weights by config.json; tokenizer files from the same folder.
    Dummy,
}

impl std::str::FromStr for LoadFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "safetensors" => Ok(Self::Safetensors),
            "gguf" => Ok(Self::Gguf),
            "dummy" => Ok(Self::Dummy),
            other => Err(format!("load format {other:?}; auto, safetensors, gguf and dummy are known")),
        }
    }
}

/// A model that can compute, and its text side.
pub struct Loaded {
    /// Computes steps.
    pub forward: Box<dyn Forward>,
    /// Tokenizes and renders.
    pub text: Arc<Text>,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded").field("shape", self.forward.shape()).finish_non_exhaustive()
    }
}

/// Loads a model onto the CPU, with its tokenizer.
///
/// Errors with [`Error::Read`], [`Error::Model`], [`Error::Text`] or [`Error::Unsupported`], each
/// naming the file and what is wrong with it.
pub fn load(source: &ModelSource, config: &EngineConfig) -> Result<Loaded, Error> {
    let path = source.path.as_path();
    let text = |source| Error::Text { path: path.to_owned(), source };
    let (model, text) = match read(source, config.seed)? {
        Read::Folder(read) => (read, Text::from_dir(path).map_err(text)?),
        Read::Gguf(read, gguf) => (read, Text::from_gguf(&gguf).map_err(text)?),
    };
    // Heads are often padded; ids beyond the tokenizer's are no tokens.
    let vocab_size = text.vocab_size();
    Ok(Loaded { forward: Box::new(model.into_cpu(vocab_size, config)?), text: Arc::new(text) })
}

/// Loads the weights alone. Every row of the head counts as a token.
pub fn load_forward(source: &ModelSource, config: &EngineConfig) -> Result<Box<dyn Forward>, Error> {
    Ok(Box::new(load_cpu(source, config)?))
}

pub(crate) fn load_cpu(source: &ModelSource, config: &EngineConfig) -> Result<CpuModel, Error> {
    match read(source, config.seed)? {
        Read::Folder(model) | Read::Gguf(model, _) => model.into_cpu(u32::MAX, config),
    }
}

enum Read {
    Folder(Model),
    Gguf(Model, Gguf),
}

/// Weights with the configuration that they follow.
pub(crate) struct Model {
    config: ModelConfig,
    weights: Weights,
    cache_type: CacheType,
}

impl Model {
    pub(crate) fn into_cpu(self, vocab_size: u32, config: &EngineConfig) -> Result<CpuModel, Error> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = config.num_threads.map_or_else(cores, |threads| threads as usize).clamp(1, MAX_THREADS);
        CpuModel::new(self.config, self.weights, self.cache_type, vocab_size, threads)
    }
}

/// More threads than this only wait for memory.
const MAX_THREADS: usize = 256;

fn read(source: &ModelSource, seed: u64) -> Result<Read, Error> {
    let path = source.path.as_path();
    let metadata = std::fs::metadata(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let wrong = |what: &str| Err(Error::Model { path: path.to_owned(), what: what.to_owned() });
    match (source.load_format, metadata.is_dir()) {
        (LoadFormat::Auto | LoadFormat::Gguf, false) => {
            let gguf = open_gguf(path)?;
            Ok(Read::Gguf(gguf_weights::read(&gguf)?, gguf))
        }
        (LoadFormat::Auto | LoadFormat::Safetensors, true) => {
            let config = read_config(path)?;
            Ok(Read::Folder(folder::read(path, config)?))
        }
        (LoadFormat::Dummy, true) => Ok(Read::Folder(dummy::model(read_config(path)?, seed))),
        (LoadFormat::Safetensors | LoadFormat::Dummy, false) => wrong("it is a file; this load format needs a folder"),
        (LoadFormat::Gguf, true) => wrong("it is a folder; the load format gguf needs the file itself"),
    }
}

fn open_gguf(path: &Path) -> Result<Gguf, Error> {
    if let Some(reason) = folder::pickle_reason(path) {
        return Err(Error::Unsupported(reason));
    }
    Gguf::open(path)
}

/// Reads config.json, and generation_config.json for the tokens that end a sequence.
fn read_config(folder: &Path) -> Result<ModelConfig, Error> {
    let path = folder.join("config.json");
    let object = read_object(&path)?;
    let mut config = ModelConfig::from_json(&object).map_err(|error| match error {
        ConfigError::Wrong(what) => Error::Model { path: path.clone(), what },
        ConfigError::Unsupported(what) => Error::Unsupported(format!("{what} ({})", path.display())),
    })?;
    let generation = folder.join("generation_config.json");
    if generation.exists() {
        let ids = token_ids(read_object(&generation)?.get("eos_token_id"));
        if !ids.is_empty() {
            config.eos_token_ids = ids;
        }
    }
    Ok(config)
}

fn read_object(path: &Path) -> Result<Map<String, Value>, Error> {
    let bytes = std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Error::Model { path: path.to_owned(), what: "it is not a JSON object".to_owned() }),
        Err(error) => Err(Error::Model { path: path.to_owned(), what: format!("it is not valid JSON: {error}") }),
    }
}
