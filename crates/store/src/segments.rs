//! Segments: rows that name immutable objects of outcomes.

use async_trait::async_trait;
use overnight_types::{Bitmap, Epoch, JobId, ShardIndex, Usage};

use crate::Error;

/// A segment object that is durable and about to be named by a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSegment {
    /// Its shard.
    pub shard: ShardIndex,
    /// Its number within the shard; the guard's `next_seq`.
    pub seq: u32,
    /// The epoch in its object's name.
    pub epoch: Epoch,
    /// Items whose outcome it holds; bit per item of the shard.
    pub items: Bitmap,
    /// Of them, the failed ones.
    pub failed: Bitmap,
    /// Outcomes by error code or `ok`, as a JSON object of counts.
    pub code_counts: String,
    /// Over its completed outcomes: they alone never run again, so no later round counts
    /// a token twice.
    pub usage: Usage,
    /// The object's size.
    pub byte_len: u64,
    /// The object's hash; its first 12 hex digits are in the name.
    pub sha256: [u8; 32],
}

/// A recorded segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Its job.
    pub job: JobId,
    /// The round in which it was committed.
    pub round: u32,
    /// Order of commits over the whole database; rises, may have gaps.
    pub committed: u64,
    /// The rest, as recorded.
    pub new: NewSegment,
}

/// Where a reader of results while running stands. Stable across restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct SegmentCursor {
    /// Commit order of the last segment read.
    pub committed: u64,
    /// Shard of it.
    pub shard: u32,
}

/// Which segments to list by commit order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentSelection {
    /// The job.
    pub job: JobId,
    /// Only this round; `None` for all rounds.
    pub round: Option<u32>,
    /// Start after this one.
    pub after: SegmentCursor,
    /// Most rows.
    pub limit: u32,
}

/// Rows of segments.
#[async_trait]
pub trait Segments {
    /// Segments of shards `from..`, ordered by (shard, seq), whole shards only,
    /// at least one shard and at most about `limit` rows.
    async fn list_segments(&self, job: JobId, from: ShardIndex, limit: u32) -> Result<Vec<Segment>, Error>;

    /// Segments of one shard by sequence.
    async fn list_segments_of_shard(&self, job: JobId, shard: ShardIndex) -> Result<Vec<Segment>, Error>;

    /// Segments in commit order: never repeats and never skips one that commits later.
    async fn list_segments_committed(&self, selection: SegmentSelection) -> Result<Vec<Segment>, Error>;
}
