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
    queue_position: Option<u32>,
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
        queue_position: queue_position(job, progress),
    })
}

/// Its place among the batches that wait for a worker, 1 for the next one; `None` once
/// something of it runs, and while nothing of it may.
pub(crate) fn queue_position(job: &Job, progress: &Progress) -> Option<u32> {
    let waits = job.state == JobState::InProgress && progress.shards_leased == 0 && progress.shards_ready > 0;
    progress.jobs_ahead.filter(|_| waits).map(|ahead| ahead.saturating_add(1))
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use overnight_store::CancelMode;
    use overnight_types::{Ending, Endpoint, JobId};
    use uuid::Uuid;

    use super::*;

    const KEYS: [&str; 29] = [
        "id",
        "object",
        "endpoint",
        "model",
        "errors",
        "input_file_id",
        "completion_window",
        "status",
        "output_file_id",
        "error_file_id",
        "created_at",
        "in_progress_at",
        "expires_at",
        "finalizing_at",
        "completed_at",
        "failed_at",
        "expired_at",
        "cancelling_at",
        "cancelled_at",
        "request_counts",
        "usage",
        "metadata",
        "outcome_counts",
        "name",
        "priority",
        "paused_at",
        "round",
        "waiting_for",
        "queue_position",
    ];

    fn at(seconds: i64) -> Option<Timestamp> {
        Some(Timestamp::from_micros(seconds * 1_000_000 + 999_999))
    }

    /// A job of 100 items with the timestamps of this state's way.
    fn job(state: JobState) -> Job {
        use JobState::*;
        let ran = !matches!(state, Validating | Failed);
        let ends = matches!(state, Finalizing | Completed | Expired | Cancelling | Cancelled);
        let id = |n: u128| Uuid::from_u128(0x0193_7a00_0000_7000_8000_0000_0000_0000 + n);
        let ending = match state {
            Finalizing | Completed => Some(Ending::Completed),
            Expired => Some(Ending::Expired),
            Cancelling | Cancelled => Some(Ending::Cancelled),
            _ => None,
        };
        let counts = match state {
            Completed => Some(OutcomeCounts { total: 100, completed: 98, failed: 2, ..OutcomeCounts::default() }),
            Expired => Some(OutcomeCounts { total: 100, completed: 40, expired: 60, ..OutcomeCounts::default() }),
            Cancelled => Some(OutcomeCounts { total: 100, completed: 39, failed: 1, cancelled: 60, expired: 0 }),
            _ => None,
        };
        let errors = r#"{"object":"list","data":[{"code":"url_mismatch","line":3,"message":"m","param":"url"}],"total":1,"counts":{"url_mismatch":1}}"#;
        Job {
            id: JobId::from_uuid(id(1)),
            endpoint: Endpoint::ChatCompletions,
            model: ran.then(|| "m".to_owned()),
            input_file_id: FileId::from_uuid(id(2)),
            input_bytes: 1_000,
            input_sha256: [0; 32],
            completion_window: "24h".to_owned(),
            window: Duration::from_secs(86_400),
            metadata: Some(r#"{"b":"2","a":"1"}"#.to_owned()),
            name: None,
            priority: 0,
            output_expires_after: None,
            state,
            ending,
            cancel_mode: CancelMode::Drain,
            paused_at: None,
            round: 1,
            created_at: at(1_000).unwrap(),
            in_progress_at: at(1_010).filter(|_| ran),
            expires_at: at(87_400).unwrap(),
            finalizing_at: at(1_020).filter(|_| matches!(state, Finalizing | Completed | Expired)),
            completed_at: at(1_030).filter(|_| state == Completed),
            failed_at: at(1_011).filter(|_| state == Failed),
            expired_at: at(87_401).filter(|_| state == Expired),
            cancelling_at: at(1_015).filter(|_| matches!(state, Cancelling | Cancelled)),
            cancelled_at: at(1_016).filter(|_| state == Cancelled),
            num_items: if ran { 100 } else { 0 },
            num_shards: u32::from(ran),
            output_file_id: ends.then(|| FileId::from_uuid(id(3))),
            error_file_id: ends.then(|| FileId::from_uuid(id(4))),
            final_counts: counts,
            final_usage: counts.map(|_| usage()),
            errors: (state == Failed).then(|| errors.to_owned()),
            intake_offset: 0,
            intake_notes: None,
        }
    }

    fn usage() -> Usage {
        Usage { input_tokens: 70, cached_tokens: 20, output_tokens: 30, reasoning_tokens: 5 }
    }

    fn running() -> Progress {
        let counts = OutcomeCounts { total: 100, completed: 39, failed: 1, ..OutcomeCounts::default() };
        Progress { counts, usage: usage(), ..Progress::default() }
    }

    fn value(object: &BatchObject) -> serde_json::Value {
        serde_json::to_value(object).unwrap()
    }

    #[test]
    fn every_status_shows_every_key_in_order() {
        for state in JobState::ALL {
            let progress = if *state == JobState::Validating { Progress::default() } else { running() };
            let object = batch_object(&job(*state), &progress, None).unwrap();
            let value = value(&object);
            assert_eq!(value.as_object().unwrap().keys().collect::<Vec<_>>(), KEYS, "{state}");
            let text = serde_json::to_string_pretty(&object).unwrap();
            insta::assert_snapshot!(format!("batch_{state}"), text);
        }
    }

    #[test]
    fn five_way_counts_sum_to_the_total_in_every_status() {
        // Field report 57: three of five buckets are not the total.
        for state in JobState::ALL {
            let progress = if *state == JobState::Validating { Progress::default() } else { running() };
            let value = value(&batch_object(&job(*state), &progress, None).unwrap());
            let sum: u64 =
                value["outcome_counts"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum();
            assert_eq!(sum, value["request_counts"]["total"].as_u64().unwrap(), "{state}");
        }
    }

    #[test]
    fn place_in_the_queue_is_told_of_a_batch_that_waits_for_its_turn() {
        // Field report 59: every job expires and nobody can tell why nothing ran.
        let waits = Progress { shards_ready: 2, jobs_ahead: Some(3), ..running() };
        let position = |state, progress: &Progress| {
            value(&batch_object(&job(state), progress, None).unwrap())["queue_position"].clone()
        };
        assert_eq!(position(JobState::InProgress, &waits), 4);
        for not in [
            Progress { shards_leased: 1, ..waits },
            Progress { shards_ready: 0, ..waits },
            Progress { jobs_ahead: None, ..waits },
        ] {
            assert!(position(JobState::InProgress, &not).is_null(), "{not:?}");
        }
        assert!(position(JobState::Cancelling, &waits).is_null());
    }

    #[test]
    fn file_without_a_line_is_null_and_no_file_shows_before_the_end() {
        // Field report 46: all requests failed is completed, with the output file null.
        let mut all_failed = job(JobState::Completed);
        all_failed.final_counts = Some(OutcomeCounts { total: 5, failed: 5, ..OutcomeCounts::default() });
        let object = value(&batch_object(&all_failed, &Progress::default(), None).unwrap());
        assert_eq!(object["status"], "completed");
        assert!(object["output_file_id"].is_null() && object["error_file_id"].is_string());
        let mut none_failed = job(JobState::Completed);
        none_failed.final_counts = Some(OutcomeCounts { total: 5, completed: 5, ..OutcomeCounts::default() });
        let object = value(&batch_object(&none_failed, &Progress::default(), None).unwrap());
        assert!(object["output_file_id"].is_string() && object["error_file_id"].is_null());
        for state in [JobState::Finalizing, JobState::Cancelling] {
            let object = value(&batch_object(&job(state), &running(), None).unwrap());
            assert!(object["output_file_id"].is_null() && object["error_file_id"].is_null(), "{state}");
        }
    }
}
