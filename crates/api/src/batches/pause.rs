//! `POST /v1/batches/{batch_id}/pause`.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use overnight_store::Guarded;

use super::object::BatchObject;
use crate::body::Fields;
use crate::error::Result;
use crate::state::Shared;

/// Starts nothing new; what runs finishes and the window keeps running.
pub(crate) async fn pause(
    State(state): State<Shared>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<BatchObject>> {
    let job = super::parse_id(&id)?;
    Fields::read_optional(&state, &headers, body, &[]).await?;
    match state.parts.store.pause_job_if_active(job).await? {
        Guarded::Applied(job) => super::show(&state, &job).await,
        Guarded::Lost { now } => Err(super::refuse(&id, now, "batch_not_active", "pause")),
    }
}
