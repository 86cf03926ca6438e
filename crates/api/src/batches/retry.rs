//! `POST /v1/batches/{batch_id}/retry`: a selective resume, or a new batch of the
//! selected lines. With `dry_run` it only says how many that would be.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use overnight_store::{InsertJob, Job, NewJob, Reopen};
use overnight_types::{JobId, OutcomeKind, chain};
use overnight_worker::items::{RetryFilter, RetryPlan, discard_leftovers, plan_retry, preview_retry};
use serde_json::json;

use super::call::Call;
use super::resume::{check_reopening, reopen_if_ended};
use super::window::parse_window;
use super::{copy_lines, refuse};
use crate::body::Fields;
use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared};

const KNOWN: [&str; 6] = ["outcomes", "error_codes", "custom_ids", "completion_window", "new_batch", "dry_run"];
/// Most entries of a list in the body.
const ENTRIES_MAX: usize = 10_000;

/// Runs what matches every given list again; nothing that succeeded ever runs again.
pub(crate) async fn retry(State(state): State<Shared>, call: Call) -> Result<Response> {
    let (id, fields) = call.read(&state, &KNOWN).await?;
    let filter = filter(&fields)?;
    let window = match fields.text("completion_window")? {
        Some(text) => Some((text.to_owned(), parse_window(text)?)),
        None => None,
    };
    let new_batch = fields.flag("new_batch")?;
    let job = super::find(&state, &id).await?;
    if !job.state.is_terminal() {
        return Err(refuse(&id, Some(job.state), "batch_busy", "retry requests of"));
    }
    if fields.flag("dry_run")? {
        let plan = preview_retry(state.parts.store.as_ref(), &state.parts.blobs, &job, &filter).await?;
        check_plan(&plan)?;
        let plan = json!({"object": "batch.retry_plan", "batch_id": id, "will_run": plan.items.len()});
        return Ok(Json(plan).into_response());
    }
    check_reopening(&state, &job, job.state).await?;
    let job = match new_batch {
        true => copy_as_new(&state, &job, &filter, window).await?,
        false => run_again(&state, &id, &job, &filter, window).await?,
    };
    super::show(&state, &job).await.map(IntoResponse::into_response)
}

async fn run_again(
    state: &Inner,
    id: &str,
    job: &Job,
    filter: &RetryFilter,
    window: Option<(String, Duration)>,
) -> Result<Job> {
    if job.num_items == 0 {
        return Err(nothing_matches());
    }
    let plan = plan_retry(state.parts.store.as_ref(), &state.parts.blobs, job, filter).await?;
    check_plan(&plan)?;
    let items = plan.reopen_items();
    let reopen = Reopen { items, window, leftover_segments: plan.leftover_segments.clone() };
    match reopen_if_ended(state, id, job.id, reopen).await? {
        Ok(job) => Ok(job),
        Err(refusal) => {
            let parts = &state.parts;
            let gone = discard_leftovers(parts.store.as_ref(), &parts.blobs, job.id, &plan.leftover_segments).await;
            if let Err(err) = gone {
                tracing::warn!(job.id = %job.id, error = %chain(&err), "objects of a refused retry stay for the sweep");
            }
            Err(refusal)
        }
    }
}

fn check_plan(plan: &RetryPlan) -> Result<()> {
    match (plan.unknown_custom_ids.first(), plan.items.is_empty()) {
        (Some(unknown), _) => Err(unknown_custom_id(unknown)),
        (None, true) => Err(nothing_matches()),
        (None, false) => Ok(()),
    }
}

/// Makes a batch of the selected lines, byte for byte; the old one stays as it is.
async fn copy_as_new(
    state: &Inner,
    job: &Job,
    filter: &RetryFilter,
    window: Option<(String, Duration)>,
) -> Result<Job> {
    state.check_free_disk()?;
    let selected = copy_lines::select(state, job, filter).await?;
    if selected.is_empty() {
        return Err(nothing_matches());
    }
    let input = copy_lines::copy(state, job, &selected).await?;
    let (completion_window, window) = window.unwrap_or_else(|| (job.completion_window.clone(), job.window));
    let new = NewJob {
        id: JobId::new(),
        endpoint: job.endpoint,
        input_file_id: input.id,
        completion_window,
        window,
        metadata: job.metadata.clone(),
        name: job.name.clone(),
        priority: job.priority,
        output_expires_after: job.output_expires_after,
    };
    match state.parts.store.insert_job(new, None).await? {
        InsertJob::Created(job) | InsertJob::Existing(job) => Ok(job),
        InsertJob::KeyReused | InsertJob::NoInput => Err(ApiError::internal("the copied input is gone already")),
    }
}

fn filter(fields: &Fields) -> Result<RetryFilter> {
    let texts = |key: &'static str| {
        let texts = fields.texts(key)?;
        match texts.len() > ENTRIES_MAX {
            true => {
                Err(ApiError::invalid(key, format!("{key} may have {ENTRIES_MAX} entries, it has {}", texts.len()))
                    .code("invalid_value"))
            }
            false => Ok(texts),
        }
    };
    let outcomes = texts("outcomes")?.iter().map(|word| parse_outcome(word)).collect::<Result<Vec<_>>>()?;
    Ok(RetryFilter { outcomes, error_codes: texts("error_codes")?, custom_ids: texts("custom_ids")? })
}

/// The words of `outcome_counts`, and ours for the same.
fn parse_outcome(word: &str) -> Result<OutcomeKind> {
    match word {
        "errored" | "failed" => Ok(OutcomeKind::Failed),
        "canceled" | "cancelled" => Ok(OutcomeKind::Cancelled),
        "expired" => Ok(OutcomeKind::Expired),
        other => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("outcomes may hold errored, canceled and expired, not: {shown}");
            Err(ApiError::invalid("outcomes", message).code("invalid_value"))
        }
    }
}

fn nothing_matches() -> ApiError {
    ApiError::conflict("nothing_to_resume", "no request of this batch that did not succeed matches")
}

/// 400 for a custom id that the batch does not have.
pub(super) fn unknown_custom_id(custom_id: &str) -> ApiError {
    let shown: String = custom_id.chars().take(80).collect();
    ApiError::invalid("custom_ids", format!("the batch has no request with this custom_id: {shown}")).code("not_found")
}
