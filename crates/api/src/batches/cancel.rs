//! `POST /v1/batches/{batch_id}/cancel`.

use axum::Json;
use axum::extract::State;
use overnight_store::CancelMode;

use super::call::Call;
use super::object::BatchObject;
use crate::error::{ApiError, Result};
use crate::state::Shared;

/// Stops a batch; what finished stays. `{"mode": "now"}` also stops what runs.
pub(crate) async fn cancel(State(state): State<Shared>, call: Call) -> Result<Json<BatchObject>> {
    let job = super::parse_id(&call.id)?;
    let (id, fields) = call.read(&state, &["mode"]).await?;
    let mode = match fields.text("mode")? {
        None | Some("drain") => CancelMode::Drain,
        Some("now") => CancelMode::Now,
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("mode must be drain or now, it is: {shown}");
            return Err(ApiError::invalid("mode", message).code("invalid_value"));
        }
    };
    let moved = state.parts.store.cancel_job_if_active(job, mode, state.parts.cancel_drain).await?;
    super::answer(&state, &id, moved, "batch_not_cancellable", "cancel").await
}
