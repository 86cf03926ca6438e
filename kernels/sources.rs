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
    ("grid.cuh", include_str!("include/grid.cuh")),
    ("philox.cuh", include_str!("include/philox.cuh")),
    ("reduce.cuh", include_str!("include/reduce.cuh")),
    ("sampling_row.cuh", include_str!("include/sampling_row.cuh")),
    ("types.cuh", include_str!("include/types.cuh")),
    ("vector.cuh", include_str!("include/vector.cuh")),
];

/// All families.
pub static SOURCES: &[&Source] = &[
    &crate::activation::SOURCE,
    &crate::embedding::SOURCE,
    &crate::fill::SOURCE,
    &crate::rms_norm::SOURCE,
    &crate::sampling::FILTER_SOURCE,
    &crate::sampling::SOURCE,
];
