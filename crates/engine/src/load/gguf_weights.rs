//! The weights of a GGUF file.

use crate::Error;
use crate::cpu::CacheType;
use crate::cpu::packed::Blocks;
use crate::gguf::{Gguf, TensorType};
use crate::load::Model;
use crate::load::assemble::{Format, RawTensor, Role, Source, assemble};
use crate::model::config::ModelConfig;

pub(super) fn read(gguf: &Gguf) -> Result<Model, Error> {
    let (config, weights) = with(gguf, |config, tensors, tied| Ok((config.clone(), assemble(config, tensors, tied)?)))?;
    Ok(Model { config, weights, cache_type: CacheType::F16 })
}

/// Lends the tensors of the file.
pub(super) fn with<T>(
    gguf: &Gguf,
    body: impl FnOnce(&ModelConfig, &mut dyn Source, bool) -> Result<T, Error>,
) -> Result<T, Error> {
    let config = ModelConfig::from_gguf(gguf)?;
    if gguf.tensor("rope_freqs.weight").is_some() {
        return Err(Error::Unsupported(format!("tensor rope_freqs.weight in {}", gguf.path().display())));
    }
    body(&config, &mut File(gguf), config.tied == Some(true))
}

struct File<'a>(&'a Gguf);

impl Source for File<'_> {
    fn take(&mut self, layer: Option<usize>, role: Role) -> Result<RawTensor<'_>, Error> {
        let name = match layer {
            Some(layer) => format!("blk.{layer}.{}.weight", tensor_name(role)),
            None => format!("{}.weight", tensor_name(role)),
        };
        let tensor = self.0.tensor(&name).ok_or_else(|| self.0.damaged(format!("tensor {name} is missing")))?;
        let bytes = self.0.tensor_bytes(tensor)?;
        let format = match tensor.ty {
            TensorType::F32 => Format::F32,
            TensorType::F16 => Format::F16,
            TensorType::BF16 => Format::BF16,
            TensorType::Q5_0 => Format::Blocks(Blocks::Q5_0),
            TensorType::Q8_0 => Format::Blocks(Blocks::Q8_0),
            TensorType::Q4K => Format::Blocks(Blocks::Q4K),
            TensorType::Q6K => Format::Blocks(Blocks::Q6K),
            TensorType::Other(_) => unreachable!("tensor_bytes refuses it"),
        };
        let shape = tensor.dims.iter().rev().map(|&dim| dim as usize).collect();
        Ok(RawTensor { name, shape, format, bytes })
    }

    fn wrong(&self, tensor: &str, what: String) -> Error {
        self.0.damaged(format!("tensor {tensor} {what}"))
    }

    fn norm_offset(&self) -> f32 {
        // The converter has already added Gemma's one.
        0.0
    }
}

fn tensor_name(role: Role) -> &'static str {
    match role {
        Role::Embedding => "token_embd",
        Role::Head => "output",
        Role::FinalNorm => "output_norm",
        Role::AttentionNorm => "attn_norm",
        Role::Q => "attn_q",
        Role::K => "attn_k",
        Role::V => "attn_v",
        Role::O => "attn_output",
        Role::QNorm => "attn_q_norm",
        Role::KNorm => "attn_k_norm",
        Role::PostAttentionNorm => "post_attention_norm",
        Role::FfnNorm => "ffn_norm",
        Role::Gate => "ffn_gate",
        Role::Up => "ffn_up",
        Role::Down => "ffn_down",
        Role::PostFfnNorm => "post_ffw_norm",
    }
}
