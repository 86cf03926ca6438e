//! Limits of intake and of a shard, as one value passed down.

/// What intake accepts and how it cuts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Longest line, bytes, its newline not counted.
    pub line_bytes_max: u64,
    /// Most items in a job; `None` for no limit.
    pub job_items_max: Option<u64>,
    /// Most errors kept word for word.
    pub errors_kept_max: usize,
    /// Most items in a shard.
    pub shard_items_max: u32,
    /// Most input bytes in a shard that has more than one item.
    pub shard_bytes_max: u64,
    /// Most items in a shard of a file that has fewer than [`Limits::small_file_shards`] full shards.
    pub small_shard_items_max: u32,
    /// A file with fewer full shards than this is cut finer.
    pub small_file_shards: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            line_bytes_max: 64 << 20,
            job_items_max: None,
            errors_kept_max: 1_000,
            shard_items_max: 1_024,
            shard_bytes_max: 16 << 20,
            small_shard_items_max: 64,
            small_file_shards: 64,
        }
    }
}
