//! The shapes that are measured.

use clap::ValueEnum;
use overnight_kernels::bench::Case;

/// What can be chosen by `--family`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Family {
    /// A copy between buffers: the card's own bandwidth
    Copy,
    /// Attention of decode rows
    AttentionDecode,
    /// Attention of prompts
    AttentionPrefill,
    /// Norms of q and k, rotation, write to the KV cache
    Rope,
    /// Norms, alone and around an addition
    RmsNorm,
    /// SiLU or GeLU of the gate times the other half
    Activation,
    /// Gather of embedding rows
    Embedding,
    /// Lists of a step: work of decode attention, block tables, chosen tokens as inputs
    Lists,
    /// Greedy choice and choice from a nucleus
    Sampling,
    /// Matrix products, beside the best algorithm of cuBLASLt
    Gemm,
}

impl Family {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::AttentionDecode => "attention-decode",
            Self::AttentionPrefill => "attention-prefill",
            Self::Rope => "rope",
            Self::RmsNorm => "rms-norm",
            Self::Activation => "activation",
            Self::Embedding => "embedding",
            Self::Lists => "lists",
            Self::Sampling => "sampling",
            Self::Gemm => "gemm",
        }
    }
}

/// Rows of embedding and head of Qwen3.
const VOCAB_SIZE: u32 = 151_936;
/// Most rows whose head an engine computes at once.
const HEAD_ROWS_MAX: u32 = 1024;

/// A dense decoder's widths.
struct Dims {
    hidden: u32,
    ffn: u32,
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
}

/// Qwen3 0.6B and 8B.
const MODELS: [Dims; 2] = [
    Dims { hidden: 1024, ffn: 3072, num_heads: 16, num_kv_heads: 8, head_dim: 128 },
    Dims { hidden: 4096, ffn: 12_288, num_heads: 32, num_kv_heads: 8, head_dim: 128 },
];

/// Heads, kv heads and head dim of attention: small, Qwen3 0.6B, Qwen3 8B, Gemma 3.
const HEADS: [(u32, u32, u32); 4] = [(32, 8, 64), (16, 8, 128), (32, 8, 128), (8, 4, 256)];
/// Rows of a decode step by context.
const DECODE: [(u32, &[u32]); 2] = [(2048, &[1, 8, 32, 128, 256]), (8192, &[1, 8, 64])];
/// Prompts by length.
const PREFILL: [(u32, u32); 3] = [(16, 1024), (8, 2048), (2, 8192)];
/// Tokens of a step.
const TOKENS: [u32; 4] = [1, 256, 2048, 16_384];
/// Rows of a decode step, for its lists.
const STEPS: [u32; 3] = [1, 256, 1024];
/// Rows of a step that choose.
const CHOICES: [u32; 3] = [1, 64, 512];

/// Everything that is measured, family by family. A card of less memory gets a smaller copy.
pub(super) fn all(memory_bytes: u64) -> impl Iterator<Item = (Family, Case)> {
    let mut cases = vec![(Family::Copy, Case::Copy { bytes: (2 << 30).min(memory_bytes / 16) })];
    for (num_heads, num_kv_heads, head_dim) in HEADS {
        for (context_len, rows) in DECODE {
            cases.extend(rows.iter().map(|&rows| {
                let case = Case::AttentionDecode { rows, context_len, num_heads, num_kv_heads, head_dim };
                (Family::AttentionDecode, case)
            }));
        }
    }
    for (num_heads, num_kv_heads, head_dim) in HEADS {
        cases.extend(PREFILL.map(|(rows, query_len)| {
            let case = Case::AttentionPrefill { rows, query_len, num_heads, num_kv_heads, head_dim };
            (Family::AttentionPrefill, case)
        }));
    }
    let of_models = |of: fn(&Dims, u32) -> Case, family: Family| {
        MODELS.iter().flat_map(move |dims| TOKENS.map(|rows| (family, of(dims, rows))))
    };
    cases.extend(of_models(
        |&Dims { num_heads, num_kv_heads, head_dim, .. }, rows| Case::QkNormRopeKvWrite {
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
        },
        Family::Rope,
    ));
    cases.extend(of_models(|dims, rows| Case::RmsNorm { rows, hidden: dims.hidden }, Family::RmsNorm));
    cases.extend(of_models(|dims, rows| Case::PostAddRmsNorm { rows, hidden: dims.hidden }, Family::RmsNorm));
    cases.extend(of_models(|dims, rows| Case::SiluMul { rows, intermediate: dims.ffn }, Family::Activation));
    cases.extend(of_models(|dims, rows| Case::GeluTanhMul { rows, intermediate: dims.ffn }, Family::Activation));
    cases.extend(of_models(
        |dims, rows| Case::EmbeddingGather { rows, hidden: dims.hidden, vocab_size: VOCAB_SIZE },
        Family::Embedding,
    ));
    cases.extend(STEPS.map(|rows| (Family::Lists, Case::DecodePlan { rows, context_len: 2048, head_dim: 128 })));
    cases.extend(STEPS.map(|rows| (Family::Lists, Case::BlockTables { rows, blocks: 2048 / 64 })));
    cases.extend(STEPS.map(|rows| (Family::Lists, Case::TokenFeedback { rows })));
    for (temperature, top_p) in [(0.0, 1.0), (0.8, 1.0), (0.8, 0.95)] {
        cases.extend(
            CHOICES.map(|rows| (Family::Sampling, Case::Sampling { rows, vocab_size: VOCAB_SIZE, temperature, top_p })),
        );
    }
    cases.extend(MODELS.iter().flat_map(products).map(|case| (Family::Gemm, case)));
    cases.into_iter()
}

/// All products of a step, at every power of two of its tokens up to 8,192.
fn products(dims: &Dims) -> Vec<Case> {
    let &Dims { hidden, ffn, num_heads, num_kv_heads, head_dim } = dims;
    let matrices = [
        ((num_heads + 2 * num_kv_heads) * head_dim, hidden, false),
        (hidden, num_heads * head_dim, true),
        (2 * ffn, hidden, false),
        (hidden, ffn, true),
        (VOCAB_SIZE, hidden, false),
    ];
    let mut cases = Vec::new();
    for (n, k, accumulates) in matrices {
        let sizes = (0..=13).map(|power| 1 << power);
        let sizes = sizes.filter(|&m| n != VOCAB_SIZE || m <= HEAD_ROWS_MAX);
        cases.extend(sizes.map(|m| Case::Gemm { m, n, k, accumulates }));
    }
    cases
}

/// The entry point's name.
pub(super) fn name(case: Case) -> &'static str {
    match case {
        Case::Copy { .. } => "copy",
        Case::AttentionDecode { .. } => "attention_decode",
        Case::AttentionPrefill { .. } => "attention_prefill",
        Case::QkNormRopeKvWrite { .. } => "qk_norm_rope_kv_write",
        Case::RmsNorm { .. } => "rms_norm",
        Case::PostAddRmsNorm { .. } => "post_add_rms_norm",
        Case::SiluMul { .. } => "silu_mul",
        Case::GeluTanhMul { .. } => "gelu_tanh_mul",
        Case::EmbeddingGather { .. } => "embedding_gather",
        Case::DecodePlan { .. } => "attention_decode_plan",
        Case::BlockTables { .. } => "expand_block_tables",
        Case::TokenFeedback { .. } => "feed_tokens",
        Case::Sampling { .. } => "sampling",
        Case::Gemm { .. } => "gemm",
    }
}

/// The shape in words.
pub(super) fn shape(case: Case) -> String {
    match case {
        Case::Copy { bytes } => format!("{bytes} bytes"),
        Case::AttentionDecode { rows, context_len, num_heads, num_kv_heads, head_dim } => {
            format!("{rows} x {context_len}, {num_heads}/{num_kv_heads} heads of {head_dim}")
        }
        Case::AttentionPrefill { rows, query_len, num_heads, num_kv_heads, head_dim } => {
            format!("{rows} x {query_len}, {num_heads}/{num_kv_heads} heads of {head_dim}")
        }
        Case::QkNormRopeKvWrite { rows, num_heads, num_kv_heads, head_dim } => {
            format!("{rows} tokens, {num_heads}/{num_kv_heads} heads of {head_dim}")
        }
        Case::RmsNorm { rows, hidden }
        | Case::PostAddRmsNorm { rows, hidden }
        | Case::EmbeddingGather { rows, hidden, .. } => format!("{rows} tokens x {hidden}"),
        Case::SiluMul { rows, intermediate } | Case::GeluTanhMul { rows, intermediate } => {
            format!("{rows} tokens x {intermediate}")
        }
        Case::DecodePlan { rows, context_len, head_dim } => format!("{rows} x {context_len}, heads of {head_dim}"),
        Case::BlockTables { rows, blocks } => format!("{rows} x {blocks} blocks"),
        Case::TokenFeedback { rows } => format!("{rows} rows"),
        Case::Sampling { rows, vocab_size, temperature, top_p } => {
            let how = match (temperature >= 1e-5, top_p < 1.0) {
                (false, _) => "greedy".to_owned(),
                (true, false) => format!("temperature {temperature}"),
                (true, true) => format!("temperature {temperature}, top-p {top_p}"),
            };
            format!("{rows} rows x {vocab_size}, {how}")
        }
        Case::Gemm { m, n, k, accumulates } => {
            format!("m {m}, n {n}, k {k}{}", if accumulates { ", added" } else { "" })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_family_is_measured_and_no_case_twice() {
        let cases: Vec<(Family, Case)> = all(141 << 30).collect();
        for family in Family::value_variants() {
            assert!(cases.iter().any(|(of, _)| of == family), "{}", family.word());
        }
        let told: BTreeSet<String> = cases.iter().map(|&(_, case)| format!("{} {}", name(case), shape(case))).collect();
        assert_eq!(told.len(), cases.len(), "a case is told apart by its name and shape");
        let families: Vec<&str> = cases.iter().map(|(family, _)| family.word()).collect();
        let mut changes = families.clone();
        changes.dedup();
        assert_eq!(changes.len(), Family::value_variants().len(), "family by family");
    }

    #[test]
    fn products_are_those_of_both_models_at_every_power_of_two() {
        let products: Vec<Case> = MODELS.iter().flat_map(products).collect();
        assert_eq!(products.len(), 2 * (4 * 14 + 11));
        assert!(products.contains(&Case::Gemm { m: 8192, n: 24_576, k: 4096, accumulates: false }));
        assert!(products.contains(&Case::Gemm { m: 1, n: 1024, k: 3072, accumulates: true }));
        assert!(!products.iter().any(|case| matches!(case, Case::Gemm { m: 2048, n: VOCAB_SIZE, .. })));
    }
}
