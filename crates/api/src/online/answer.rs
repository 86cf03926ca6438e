//! The outputs of one online request, and the promise that a client who leaves stops it.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use overnight_worker::generate::{Generate, Output, RequestId};
use overnight_worker::mapper::{self, Refusal};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;

use crate::error::{ApiError, Result};

/// Outputs as they come. Dropped before the end, it cancels what still runs.
#[derive(Debug)]
pub(crate) struct Outputs {
    generate: Arc<dyn Generate>,
    ids: Vec<RequestId>,
    receiver: mpsc::UnboundedReceiver<Vec<Output>>,
    ready: std::vec::IntoIter<Output>,
    deadline: Instant,
    limit: Duration,
    over: bool,
    _place: OwnedSemaphorePermit,
}

impl Outputs {
    pub(crate) fn new(
        generate: Arc<dyn Generate>,
        ids: Vec<RequestId>,
        receiver: mpsc::UnboundedReceiver<Vec<Output>>,
        limit: Duration,
        place: OwnedSemaphorePermit,
    ) -> Self {
        let (ready, deadline) = (Vec::new().into_iter(), Instant::now() + limit);
        Self { generate, ids, receiver, ready, deadline, limit, over: false, _place: place }
    }

    /// The next output, or why none comes any more.
    pub(crate) async fn next(&mut self) -> Result<Output> {
        loop {
            if let Some(output) = self.ready.next() {
                return Ok(output);
            }
            match tokio::time::timeout_at(self.deadline, self.receiver.recv()).await {
                Ok(Some(outputs)) => self.ready = outputs.into_iter(),
                Ok(None) => return Err(ApiError::internal("the engine dropped an online request")),
                Err(_) => {
                    let cause = format!("no end within {:?}, set by api.online_timeout", self.limit);
                    return Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout")
                        .code("request_timeout")
                        .cause(cause));
                }
            }
        }
    }

    /// The answer is complete: nothing is left to cancel.
    pub(crate) fn finish(&mut self) {
        self.over = true;
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        if !self.over {
            self.generate.cancel(&self.ids);
        }
    }
}

/// A body that the mapper refuses.
pub(crate) fn refused(refusal: &Refusal) -> Response {
    json(StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::BAD_REQUEST), refusal.body())
}

/// A finished answer. One that is our fault goes out as any other 5xx does.
pub(crate) fn finished(response: mapper::Response, retry_after: Duration) -> Response {
    let status = StatusCode::from_u16(response.status).unwrap_or(StatusCode::BAD_GATEWAY);
    if !status.is_server_error() {
        let mut answer = json(status, response.body);
        if status == StatusCode::TOO_MANY_REQUESTS {
            answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_after.as_secs().max(1)));
        }
        return answer;
    }
    let mut error = ApiError::new(status, "the engine failed")
        .code(response.error_code.unwrap_or_else(|| "engine_error".to_owned()));
    error.retry_after = (status == StatusCode::SERVICE_UNAVAILABLE).then_some(retry_after);
    error.cause(String::from_utf8_lossy(&response.body).into_owned()).into_response()
}

fn json(status: StatusCode, body: Bytes) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
