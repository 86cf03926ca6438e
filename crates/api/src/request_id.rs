//! The outermost layer: gives every answer its `X-Request-Id`, renders errors in the
//! form of their path, and logs each failure once.

use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use serde_json::json;
use uuid::Uuid;

use crate::error::ApiError;

/// The id of one HTTP request, `req_…`; an extension of the request.
#[derive(Debug, Clone)]
pub(crate) struct RequestIdText(pub(crate) String);

/// Paths whose requests leave no line in the log.
const QUIET: [&str; 3] = ["/health", "/ping", "/metrics"];

/// Wraps every request.
pub(crate) async fn wrap(mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = format!("req_{}", Uuid::now_v7().simple());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    request.extensions_mut().insert(RequestIdText(id.clone()));
    let mut response = next.run(request).await;
    if response.status().is_client_error() || response.status().is_server_error() {
        let error = response.extensions_mut().remove::<ApiError>().or_else(|| foreign(&response));
        if let Some(error) = error {
            if error.status.is_server_error() {
                let cause = error.cause.as_deref().unwrap_or(&error.message);
                tracing::error!(request.id = %id, %method, path, status = error.status.as_u16(), cause, "request failed");
            }
            response = render(&error, &path, &id, response);
        }
    }
    if !QUIET.contains(&path.as_str()) {
        let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let status = response.status().as_u16();
        // Who waits for a batch asks every second: what only read and went well is detail.
        if method == Method::GET && response.status().is_success() {
            tracing::debug!(request.id = %id, %method, path, status, elapsed_ms, "request");
        } else {
            tracing::info!(request.id = %id, %method, path, status, elapsed_ms, "request");
        }
    }
    let value = HeaderValue::from_str(&id).expect("the id is letters, digits and an underscore");
    response.headers_mut().insert("x-request-id", value);
    response
}

/// An error answer of the framework (a bad path, say), which has no body of ours.
fn foreign(response: &Response) -> Option<ApiError> {
    let ours = response.headers().get(header::CONTENT_TYPE).is_some_and(|value| {
        value.as_bytes().starts_with(b"application/") || value.as_bytes().starts_with(b"text/html")
    });
    (!ours).then(|| ApiError::new(response.status(), response.status().canonical_reason().unwrap_or("refused")))
}

/// The body of an error; headers that the handler set stay.
fn render(error: &ApiError, path: &str, id: &str, response: Response) -> Response {
    let message = error.shown(id);
    let openai = path == "/v1" || path.starts_with("/v1/");
    let body = if openai {
        json!({"error": {"message": message, "type": error.kind(), "param": error.param, "code": error.code}})
    } else {
        let title = error.status.canonical_reason().unwrap_or("error");
        json!({"type": "about:blank", "title": title, "status": error.status.as_u16(), "detail": message,
               "code": error.code, "request_id": id})
    };
    let (mut parts, _) = response.into_parts();
    let content_type = if openai { "application/json" } else { "application/problem+json" };
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    parts.headers.remove(header::CONTENT_LENGTH);
    if let Some(after) = error.retry_after {
        parts.headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
    }
    if error.status == StatusCode::UNAUTHORIZED {
        parts.headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    Response::from_parts(parts, Body::from(body.to_string()))
}
