//! The route table and the layers around it.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use tower_http::catch_panic::CatchPanicLayer;

use crate::error::{ApiError, Error, Result};
use crate::state::{ApiState, Inner, Shared};
use crate::{auth, batches, files, health, metrics, online, openapi, request_id};

/// Collects routes and remembers what it collected, so that the OpenAPI document can
/// be held against the truth.
pub(crate) struct Routes {
    router: Router<Shared>,
    /// Method and path of every route, in order.
    pub(crate) listed: Vec<(Method, &'static str)>,
    time_limit: Duration,
}

impl Routes {
    fn new(time_limit: Duration) -> Self {
        Self { router: Router::new(), listed: Vec::new(), time_limit }
    }

    fn on(mut self, method: Method, path: &'static str, route: MethodRouter<Shared>) -> Self {
        self.listed.push((method, path));
        self.router = self.router.route(path, route);
        self
    }

    /// Answers within the time limit, or 503.
    fn bounded<H: Handler<T, Shared>, T: 'static>(&self, filter: MethodFilter, handler: H) -> MethodRouter<Shared> {
        let limit = self.time_limit;
        on(filter, handler).layer(from_fn(move |request: Request, next: Next| async move {
            tokio::time::timeout(limit, next.run(request)).await.map_err(|_| {
                ApiError::unavailable("request_timeout", limit).cause(format!("no answer within {limit:?}"))
            })
        }))
    }

    pub(crate) fn get<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        let route = self.bounded(MethodFilter::GET, handler);
        self.on(Method::GET, path, route)
    }

    pub(crate) fn post<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        let route = self.bounded(MethodFilter::POST, handler);
        self.on(Method::POST, path, route)
    }

    pub(crate) fn delete<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        let route = self.bounded(MethodFilter::DELETE, handler);
        self.on(Method::DELETE, path, route)
    }

    /// A GET whose body may flow for long: only its own limits hold.
    pub(crate) fn get_stream<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.on(Method::GET, path, on(MethodFilter::GET, handler))
    }

    /// A POST that takes or gives a long body: only its own limits hold.
    pub(crate) fn post_stream<H: Handler<T, Shared>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.on(Method::POST, path, on(MethodFilter::POST, handler))
    }
}

/// Every route of this crate.
pub(crate) fn routes(time_limit: Duration) -> Routes {
    Routes::new(time_limit)
        .post_stream("/v1/files", files::upload)
        .get("/v1/files", files::list)
        .get("/v1/files/{file_id}", files::retrieve)
        .delete("/v1/files/{file_id}", files::delete)
        .get_stream("/v1/files/{file_id}/content", files::content)
        .post_stream("/v1/files/{file_id}/validate", files::validate)
        .post("/v1/batches", batches::create)
        .get("/v1/batches", batches::list)
        .get("/v1/batches/{batch_id}", batches::retrieve)
        .delete("/v1/batches/{batch_id}", batches::delete)
        .post("/v1/batches/{batch_id}/cancel", batches::cancel)
        .post("/v1/batches/{batch_id}/pause", batches::pause)
        .post("/v1/batches/{batch_id}/resume", batches::resume)
        .post_stream("/v1/batches/{batch_id}/retry", batches::retry)
        .get("/v1/batches/{batch_id}/items", batches::items)
        .get("/v1/batches/{batch_id}/items/{index}", batches::item)
        .get("/v1/batches/{batch_id}/results", batches::results)
        .get_stream("/v1/batches/{batch_id}/events", batches::events)
        .get("/v1/models", online::list_models)
        .get("/v1/models/{*model}", online::retrieve_model)
        .post_stream("/v1/chat/completions", online::chat_completions)
        .post_stream("/v1/completions", online::completions)
        .post("/v1/embeddings", online::not_built)
        .post("/v1/rerank", online::not_built)
        .post("/rerank", online::not_built)
        .post("/v1/score", online::not_built)
        .post("/score", online::not_built)
        .post("/v1/responses", online::not_built)
        .post("/tokenize", online::tokenize)
        .post("/detokenize", online::detokenize)
        .get("/health", health::health)
        .get("/ping", health::health)
        .get("/version", health::version)
        .get(metrics::PATH, metrics::show)
        .get("/openapi.json", openapi::openapi)
}

/// The server's router: all routes, guarded by keys, with errors in their wire form.
/// Fails when a setting is out of range or the key file cannot be used.
pub fn router(parts: ApiState) -> Result<Router, Error> {
    let state: Shared = Arc::new(Inner::new(parts)?);
    let extra = state.parts.extra.clone();
    let inner = routes(state.parts.config.request_timeout)
        .router
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Arc::clone(&state))
        .merge(extra);
    Ok(guarded(inner, state))
}

/// The door of a process that serves no API: for probes, and for what this process itself
/// counts. Fails as [`router`] does.
pub fn probes_router(parts: ApiState) -> Result<Router, Error> {
    let state: Shared = Arc::new(Inner::new(parts)?);
    let inner = Routes::new(state.parts.config.request_timeout)
        .get("/health", health::health)
        .get("/ping", health::health)
        .get("/version", health::version)
        .get(metrics::PATH, metrics::show_process)
        .router
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Arc::clone(&state));
    Ok(guarded(inner, state))
}

/// What stands around every route.
fn guarded(inner: Router, state: Shared) -> Router {
    inner
        .fallback(not_found)
        .layer(from_fn_with_state(Arc::clone(&state), refuse_while_draining))
        .layer(from_fn_with_state(Arc::clone(&state), auth::guard))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(state, metrics::http::measure))
        .layer(from_fn(request_id::wrap))
}

async fn refuse_while_draining(State(state): State<Shared>, request: Request, next: Next) -> Result<Response> {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    if state.parts.draining.is_cancelled() && !reads {
        return Err(ApiError::unavailable("draining", state.retry_after()));
    }
    Ok(next.run(request).await)
}

async fn not_found(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::new(StatusCode::NOT_FOUND, format!("no such route: {} {path}", request.method())).code("unknown_route")
}

async fn method_not_allowed(request: Request) -> ApiError {
    let message = format!("{} is not a method of this route: {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
}

#[expect(clippy::needless_pass_by_value, reason = "the signature is tower-http's")]
fn panicked(payload: Box<dyn std::any::Any + Send>) -> Response {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    ApiError::internal(format!("handler panicked: {text}")).into_response()
}
