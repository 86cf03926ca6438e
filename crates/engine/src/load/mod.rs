//! From a folder or file to a model that can compute.
//!
//! Rules: safetensors, single or sharded with an index, and GGUF are read; pickle files never
//! are, because opening one runs the code in it. `tie_word_embeddings` decides whether the
//! embedding is the head, also where a `lm_head` is there. Tensors may carry the prefix
//! `model.`, `model.language_model.`, `language_model.model.` or none. Whatever else is
//! missing, double, left over or of a wrong shape is an error that names file and tensor.

pub(crate) mod assemble;
mod dummy;
mod folder;
mod gguf_weights;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::Error;
use crate::config::{DeviceKind, EngineConfig};
use crate::cpu::{CacheType, CpuModel, Weights};
use crate::cuda::{CudaModel, DeviceOptions};
use crate::gguf::Gguf;
use crate::load::assemble::Source;
use crate::model::Forward;
use crate::model::config::{ConfigError, ModelConfig, token_ids};
use crate::running::Alive;
use crate::text::Text;

/// How long `auto` waits for memory of the GPU that others hold, before it takes the CPU.
const BUSY_WAIT: Duration = Duration::from_secs(3);

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
    /// Where it computes, for people: `the CPU`, `NVIDIA H200`.
    pub device: String,
    /// The same for a setting: what `auto` has come to.
    pub device_kind: DeviceKind,
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
    let forward = Box::new(model.into_cpu(vocab_size, config)?);
    Ok(Loaded { forward, text: Arc::new(text), device: "the CPU".to_owned(), device_kind: DeviceKind::Cpu })
}

/// Loads a model onto the device that `config.device` names, with its tokenizer. `auto` takes the
/// GPU when one is usable for this model, with its libraries and the memory that others leave, and
/// logs why not when none is.
/// Errors as [`load`], and when the GPU was asked for or fails while it is filled with
/// [`Error::Device`] or [`Error::Busy`].
pub fn load_on(source: &ModelSource, config: &EngineConfig, options: &DeviceOptions) -> Result<Loaded, Error> {
    let path = source.path.as_path();
    let failed = |source| Error::Text { path: path.to_owned(), source };
    let open = || crate::cuda::open(options);
    let loaded = on_gpu(config.device, BUSY_WAIT, open, |device| {
        let text = match kind(source)? {
            Kind::Folder | Kind::Dummy => Text::from_dir(path).map_err(failed)?,
            Kind::Gguf => Text::from_gguf(&open_gguf(path)?).map_err(failed)?,
        };
        let name = device.properties().name.clone();
        let forward = Box::new(load_cuda(source, config, options, device, text.vocab_size())?);
        Ok(Loaded { forward, text: Arc::new(text), device: name, device_kind: DeviceKind::Cuda })
    })?;
    loaded.map_or_else(|| load(source, config), Ok)
}

/// Loads the weights alone, as [`load_on`], and names the device. Every row of the head counts as
/// a token; no tokenizer is read.
pub fn load_forward_on(
    source: &ModelSource,
    config: &EngineConfig,
    options: &DeviceOptions,
) -> Result<(Box<dyn Forward>, String), Error> {
    let loaded = on_gpu(
        config.device,
        BUSY_WAIT,
        || crate::cuda::open(options),
        |device| {
            let name = device.properties().name.clone();
            let forward: Box<dyn Forward> = Box::new(load_cuda(source, config, options, device, u32::MAX)?);
            Ok((forward, name))
        },
    )?;
    loaded.map_or_else(|| Ok((load_forward(source, config)?, "the CPU".to_owned())), Ok)
}

/// What `load` gives on the GPU, or `None` for the CPU: when that is asked for, and under `auto`
/// when there is no GPU, no library for it, no memory on it that others leave, or no type that
/// bears this model.
fn on_gpu<D, T>(
    kind: DeviceKind,
    busy_wait: Duration,
    open: impl Fn() -> Result<D, Error>,
    mut load: impl FnMut(D) -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    if kind == DeviceKind::Cpu {
        return Ok(None);
    }
    // Whoever ends the process meanwhile must know of a thread that may be inside the driver.
    let _alive = Alive::loading();
    let is_auto = kind == DeviceKind::Auto;
    let has_opened = Cell::new(false);
    let mut attempt = || {
        has_opened.set(false);
        let device = open()?;
        has_opened.set(true);
        load(device)
    };
    let mut loaded = attempt();
    if is_auto && matches!(loaded, Err(Error::Busy(_))) {
        // The process that this one takes the place of may be about to let its memory go.
        std::thread::sleep(busy_wait);
        loaded = attempt();
    }
    let error = match loaded {
        Ok(loaded) => return Ok(Some(loaded)),
        Err(error) => error,
    };
    if !is_auto || has_opened.get() && !is_unusable(&error) {
        return Err(name_the_cpu(error));
    }
    let why = crate::error::chain(&error);
    if crate::cuda::is_there() {
        tracing::warn!("there is a GPU, and the engine computes on the CPU all the same: {why}");
    } else {
        tracing::info!("computing on the CPU: {why}");
    }
    Ok(None)
}

/// Whether the GPU cannot be used, and no other model or setting would help it much: a library is
/// missing, others hold its memory, or it has no type for the model.
fn is_unusable(error: &Error) -> bool {
    let is_library = matches!(error, Error::Device { source: overnight_kernels::Error::Library { .. }, .. });
    is_library || matches!(error, Error::Busy(_) | Error::NoDtype(_))
}

/// Says how to do without the GPU, where nothing else does.
fn name_the_cpu(error: Error) -> Error {
    match error {
        Error::Device { stage, source: source @ overnight_kernels::Error::Library { .. } } => {
            Error::Device { stage: format!("{stage} (--device cpu does without a GPU)"), source }
        }
        error => error,
    }
}

/// Loads the weights alone onto a GPU that is open. Ids from `vocab_size` on are no tokens.
pub fn load_cuda(
    source: &ModelSource,
    config: &EngineConfig,
    options: &DeviceOptions,
    device: overnight_kernels::Device,
    vocab_size: u32,
) -> Result<CudaModel, Error> {
    with_source(source, |model, tensors, tied| {
        CudaModel::load(device, options, config, model, tensors, tied, vocab_size)
    })
}

/// Opens the files of a model and lends its tensors to `body`: configuration, tensors (`None`:
/// random ones are asked for), and whether the embedding is the head.
fn with_source<T>(
    source: &ModelSource,
    body: impl FnOnce(&ModelConfig, Option<&mut dyn Source>, bool) -> Result<T, Error>,
) -> Result<T, Error> {
    let path = source.path.as_path();
    match kind(source)? {
        Kind::Gguf => {
            let gguf = open_gguf(path)?;
            gguf_weights::with(&gguf, |model, tensors, tied| body(model, Some(tensors), tied))
        }
        Kind::Folder => folder::with(path, read_config(path)?, |model, tensors, tied| body(model, Some(tensors), tied)),
        Kind::Dummy => {
            let model = read_config(path)?;
            let tied = model.tied != Some(false);
            body(&model, None, tied)
        }
    }
}

/// What a source is read as.
enum Kind {
    Folder,
    Gguf,
    Dummy,
}

fn kind(source: &ModelSource) -> Result<Kind, Error> {
    let path = source.path.as_path();
    let metadata = std::fs::metadata(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let wrong = |what: &str| Err(Error::Model { path: path.to_owned(), what: what.to_owned() });
    match (source.load_format, metadata.is_dir()) {
        (LoadFormat::Auto | LoadFormat::Gguf, false) => Ok(Kind::Gguf),
        (LoadFormat::Auto | LoadFormat::Safetensors, true) => Ok(Kind::Folder),
        (LoadFormat::Dummy, true) => Ok(Kind::Dummy),
        (LoadFormat::Safetensors | LoadFormat::Dummy, false) => wrong("it is a file; this load format needs a folder"),
        (LoadFormat::Gguf, true) => wrong("it is a folder; the load format gguf needs the file itself"),
    }
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
    match kind(source)? {
        Kind::Gguf => {
            let gguf = open_gguf(path)?;
            Ok(Read::Gguf(gguf_weights::read(&gguf)?, gguf))
        }
        Kind::Folder => Ok(Read::Folder(folder::read(path, read_config(path)?)?)),
        Kind::Dummy => Ok(Read::Folder(dummy::model(read_config(path)?, seed))),
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
