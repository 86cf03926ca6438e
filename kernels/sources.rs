//! Everything that is compiled for the device, embedded in the binary.
//!
//! A test holds this list to the files on disk.

/// A `.cu` file.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// The family, which names it in messages and in the cache.
    pub name: &'static str,
    /// Below the crate's folder.
    pub path: &'static str,
    /// Its text.
    pub text: &'static str,
}

impl Source {
    /// Lists as `Source::new("rms_norm", "rms_norm/rms_norm.cu", include_str!("rms_norm/rms_norm.cu"))`.
    pub const fn new(name: &'static str, path: &'static str, text: &'static str) -> Self {
        Self { name, path, text }
    }
}

/// Headers by the name that sources include them by.
pub const HEADERS: &[(&str, &str)] = &[
    ("async_copy.cuh", include_str!("include/async_copy.cuh")),
    ("decode_slices.cuh", include_str!("include/decode_slices.cuh")),
    ("decode_work.cuh", include_str!("include/decode_work.cuh")),
    ("grid.cuh", include_str!("include/grid.cuh")),
    ("mma.cuh", include_str!("include/mma.cuh")),
    ("philox.cuh", include_str!("include/philox.cuh")),
    ("reduce.cuh", include_str!("include/reduce.cuh")),
    ("sampling_row.cuh", include_str!("include/sampling_row.cuh")),
    ("types.cuh", include_str!("include/types.cuh")),
    ("vector.cuh", include_str!("include/vector.cuh")),
    ("wgmma.cuh", include_str!("include/wgmma.cuh")),
];

/// All families.
pub const SOURCES: &[&Source] = &[
    &crate::activation::SOURCE,
    &crate::attention_decode::PLAN_SOURCE,
    &crate::attention_decode::SOURCE,
    &crate::attention_prefill::SOURCE,
    &crate::block_tables::SOURCE,
    &crate::embedding::SOURCE,
    &crate::fill::SOURCE,
    &crate::rms_norm::SOURCE,
    &crate::rope::SOURCE,
    &crate::sampling::FILTER_SOURCE,
    &crate::sampling::SOURCE,
    &crate::token_feedback::SOURCE,
];
