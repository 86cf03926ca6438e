//! The families that a dense decoder needs, for one head size.

use overnight_kernels::activation::Activation;
use overnight_kernels::attention_decode::AttentionDecode;
use overnight_kernels::attention_prefill::AttentionPrefill;
use overnight_kernels::block_tables::BlockTables;
use overnight_kernels::embedding::Embedding;
use overnight_kernels::fill::Fill;
use overnight_kernels::rms_norm::RmsNorm;
use overnight_kernels::rope::QkNormRopeKvWrite;
use overnight_kernels::sampling::Sampling;
use overnight_kernels::token_feedback::TokenFeedback;
use overnight_kernels::{Device, Error, Modules};

use crate::cuda::buffers::heads;
use crate::model::config::ModelConfig;

/// Loaded entry points.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) activation: Activation,
    pub(super) block_tables: BlockTables,
    pub(super) decode: AttentionDecode,
    pub(super) embedding: Embedding,
    pub(super) fill: Fill,
    pub(super) prefill: AttentionPrefill,
    pub(super) rms_norm: RmsNorm,
    pub(super) rope: QkNormRopeKvWrite,
    pub(super) sampling: Sampling,
    pub(super) token_feedback: TokenFeedback,
}

impl Kernels {
    pub(super) fn load(modules: &Modules, device: &Device, config: &ModelConfig) -> Result<Self, Error> {
        let dim = heads(config).head_dim;
        Ok(Self {
            activation: Activation::load(modules)?,
            block_tables: BlockTables::load(modules)?,
            decode: AttentionDecode::load(device, modules, dim)?,
            embedding: Embedding::load(modules)?,
            fill: Fill::load(modules)?,
            prefill: AttentionPrefill::load(device, modules, dim)?,
            rms_norm: RmsNorm::load(modules)?,
            rope: QkNormRopeKvWrite::load(modules, dim)?,
            sampling: Sampling::load(modules)?,
            token_feedback: TokenFeedback::load(modules)?,
        })
    }
}
