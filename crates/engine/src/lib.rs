//! Continuous batching on one model replica: requests in, token events out.
//!
//! Owns the scheduler, the paged KV cache, the models and the CPU back end.
//! Invariant: a request's tokens depend on its prompt, parameters and seed, never
//! on its neighbours, arrival order or the size of the KV pool.
//! Knows nothing about jobs, shards, SQL, HTTP or objects.
//! Start with [`request`] for the words, then `engine.rs` for the step.

#![warn(missing_docs, clippy::unwrap_used)]

pub mod bench;
pub mod blocks;
pub mod config;
mod cpu;
pub mod cuda;
pub mod door;
pub mod engine;
pub mod error;
pub mod gguf;
pub mod handle;
pub mod load;
pub mod metrics;
pub mod model;
#[cfg(test)]
mod model_bed;
pub mod output;
pub mod request;
mod running;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod step;
pub mod text;
#[cfg(test)]
mod tiny_gguf;
#[cfg(test)]
#[path = "../../testing/src/tiny_model.rs"]
#[expect(unreachable_pub, reason = "shared with `testing`, which depends on this crate")]
mod tiny_model;
mod waiting;
pub mod weights;

pub use config::{DeviceKind, DtypeSetting, EngineConfig};
pub use engine::Engine;
pub use error::Error;
pub use handle::{EngineHandle, EngineState, EngineStatus};
pub use output::{Event, Sink};
pub use overnight_kernels::device::exit_at_once;
pub use request::{
    Finish, FinishReason, Request, RequestError, RequestId, SamplingParams, StopReason, StopRules, TokenLogprob,
    TokenLogprobs, TokenOutput,
};
pub use running::shut_down_all;
