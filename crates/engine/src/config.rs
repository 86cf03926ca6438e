//! The `[engine]` section as far as the local engine reads it.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::model::DeviceDefaults;

/// Where a model computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// On the GPU when a usable one is there, else on the CPU; the log says which and why.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On the GPU; without a usable one the start fails and says what is missing.
    Cuda,
}

/// The type of weights, activations and KV cache on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DtypeSetting {
    /// bfloat16, or float16 on a GPU without it.
    #[default]
    Auto,
    /// bfloat16.
    Bfloat16,
    /// float16.
    Float16,
}

/// Settings of the local engine. Flags keep the names that operators know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Where the model computes.
    pub device: DeviceKind,
    /// Of weights, activations and KV cache on a GPU; the CPU takes the types of the files.
    pub dtype: DtypeSetting,
    /// Share of the GPU's memory that the engine may use, 0.05…0.99.
    pub gpu_memory_utilization: f64,
    /// Decode steps on a GPU launch their kernels one by one instead of replaying graphs.
    pub enforce_eager: bool,
    /// Longest prompt plus output, tokens; `None`: the model's own.
    pub max_model_len: Option<u32>,
    /// Most sequences in a step, 1…4096; `None`: set by device (32 on the CPU, 1024 on a GPU).
    pub max_num_seqs: Option<u32>,
    /// Most tokens in a step; `None`: set by device (512 on the CPU, 8192 on a GPU,
    /// 16384 with 70 GB of memory and more).
    pub max_num_batched_tokens: Option<u32>,
    /// Token slots in a KV block; a power of two, 8…256.
    pub block_size: u32,
    /// Bytes for the KV cache; `None`: on the CPU a quarter of free memory, on a GPU what
    /// `gpu_memory_utilization` leaves; at most what `max_num_seqs` sequences of full length need.
    pub kv_cache_memory_bytes: Option<u64>,
    /// KV blocks, overriding the line above; for tests of preemption.
    pub num_gpu_blocks_override: Option<u32>,
    /// Find finished blocks again.
    pub enable_prefix_caching: bool,
    /// Threads of the CPU back end; `None`: the cores at hand.
    pub num_threads: Option<u32>,
    /// Most logprobs per position that a request may ask for.
    pub max_logprobs: u32,
    /// Seed of what has no seed of its own (dummy weights).
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            device: DeviceKind::Auto,
            dtype: DtypeSetting::Auto,
            gpu_memory_utilization: 0.92,
            enforce_eager: false,
            max_model_len: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            block_size: 64,
            kv_cache_memory_bytes: None,
            num_gpu_blocks_override: None,
            enable_prefix_caching: true,
            num_threads: None,
            max_logprobs: 20,
            seed: 0,
        }
    }
}

impl EngineConfig {
    /// With a device's values where none is set.
    pub fn with_defaults(&self, defaults: DeviceDefaults) -> Self {
        Self {
            max_num_seqs: self.max_num_seqs.or(defaults.max_num_seqs),
            max_num_batched_tokens: self.max_num_batched_tokens.or(defaults.max_num_batched_tokens),
            kv_cache_memory_bytes: self.kv_cache_memory_bytes.or(defaults.kv_cache_memory_bytes),
            ..self.clone()
        }
    }

    /// Refuses values out of range, by key.
    pub fn validate(&self) -> Result<(), Error> {
        let check = |ok: bool, key, what: String| if ok { Ok(()) } else { Err(Error::Config { key, what }) };
        check(
            self.block_size.is_power_of_two() && (8..=256).contains(&self.block_size),
            "block_size",
            format!("{} is not a power of two from 8 to 256", self.block_size),
        )?;
        check(
            (0.05..=0.99).contains(&self.gpu_memory_utilization),
            "gpu_memory_utilization",
            format!("{} is not within 0.05…0.99", self.gpu_memory_utilization),
        )?;
        if let Some(seqs) = self.max_num_seqs {
            check((1..=4096).contains(&seqs), "max_num_seqs", format!("{seqs} is not within 1…4096"))?;
            if let Some(tokens) = self.max_num_batched_tokens {
                check(
                    tokens >= seqs,
                    "max_num_batched_tokens",
                    format!("{tokens} is below max_num_seqs = {seqs}; raise it or lower max_num_seqs"),
                )?;
            }
        }
        check(
            self.max_num_batched_tokens != Some(0),
            "max_num_batched_tokens",
            "0 leaves no room for a token; use 1 or more".to_owned(),
        )?;
        check(self.max_model_len != Some(0), "max_model_len", "0 leaves no room for a token".to_owned())
    }
}
