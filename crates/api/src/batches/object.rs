//! The batch object: a job in the wire's words, every key always there, in order.

use overnight_store::{Job, Progress};
use overnight_types::{FileId, JobState, OutcomeCounts, Timestamp, Usage};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::error::{ApiError, Result};

/// The wire's batch object. The order of the fields is the order on the wire.
#[derive(Debug, Serialize)]
pub(crate) struct BatchObject {
    id: String,
    object: &'static str,
    endpoint: &'static str,
    model: Option<String>,
    errors: Option<Box<RawValue>>,
    input_file_id: FileId,
    completion_window: String,
    status: &'static str,
    output_file_id: Option<FileId>,
    error_file_id: Option<FileId>,
    created_at: i64,
    in_progress_at: Option<i64>,
    expires_at: Option<i64>,
    finalizing_at: Option<i64>,
    completed_at: Option<i64>,
    failed_at: Option<i64>,
    expired_at: Option<i64>,
    cancelling_at: Option<i64>,
    cancelled_at: Option<i64>,
    request_counts: RequestCounts,
    usage: UsageObject,
    metadata: Option<Box<RawValue>>,
    outcome_counts: FiveWayCounts,
    name: Option<String>,
    priority: i32,
    paused_at: Option<i64>,
    round: u32,
    waiting_for: Option<String>,
}

#[derive(Debug, Serialize)]
struct RequestCounts {
    total: u64,
    completed: u64,
    failed: u64,
}

/// Anthropic's five counts, with its spelling; they sum to the total at all times.
#[derive(Debug, Serialize)]
struct FiveWayCounts {
    processing: u64,
    succeeded: u64,
    errored: u64,
    canceled: u64,
    expired: u64,
}

/// Token counts in the form of OpenAI's batch object.
#[derive(Debug, Serialize)]
pub(crate) struct UsageObject {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

#[derive(Debug, Serialize)]
struct InputDetails {
    cached_tokens: u64,
}

#[derive(Debug, Serialize)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl From<Usage> for UsageObject {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.input_tokens,
            input_tokens_details: InputDetails { cached_tokens: usage.cached_tokens },
            output_tokens: usage.output_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: usage.reasoning_tokens },
            total_tokens: usage.total_tokens(),
        }
    }
}

/// Translates a job. `progress` is asked for only while the job has no final counts.
pub(crate) fn batch_object(job: &Job, progress: &Progress, waiting_for: Option<String>) -> Result<BatchObject> {
    let terminal = job.state.is_terminal();
    let counts = counts_of(job, progress);
    let usage = if terminal { job.final_usage.unwrap_or_default() } else { progress.usage };
    let seconds = |at: Option<Timestamp>| at.map(|at| at.unix_seconds());
    let published = |id: Option<FileId>, num_lines: u64| id.filter(|_| terminal && num_lines > 0);
    Ok(BatchObject {
        id: job.id.to_string(),
        object: "batch",
        endpoint: job.endpoint.as_str(),
        model: job.model.clone(),
        errors: raw("errors", job.errors.as_ref().filter(|_| job.state == JobState::Failed))?,
        input_file_id: job.input_file_id,
        completion_window: job.completion_window.clone(),
        status: job.state.as_str(),
        output_file_id: published(job.output_file_id, counts.completed),
        error_file_id: published(job.error_file_id, counts.total.saturating_sub(counts.completed)),
        created_at: job.created_at.unix_seconds(),
        in_progress_at: seconds(job.in_progress_at),
        expires_at: Some(job.expires_at.unix_seconds()),
        finalizing_at: seconds(job.finalizing_at),
        completed_at: seconds(job.completed_at),
        failed_at: seconds(job.failed_at),
        expired_at: seconds(job.expired_at),
        cancelling_at: seconds(job.cancelling_at),
        cancelled_at: seconds(job.cancelled_at),
        request_counts: RequestCounts { total: counts.total, completed: counts.completed, failed: counts.failed },
        usage: usage.into(),
        metadata: raw("metadata", job.metadata.as_ref())?,
        outcome_counts: FiveWayCounts {
            processing: counts.unfinished(),
            succeeded: counts.completed,
            errored: counts.failed,
            canceled: counts.cancelled,
            expired: counts.expired,
        },
        name: job.name.clone(),
        priority: job.priority,
        paused_at: seconds(job.paused_at),
        round: job.round,
        waiting_for,
    })
}

/// Outcomes of a job: the final ones once it has ended, else the running sums.
pub(crate) fn counts_of(job: &Job, progress: &Progress) -> OutcomeCounts {
    match job.state.is_terminal() {
        true => job.final_counts.unwrap_or_default(),
        false => OutcomeCounts { total: job.num_items, ..progress.counts },
    }
}

fn raw(what: &'static str, text: Option<&String>) -> Result<Option<Box<RawValue>>> {
    let parse = |text: &String| RawValue::from_string(text.clone());
    text.map(parse).transpose().map_err(|error| ApiError::internal(format!("stored {what} is not JSON: {error}")))
}
