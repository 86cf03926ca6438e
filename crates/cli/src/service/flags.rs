//! The engine's flags, with the names that operators know, as settings.

use std::path::PathBuf;

use clap::Args;

use crate::config::{Setting, path_text};
use crate::error::Result;
use crate::output::human;

/// Flags of `serve`, `worker`, `run` and `bench throughput`.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Engine options")]
pub(crate) struct EngineFlags {
    /// A name that `batch models list` shows, a folder of safetensors, or a GGUF file
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Names that requests may use; may be given several times [default: the model's name]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub(crate) served_model_name: Vec<String>,
    /// auto, safetensors, gguf, or dummy (random weights, for speed work)
    #[arg(long, value_name = "FORMAT")]
    pub(crate) load_format: Option<String>,
    /// A Jinja file to render chats with [default: the model's own template]
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Where to compute: auto (a usable GPU, else the CPU), cpu or cuda
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// Type of weights and KV cache on a GPU: auto, bfloat16 or float16
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<String>,
    /// Share of the GPU's memory to use [default: 0.92]
    #[arg(long, value_name = "SHARE")]
    pub(crate) gpu_memory_utilization: Option<f64>,
    /// Launch decode kernels one by one instead of replaying graphs
    #[arg(long)]
    pub(crate) enforce_eager: bool,
    /// Longest prompt plus output, tokens [default: the model's own]
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) max_model_len: Option<u64>,
    /// Most sequences in a step [default: 32 on the CPU, 1024 on a GPU]
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) max_num_seqs: Option<u64>,
    /// Most tokens in a step [default: 512 on the CPU, 8192 or 16384 on a GPU]
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) max_num_batched_tokens: Option<u64>,
    /// Token slots in a KV block [default: 64]
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) block_size: Option<u64>,
    /// Memory of the KV cache, for example 2GiB
    #[arg(long, value_parser = human::parse_bytes)]
    pub(crate) kv_cache_memory_bytes: Option<u64>,
    /// KV blocks, for tests of preemption
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) num_gpu_blocks_override: Option<u64>,
    /// Find finished blocks again (on unless turned off)
    #[arg(long, conflicts_with = "no_enable_prefix_caching")]
    pub(crate) enable_prefix_caching: bool,
    /// Compute every prompt anew
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,
    /// Most logprobs per position that a request may ask for [default: 20]
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) max_logprobs: Option<u64>,
    /// Threads of the CPU back end [default: the cores at hand]
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) num_threads: Option<u64>,
    /// Seed of dummy weights; refused with others, because a request's own seed decides its samples
    #[arg(long, value_parser = human::parse_count)]
    pub(crate) seed: Option<u64>,
}

impl EngineFlags {
    /// Those that were given.
    pub(crate) fn settings(&self) -> Result<Vec<Setting>> {
        let mut settings = Vec::new();
        if let Some(model) = &self.model {
            settings.push(Setting::flag("--model", "engine.model", model.as_str()));
        }
        if !self.served_model_name.is_empty() {
            settings.push(Setting::flag(
                "--served-model-name",
                "engine.served_model_name",
                self.served_model_name.clone(),
            ));
        }
        if let Some(format) = &self.load_format {
            settings.push(Setting::flag("--load-format", "engine.load_format", format.as_str()));
        }
        if let Some(path) = &self.chat_template {
            settings.push(Setting::flag("--chat-template", "engine.chat_template", path_text(path)?));
        }
        if let Some(device) = &self.device {
            settings.push(Setting::flag("--device", "engine.device", device.as_str()));
        }
        if let Some(dtype) = &self.dtype {
            settings.push(Setting::flag("--dtype", "engine.dtype", dtype.as_str()));
        }
        if let Some(share) = self.gpu_memory_utilization {
            settings.push(Setting::flag("--gpu-memory-utilization", "engine.gpu_memory_utilization", share));
        }
        if self.enforce_eager {
            settings.push(Setting::flag("--enforce-eager", "engine.enforce_eager", true));
        }
        let numbers = [
            ("--max-model-len", "engine.max_model_len", self.max_model_len),
            ("--max-num-seqs", "engine.max_num_seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", "engine.max_num_batched_tokens", self.max_num_batched_tokens),
            ("--block-size", "engine.block_size", self.block_size),
            ("--kv-cache-memory-bytes", "engine.kv_cache_memory_bytes", self.kv_cache_memory_bytes),
            ("--num-gpu-blocks-override", "engine.num_gpu_blocks_override", self.num_gpu_blocks_override),
            ("--max-logprobs", "engine.max_logprobs", self.max_logprobs),
            ("--num-threads", "engine.num_threads", self.num_threads),
            ("--seed", "engine.seed", self.seed),
        ];
        settings.extend(
            numbers.into_iter().filter_map(|(flag, key, value)| value.map(|value| Setting::flag(flag, key, value))),
        );
        if self.enable_prefix_caching {
            settings.push(Setting::flag("--enable-prefix-caching", "engine.enable_prefix_caching", true));
        }
        if self.no_enable_prefix_caching {
            settings.push(Setting::flag("--no-enable-prefix-caching", "engine.enable_prefix_caching", false));
        }
        Ok(settings)
    }
}
