//! `POST /v1/batches/{batch_id}/resume`: goes on with a paused batch, or re-opens an
//! ended one for what did not complete.

use axum::Json;
use axum::extract::State;
use overnight_store::{Guarded, Job, Reopen, ReopenItems};
use overnight_types::JobState;

use super::call::Call;
use super::object::BatchObject;
use super::window::parse_window;
use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared};

/// What resume does depends on the state; see the table in the API reference.
pub(crate) async fn resume(State(state): State<Shared>, call: Call) -> Result<Json<BatchObject>> {
    let (id, fields) = call.read(&state, &["completion_window"]).await?;
    let window = match fields.text("completion_window")? {
        Some(text) => Some((text.to_owned(), parse_window(text)?)),
        None => None,
    };
    let job = super::find(&state, &id).await?;
    let resumed = match job.state {
        JobState::Validating | JobState::InProgress => go_on(&state, &id, &job).await?,
        ended => {
            check_reopening(&state, &job, ended).await?;
            let reopen = Reopen { items: ReopenItems::NotCompleted, window, leftover_segments: Vec::new() };
            reopen_job(&state, &id, job.id, reopen).await?
        }
    };
    super::show(&state, &resumed).await
}

/// Clears a pause, or takes the shards of dead workers back at once.
async fn go_on(state: &Inner, id: &str, job: &Job) -> Result<Job> {
    let store = &state.parts.store;
    if job.paused_at.is_none() {
        store.release_lost_leases(job.id).await?;
        return store.find_job(job.id).await?.ok_or_else(|| super::no_such_batch(id));
    }
    match store.unpause_job_if_active(job.id).await? {
        Guarded::Applied(job) => Ok(job),
        Guarded::Lost { now } => Err(super::refuse(id, now, "batch_busy", "resume")),
    }
}

/// Why an ended (or ending) job cannot be re-opened, if so.
pub(crate) async fn check_reopening(state: &Inner, job: &Job, now: JobState) -> Result<()> {
    let id = job.id;
    match now {
        JobState::Failed => Err(ApiError::conflict(
            "batch_invalid",
            format!("the input of this batch did not validate; correct the file and submit it again: {id}"),
        )),
        JobState::Cancelling | JobState::Finalizing => {
            Err(ApiError::conflict("batch_busy", format!("this batch is {now}; try again when it has ended: {id}")))
        }
        // As a re-opening sees it: also gone while another batch still reads its bytes.
        _ if state.parts.store.find_file(job.input_file_id).await?.is_none() => Err(ApiError::conflict(
            "input_file_deleted",
            format!("the input file of this batch is gone: {}", job.input_file_id),
        )),
        _ => Ok(()),
    }
}

/// Opens a new round, or says why not.
pub(crate) async fn reopen_job(state: &Inner, id: &str, job: overnight_types::JobId, reopen: Reopen) -> Result<Job> {
    reopen_if_ended(state, id, job, reopen).await?
}

/// As [`reopen_job`]; a refusal, after which nothing has changed, is the inner error.
pub(super) async fn reopen_if_ended(
    state: &Inner,
    id: &str,
    job: overnight_types::JobId,
    reopen: Reopen,
) -> Result<Result<Job>> {
    Ok(match state.parts.store.reopen_job_if_ended(job, reopen).await? {
        Guarded::Applied(reopened) => Ok(reopened.job),
        Guarded::Lost { now: Some(JobState::Completed | JobState::Expired | JobState::Cancelled) } => {
            Err(ApiError::conflict("nothing_to_resume", format!("no request of this batch is left to run: {id}")))
        }
        Guarded::Lost { now } => Err(super::refuse(id, now, "batch_busy", "re-open")),
    })
}
