//! Online routes: one request, answered while somebody waits.
//!
//! They use the same mapper and the same [`Generate`]
//! as jobs, and go before job items in the engine. Their number at once is bounded.

mod answer;
mod complete;
mod models;
mod stream;
mod tokenize;

pub(crate) use complete::{chat_completions, completions};
pub(crate) use models::{list_models, retrieve_model};
pub(crate) use tokenize::{detokenize, tokenize};

use std::sync::Arc;

use axum::extract::Request;
use axum::http::StatusCode;
use overnight_worker::generate::{EngineState, Generate};
use overnight_worker::mapper::Mapper;

use crate::error::{ApiError, Result};
use crate::state::Inner;

/// Routes that clients of other servers know and this one does not have.
pub(crate) async fn not_built(request: Request) -> ApiError {
    let message = format!(
        "not built in this version: {}; built are /v1/chat/completions and /v1/completions",
        request.uri().path()
    );
    ApiError::new(StatusCode::NOT_FOUND, message).code("not_built")
}

/// The engine and its mapper, when this process has them and they can answer.
fn engine(state: &Inner) -> Result<(Arc<dyn Generate>, Mapper)> {
    let Some(generate) = &state.parts.generate else {
        let message = "this process has no engine and answers no online requests; send a batch";
        return Err(ApiError::new(StatusCode::NOT_FOUND, message).code("no_engine"));
    };
    let unavailable = |code, cause| Err(ApiError::unavailable(code, state.retry_after()).cause(cause));
    match generate.status().state {
        EngineState::Ready => match state.parts.mapper.get() {
            Some(mapper) => Ok((Arc::clone(generate), mapper.clone())),
            None => unavailable("engine_starting", "the mapper is not there yet".to_owned()),
        },
        EngineState::Starting(stage) => unavailable("engine_starting", stage),
        EngineState::Poisoned(reason) => unavailable("engine_poisoned", reason),
        EngineState::Stalled(reason) => unavailable("engine_stalled", reason),
    }
}
