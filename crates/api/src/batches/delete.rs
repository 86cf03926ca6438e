//! `DELETE /v1/batches/{batch_id}`.

use axum::Json;
use axum::extract::{Path, State};
use overnight_store::Guarded;
use serde_json::{Value, json};

use crate::error::Result;
use crate::state::Shared;

/// Hides an ended batch at once; its rows and objects go in the background.
pub(crate) async fn delete(State(state): State<Shared>, Path(id): Path<String>) -> Result<Json<Value>> {
    let job = super::parse_id(&id)?;
    match state.parts.store.delete_job_if_terminal(job).await? {
        Guarded::Applied(()) => Ok(Json(json!({"id": job, "object": "batch", "deleted": true}))),
        Guarded::Lost { now } => Err(super::refuse(&id, now, "batch_not_ended", "delete")),
    }
}
