//! HTTP requests by route, method and status. The route is its pattern, never the path.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts};

use super::MetricsPage;
use crate::state::Shared;

/// Upper bounds in seconds, as vLLM's front end has them.
const SECONDS: &[f64] = &[0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0];

#[derive(Debug)]
pub(crate) struct HttpMetrics {
    requests: IntCounterVec,
    seconds: HistogramVec,
}

impl HttpMetrics {
    pub(super) fn new() -> Self {
        let requests = Opts::new("http_requests_total", "HTTP requests answered");
        let seconds = HistogramOpts::new(
            "http_request_duration_seconds",
            "Seconds until an answer's head; a body that flows for long is not in it",
        );
        Self {
            requests: IntCounterVec::new(requests, &["handler", "method", "status"]).expect("valid names"),
            seconds: HistogramVec::new(seconds.buckets(SECONDS.to_vec()), &["handler", "method"]).expect("valid names"),
        }
    }

    pub(super) fn show(&self, page: &mut MetricsPage) {
        page.collect(&self.requests);
        page.collect(&self.seconds);
    }
}

/// Counts each request when its answer begins.
pub(crate) async fn measure(State(state): State<Shared>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let handler = request.extensions().get::<MatchedPath>().cloned();
    let method = method_word(request.method());
    let response = next.run(request).await;
    let handler = handler.as_ref().map_or("none", MatchedPath::as_str);
    let metrics = &state.metrics.http;
    metrics.requests.with_label_values(&[handler, method, response.status().as_str()]).inc();
    metrics.seconds.with_label_values(&[handler, method]).observe(started.elapsed().as_secs_f64());
    response
}

/// A client may make up methods; they must not make up series.
fn method_word(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "PATCH" => "PATCH",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}
