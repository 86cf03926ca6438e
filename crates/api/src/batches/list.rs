//! `GET /v1/batches`: newest first, by keyset.

use std::collections::HashMap;

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use overnight_store::{JobQuery, JobsAhead, Progress};
use overnight_types::{JobId, JobState};

use super::object::{BatchObject, batch_object};
use crate::body::Query;
use crate::error::{ApiError, Result};
use crate::list_object::ListObject;
use crate::state::Shared;

const LIMIT_MAX: u32 = 100;
const LIMIT_DEFAULT: u32 = 20;

/// One page of batches; `status` and `model` narrow it.
pub(crate) async fn list(State(state): State<Shared>, uri: Uri) -> Result<Json<ListObject<BatchObject>>> {
    let query = Query::of(&uri);
    let limit = query.limit(LIMIT_MAX, LIMIT_DEFAULT)?;
    let unknown_after = |text: &str| {
        let shown: String = text.chars().take(80).collect();
        ApiError::invalid("after", format!("no such batch: {shown}")).code("not_found")
    };
    let after_text = query.get("after");
    let after = after_text.map(|text| text.parse::<JobId>().map_err(|_| unknown_after(text))).transpose()?;
    let states = query
        .get("status")
        .map(|word| word.parse::<JobState>())
        .transpose()
        .map_err(|error| ApiError::invalid("status", error.to_string()).code("invalid_value"))?;
    let model = query.get("model").map(str::to_owned);
    let query = JobQuery { after, limit, states: states.into_iter().collect(), model, since: None };
    let page = match state.parts.store.list_jobs(query).await {
        Err(overnight_store::Error::Missing { .. }) => return Err(unknown_after(after_text.unwrap_or(""))),
        page => page?,
    };
    let running: Vec<JobId> =
        page.rows.iter().filter(|job| !job.state.is_terminal() && job.num_items > 0).map(|job| job.id).collect();
    let progress: HashMap<JobId, Progress> = match running.is_empty() {
        true => HashMap::new(),
        false => state.parts.store.find_progress_of(&running, JobsAhead::Count).await?.into_iter().collect(),
    };
    let mut data = Vec::with_capacity(page.rows.len());
    for job in &page.rows {
        let progress = progress.get(&job.id).copied().unwrap_or_default();
        let waiting_for = super::waiting::reason(&state, job, &progress).await?;
        data.push(batch_object(job, &progress, waiting_for)?);
    }
    let id_of = |job: Option<&overnight_store::Job>| job.map(|job| job.id.to_string());
    let (first, last) = (id_of(page.rows.first()), id_of(page.rows.last()));
    Ok(Json(ListObject::new(data, first, last, page.has_more)))
}
