//! Names, reads and writes immutable objects: inputs, segments, published files,
//! manifests and the index of custom ids, and knows the formats inside them.
//!
//! Invariants: an object's name is made of ids only, never of user text; a write
//! that returned is durable (on a local folder: file and folder synced); bytes of
//! input lines and finished output lines pass through unchanged.
//! Knows nothing about SQL, the engine or requests. An object's existence proves
//! nothing: what counts is the database row that names it.
//! Start with [`Blobs`], then [`segment`].

mod call;
pub mod envelope;
pub mod error;
pub mod index;
pub mod json;
pub mod layout;
pub mod lines;
pub mod lines_hash;
pub mod manifest;
mod mark;
mod open;
pub mod outcome_line;
mod probe;
mod remote;
pub mod segment;
pub mod sha;
pub mod store;
#[cfg(test)]
mod store_tests;
#[cfg(test)]
mod test_stores;
pub mod writer;

pub use error::Error;
pub use layout::{ObjectName, Prefix};
pub use outcome_line::{error_line, response_line};
pub use probe::Capabilities;
pub use remote::{Options, Unmarked};
pub use segment::{ItemRecord, SegmentHead, SegmentParts, SegmentReader, SegmentWriter};
pub use store::{Blobs, Listed};
pub use writer::{BlobWriter, Written};
