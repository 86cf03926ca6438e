//! The manifest of one round of a job: what was published, with counts and hashes.
//!
//! A pure function of the job and its segments, so that two finalizers write the
//! same bytes; it holds no moment of its own.

use bytes::Bytes;
use overnight_types::{Ending, FileId, JobId, OutcomeCounts, Usage};
use serde::{Deserialize, Serialize};

use crate::sha::hex;
use crate::writer::Written;

/// What a round published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of this form.
    pub version: u32,
    /// The job.
    pub job: JobId,
    /// Its round.
    pub round: u32,
    /// How it ended.
    pub ending: Ending,
    /// The route.
    pub endpoint: String,
    /// The model that every item names; `None` when intake did not end.
    pub model: Option<String>,
    /// The input.
    pub input: FileEntry,
    /// The output file; `None` without a line.
    pub output: Option<FileEntry>,
    /// The error file; `None` without a line.
    pub error: Option<FileEntry>,
    /// Sums to the items.
    pub counts: OutcomeCounts,
    /// Over completed outcomes.
    pub usage: Usage,
    /// Segments that were read.
    pub num_segments: u64,
    /// What made the outcomes, each once, sorted: engines, versions, model digests.
    pub producers: Vec<String>,
}

/// One file of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its id.
    pub id: FileId,
    /// Its size.
    pub bytes: u64,
    /// Its hash, hexadecimal.
    pub sha256: String,
    /// Its lines, when counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lines: Option<u64>,
}

impl FileEntry {
    /// Of a written object.
    pub fn new(id: FileId, written: &Written, lines: Option<u64>) -> Self {
        Self { id, bytes: written.bytes, sha256: hex(&written.sha256), lines }
    }
}

impl Manifest {
    /// The form that this build writes.
    pub const VERSION: u32 = 1;

    /// The object's bytes.
    pub fn to_bytes(&self) -> Bytes {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        bytes.push(b'\n');
        Bytes::from(bytes)
    }
}
