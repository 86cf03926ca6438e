//! A completion as server-sent events: one `data:` line per chunk, then `[DONE]`.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use overnight_worker::mapper::{Answer, Response as Answered, StreamEnd};
use serde_json::json;

use super::answer::{Outputs, finished};
use crate::error::{ApiError, Result};

/// Answers with the stream once its first chunk is there; a failure before that is
/// an ordinary error answer.
pub(crate) async fn stream(
    outputs: Outputs,
    answer: Answer,
    request_id: String,
    retry_after: Duration,
) -> Result<Response> {
    let mut chunks = Chunks { outputs, answer, request_id, ready: VecDeque::new(), over: false };
    while chunks.ready.is_empty() && !chunks.over {
        if let Some(StreamEnd::Failed(response)) = chunks.advance().await?
            && chunks.ready.is_empty()
        {
            return Ok(finished(response, retry_after));
        }
    }
    let events = stream::unfold(chunks, |mut chunks| async {
        let event = chunks.next_event().await?;
        Some((Ok::<Bytes, Infallible>(event), chunks))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, [("x-accel-buffering", "no")], Body::from_stream(events)).into_response())
}

struct Chunks {
    outputs: Outputs,
    answer: Answer,
    request_id: String,
    ready: VecDeque<Bytes>,
    over: bool,
}

impl Chunks {
    /// Takes one output. The end, when it was the last.
    async fn advance(&mut self) -> Result<Option<StreamEnd>> {
        let step = self.answer.push_stream(self.outputs.next().await?);
        self.ready.extend(step.chunks);
        if let Some(end) = &step.end {
            self.over = true;
            if matches!(end, StreamEnd::Done { .. }) {
                self.outputs.finish();
            }
        }
        Ok(step.end)
    }

    async fn next_event(&mut self) -> Option<Bytes> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Some(event(&chunk));
            }
            if self.over {
                return None;
            }
            // Headers are out: trouble can only be told as a last event.
            match self.advance().await {
                Ok(Some(StreamEnd::Failed(response))) => {
                    let last = failed(response, &self.request_id);
                    self.ready.push_back(last);
                }
                Ok(_) => {}
                Err(error) => {
                    self.over = true;
                    return Some(event(trouble(&error, &self.request_id).as_bytes()));
                }
            }
        }
    }
}

/// What a client is told of a failed answer: a refusal as it is, our own trouble without
/// its cause, as in any other 5xx.
fn failed(response: Answered, request_id: &str) -> Bytes {
    let status = StatusCode::from_u16(response.status).unwrap_or(StatusCode::BAD_GATEWAY);
    if !status.is_server_error() {
        return response.body;
    }
    let error = ApiError::new(status, "the engine failed")
        .code(response.error_code.unwrap_or_else(|| "engine_error".to_owned()))
        .cause(String::from_utf8_lossy(&response.body).into_owned());
    trouble(&error, request_id).into()
}

fn trouble(error: &ApiError, request_id: &str) -> String {
    let cause = error.cause.as_deref().unwrap_or(&error.message);
    tracing::error!(request.id = %request_id, cause, "stream cut short");
    let message = format!("the server could not finish the stream; request id: {request_id}");
    json!({"error": {"message": message, "type": error.kind(), "param": null, "code": error.code}}).to_string()
}

fn event(data: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(data.len() + 8);
    bytes.put_slice(b"data: ");
    bytes.put_slice(data);
    bytes.put_slice(b"\n\n");
    bytes.freeze()
}
