//! The weights of a folder of safetensors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::Value;

use crate::Error;
use crate::cpu::CacheType;
use crate::load::assemble::{Format, RawTensor, Role, Source, assemble};
use crate::load::{Model, read_object};
use crate::model::config::{Architecture, ModelConfig};
use crate::weights::Mapped;

const INDEX: &str = "model.safetensors.index.json";
/// Endings of files whose reader runs code from the file.
const PICKLES: [&str; 5] = ["bin", "pth", "pt", "ckpt", "pkl"];

/// Why a file is refused, when it is a pickle.
pub(super) fn pickle_reason(path: &Path) -> Option<String> {
    let ending = path.extension()?.to_str()?;
    PICKLES.contains(&ending).then(|| {
        format!(
            "{} is a pickle file, and opening one runs whatever code is in it; convert the model to safetensors",
            path.display()
        )
    })
}

pub(super) fn read(folder: &Path, config: ModelConfig) -> Result<Model, Error> {
    let mut cache_type = CacheType::F16;
    let weights = with(folder, config.clone(), |config, tensors, tied| {
        let weights = assemble(config, tensors, tied)?;
        if tensors.format == Some(Format::F32) {
            cache_type = CacheType::F32;
        }
        Ok(weights)
    })?;
    Ok(Model { config, weights, cache_type })
}

/// Maps the files and lends their tensors; what is left over afterwards is refused.
pub(super) fn with<T>(
    folder: &Path,
    config: ModelConfig,
    body: impl FnOnce(&ModelConfig, &mut Tensors<'_>, bool) -> Result<T, Error>,
) -> Result<T, Error> {
    let files = weight_files(folder)?;
    let maps = files.iter().map(|path| Ok((path.clone(), Mapped::open(path)?))).collect::<Result<Vec<_>, Error>>()?;
    let mut tensors = Tensors::open(folder, &maps, config.architecture == Architecture::Gemma3)?;
    let tied = match config.tied {
        Some(tied) => tied,
        None => !tensors.by_name.contains_key("lm_head.weight"),
    };
    let done = body(&config, &mut tensors, tied)?;
    tensors.refuse_leftovers()?;
    Ok(done)
}

/// The files to read: those of the index, or the single file, or a whole set of shards.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let wrong = |path: &Path, what: String| Err(Error::Model { path: path.to_owned(), what });
    let index = folder.join(INDEX);
    if index.exists() {
        return indexed_files(folder, &index);
    }
    let (mut weights, mut pickles) = (Vec::new(), Vec::new());
    let unreadable = |source| Error::Read { path: folder.to_owned(), source };
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            weights.push(path);
        } else if pickle_reason(&path).is_some() {
            pickles.push(path);
        }
    }
    weights.sort();
    pickles.sort();
    match (weights.as_slice(), pickles.first()) {
        ([], Some(pickle)) => Err(Error::Unsupported(pickle_reason(pickle).expect("listed for this reason"))),
        ([], None) => wrong(folder, "it holds no *.safetensors file".to_owned()),
        ([_], _) => {
            warn_of(&pickles);
            complete_set(weights)
        }
        (many, _) => match many.iter().find(|path| path.file_name().is_some_and(|n| n == "model.safetensors")) {
            Some(single) => Ok(vec![single.clone()]),
            None => complete_set(weights),
        },
    }
}

fn warn_of(pickles: &[PathBuf]) {
    for pickle in pickles {
        tracing::warn!(path = %pickle.display(), "passing over a pickle file beside safetensors");
    }
}

/// Without an index, shards say themselves how many they are: `name-00001-of-00003.safetensors`.
fn complete_set(files: Vec<PathBuf>) -> Result<Vec<PathBuf>, Error> {
    let parse = |path: &Path| {
        let stem = path.file_stem()?.to_str()?;
        let (rest, total) = stem.rsplit_once("-of-")?;
        let (name, number) = rest.rsplit_once('-')?;
        Some((name.to_owned(), number.to_owned(), total.parse::<usize>().ok()?, total.to_owned()))
    };
    let Some((name, _, total, total_text)) = parse(&files[0]) else {
        return match files.len() {
            1 => Ok(files),
            _ => Err(Error::Model {
                path: files[1].clone(),
                what: format!("it lies beside {} without a {INDEX} that says which to read", files[0].display()),
            }),
        };
    };
    let folder = files[0].parent().unwrap_or(Path::new("."));
    if total == 0 || total > 100_000 {
        return Err(Error::Model { path: files[0].clone(), what: format!("its name speaks of {total} shards") });
    }
    (1..=total)
        .map(|number| {
            let shard =
                folder.join(format!("{name}-{number:0width$}-of-{total_text}.safetensors", width = total_text.len()));
            match shard.exists() {
                true => Ok(shard),
                false => {
                    Err(Error::Model { path: shard, what: format!("this shard of {total} is missing; fetch it again") })
                }
            }
        })
        .collect()
}

fn indexed_files(folder: &Path, index: &Path) -> Result<Vec<PathBuf>, Error> {
    let wrong = |what: String| Error::Model { path: index.to_owned(), what };
    let object = read_object(index)?;
    let map = object
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| wrong("it has no object weight_map".to_owned()))?;
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| wrong(format!("weight_map gives no file name for {tensor}")))?;
        if Path::new(file).file_name().is_none_or(|name| name != file) {
            return Err(wrong(format!("weight_map names {file:?}, which is not a plain file name")));
        }
        if let Some(reason) = pickle_reason(Path::new(file)) {
            return Err(Error::Unsupported(reason));
        }
        names.insert(file);
    }
    names
        .into_iter()
        .map(|name| match folder.join(name) {
            shard if shard.exists() => Ok(shard),
            shard => Err(Error::Model {
                path: shard,
                what: format!("this shard is missing, but {INDEX} names it; fetch it again"),
            }),
        })
        .collect()
}

/// All tensors of the files by name.
pub(super) struct Tensors<'a> {
    folder: PathBuf,
    by_name: HashMap<String, (&'a Path, RawTensor<'a>)>,
    /// Before the names inside the model.
    prefix: String,
    gemma: bool,
    /// Type of the embedding.
    format: Option<Format>,
    used: BTreeSet<String>,
}

impl<'a> Tensors<'a> {
    fn open(folder: &Path, maps: &'a [(PathBuf, Mapped)], gemma: bool) -> Result<Self, Error> {
        let mut by_name: HashMap<String, (&'a Path, RawTensor<'a>)> = HashMap::new();
        for (path, map) in maps {
            for (name, tensor) in tensors_of(path, map.bytes())? {
                if let Some((other, _)) = by_name.get(&name) {
                    let what = format!("tensor {name} is also in {}", other.display());
                    return Err(Error::Model { path: path.clone(), what });
                }
                by_name.insert(name, (path.as_path(), tensor));
            }
        }
        let prefix = ["model.", "", "model.language_model.", "language_model.model."]
            .into_iter()
            .find(|prefix| by_name.contains_key(&format!("{prefix}embed_tokens.weight")))
            .ok_or_else(|| Error::Model {
                path: folder.to_owned(),
                what: "no file holds the tensor model.embed_tokens.weight, or the same under another prefix".to_owned(),
            })?
            .to_owned();
        Ok(Self { folder: folder.to_owned(), by_name, prefix, gemma, format: None, used: BTreeSet::new() })
    }

    /// Tensors of layers that nothing took would have changed the result: a bias, another norm.
    fn refuse_leftovers(&self) -> Result<(), Error> {
        let layers = format!("{}layers.", self.prefix);
        let left: BTreeMap<_, _> = self
            .by_name
            .iter()
            .filter(|(name, _)| name.starts_with(&layers) && !self.used.contains(*name))
            .filter(|(name, _)| !name.ends_with("rotary_emb.inv_freq"))
            .collect();
        match left.first_key_value() {
            None => Ok(()),
            Some((name, (path, _))) => Err(Error::Unsupported(format!(
                "tensor {name} in {} has no place in this architecture ({} such tensors)",
                path.display(),
                left.len()
            ))),
        }
    }

    fn name(&self, layer: Option<usize>, role: Role) -> String {
        let prefix = &self.prefix;
        match (layer, role) {
            (_, Role::Head) => match prefix.strip_suffix("model.").filter(|rest| rest.starts_with("language_model")) {
                Some(rest) => format!("{rest}lm_head.weight"),
                None => "lm_head.weight".to_owned(),
            },
            (Some(layer), role) => format!("{prefix}layers.{layer}.{}.weight", tensor_name(role, self.gemma)),
            (None, role) => format!("{prefix}{}.weight", tensor_name(role, self.gemma)),
        }
    }
}

impl Source for Tensors<'_> {
    fn take(&mut self, layer: Option<usize>, role: Role) -> Result<RawTensor<'_>, Error> {
        let name = self.name(layer, role);
        let Some((_, tensor)) = self.by_name.get(&name) else {
            let what = match role {
                Role::Head => format!("tie_word_embeddings is false but no file holds the tensor {name}"),
                _ => format!("no file holds the tensor {name}"),
            };
            return Err(Error::Model { path: self.folder.clone(), what });
        };
        if role == Role::Embedding {
            self.format = Some(tensor.format);
        }
        self.used.insert(name);
        Ok(tensor.clone())
    }

    fn wrong(&self, tensor: &str, what: String) -> Error {
        let path = self.by_name.get(tensor).map_or(self.folder.as_path(), |(path, _)| path);
        Error::Model { path: path.to_owned(), what: format!("tensor {tensor} {what}") }
    }

    fn norm_offset(&self) -> f32 {
        // Gemma's files store the factor less one.
        if self.gemma { 1.0 } else { 0.0 }
    }
}

fn tensors_of<'a>(path: &Path, bytes: &'a [u8]) -> Result<Vec<(String, RawTensor<'a>)>, Error> {
    let damaged = |what: String| Error::Model { path: path.to_owned(), what };
    let file = SafeTensors::deserialize(bytes)
        .map_err(|error| damaged(format!("it is not a whole safetensors file ({error:?}); fetch it again")))?;
    file.iter()
        .map(|(name, view)| {
            let format = match view.dtype() {
                Dtype::F32 => Format::F32,
                Dtype::F16 => Format::F16,
                Dtype::BF16 => Format::BF16,
                // Buffers of other types may lie in the file as long as no weight is one.
                other if name.ends_with(".weight") => {
                    return Err(Error::Unsupported(format!(
                        "tensor {name} in {} is stored as {other:?}; F32, F16 and BF16 are read",
                        path.display()
                    )));
                }
                _ => Format::F32,
            };
            let tensor = RawTensor { name: name.to_owned(), shape: view.shape().to_vec(), format, bytes: view.data() };
            Ok((name.to_owned(), tensor))
        })
        .collect()
}

fn tensor_name(role: Role, gemma: bool) -> &'static str {
    match role {
        Role::Embedding => "embed_tokens",
        Role::Head => "lm_head",
        Role::FinalNorm => "norm",
        Role::AttentionNorm => "input_layernorm",
        Role::Q => "self_attn.q_proj",
        Role::K => "self_attn.k_proj",
        Role::V => "self_attn.v_proj",
        Role::O => "self_attn.o_proj",
        Role::QNorm => "self_attn.q_norm",
        Role::KNorm => "self_attn.k_norm",
        Role::PostAttentionNorm => "post_attention_layernorm",
        Role::FfnNorm if gemma => "pre_feedforward_layernorm",
        Role::FfnNorm => "post_attention_layernorm",
        Role::Gate => "mlp.gate_proj",
        Role::Up => "mlp.up_proj",
        Role::Down => "mlp.down_proj",
        Role::PostFfnNorm => "post_feedforward_layernorm",
    }
}
