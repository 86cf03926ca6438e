//! What a checkpoint's configuration says about the computation, read strictly.
//!
//! Invariant: a field that would change the result is either honoured or refused by name;
//! fields that only describe training or other programs are passed over.

use serde_json::{Map, Value};

use crate::Error;
use crate::gguf::{self, Gguf};
use crate::model::rope::Rope;

/// The architectures that are built.
pub const ARCHITECTURES: [&str; 3] = ["Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"];

/// Largest size of anything; what is above is damage.
const SIZE_MAX: usize = 1 << 24;

/// A dense decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// By its Hugging Face name.
    pub architecture: Architecture,
    /// Width of the residual.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rows of embedding and head.
    pub vocab_rows: usize,
    /// Longest sequence.
    pub max_position: u32,
    /// Added to the mean of squares in norms.
    pub norm_eps: f32,
    /// Factor of attention scores.
    pub attention_scale: f32,
    /// Whether the head is the embedding, where the file says so.
    pub tied: Option<bool>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// The layers in order.
    pub layers: Vec<LayerConfig>,
    /// Rotary variants that layers name.
    pub ropes: Vec<Rope>,
}

/// One layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// A token sees itself and `window - 1` before it; `None`: all before it.
    pub window: Option<u32>,
    /// Index in [`ModelConfig::ropes`].
    pub rope: usize,
}

/// Families of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Norms before and after, GeLU, embedding scaled, q and k normed.
    Gemma3,
    /// SiLU.
    Llama,
    /// SiLU, q and k normed.
    Qwen3,
}

impl Architecture {
    /// The Hugging Face name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Gemma3, Self::Llama, Self::Qwen3].into_iter().find(|a| a.name() == name)
    }

    /// Whether q and k have a norm per head.
    pub fn qk_norm(self) -> bool {
        self != Self::Llama
    }
}

impl ModelConfig {
    /// Reads the object of config.json. The error is a sentence that names the key.
    pub fn from_json(config: &Map<String, Value>) -> Result<Self, ConfigError> {
        let architecture = architecture_of(config)?;
        // A multimodal wrapper keeps the text model's numbers in an object of their own.
        let fields = Fields(config.get("text_config").and_then(Value::as_object).unwrap_or(config));
        refuse_unbuilt(&fields, architecture)?;
        let hidden = fields.size("hidden_size")?;
        let heads = fields.size("num_attention_heads")?;
        let kv_heads = fields.size_or("num_key_value_heads", heads)?;
        let head_dim = fields.size_or("head_dim", hidden.checked_div(heads).unwrap_or(0))?;
        let max_position = u32::try_from(fields.size_or("max_position_embeddings", 32768)?).unwrap_or(u32::MAX);
        let (layers, ropes) = layers_of(&fields, architecture, max_position)?;
        let scalar = match architecture {
            Architecture::Gemma3 => fields.number("query_pre_attn_scalar")?.unwrap_or(256.0),
            _ => head_dim as f64,
        };
        let config = Self {
            architecture,
            hidden,
            ffn: fields.size("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            vocab_rows: fields.size("vocab_size")?,
            max_position,
            norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            attention_scale: (1.0 / scalar.sqrt()) as f32,
            tied: fields
                .flag("tie_word_embeddings")?
                .or(Fields(config).flag("tie_word_embeddings")?)
                .or((architecture == Architecture::Gemma3).then_some(true)),
            eos_token_ids: token_ids(fields.0.get("eos_token_id").or_else(|| config.get("eos_token_id"))),
            layers,
            ropes,
        };
        config.checked()
    }

    /// Reads the metadata of a GGUF file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        let name = gguf.require_str("general.architecture")?;
        let architecture = match name {
            "gemma3" => Architecture::Gemma3,
            "qwen3" => Architecture::Qwen3,
            other => {
                return Err(Error::Unsupported(format!(
                    "GGUF architecture {other:?} in {}; gemma3 and qwen3 are read from GGUF, and {} from safetensors",
                    gguf.path().display(),
                    ARCHITECTURES.join(", ")
                )));
            }
        };
        let key = |suffix: &str| format!("{name}.{suffix}");
        let size = |suffix: &str| gguf.require_u64(&key(suffix)).map(|v| v as usize);
        let number = |suffix: &str| gguf.get(&key(suffix)).and_then(gguf::Value::as_f64);
        for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if number(cap).is_some_and(|v| v != 0.0) {
                return Err(Error::Unsupported(format!("{} in {}", key(cap), gguf.path().display())));
            }
        }
        let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let head_dim = number("attention.key_length").map_or(hidden / heads.max(1), |v| v as usize);
        if number("attention.value_length").is_some_and(|v| v as usize != head_dim) {
            return Err(gguf.damaged("key and value heads of different size are not supported".to_owned()));
        }
        let num_layers = size("block_count")?;
        let theta = number("rope.freq_base").unwrap_or(10_000.0);
        let global = gguf_rope(gguf, name, theta)?;
        let (layers, ropes) = match (architecture, number("attention.sliding_window")) {
            (Architecture::Gemma3, Some(window)) => {
                let local = number("rope.local.freq_base").or(number("rope.freq_base_swa")).unwrap_or(10_000.0);
                let layer = |index: usize| match (index + 1) % 6 {
                    0 => LayerConfig { window: None, rope: 0 },
                    _ => LayerConfig { window: Some(window as u32), rope: 1 },
                };
                ((0..num_layers).map(layer).collect(), vec![global, Rope::plain(local)])
            }
            _ => (vec![LayerConfig { window: None, rope: 0 }; num_layers], vec![global]),
        };
        // Gemma 3 27B alone scales by hidden / heads instead of the head's size.
        let scalar =
            if architecture == Architecture::Gemma3 && num_layers == 62 { hidden / heads.max(1) } else { head_dim };
        let embedding = gguf
            .tensor("token_embd.weight")
            .ok_or_else(|| gguf.damaged("tensor token_embd.weight is missing".to_owned()))?;
        let config = Self {
            architecture,
            hidden,
            ffn: size("feed_forward_length")?,
            heads,
            kv_heads: number("attention.head_count_kv").map_or(heads, |v| v as usize),
            head_dim,
            vocab_rows: embedding.dims.get(1).copied().unwrap_or(0) as usize,
            max_position: u32::try_from(size("context_length")?).unwrap_or(u32::MAX),
            norm_eps: number("attention.layer_norm_rms_epsilon").unwrap_or(1e-6) as f32,
            attention_scale: (1.0 / (scalar as f64).sqrt()) as f32,
            tied: Some(gguf.tensor("output.weight").is_none()),
            eos_token_ids: ["eos_token_id", "eot_token_id", "eom_token_id"]
                .iter()
                .filter_map(|id| gguf.get(&format!("tokenizer.ggml.{id}")).and_then(gguf::Value::as_u64))
                .map(|id| id as u32)
                .collect(),
            layers,
            ropes,
        };
        config.checked().map_err(|error| match error {
            ConfigError::Wrong(what) => gguf.damaged(what),
            ConfigError::Unsupported(what) => Error::Unsupported(format!("{what} in {}", gguf.path().display())),
        })
    }

    /// Sizes that the kernels can take, and that agree with each other.
    fn checked(self) -> Result<Self, ConfigError> {
        let wrong = |what: String| Err(ConfigError::Wrong(what));
        let sizes = [
            ("hidden_size", self.hidden),
            ("intermediate_size", self.ffn),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_rows),
            ("num_hidden_layers", self.layers.len()),
        ];
        if let Some((key, size)) = sizes.into_iter().find(|(_, size)| !(1..=SIZE_MAX).contains(size)) {
            return wrong(format!("{key} is {size}, which is not within 1…{SIZE_MAX}"));
        }
        if self.max_position == 0 {
            return wrong("max_position_embeddings is 0".to_owned());
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return wrong(format!("{} query heads do not share {} key-value heads evenly", self.heads, self.kv_heads));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps.is_finite() && self.attention_scale.is_finite()) {
            return wrong("rms_norm_eps or query_pre_attn_scalar is not a positive number".to_owned());
        }
        if !self.hidden.is_multiple_of(8) || !self.ffn.is_multiple_of(8) || !self.head_dim.is_multiple_of(16) {
            return Err(ConfigError::Unsupported(format!(
                "hidden_size {} and intermediate_size {} must be multiples of 8, head_dim {} of 16",
                self.hidden, self.ffn, self.head_dim
            )));
        }
        if self.layers.iter().any(|layer| layer.window == Some(0)) {
            return wrong("sliding_window is 0".to_owned());
        }
        Ok(self)
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// It contradicts itself or lacks something.
    #[error("{0}")]
    Wrong(String),
    /// It asks for something that is not built.
    #[error("{0}")]
    Unsupported(String),
}

fn gguf_rope(gguf: &Gguf, name: &str, theta: f64) -> Result<Rope, Error> {
    let mut scaling = Map::new();
    let key = |suffix: &str| gguf.get(&format!("{name}.rope.scaling.{suffix}"));
    match key("type").and_then(gguf::Value::as_str) {
        None | Some("none") => {}
        Some(kind) => {
            scaling.insert("rope_type".to_owned(), kind.into());
        }
    }
    for (ours, theirs) in [("factor", "factor"), ("original_max_position_embeddings", "original_context_length")] {
        if let Some(value) = key(theirs).and_then(gguf::Value::as_f64) {
            scaling.insert(ours.to_owned(), value.into());
        }
    }
    let max_position = gguf.require_u64(&format!("{name}.context_length"))? as u32;
    Rope::from_json(theta, &scaling, max_position).map_err(|what| gguf.damaged(what))
}

fn architecture_of(config: &Map<String, Value>) -> Result<Architecture, ConfigError> {
    let named = config.get("architectures").and_then(Value::as_array).and_then(|a| a.first()).and_then(Value::as_str);
    let named = match named {
        Some(name) => name,
        None => match config.get("model_type").and_then(Value::as_str) {
            Some("gemma3_text") => "Gemma3ForCausalLM",
            Some("qwen3") => "Qwen3ForCausalLM",
            Some("llama") => "LlamaForCausalLM",
            _ => return Err(ConfigError::Wrong("config.json names no architecture".to_owned())),
        },
    };
    Architecture::from_name(named).ok_or_else(|| {
        ConfigError::Unsupported(format!("architecture {named}; these are built: {}", ARCHITECTURES.join(", ")))
    })
}

/// Fields whose value would change the result and that are not built.
fn refuse_unbuilt(fields: &Fields<'_>, architecture: Architecture) -> Result<(), ConfigError> {
    let refuse = |what: String| Err(ConfigError::Unsupported(what));
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if fields.number(key)?.is_some() {
            return refuse(format!("{key} in config.json"));
        }
    }
    for key in ["attention_bias", "mlp_bias", "use_bidirectional_attention"] {
        if fields.flag(key)? == Some(true) {
            return refuse(format!("{key} = true in config.json"));
        }
    }
    if fields.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return refuse("partial_rotary_factor other than 1 in config.json".to_owned());
    }
    if let Some(quantization) = fields.0.get("quantization_config").filter(|v| !v.is_null()) {
        let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        return refuse(format!("quantization_config ({method}) in config.json"));
    }
    let (key, wanted) = match architecture {
        Architecture::Gemma3 => ("hidden_activation", "gelu_pytorch_tanh"),
        _ => ("hidden_act", "silu"),
    };
    match fields.0.get(key).and_then(Value::as_str) {
        Some(found) if found != wanted => refuse(format!("{key} = {found:?} in config.json; {wanted:?} is built")),
        _ => Ok(()),
    }
}

fn layers_of(
    fields: &Fields<'_>,
    architecture: Architecture,
    max_position: u32,
) -> Result<(Vec<LayerConfig>, Vec<Rope>), ConfigError> {
    let num_layers = fields.size("num_hidden_layers")?;
    if num_layers > 4096 {
        return Err(ConfigError::Wrong(format!("num_hidden_layers is {num_layers}")));
    }
    let theta = fields.number("rope_theta")?.unwrap_or(if architecture == Architecture::Gemma3 { 1e6 } else { 1e4 });
    let object = |key: &str| fields.0.get(key).and_then(Value::as_object);
    let empty = Map::new();
    let parameters = object("rope_parameters").or_else(|| object("rope_scaling")).unwrap_or(&empty);
    let rope = |theta, map| Rope::from_json(theta, map, max_position).map_err(ConfigError::Unsupported);
    let local_theta = fields.number("rope_local_base_freq")?.unwrap_or(1e4);
    // Newer files keep one set of parameters for each type of layer.
    let by_type = |kind: &str| parameters.get(kind).and_then(Value::as_object);
    let global = rope(theta, by_type("full_attention").unwrap_or(parameters))?;
    let local = match by_type("sliding_attention") {
        Some(map) => rope(local_theta, map)?,
        None if architecture == Architecture::Gemma3 => Rope::plain(local_theta),
        None => global.clone(),
    };
    let sliding = sliding_layers(fields, architecture, num_layers)?;
    let window = match fields.number("sliding_window")? {
        Some(window) if sliding.contains(&true) => Some(window as u32),
        None if sliding.contains(&true) => {
            return Err(ConfigError::Wrong("layers slide but sliding_window is missing".to_owned()));
        }
        _ => None,
    };
    let layer = |&slides: &bool| match slides {
        true => LayerConfig { window, rope: 1 },
        false => LayerConfig { window: None, rope: 0 },
    };
    Ok((sliding.iter().map(layer).collect(), vec![global, local]))
}

/// Which layers see only a window.
fn sliding_layers(
    fields: &Fields<'_>,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Vec<bool>, ConfigError> {
    if let Some(types) = fields.0.get("layer_types").and_then(Value::as_array) {
        if types.len() != num_layers {
            return Err(ConfigError::Wrong(format!("layer_types names {} layers of {num_layers}", types.len())));
        }
        return types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("sliding_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                _ => Err(ConfigError::Unsupported(format!("layer type {kind} in config.json"))),
            })
            .collect();
    }
    match architecture {
        Architecture::Gemma3 => {
            let pattern = fields.size_or("sliding_window_pattern", 6)?;
            Ok((0..num_layers).map(|index| pattern == 0 || !(index + 1).is_multiple_of(pattern)).collect())
        }
        _ if fields.flag("use_sliding_window")? == Some(true) => {
            let first = fields.size_or("max_window_layers", 0)?;
            Ok((0..num_layers).map(|index| index >= first).collect())
        }
        _ => Ok(vec![false; num_layers]),
    }
}

/// One id, a list of them, or none.
pub(crate) fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Typed access that tells a missing key from one of the wrong type.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| ConfigError::Wrong(format!("{key} is not a number"))),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                value.as_bool().map(Some).ok_or_else(|| ConfigError::Wrong(format!("{key} is not a boolean")))
            }
        }
    }

    fn size(&self, key: &str) -> Result<usize, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Err(ConfigError::Wrong(format!("{key} is missing"))),
            Some(value) => value
                .as_u64()
                .map(|v| v as usize)
                .ok_or_else(|| ConfigError::Wrong(format!("{key} is not a whole number"))),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(_) => self.size(key),
        }
    }
}
