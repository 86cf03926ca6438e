//! What a checkpoint's configuration says about the computation, read strictly.
//!
//! Invariant: a field that would change the result is either honoured or refused by name;
//! fields that only describe training or other programs are passed over.

mod fields;
mod gguf;
mod json;

use crate::model::rope::Rope;

pub(crate) use fields::token_ids;

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

    /// Whether the outputs of attention and feed-forward are normed before they join the residual.
    pub fn post_norms(self) -> bool {
        self == Self::Gemma3
    }
}

impl ModelConfig {
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
