//! The nouns of the control plane: typed ids, states and their legal moves,
//! outcomes, limits and error classes.
//!
//! Invariant: a value of these types is always legal by itself; an impossible
//! combination (a shard state and an epoch, say) is the store's to refuse.
//! Knows nothing about async, SQL, HTTP or CUDA. Start with [`job`].

pub mod error;
pub mod humane;
pub mod id;
pub mod item;
pub mod job;
pub mod limits;
pub mod outcome;
pub mod shard;
pub mod time;

pub use error::{Class, chain};
pub use id::{BatchRequestId, Epoch, EventId, FileId, ItemIndex, JobId, ParseIdError, ShardIndex, WorkerId};
pub use item::{Bitmap, ItemState};
pub use job::{Ending, Endpoint, JobState};
pub use limits::Limits;
pub use outcome::{ErrorCode, FailedTry, OutcomeCounts, OutcomeKind, Usage};
pub use shard::ShardState;
pub use time::Timestamp;
