//! `POST /v1/batches/{batch_id}/cancel`.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use overnight_store::{CancelMode, Guarded};

use super::object::BatchObject;
use crate::body::Fields;
use crate::error::{ApiError, Result};
use crate::state::Shared;

/// Stops a batch; what finished stays. `{"mode": "now"}` also stops what runs.
pub(crate) async fn cancel(
    State(state): State<Shared>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<BatchObject>> {
    let job = super::parse_id(&id)?;
    let fields = Fields::read_optional(&state, &headers, body, &["mode"]).await?;
    let mode = match fields.text("mode")? {
        None | Some("drain") => CancelMode::Drain,
        Some("now") => CancelMode::Now,
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("mode must be drain or now, it is: {shown}");
            return Err(ApiError::invalid("mode", message).code("invalid_value"));
        }
    };
    match state.parts.store.cancel_job_if_active(job, mode, state.parts.cancel_drain).await? {
        Guarded::Applied(job) => super::show(&state, &job).await,
        Guarded::Lost { now } => Err(super::refuse(&id, now, "batch_not_cancellable", "cancel")),
    }
}
