//! How much of the GPU's memory the engine takes, and the words for when it does not suffice:
//! what has taken it, and which flag to change first.

use overnight_kernels::Error as DeviceError;
use overnight_kernels::memory::{ALIGNMENT, Ledger, Region};

use crate::Error;
use crate::config::EngineConfig;

/// No model is begun with less.
const ARENA_MIN: u64 = 1 << 28;
/// What was in use before is told from here on: less is this process's own context and what a
/// desktop draws with.
const OTHERS_MIN: u64 = 1 << 30;

/// What memory is asked for; that decides what helps when there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The model itself.
    Weights,
    /// Activations and whatever else grows with the size of a step.
    Steps,
    /// The KV cache, of this many blocks by a setting with this flag; `None`: of what is left.
    KvCache(Option<&'static str>),
}

impl Purpose {
    /// The KV cache as the settings size it.
    pub(super) fn kv_cache(config: &EngineConfig) -> Self {
        let blocks = config.num_gpu_blocks_override.map(|_| "--num-gpu-blocks-override");
        Self::KvCache(blocks.or(config.kv_cache_memory_bytes.map(|_| "--kv-cache-memory-bytes")))
    }

    fn name(self) -> &'static str {
        match self {
            Self::Weights => "the weights",
            Self::Steps => "what a step computes with",
            Self::KvCache(_) => "the KV cache",
        }
    }

    /// What to change, in the order to try it.
    fn remedies(self) -> String {
        let smaller_steps = "raise --gpu-memory-utilization, lower --max-num-batched-tokens, then --max-num-seqs, then \
                             --max-model-len";
        match self {
            Self::Weights => "raise --gpu-memory-utilization, or take a smaller model".to_owned(),
            Self::Steps => smaller_steps.to_owned(),
            Self::KvCache(Some(flag)) => format!("lower {flag}, or leave it out; else {smaller_steps}"),
            Self::KvCache(None) => format!("{smaller_steps}, or take a smaller model"),
        }
    }
}

/// The share of the memory that the settings give, less what is in use already. Errors with
/// [`Error::Busy`] when that leaves too little to begin with.
pub(super) fn arena_bytes(free: u64, total: u64, utilization: f64) -> Result<u64, Error> {
    let share = (total as f64 * utilization) as u64;
    let used = total - free;
    if share <= used + ARENA_MIN {
        return Err(Error::Busy(format!(
            "{} of {}, where all programs together may hold {} (--gpu-memory-utilization {utilization}): end those \
             that hold it (`nvidia-smi` lists them), raise the share, or compute on the CPU with --device cpu",
            amount(used),
            amount(total),
            amount(share)
        )));
    }
    Ok((share - used) / ALIGNMENT * ALIGNMENT)
}

/// The driver refuses the one allocation, which was free when it was asked for its size.
pub(super) fn arena_refused(utilization: f64, source: DeviceError) -> Error {
    match source {
        DeviceError::OutOfMemory { asked_bytes, free_bytes, total_bytes, .. } => Error::Busy(format!(
            "{} were free and are not any more, now {} of {}: end the programs that took it (`nvidia-smi` lists \
             them), lower --gpu-memory-utilization below {utilization}, or compute on the CPU with --device cpu",
            amount(asked_bytes),
            amount(free_bytes),
            amount(total_bytes)
        )),
        source => Error::Device { stage: "could not set the GPU's memory aside".to_owned(), source },
    }
}

/// Memory that does not suffice for `purpose`, in words; `taken` by region, and `others_bytes` were
/// in use before. Other failures pass.
pub(super) fn out_of_memory(taken: &[Region], others_bytes: u64, purpose: Purpose, source: DeviceError) -> Error {
    if !matches!(source, DeviceError::OutOfMemory { .. }) {
        return Error::Device { stage: format!("could not set memory aside for {}", purpose.name()), source };
    }
    let mut taken: Vec<&Region> = taken.iter().collect();
    taken.sort_by_key(|region| std::cmp::Reverse(region.bytes));
    let taken: Vec<String> = taken.iter().map(|region| format!("{} {}", region.name, amount(region.bytes))).collect();
    let mut beside = if taken.is_empty() { "nothing".to_owned() } else { taken.join(", ") };
    let (name, mut remedies) = (purpose.name(), purpose.remedies());
    if others_bytes >= OTHERS_MIN {
        beside = format!("{beside}, and {} that other programs hold", amount(others_bytes));
        remedies = format!("end those programs (`nvidia-smi` lists them), {remedies}");
    }
    let stage = format!("the engine's share of the GPU's memory does not hold {name} beside {beside}: {remedies}");
    Error::Device { stage, source }
}

/// Refuses what the arena has no room for, before any of it is taken. Weights that would fit
/// without the `others_bytes` that were in use before are [`Error::Busy`].
pub(super) fn check_room(ledger: &Ledger, others_bytes: u64, purpose: Purpose, asked_bytes: u64) -> Result<(), Error> {
    let free_bytes = ledger.free_bytes();
    if asked_bytes <= free_bytes {
        return Ok(());
    }
    if purpose == Purpose::Weights && others_bytes >= OTHERS_MIN && asked_bytes <= free_bytes + others_bytes {
        return Err(Error::Busy(format!(
            "other programs hold {} of it, and what they leave of the engine's share, {}, does not hold the weights, \
             {}: end those programs (`nvidia-smi` lists them), raise --gpu-memory-utilization, or compute on the CPU \
             with --device cpu",
            amount(others_bytes),
            amount(free_bytes),
            amount(asked_bytes)
        )));
    }
    let total_bytes = free_bytes + ledger.regions().iter().map(|region| region.bytes).sum::<u64>();
    let what = purpose.name().to_owned();
    let source = DeviceError::OutOfMemory { what, asked_bytes, free_bytes, total_bytes };
    Err(out_of_memory(ledger.regions(), others_bytes, purpose, source))
}

/// Where a card's memory is, bytes by name; see [`crate::cuda::CudaModel::memory_report`].
pub(super) fn report(ledger: &Ledger, graphs_bytes: u64, card_free: u64, total: u64) -> Vec<(String, u64)> {
    let regions = ledger.regions().iter().map(|region| (region.name.clone(), region.bytes));
    let ours = ledger.regions().iter().map(|region| region.bytes).sum::<u64>() + ledger.free_bytes();
    let others = total.saturating_sub(ours).saturating_sub(graphs_bytes).saturating_sub(card_free);
    let rest =
        [("free", ledger.free_bytes()), ("graphs", graphs_bytes), ("others", others), ("free on the card", card_free)];
    regions.chain(rest.map(|(name, bytes)| (name.to_owned(), bytes))).collect()
}

/// Bytes for people.
pub(super) fn amount(bytes: u64) -> String {
    match bytes {
        10_000_000.. => format!("{:.2} GB", bytes as f64 / 1e9),
        _ => format!("{:.2} MB", bytes as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    /// An arena of 20 GB with a model in it, and how it refuses 5 GB more.
    fn full() -> (Ledger, DeviceError) {
        let mut ledger = Ledger::new(20 * GB);
        for (name, bytes) in
            [("workspace", 64_000_000), ("weights", 16 * GB), ("activations", GB), ("sampling", 1 << 20)]
        {
            ledger.take(name, bytes).expect("fits");
        }
        let refused = ledger.take("kv cache", 5 * GB).expect_err("does not fit");
        (ledger, refused)
    }

    fn words(purpose: Purpose) -> String {
        let (ledger, refused) = full();
        let error = out_of_memory(ledger.regions(), 0, purpose, refused);
        format!("{error}: {}", std::error::Error::source(&error).expect("the device's own words"))
    }

    #[track_caller]
    fn assert_order(text: &str, parts: &[&str]) {
        let mut rest = text;
        for part in parts {
            let at = rest.find(part).unwrap_or_else(|| panic!("{part} is missing, or comes too early, in: {text}"));
            rest = &rest[at + part.len()..];
        }
    }

    #[test]
    fn what_took_the_memory_is_said_the_largest_first_with_what_was_asked_and_free() {
        let text = words(Purpose::Steps);
        assert_order(&text, &["weights 16.00 GB", "activations 1.00 GB", "workspace 0.06 GB", "sampling 1.05 MB"]);
        assert!(text.contains("5000000000 bytes asked") && text.contains("of 20000000000"), "{text}");
        let empty = out_of_memory(&[], 0, Purpose::Weights, full().1).to_string();
        assert!(empty.contains("beside nothing"), "{empty}");
    }

    #[test]
    fn each_stage_has_the_remedies_that_help_it_in_the_order_to_try() {
        let flags = [
            "--gpu-memory-utilization",
            "--max-num-batched-tokens",
            "--max-num-seqs",
            "--max-model-len",
            "smaller model",
        ];
        assert_order(&words(Purpose::KvCache(None)), &flags);
        assert_order(&words(Purpose::Steps), &flags[..4]);
        let weights = words(Purpose::Weights);
        assert_order(&weights, &["raise --gpu-memory-utilization", "smaller model"]);
        assert!(!weights.contains("--max-num-seqs"), "steps take nothing yet: {weights}");
    }

    #[test]
    fn a_size_of_the_kv_cache_that_was_set_is_named_as_the_first_to_change() {
        let config = EngineConfig { kv_cache_memory_bytes: Some(50 << 30), ..EngineConfig::default() };
        let text = words(Purpose::kv_cache(&config));
        assert_order(&text, &["lower --kv-cache-memory-bytes", "--gpu-memory-utilization", "--max-num-batched-tokens"]);
        // The number of blocks wins over the bytes.
        let config = EngineConfig { num_gpu_blocks_override: Some(1 << 20), ..config };
        assert_order(&words(Purpose::kv_cache(&config)), &["lower --num-gpu-blocks-override"]);
        assert_eq!(Purpose::kv_cache(&EngineConfig::default()), Purpose::KvCache(None));
    }

    #[test]
    fn memory_that_others_hold_is_named_and_comes_first() {
        let (ledger, refused) = full();
        let text = out_of_memory(ledger.regions(), 15 * GB, Purpose::Steps, refused).to_string();
        assert_order(&text, &["weights 16.00 GB", "15.00 GB that other programs hold", "end those", "nvidia-smi"]);
        assert_order(&text, &["end those", "raise --gpu-memory-utilization", "--max-num-seqs"]);
        assert!(!words(Purpose::Steps).contains("other programs"), "a context of our own is no other program");
    }

    #[test]
    fn weights_that_would_fit_without_others_find_the_memory_in_use() {
        let ledger = Ledger::new(7 * GB);
        let refused = |others, asked| check_room(&ledger, others, Purpose::Weights, asked).expect_err("no room");
        let error = refused(15 * GB, 16 * GB);
        assert!(matches!(error, Error::Busy(_)), "{error:?}");
        assert_order(&error.to_string(), &["15.00 GB", "7.00 GB", "16.00 GB", "end those", "--device cpu"]);
        let error = refused(15 * GB, 30 * GB);
        assert!(matches!(error, Error::Device { .. }), "they would not fit either way: {error:?}");
        assert!(matches!(refused(0, 16 * GB), Error::Device { .. }));
    }

    #[test]
    fn a_failure_of_another_kind_gets_no_advice_about_memory() {
        let (ledger, _) = full();
        let lost = DeviceError::Driver { what: "fill".to_owned(), status: "lost".to_owned(), is_sticky: true };
        let text = out_of_memory(ledger.regions(), 0, Purpose::KvCache(None), lost).to_string();
        assert_eq!(text, "could not set memory aside for the KV cache");
    }

    #[test]
    fn what_exceeds_the_room_is_refused_whole_with_the_numbers() {
        let (ledger, _) = full();
        let free = ledger.free_bytes();
        check_room(&ledger, 0, Purpose::KvCache(None), free).expect("it fits exactly");
        let error = check_room(&ledger, 0, Purpose::KvCache(None), free + 1).expect_err("one byte more");
        let source = std::error::Error::source(&error).expect("the numbers").to_string();
        assert_order(&source, &[&format!("{} bytes asked", free + 1), &format!("{free} free"), "20000000000"]);
        assert!(error.to_string().contains("does not hold the KV cache beside weights 16.00 GB"), "{error}");
    }

    #[test]
    fn the_report_adds_up_to_the_card() {
        let (ledger, _) = full();
        let report = report(&ledger, 300_000_000, 3 * GB, 24 * GB);
        let of = |wanted: &str| report.iter().find(|(name, _)| name == wanted).expect("it is told").1;
        assert_eq!((of("weights"), of("graphs"), of("free on the card")), (16 * GB, 300_000_000, 3 * GB));
        assert_eq!(of("free"), ledger.free_bytes());
        assert_eq!(of("others"), 700_000_000);
        assert_eq!(report.iter().map(|(_, bytes)| bytes).sum::<u64>(), 24 * GB);
    }

    #[test]
    fn the_share_counts_what_others_use() {
        assert_eq!(arena_bytes(100 * GB, 100 * GB, 0.5).expect("all free"), 50 * GB / ALIGNMENT * ALIGNMENT);
        assert_eq!(arena_bytes(70 * GB, 100 * GB, 0.5).expect("30 used"), 20 * GB / ALIGNMENT * ALIGNMENT);
        for free in [0, 20 * GB, 50 * GB, 50 * GB + ARENA_MIN] {
            let text = arena_bytes(free, 100 * GB, 0.5).expect_err("too little").to_string();
            assert_order(&text, &["is in use", "of 100.00 GB", "50.00 GB", "nvidia-smi", "raise", "--device cpu"]);
        }
    }

    #[test]
    fn memory_that_went_meanwhile_asks_for_a_smaller_share_not_a_larger_one() {
        let refused = Ledger::new(GB).take("the arena", 2 * GB).expect_err("does not fit");
        let text = arena_refused(0.92, refused).to_string();
        assert_order(&text, &["2.00 GB", "1.00 GB", "nvidia-smi", "lower --gpu-memory-utilization below 0.92"]);
        assert!(!text.contains("raise"), "{text}");
    }
}
