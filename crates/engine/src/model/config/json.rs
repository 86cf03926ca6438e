//! From config.json.

use serde_json::{Map, Value};

use super::fields::{Fields, token_ids};
use super::{ARCHITECTURES, Architecture, ConfigError, LayerConfig, ModelConfig};
use crate::model::rope::Rope;

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
