//! Writes a tiny model's weights as GGUF, for tests that read the same weights from both forms.

use half::{bf16, f16};

use crate::tiny_model::{TinyArch, TinyModel};

/// How matrices are stored; norms are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    F32,
    F16,
    Bf16,
    /// Blocks of 32 with a scale.
    Q8_0,
}

impl Stored {
    pub(crate) const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0];

    /// The number that the format has for it.
    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            Self::Q8_0 => values.chunks_exact(32).flat_map(block).collect(),
        }
    }
}

/// A block of Q8_0: the scale in f16, then 32 signed bytes.
fn block(values: &[f32]) -> Vec<u8> {
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = f16::from_f32(largest / 127.0);
    let unit = scale.to_f32().recip();
    let byte = |&value: &f32| (value * unit).round().clamp(-127.0, 127.0) as i8 as u8;
    scale.to_le_bytes().into_iter().chain(values.iter().map(byte)).collect()
}

/// The file of a Qwen3; the other architectures have other layer patterns in this form.
pub(crate) fn gguf_bytes(tiny: &TinyModel, stored: Stored) -> Vec<u8> {
    assert_eq!(tiny.arch, TinyArch::Qwen3, "the one that is written here");
    let config = tiny.config();
    let size = |key: &str| config[key].as_u64().expect("a size") as u32;
    let mut keys = Vec::new();
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut key = |name: &str, ty: u32, value: Vec<u8>| {
        keys.push([string(name), ty.to_le_bytes().to_vec(), value].concat());
    };
    key("general.architecture", 8, string("qwen3"));
    for (name, value) in [
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.head_count_kv", size("num_key_value_heads")),
        ("attention.key_length", size("head_dim")),
        ("attention.value_length", size("head_dim")),
        ("block_count", size("num_hidden_layers")),
        ("context_length", size("max_position_embeddings")),
    ] {
        key(&format!("qwen3.{name}"), 4, value.to_le_bytes().to_vec());
    }
    key("qwen3.attention.layer_norm_rms_epsilon", 6, 1e-6f32.to_le_bytes().to_vec());
    key("qwen3.rope.freq_base", 6, 10_000.0f32.to_le_bytes().to_vec());
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for (name, (shape, values)) in tiny.tensors() {
        let stored = if shape.len() == 1 { Stored::F32 } else { stored };
        data.resize(usize::next_multiple_of(data.len(), 32), 0);
        let mut info = string(&gguf_name(&name));
        info.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&dim| info.extend((dim as u64).to_le_bytes()));
        info.extend(stored.id().to_le_bytes());
        info.extend((data.len() as u64).to_le_bytes());
        infos.push(info);
        data.extend(stored.bytes(&values));
    }
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((infos.len() as u64).to_le_bytes());
    file.extend((keys.len() as u64).to_le_bytes());
    file.extend(keys.concat());
    file.extend(infos.concat());
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}

/// A tensor's name in the form's own words.
fn gguf_name(name: &str) -> String {
    let name = name.replace("model.layers.", "blk.");
    let words = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
    ];
    words.into_iter().fold(name, |name, (theirs, ours)| name.replace(theirs, ours))
}
