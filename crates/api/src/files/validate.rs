//! `POST /v1/files/{file_id}/validate`: what a batch of this file would say, at once
//! and without side effect. The checks are intake's own.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use overnight_blobs::ObjectName;
use overnight_store::FilePurpose;
use overnight_types::chain;
use overnight_worker::intake::{self, Expected, IntakeOptions, KnownModels, Source, SourceError, validate as check};
use serde_json::{Value, json};

use crate::batches::parse_endpoint;
use crate::body::Fields;
use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared};

/// All errors of the file, as the batch would show them.
pub(crate) async fn validate(
    State(state): State<Shared>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>> {
    // Reading a large file is work like an upload's, and bounded with it.
    let _place = state.uploads.enter()?;
    let fields = Fields::read(&state, &headers, body, &["endpoint"]).await?;
    let endpoint = parse_endpoint(fields.required_text("endpoint")?)?;
    let file = super::find(&state, &id).await?;
    if file.purpose != FilePurpose::Batch {
        let message = format!("the purpose of the file must be batch, it is: {}", file.purpose.as_str());
        return Err(ApiError::invalid("file_id", message).code("invalid_purpose"));
    }
    let mut options = IntakeOptions::new(endpoint, known_models(&state).await?);
    options.limits = state.parts.limits.clone();
    options.expected = Some(Expected { bytes: file.bytes, sha256: file.sha256 });
    let source = Source::Object(state.parts.blobs.clone(), ObjectName::file(file.id));
    let report = check(&source, options, None).await.map_err(unreadable)?;
    Ok(Json(json!({
        "object": "batch_validation",
        "valid": report.is_valid(),
        "requests": report.requests,
        "errors": report.findings.to_json(),
    })))
}

/// As a batch's own intake judges names.
async fn known_models(state: &Inner) -> Result<KnownModels> {
    let parts = &state.parts;
    let mut configured = parts.models.clone();
    configured.extend(parts.generate.iter().flat_map(|generate| generate.status().models));
    intake::known_models(parts.store.as_ref(), &configured).await.map_err(|error| ApiError::internal(chain(&error)))
}

fn unreadable(error: SourceError) -> ApiError {
    match error {
        SourceError::Blobs(error) => error.into(),
        other => ApiError::internal(chain(&other)),
    }
}
