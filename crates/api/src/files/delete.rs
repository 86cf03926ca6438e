//! `DELETE /v1/files/{file_id}`.

use axum::Json;
use axum::extract::{Path, State};
use overnight_store::Guarded;
use serde_json::{Value, json};

use crate::error::Result;
use crate::state::Shared;

/// Hides the file at once. Its bytes stay until no accepted batch reads them.
pub(crate) async fn delete(State(state): State<Shared>, Path(id): Path<String>) -> Result<Json<Value>> {
    let file = super::parse_id(&id)?;
    match state.parts.store.delete_file_if_present(file).await? {
        Guarded::Applied(()) => Ok(Json(json!({"id": file, "object": "file", "deleted": true}))),
        Guarded::Lost { .. } => Err(super::no_such_file(&id)),
    }
}
