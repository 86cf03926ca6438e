//! `GET /v1/models`: every name that something here answers to.

use std::collections::BTreeSet;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::Serialize;

use crate::error::{ApiError, Result};
use crate::list_object::ListObject;
use crate::state::{Inner, Shared};

/// OpenAI's model object with vLLM's `max_model_len`.
#[derive(Debug, Serialize)]
pub(crate) struct ModelObject {
    id: String,
    object: &'static str,
    created: i64,
    owned_by: &'static str,
    root: String,
    parent: Option<String>,
    max_model_len: Option<u32>,
}

/// Names of the configuration, of this process's engine and of live workers.
pub(crate) async fn list_models(State(state): State<Shared>) -> Result<Json<ListObject<ModelObject>>> {
    let data: Vec<ModelObject> = names(&state).await?.into_iter().map(|name| object(&state, name)).collect();
    let (first, last) = (data.first().map(|model| model.id.clone()), data.last().map(|model| model.id.clone()));
    Ok(Json(ListObject::new(data, first, last, false)))
}

/// One of them; its name may hold slashes.
pub(crate) async fn retrieve_model(State(state): State<Shared>, Path(name): Path<String>) -> Result<Json<ModelObject>> {
    let names = names(&state).await?;
    match names.contains(&name) {
        true => Ok(Json(object(&state, name))),
        false => {
            let shown: String = name.chars().take(120).collect();
            let served = names.into_iter().collect::<Vec<_>>().join(", ");
            let message =
                format!("no such model: {shown}; served: {}", if served.is_empty() { "none" } else { &served });
            Err(ApiError::new(StatusCode::NOT_FOUND, message).param("model").code("model_not_found"))
        }
    }
}

async fn names(state: &Inner) -> Result<BTreeSet<String>> {
    let mut names = state.known_models().await?;
    names.remove("*");
    Ok(names)
}

fn object(state: &Inner, name: String) -> ModelObject {
    let mapper = state.parts.mapper.get();
    let local = mapper.filter(|mapper| mapper.names().is_some_and(|names| names.contains(&name)));
    ModelObject {
        object: "model",
        created: state.started_at.unix_seconds(),
        owned_by: "overnight",
        root: name.clone(),
        parent: None,
        max_model_len: local.and_then(|mapper| mapper.limits()).map(|limits| limits.max_model_len),
        id: name,
    }
}
