//! `GET /v1/batches/{batch_id}`.

use axum::Json;
use axum::extract::{Path, State};

use super::object::BatchObject;
use crate::error::Result;
use crate::state::Shared;

/// One batch as it is now.
pub(crate) async fn retrieve(State(state): State<Shared>, Path(id): Path<String>) -> Result<Json<BatchObject>> {
    let job = super::find(&state, &id).await?;
    super::show(&state, &job).await
}
