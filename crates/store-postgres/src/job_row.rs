//! Reading a job's row, its final counts and its sums.

use std::time::Duration;

use overnight_store::{Error, Job, Progress};
use overnight_types::{Ending, FileId, OutcomeCounts, Usage};

use crate::error::damaged;
use crate::row::Read;

/// The columns that `read` reads, each with a prefix. Named, because a plan with `*`
/// breaks when a newer binary adds a column.
macro_rules! job_columns {
    ($of:literal) => {
        concat!(
            $of,
            "job_id, ",
            $of,
            "endpoint, ",
            $of,
            "model, ",
            $of,
            "input_file_id, ",
            $of,
            "input_bytes, ",
            $of,
            "input_sha256, ",
            $of,
            "completion_window, ",
            $of,
            "window_us, ",
            $of,
            "metadata, ",
            $of,
            "name, ",
            $of,
            "priority, ",
            $of,
            "output_expires_after_us, ",
            $of,
            "state, ",
            $of,
            "ending, ",
            $of,
            "cancel_mode, ",
            $of,
            "paused_at, ",
            $of,
            "round, ",
            $of,
            "retries_used, ",
            $of,
            "created_at, ",
            $of,
            "in_progress_at, ",
            $of,
            "expires_at, ",
            $of,
            "finalizing_at, ",
            $of,
            "completed_at, ",
            $of,
            "failed_at, ",
            $of,
            "expired_at, ",
            $of,
            "cancelling_at, ",
            $of,
            "cancelled_at, ",
            $of,
            "num_items, ",
            $of,
            "num_shards, ",
            $of,
            "output_file_id, ",
            $of,
            "error_file_id, ",
            $of,
            "final_completed, ",
            $of,
            "final_failed, ",
            $of,
            "final_cancelled, ",
            $of,
            "final_expired, ",
            $of,
            "final_input_tokens, ",
            $of,
            "final_cached_tokens, ",
            $of,
            "final_output_tokens, ",
            $of,
            "final_reasoning_tokens, ",
            $of,
            "errors, ",
            $of,
            "intake_offset, ",
            $of,
            "intake_notes, ",
            $of,
            "step_epoch, ",
            $of,
            "step_owner, ",
            $of,
            "step_until"
        )
    };
}
pub(crate) use job_columns;

pub(crate) fn read(row: &impl Read) -> Result<Job, Error> {
    let ending = match row.text_or_null("ending")?.as_deref() {
        None => None,
        Some("completed") => Some(Ending::Completed),
        Some("expired") => Some(Ending::Expired),
        Some("cancelled") => Some(Ending::Cancelled),
        Some(other) => return Err(damaged("jobs.ending", other)),
    };
    let priority = row.int("priority")?;
    let file = |column| Ok::<_, Error>(row.uuid_or_null(column)?.map(FileId::from_uuid));
    let (final_counts, final_usage) = read_final(row)?.unzip();
    Ok(Job {
        id: row.job_id()?,
        endpoint: row.word("endpoint")?,
        model: row.text_or_null("model")?,
        input_file_id: row.file_id("input_file_id")?,
        input_bytes: row.u64("input_bytes")?,
        input_sha256: row.hash("input_sha256")?,
        completion_window: row.text("completion_window")?,
        window: row.length("window_us")?,
        metadata: row.text_or_null("metadata")?,
        name: row.text_or_null("name")?,
        priority: i32::try_from(priority).map_err(|_| damaged("jobs.priority", priority))?,
        output_expires_after: row
            .int_or_null("output_expires_after_us")?
            .map(|length| Duration::from_micros(length.unsigned_abs())),
        state: row.word("state")?,
        ending,
        cancel_mode: row.word("cancel_mode")?,
        paused_at: row.at_or_null("paused_at")?,
        round: row.u32("round")?,
        created_at: row.at("created_at")?,
        in_progress_at: row.at_or_null("in_progress_at")?,
        expires_at: row.at("expires_at")?,
        finalizing_at: row.at_or_null("finalizing_at")?,
        completed_at: row.at_or_null("completed_at")?,
        failed_at: row.at_or_null("failed_at")?,
        expired_at: row.at_or_null("expired_at")?,
        cancelling_at: row.at_or_null("cancelling_at")?,
        cancelled_at: row.at_or_null("cancelled_at")?,
        num_items: row.u64("num_items")?,
        num_shards: row.u32("num_shards")?,
        output_file_id: file("output_file_id")?,
        error_file_id: file("error_file_id")?,
        final_counts,
        final_usage,
        errors: row.text_or_null("errors")?,
        intake_offset: row.u64("intake_offset")?,
        intake_notes: row.text_or_null("intake_notes")?,
    })
}

fn read_final(row: &impl Read) -> Result<Option<(OutcomeCounts, Usage)>, Error> {
    if row.int_or_null("final_completed")?.is_none() {
        return Ok(None);
    }
    let counts = OutcomeCounts {
        total: row.u64("num_items")?,
        completed: row.u64("final_completed")?,
        failed: row.u64("final_failed")?,
        cancelled: row.u64("final_cancelled")?,
        expired: row.u64("final_expired")?,
    };
    let usage = Usage {
        input_tokens: row.u64("final_input_tokens")?,
        cached_tokens: row.u64("final_cached_tokens")?,
        output_tokens: row.u64("final_output_tokens")?,
        reasoning_tokens: row.u64("final_reasoning_tokens")?,
    };
    Ok(Some((counts, usage)))
}

pub(crate) fn read_progress(row: &impl Read) -> Result<Progress, Error> {
    let (num_failed, num_cancelled, num_expired) =
        (row.u64("num_failed")?, row.u64("num_cancelled")?, row.u64("num_expired")?);
    let so_far = OutcomeCounts {
        total: row.u64("num_items")?,
        completed: row.u64("num_done")?.saturating_sub(num_failed),
        failed: num_failed.saturating_sub(num_cancelled).saturating_sub(num_expired),
        cancelled: num_cancelled,
        expired: num_expired,
    };
    let (counts, usage) = match read_final(row)? {
        Some(last) => last,
        None => (so_far, row.usage()?),
    };
    Ok(Progress {
        counts,
        usage,
        shards_ready: row.u32("shards_ready")?,
        shards_leased: row.u32("shards_leased")?,
        shards_done: row.u32("shards_done")?,
        items_waiting: row.u64("num_waiting")?,
        retries_used: row.u64("retries_used")?,
        jobs_ahead: row.u32_or_null("jobs_ahead")?,
    })
}
