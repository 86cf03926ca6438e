//! `GET /v1/files/{file_id}`.

use axum::Json;
use axum::extract::{Path, State};

use super::object::FileObject;
use crate::error::Result;
use crate::state::Shared;

/// One file's row.
pub(crate) async fn retrieve(State(state): State<Shared>, Path(id): Path<String>) -> Result<Json<FileObject>> {
    Ok(Json(super::find(&state, &id).await?.into()))
}
