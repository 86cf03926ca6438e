//! What a model's settings come to on a GPU: what is refused by name before anything of it is
//! loaded, the type it computes in, and the sizes that memory is set aside for.

use overnight_kernels::attention_decode::GROUP_MAX;
use overnight_kernels::paged::BLOCK_SIZE_MIN;
use overnight_kernels::rms_norm::HIDDEN_MAX;
use overnight_kernels::sampling::VOCAB_MAX;
use overnight_kernels::{Arch, Device, Dtype};

use crate::Error;
use crate::config::{DtypeSetting, EngineConfig};
use crate::cuda::StepLimits;
use crate::cuda::buffers::DECODE_CHUNKS_MAX;
use crate::cuda::sampling::TOP_MAX;
use crate::door::check_model_len;
use crate::model::config::{Architecture, ModelConfig};

/// Rows of a decode step, where no setting says.
const MAX_NUM_SEQS: u32 = 1024;
/// Rows of logits at once.
const LOGITS_ROWS_MAX: u32 = 1024;
/// Tokens of a step, where no setting says, and on cards with this much memory.
const MAX_NUM_BATCHED_TOKENS: u32 = 8192;
const LARGE_MAX_NUM_BATCHED_TOKENS: u32 = 16_384;
const LARGE_MEMORY: u64 = 70_000_000_000;

/// Longest sequence: decode attention never splits the chunks of one row over two launches, and the
/// smallest chunk is 256 tokens.
const LEN_MAX: u32 = 256 * DECODE_CHUNKS_MAX;

/// What the kernels cannot do, by name, before anything of the model is loaded.
pub(super) fn refuse_unbuilt(
    model: &ModelConfig,
    config: &EngineConfig,
    dtype: Dtype,
    arch: Arch,
) -> Result<(), Error> {
    check_model_len(config, model.max_position)?;
    let unsupported = |what: String| Err(Error::Unsupported(format!("{what}: use --device cpu")));
    let ModelConfig { head_dim, heads, kv_heads, hidden, ffn, vocab_rows, .. } = *model;
    if ![64, 128, 256].contains(&head_dim) {
        return unsupported(format!("head_dim {head_dim} on a GPU; 64, 128 and 256 are built"));
    }
    if heads > kv_heads * GROUP_MAX as usize {
        let what = format!("{heads} heads over {kv_heads} kv heads on a GPU; at most {GROUP_MAX} may share one");
        return unsupported(what);
    }
    // Rows are read in vectors of eight.
    for (name, size) in [("hidden_size", hidden), ("intermediate_size", ffn)] {
        if !size.is_multiple_of(8) {
            return unsupported(format!("{name} {size} on a GPU; multiples of 8 are built"));
        }
    }
    if hidden > HIDDEN_MAX as usize {
        return unsupported(format!("hidden_size {hidden} on a GPU; up to {HIDDEN_MAX} is built"));
    }
    if vocab_rows > VOCAB_MAX as usize {
        return unsupported(format!("a vocabulary of {vocab_rows} on a GPU; up to {VOCAB_MAX} is built"));
    }
    if model.architecture == Architecture::Gemma3 && dtype == Dtype::F16 {
        let what = "Gemma 3 in float16, which does not hold the numbers between its layers";
        return match config.dtype {
            DtypeSetting::Auto => {
                Err(Error::NoDtype(format!("it does not compute with bfloat16, and {what}: use --device cpu")))
            }
            _ => unsupported(format!("{what}; use --dtype bfloat16, and where the GPU does not compute with that")),
        };
    }
    if dtype == Dtype::Bf16 && !arch.has_bf16() {
        return Err(Error::NoDtype(
            "it does not compute with bfloat16: use --dtype float16, or --device cpu".to_owned(),
        ));
    }
    let longest = config.max_model_len.unwrap_or(model.max_position).min(model.max_position);
    if longest > LEN_MAX {
        let what = format!("{longest} tokens is above {LEN_MAX}, the most on a GPU");
        return Err(Error::Config { key: "max_model_len", what });
    }
    if config.block_size < BLOCK_SIZE_MIN {
        let what = format!("{} is below {BLOCK_SIZE_MIN}, the least on a GPU", config.block_size);
        return Err(Error::Config { key: "block_size", what });
    }
    if config.max_logprobs > TOP_MAX {
        let what = format!("{} is above {TOP_MAX}, the most on a GPU", config.max_logprobs);
        return Err(Error::Config { key: "max_logprobs", what });
    }
    Ok(())
}

/// The type of weights, activations and KV cache.
pub(super) fn dtype(device: &Device, config: &EngineConfig) -> Dtype {
    let dtype = choose_dtype(config.dtype, device.arch());
    if config.dtype == DtypeSetting::Auto && dtype == Dtype::F16 {
        let name = &device.properties().name;
        tracing::warn!("{name} does not compute with bfloat16: weights and KV cache are float16");
    }
    dtype
}

/// bfloat16 that was asked for stays; a card without it refuses it when kernels are built.
fn choose_dtype(setting: DtypeSetting, arch: Arch) -> Dtype {
    match setting {
        DtypeSetting::Bfloat16 => Dtype::Bf16,
        DtypeSetting::Float16 => Dtype::F16,
        DtypeSetting::Auto if arch.has_bf16() => Dtype::Bf16,
        DtypeSetting::Auto => Dtype::F16,
    }
}

/// Bounds that memory is set aside for.
pub(super) fn limits(device: &Device, config: &EngineConfig, model: &ModelConfig) -> StepLimits {
    let large = device.properties().memory_bytes >= LARGE_MEMORY;
    let num_rows = config.max_num_seqs.unwrap_or(MAX_NUM_SEQS.min(config.max_num_batched_tokens.unwrap_or(u32::MAX)));
    let tokens = if large { LARGE_MAX_NUM_BATCHED_TOKENS } else { MAX_NUM_BATCHED_TOKENS };
    let longest = config.max_model_len.unwrap_or(model.max_position).min(model.max_position);
    StepLimits {
        num_rows,
        num_tokens: config.max_num_batched_tokens.unwrap_or(tokens).max(num_rows),
        block_size: config.block_size,
        blocks_per_row: longest.div_ceil(config.block_size).next_multiple_of(4),
        logits_rows: num_rows.min(LOGITS_ROWS_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiny_model::{TinyArch, TinyModel};

    type Change = fn(&mut ModelConfig);

    fn model(arch: TinyArch) -> ModelConfig {
        let tiny = TinyModel { head_dim: 128, ..TinyModel::new(arch) }.config();
        ModelConfig::from_json(tiny.as_object().expect("an object")).expect("a good configuration")
    }

    fn old() -> Arch {
        Arch::of((7, 5))
    }

    fn new() -> Arch {
        Arch::of((9, 0))
    }

    /// Else the start fails later and blames the graphs, or the first step does and blames the items.
    #[test]
    fn models_that_the_kernels_cannot_take_are_refused_at_once_with_the_size_and_the_limit() {
        let config = EngineConfig::default();
        let refused = |change: Change| {
            let mut model = model(TinyArch::Qwen3);
            change(&mut model);
            let error = refuse_unbuilt(&model, &config, Dtype::Bf16, new()).expect_err("it does not fit the kernels");
            assert!(error.to_string().ends_with("use --device cpu"), "{error}");
            error.to_string()
        };
        refuse_unbuilt(&model(TinyArch::Qwen3), &config, Dtype::Bf16, new()).expect("it fits");
        let cases: [(Change, [&str; 2]); 6] = [
            (|model| model.head_dim = 96, ["head_dim 96", "256"]),
            (|model| (model.heads, model.kv_heads) = (34, 2), ["34 heads over 2", "16"]),
            (|model| model.hidden = 16_392, ["hidden_size 16392", "16384"]),
            (|model| model.hidden = 1028, ["hidden_size 1028", "8"]),
            (|model| model.ffn = 100, ["intermediate_size 100", "8"]),
            (|model| model.vocab_rows = 524_289, ["524289", "524288"]),
        ];
        for (change, words) in cases {
            let text = refused(change);
            assert!(words.iter().all(|word| text.contains(word)), "{words:?} in {text}");
        }
        let at_the_limit = |model: &mut ModelConfig| {
            (model.heads, model.kv_heads, model.hidden, model.vocab_rows) = (32, 2, 16_384, 524_288);
        };
        let mut large = model(TinyArch::Qwen3);
        at_the_limit(&mut large);
        refuse_unbuilt(&large, &config, Dtype::F16, new()).expect("it fits exactly");
    }

    #[test]
    fn gemma_in_float16_and_a_context_beyond_the_model_are_refused_before_weights_are_read() {
        let config = EngineConfig::default();
        let gemma = model(TinyArch::Gemma3);
        refuse_unbuilt(&gemma, &config, Dtype::Bf16, new()).expect("as it was trained");
        let asked = EngineConfig { dtype: DtypeSetting::Float16, ..config.clone() };
        let text =
            refuse_unbuilt(&gemma, &asked, Dtype::F16, new()).expect_err("its numbers are too large").to_string();
        assert!(
            ["Gemma 3", "float16", "--dtype bfloat16", "--device cpu"].iter().all(|word| text.contains(word)),
            "{text}"
        );
        // A card that has no other type is of no use for this model, and `auto` may do without it.
        for (model, dtype, arch) in [(&gemma, Dtype::F16, old()), (&model(TinyArch::Qwen3), Dtype::Bf16, old())] {
            let error = refuse_unbuilt(model, &config, dtype, arch).expect_err("not on this card");
            assert!(matches!(&error, Error::NoDtype(text) if text.contains("--device cpu")), "{error}");
        }
        let too_long = EngineConfig { max_model_len: Some(gemma.max_position + 1), ..config };
        let error = refuse_unbuilt(&gemma, &too_long, Dtype::Bf16, new()).expect_err("longer than the model");
        assert!(error.to_string().contains("max_model_len"), "{error}");
        // No list of work could ever hold one such row.
        let endless = ModelConfig { max_position: LEN_MAX + 1, ..model(TinyArch::Qwen3) };
        let error = refuse_unbuilt(&endless, &EngineConfig::default(), Dtype::Bf16, new()).expect_err("too long a row");
        assert!(error.to_string().contains("max_model_len") && error.to_string().contains("2097152"), "{error}");
    }

    // Field report 58.
    #[test]
    fn cards_without_bfloat16_take_float16_unless_told_otherwise() {
        let (old, new) = (Arch::of((7, 5)), Arch::of((9, 0)));
        assert_eq!(choose_dtype(DtypeSetting::Auto, old), Dtype::F16);
        assert_eq!(choose_dtype(DtypeSetting::Auto, new), Dtype::Bf16);
        assert_eq!(choose_dtype(DtypeSetting::Float16, new), Dtype::F16);
        assert_eq!(choose_dtype(DtypeSetting::Bfloat16, old), Dtype::Bf16, "refused by name later, not changed");
    }
}
