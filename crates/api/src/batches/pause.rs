//! `POST /v1/batches/{batch_id}/pause`.

use axum::Json;
use axum::extract::State;

use super::call::Call;
use super::object::BatchObject;
use crate::error::Result;
use crate::state::Shared;

/// Starts nothing new; what runs finishes and the window keeps running.
pub(crate) async fn pause(State(state): State<Shared>, call: Call) -> Result<Json<BatchObject>> {
    let job = super::parse_id(&call.id)?;
    let (id, _) = call.read(&state, &[]).await?;
    let moved = state.parts.store.pause_job_if_active(job).await?;
    super::answer(&state, &id, moved, "batch_not_active", "pause").await
}
