//! CUDA families, their launchers and their CPU references, over a thin safe layer.
//!
//! Owns everything that touches the driver, NVRTC and cuBLASLt: [`device`], [`stream`],
//! [`memory`], [`compile`] with its [`cache`], [`launch`], [`graph`] and [`gemm`].
//! Invariant: after the start nothing here allocates device memory, and a failed call of
//! CUDA is an [`Error`] with the kernel and its dims, never an exit or a panic.
//! Knows no models, sequences or requests, and reads no environment.
//! Start with `rms_norm/` for the pattern of a family, with [`device`] for the layer below.

#![warn(missing_docs, clippy::unwrap_used)]

pub mod activation;
pub mod attention_decode;
pub mod attention_prefill;
pub mod bench;
pub mod block_tables;
pub mod cache;
pub mod compile;
pub mod device;
mod driver;
pub mod embedding;
pub mod error;
pub mod fill;
pub mod gemm;
pub mod graph;
pub mod launch;
pub mod library;
pub mod memory;
pub mod module;
pub mod paged;
#[cfg(test)]
mod paged_case;
pub mod rms_norm;
pub mod rope;
pub mod sampling;
pub mod sources;
pub mod stream;
#[cfg(test)]
mod testing;
pub mod token_feedback;
mod vectors;

pub use compile::{Arch, Dtype, Program};
pub use device::Device;
pub use error::Error;
pub use launch::Launch;
pub use memory::{Arena, DeviceSlice};
pub use module::{Function, Modules};
pub use stream::{Event, Stream};

/// The slot of a padding row in every kernel that writes K and V: nothing is written.
pub const PAD_SLOT: i32 = -1;
