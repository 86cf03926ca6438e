//! Writes tiny checkpoints with seeded random weights: real files in the layouts that
//! Hugging Face uses, a few hundred kilobytes, for tests that need a model but not its sense.
//!
//! Invariant: the same [`TinyModel`] writes the same bytes on every machine and in every
//! version, since the goldens under `tests/goldens/` were computed from them.
//! The weights mean nothing: never judge the text that comes out.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

/// The architectures that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TinyArch {
    /// `Gemma3ForCausalLM`: sliding window of 16 on two of three layers, tied head.
    Gemma3,
    /// `Qwen3ForCausalLM`: norms on q and k, tied head.
    Qwen3,
    /// `LlamaForCausalLM`: head of its own.
    Llama,
}

/// What to write.
#[derive(Debug, Clone)]
pub struct TinyModel {
    /// Which layers.
    pub arch: TinyArch,
    /// Seed of the weights.
    pub seed: u64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Whether `tokenizer_config.json` has a chat template.
    pub chat_template: bool,
    /// Longest sequence.
    pub max_position: u32,
    /// `rope_scaling` of config.json, when there is one.
    pub rope_scaling: Option<Value>,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether values are cut to bf16, so that a back end of 16 bits has the very same weights.
    pub rounded: bool,
}

/// Rows of embedding and head; more than the tokenizer has, as in real checkpoints.
pub const VOCAB_ROWS: usize = 320;
/// Id of `<bos>`.
pub const BOS: u32 = 256;
/// Id of `<eos>`.
pub const EOS: u32 = 257;

/// The checkpoints that `tests/goldens/` holds the reference's answers for, by name.
pub fn golden_cases() -> Vec<(&'static str, TinyModel)> {
    let with = |arch, rope_scaling| TinyModel { rope_scaling: Some(rope_scaling), ..TinyModel::new(arch) };
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let linear = || json!({"rope_type": "linear", "factor": 4.0});
    vec![
        ("gemma3", TinyModel::new(TinyArch::Gemma3)),
        ("gemma3-linear", with(TinyArch::Gemma3, linear())),
        ("llama", TinyModel::new(TinyArch::Llama)),
        ("llama-linear", with(TinyArch::Llama, linear())),
        ("llama-llama3", with(TinyArch::Llama, llama3)),
        ("qwen3", TinyModel::new(TinyArch::Qwen3)),
        ("qwen3-yarn", with(TinyArch::Qwen3, yarn)),
    ]
}

const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const FFN: usize = 128;
const SPECIALS: [&str; 5] = ["<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>"];
const CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const MERGES: [(&str, &str); 16] = [
    ("t", "h"),
    ("Ġ", "t"),
    ("Ġ", "a"),
    ("i", "n"),
    ("r", "e"),
    ("o", "n"),
    ("Ġt", "he"),
    ("h", "e"),
    ("e", "r"),
    ("Ġ", "s"),
    ("a", "t"),
    ("n", "d"),
    ("Ġ", "w"),
    ("e", "s"),
    ("o", "u"),
    ("in", "g"),
];

impl TinyModel {
    /// The usual one of an architecture.
    pub fn new(arch: TinyArch) -> Self {
        let tied = arch != TinyArch::Llama;
        Self {
            arch,
            seed: 1,
            tied,
            chat_template: true,
            max_position: 512,
            rope_scaling: None,
            head_dim: HEAD_DIM,
            rounded: false,
        }
    }

    /// Writes `config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`
    /// and `generation_config.json` into a folder, which is made when absent.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let put = |name: &str, value: &Value| fs::write(folder.join(name), serde_json::to_vec_pretty(value)?);
        put("config.json", &self.config())?;
        put("generation_config.json", &json!({"bos_token_id": BOS, "eos_token_id": EOS}))?;
        put("tokenizer.json", &self.tokenizer())?;
        put("tokenizer_config.json", &self.tokenizer_config())?;
        fs::write(folder.join("model.safetensors"), safetensors_bytes(&self.tensors()))
    }

    /// The same with the weights in `a.safetensors` and `b.safetensors`, and their index.
    pub fn write_sharded(&self, folder: &Path) -> io::Result<()> {
        self.write(folder)?;
        let (mut first, mut map) = (self.tensors(), serde_json::Map::new());
        let second = first.split_off("model.layers.1");
        for (tensors, file) in [(first, "a.safetensors"), (second, "b.safetensors")] {
            map.extend(tensors.keys().map(|name| (name.clone(), json!(file))));
            fs::write(folder.join(file), safetensors_bytes(&tensors))?;
        }
        fs::write(folder.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())?;
        fs::remove_file(folder.join("model.safetensors"))
    }

    /// The content of config.json.
    pub fn config(&self) -> Value {
        let mut config = json!({
            "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": self.head_dim, "vocab_size": VOCAB_ROWS,
            "num_hidden_layers": self.num_layers(), "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": self.tied,
            "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 258, "torch_dtype": "float32",
            "attention_bias": false, "attention_dropout": 0.0,
        });
        let extra = match self.arch {
            TinyArch::Gemma3 => json!({
                "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": 16, "rope_local_base_freq": 1000.0, "query_pre_attn_scalar": 24,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "attn_logit_softcapping": null, "final_logit_softcapping": null,
            }),
            TinyArch::Qwen3 => {
                json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"})
            }
            TinyArch::Llama => {
                json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "mlp_bias": false})
            }
        };
        let fields = config.as_object_mut().expect("an object");
        fields.extend(extra.as_object().expect("an object").clone());
        fields.insert("rope_scaling".to_owned(), self.rope_scaling.clone().unwrap_or(Value::Null));
        config
    }

    /// Names, shapes and values of all tensors, by name.
    pub fn tensors(&self) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
        let mut tensors = BTreeMap::new();
        let mut put = |name: String, shape: &[usize], mean: f32, spread: f32| {
            let mut random = Random::new(self.seed, &name);
            let mask = if self.rounded { 0xffff_0000 } else { u32::MAX };
            let mut value = || f32::from_bits((mean + spread * random.unit()).to_bits() & mask);
            let values = (0..shape.iter().product()).map(|_| value()).collect();
            tensors.insert(name, (shape.to_vec(), values));
        };
        let gemma = self.arch == TinyArch::Gemma3;
        let norm_mean = if gemma { 0.0 } else { 1.0 };
        put("model.embed_tokens.weight".to_owned(), &[VOCAB_ROWS, HIDDEN], 0.0, if gemma { 0.25 } else { 1.0 });
        put("model.norm.weight".to_owned(), &[HIDDEN], norm_mean, 0.2);
        if !self.tied {
            put("lm_head.weight".to_owned(), &[VOCAB_ROWS, HIDDEN], 0.0, 0.5);
        }
        for layer in 0..self.num_layers() {
            let mut matrix = |name: &str, rows: usize, cols: usize| {
                // Uniform within ±spread has a variance of spread²/3: twice the usual gain, so
                // that layers matter beside the residual.
                let spread = 2.0 * (3.0 / cols as f32).sqrt();
                put(format!("model.layers.{layer}.{name}.weight"), &[rows, cols], 0.0, spread);
            };
            matrix("self_attn.q_proj", HEADS * self.head_dim, HIDDEN);
            matrix("self_attn.k_proj", KV_HEADS * self.head_dim, HIDDEN);
            matrix("self_attn.v_proj", KV_HEADS * self.head_dim, HIDDEN);
            matrix("self_attn.o_proj", HIDDEN, HEADS * self.head_dim);
            matrix("mlp.gate_proj", FFN, HIDDEN);
            matrix("mlp.up_proj", FFN, HIDDEN);
            matrix("mlp.down_proj", HIDDEN, FFN);
            let mut norm = |name: &str, size: usize| {
                put(format!("model.layers.{layer}.{name}.weight"), &[size], norm_mean, 0.2);
            };
            norm("input_layernorm", HIDDEN);
            norm("post_attention_layernorm", HIDDEN);
            if gemma {
                norm("pre_feedforward_layernorm", HIDDEN);
                norm("post_feedforward_layernorm", HIDDEN);
            }
            if self.arch != TinyArch::Llama {
                norm("self_attn.q_norm", self.head_dim);
                norm("self_attn.k_norm", self.head_dim);
            }
        }
        tensors
    }

    fn num_layers(&self) -> usize {
        if self.arch == TinyArch::Gemma3 { 6 } else { 4 }
    }

    /// A byte-level BPE: ids 0…255 are the bytes, then the special tokens, then the merges.
    fn tokenizer(&self) -> Value {
        let mut vocab = serde_json::Map::new();
        for byte in 0..=255u8 {
            vocab.insert(byte_char(byte).to_string(), json!(byte));
        }
        let mut next = 256;
        let mut added = Vec::new();
        for special in SPECIALS {
            added.push(json!({"id": next, "content": special, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}));
            next += 1;
        }
        let mut merges = Vec::new();
        // A merge is listed only once both its parts are tokens, as the format demands.
        let mut pending: Vec<_> = MERGES.to_vec();
        while !pending.is_empty() {
            let (ready, rest): (Vec<_>, Vec<_>) =
                pending.into_iter().partition(|(a, b)| vocab.contains_key(*a) && vocab.contains_key(*b));
            assert!(!ready.is_empty(), "every merge is reachable");
            for (a, b) in ready {
                vocab.insert(format!("{a}{b}"), json!(next));
                next += 1;
                merges.push(json!([a, b]));
            }
            pending = rest;
        }
        let bos = json!({"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]});
        let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let post_processor = if self.arch == TinyArch::Qwen3 {
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
        } else {
            json!({
                "type": "TemplateProcessing",
                "single": [special("<bos>"), sequence("A")],
                "pair": [special("<bos>"), sequence("A"), special("<bos>"), sequence("B")],
                "special_tokens": {"<bos>": bos},
            })
        };
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": post_processor,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": merges,
            },
        })
    }

    fn tokenizer_config(&self) -> Value {
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
            "add_bos_token": self.arch != TinyArch::Qwen3, "clean_up_tokenization_spaces": false,
            "model_max_length": self.max_position,
        });
        if self.chat_template {
            config["chat_template"] = json!(CHAT_TEMPLATE);
        }
        config
    }
}

/// A safetensors file of f32 tensors, in the order of their names.
pub fn safetensors_bytes(tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, (shape, values)) in tensors {
        let end = at + values.len() * 4;
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut header = serde_json::to_vec(&header).expect("a JSON object of numbers and names");
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    for (_, values) in tensors.values() {
        file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    file
}

/// SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014).
struct Random(u64);

impl Random {
    /// A stream of its own for each name (FNV-1a), so that tensors do not depend on their order.
    fn new(seed: u64, name: &str) -> Self {
        let hash =
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Self(hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Uniform within -1…1, exact in f32.
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((z >> 41) as i32 - (1 << 22)) as f32 / (1 << 22) as f32
    }
}

/// The character that stands for a byte in byte-level BPE: itself when printable, else from U+0100 on.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return byte.into();
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + rank).expect("U+0100…U+0143 are characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_model_writes_same_bytes() {
        for arch in [TinyArch::Gemma3, TinyArch::Qwen3, TinyArch::Llama] {
            let model = TinyModel::new(arch);
            assert_eq!(safetensors_bytes(&model.tensors()), safetensors_bytes(&model.tensors()));
            assert_eq!(model.tokenizer(), model.tokenizer());
            let other = TinyModel { seed: 2, ..model.clone() };
            assert_ne!(safetensors_bytes(&model.tensors()), safetensors_bytes(&other.tensors()));
        }
    }
}
