//! From the metadata of a GGUF file.

use serde_json::Map;

use super::{ARCHITECTURES, Architecture, ConfigError, LayerConfig, ModelConfig};
use crate::Error;
use crate::gguf::{self, Gguf};
use crate::model::rope::Rope;

impl ModelConfig {
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
