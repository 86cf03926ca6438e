//! How an item ended, in counts and codes.

use serde::{Deserialize, Serialize};

use crate::job::worded_enum;

worded_enum!(
    /// The terminal state of one item.
    OutcomeKind, "outcome", {
    /// A 2xx answer; goes to the output file.
    Completed = "completed",
    /// Another HTTP status, a timeout, or attempts used up; goes to the error file.
    Failed = "failed",
    /// Undone when a cancel took effect.
    Cancelled = "cancelled",
    /// Undone when the window closed.
    Expired = "expired",
});

worded_enum!(
    /// Codes of items that ended without an HTTP answer, and of whole-job trouble.
    ErrorCode, "error code", {
    /// The window closed first.
    BatchExpired = "batch_expired",
    /// The job was cancelled first.
    BatchCancelled = "batch_cancelled",
    /// The item took longer than the request time limit.
    RequestTimeout = "request_timeout",
    /// Three workers died while the item ran alone.
    WorkerLost = "worker_lost",
    /// The input bytes vanished or changed after validation.
    InputUnavailable = "input_unavailable",
});

/// A try of an item that failed and was followed by another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedTry {
    /// Its number, from 1.
    pub number: u32,
    /// HTTP status, when there was an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// Stable code.
    pub code: String,
    /// In words, at most [`FailedTry::MESSAGE_CHARS_MAX`] characters.
    pub message: String,
}

impl FailedTry {
    /// Tries kept of one item, the latest ones: a record's head is bounded.
    pub const KEPT_MAX: usize = 8;
    /// Longest message kept.
    pub const MESSAGE_CHARS_MAX: usize = 200;
}

/// Tokens used, summed over final outcomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Prompt tokens.
    pub input_tokens: u64,
    /// Of them, found in the prefix cache.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// Of them, spent on reasoning.
    pub reasoning_tokens: u64,
}

impl Usage {
    /// Adds another usage to this one, saturating.
    pub fn add(&mut self, other: Usage) {
        self.input_tokens = self.input_tokens.saturating_add(other.input_tokens);
        self.cached_tokens = self.cached_tokens.saturating_add(other.cached_tokens);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.reasoning_tokens = self.reasoning_tokens.saturating_add(other.reasoning_tokens);
    }

    /// Prompt and generated tokens together.
    pub fn total_tokens(&self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }
}

/// Items of a job by how they ended; sums to the job's items once it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OutcomeCounts {
    /// Items that the job has; 0 until intake ends.
    pub total: u64,
    /// With a 2xx answer.
    pub completed: u64,
    /// With a final failure.
    pub failed: u64,
    /// Undone at a cancel.
    pub cancelled: u64,
    /// Undone at the window's end.
    pub expired: u64,
}

impl OutcomeCounts {
    /// Items without an outcome yet.
    pub fn unfinished(&self) -> u64 {
        self.total
            .saturating_sub(self.completed)
            .saturating_sub(self.failed)
            .saturating_sub(self.cancelled)
            .saturating_sub(self.expired)
    }
}
