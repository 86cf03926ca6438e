//! `POST /v1/files/{file_id}/validate`: what a batch of this file would say, at once
//! and without side effect. The checks are intake's own.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use overnight_blobs::ObjectName;
use overnight_store::FilePurpose;
use overnight_types::chain;
use overnight_worker::intake::{
    self, BodyCheck, Expected, IntakeOptions, KnownModels, ModelFree, Source, SourceError, validate as check,
};
use overnight_worker::mapper::Mapper;
use serde_json::Value;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::batches::parse_endpoint;
use crate::body::Fields;
use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared};

/// What is said of bodies that another server judges.
const JUDGED_ELSEWHERE: &str = "bodies: the engine is another server, which judges them itself";

/// All errors of the file, as the batch would show them, and the requests that would end
/// with 400.
pub(crate) async fn validate(
    State(state): State<Shared>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>> {
    // Reading a large file is work like an upload's, and bounded with it.
    let place = state.uploads.enter()?;
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
    let gone = CancellationToken::new();
    let _ends_with_the_call = gone.clone().drop_guard();
    // Tokenizing every prompt is work for minutes: it keeps no thread of the server's busy,
    // and ends when nobody waits for it any more.
    let working = tokio::task::spawn_blocking(move || {
        let _place = place;
        let mapper = state.parts.mapper.get();
        let bodies = Bodies::of(mapper, state.parts.checks_bodies);
        let checking = check(&source, options, bodies.check());
        let report = Handle::current().block_on(gone.run_until_cancelled(checking))?;
        Some(report.map(|report| report.to_json(bodies.unchecked(report.model.as_deref()))))
    });
    match working.await {
        Ok(Some(report)) => Ok(Json(report.map_err(unreadable)?)),
        Ok(None) => Err(ApiError::internal("a validation was given up")),
        Err(error) => Err(ApiError::internal(chain(&error))),
    }
}

/// Who judges bodies here.
enum Bodies<'a> {
    Mapper(&'a Mapper),
    ModelFree,
    Nobody,
}

impl<'a> Bodies<'a> {
    fn of(mapper: Option<&'a Mapper>, checks_bodies: bool) -> Self {
        match mapper {
            Some(mapper) if mapper.text().is_some() => Self::Mapper(mapper),
            None if checks_bodies => Self::ModelFree,
            Some(_) | None => Self::Nobody,
        }
    }

    fn check(&self) -> Option<&dyn BodyCheck> {
        match self {
            Self::Mapper(mapper) => Some(*mapper),
            Self::ModelFree => Some(&ModelFree),
            Self::Nobody => None,
        }
    }

    /// What was not looked at in a file that names this model.
    fn unchecked(&self, model: Option<&str>) -> Option<&'static str> {
        match self {
            Self::Mapper(mapper) => {
                let names = mapper.names().unwrap_or_default();
                let is_ours = model.is_none_or(|model| names.iter().any(|name| name == model));
                (!is_ours).then_some(ModelFree::UNCHECKED)
            }
            Self::ModelFree => Some(ModelFree::UNCHECKED),
            Self::Nobody => Some(JUDGED_ELSEWHERE),
        }
    }
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
