//! Leases shards, runs their items through [`generate::Generate`], writes segments,
//! commits outcomes; runs the lifecycle steps.
//!
//! Invariants: a segment object is durable before the row that names it; every
//! write carries its lease's epoch, so a late one changes nothing; an item gets
//! exactly one outcome, though it may be computed more than once.
//! Knows nothing about HTTP serving and not which database it writes to.
//! Start with `shard_run.rs`: lease, read, generate, write the segment, commit.

pub mod config;
pub mod error;
pub mod failpoints;
pub mod generate;
pub mod instant;
pub mod intake;
pub mod items;
pub mod lifecycle;
pub mod local;
pub mod lock;
pub mod mapper;
pub mod metrics;
pub mod remote;

mod checkpoint;
mod claim;
mod feed;
mod outcome;
mod planner;
mod pool;
mod prepare;
mod renewal;
mod shard_claim;
mod shard_run;
mod window;
mod worker;

pub use config::WorkerConfig;
pub use error::Error;
pub use window::WindowStatus;
pub use worker::{WorkerHandle, WorkerParts, WorkerStatus, start};

/// Seconds for the log, to the millisecond.
fn seconds(time: std::time::Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}
