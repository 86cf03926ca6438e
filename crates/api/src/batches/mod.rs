//! `/v1/batches`: one file per verb.

mod call;
mod cancel;
mod copy_lines;
mod create;
mod delete;
mod events;
mod items;
mod list;
mod object;
mod pause;
mod results;
mod resume;
mod retrieve;
mod retry;
mod waiting;
pub(crate) mod window;

pub(crate) use cancel::cancel;
pub(crate) use create::{create, parse_endpoint};
pub(crate) use delete::delete;
pub(crate) use events::events;
pub(crate) use items::{item, items};
pub(crate) use list::list;
pub(crate) use pause::pause;
pub(crate) use results::results;
pub(crate) use resume::resume;
pub(crate) use retrieve::retrieve;
pub(crate) use retry::retry;

use axum::Json;
use overnight_store::{Guarded, Job, Progress};
use overnight_types::{JobId, JobState};

use crate::error::{ApiError, Result};
use crate::state::Inner;
use object::{BatchObject, batch_object};

/// The id of a path, or the same 404 that an unknown id gets.
fn parse_id(text: &str) -> Result<JobId> {
    text.parse().map_err(|_| no_such_batch(text))
}

fn no_such_batch(id: &str) -> ApiError {
    ApiError::no_such("batch", id)
}

/// The job, or 404.
async fn find(state: &Inner, id: &str) -> Result<Job> {
    let job = parse_id(id)?;
    state.parts.store.find_job(job).await?.ok_or_else(|| no_such_batch(id))
}

/// Running sums of a job that has not ended; an ended one carries its own.
async fn progress_of(state: &Inner, job: &Job) -> Result<Progress> {
    if job.state.is_terminal() || job.num_items == 0 {
        return Ok(Progress::default());
    }
    match state.parts.store.find_progress(job.id).await {
        Err(overnight_store::Error::Missing { .. }) => Err(no_such_batch(&job.id.to_string())),
        found => Ok(found?),
    }
}

/// The whole object of one job.
async fn show(state: &Inner, job: &Job) -> Result<Json<BatchObject>> {
    let progress = progress_of(state, job).await?;
    let waiting_for = waiting::reason(state, job, &progress).await?;
    Ok(Json(batch_object(job, &progress, waiting_for)?))
}

/// The batch after a move, or why there was none.
async fn answer(
    state: &Inner,
    id: &str,
    moved: Guarded<JobState, Job>,
    code: &'static str,
    doing: &str,
) -> Result<Json<BatchObject>> {
    match moved {
        Guarded::Applied(job) => show(state, &job).await,
        Guarded::Lost { now } => Err(refuse(id, now, code, doing)),
    }
}

/// 409 for a move that the state does not allow, 404 when the job is gone.
fn refuse(id: &str, now: Option<JobState>, code: &'static str, doing: &str) -> ApiError {
    match now {
        Some(now) => ApiError::conflict(code, format!("cannot {doing} a batch whose status is {now}: {id}")),
        None => no_such_batch(id),
    }
}
