//! `POST /v1/chat/completions` and `POST /v1/completions`, whole or streamed.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use overnight_types::{Endpoint, Timestamp};
use overnight_worker::generate::Class;
use overnight_worker::mapper::{Answer, AnswerState, PrepareOptions, Prepared, Refusal, failure_response};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::answer::{Outputs, finished, refused};
use super::stream::stream;
use crate::body::{read, require_json};
use crate::error::{ApiError, Result};
use crate::request_id::RequestIdText;
use crate::state::{Inner, Shared};

/// One chat completion.
pub(crate) async fn chat_completions(
    State(state): State<Shared>,
    Extension(id): Extension<RequestIdText>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response> {
    complete(&state, Endpoint::ChatCompletions, &id, &headers, body).await
}

/// One text completion.
pub(crate) async fn completions(
    State(state): State<Shared>,
    Extension(id): Extension<RequestIdText>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response> {
    complete(&state, Endpoint::Completions, &id, &headers, body).await
}

async fn complete(
    state: &Inner,
    endpoint: Endpoint,
    id: &RequestIdText,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response> {
    let (generate, mapper) = super::engine(state)?;
    let place = state.online.enter()?;
    require_json(headers)?;
    let body = read(state, headers, body).await?;
    let request_id = id.0.clone();
    let id = request_id.trim_start_matches("req_").to_owned();
    // Templates and tokenizers take CPU time.
    let prepared = tokio::task::spawn_blocking(move || {
        let options = PrepareOptions {
            class: Class::Online,
            allow_stream: true,
            seed: Uuid::now_v7().as_u64_pair().1,
            request_id: &id,
            created: Timestamp::now().unix_seconds(),
        };
        mapper.prepare(endpoint, &body, options)
    });
    let prepared: Result<Prepared, Refusal> =
        prepared.await.map_err(|error| ApiError::internal(format!("mapping a body panicked: {error}")))?;
    let Prepared { requests, answer, stream: streams, .. } = match prepared {
        Ok(prepared) => prepared,
        Err(refusal) => return Ok(refused(&refusal)),
    };
    let (sender, receiver) = mpsc::unbounded_channel();
    let ids = answer.request_ids().to_vec();
    // Taken before the submission, so that a client who leaves in the middle of it cancels too.
    let outputs = Outputs::new(Arc::clone(&generate), ids, receiver, state.parts.config.online_timeout, place);
    generate
        .submit(requests, sender)
        .await
        .map_err(|error| ApiError::unavailable("engine_not_accepting", state.retry_after()).cause(error.to_string()))?;
    match streams {
        true => stream(outputs, answer, request_id, state.retry_after()).await,
        false => whole(outputs, answer, state).await,
    }
}

async fn whole(mut outputs: Outputs, mut answer: Answer, state: &Inner) -> Result<Response> {
    loop {
        match answer.push(outputs.next().await?) {
            AnswerState::Pending => {}
            AnswerState::Done(response) => {
                outputs.finish();
                return Ok(finished(response, state.retry_after()));
            }
            // The other choices of the body still run; dropping the outputs cancels them.
            AnswerState::Failed(failure) => return Ok(finished(failure_response(&failure), state.retry_after())),
        }
    }
}
