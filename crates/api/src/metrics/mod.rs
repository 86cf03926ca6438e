//! `GET /metrics`: what this process and its database have to tell, as Prometheus text.
//!
//! Owns the page's form ([`MetricsPage`]), the counts of HTTP requests and the service's own
//! gauges; whoever starts the server adds more through [`Measure`]. Invariants: no label holds
//! text of a user, so the number of series is bounded; a page costs the database at most one
//! look every few seconds, and is given out without it when it does not answer.

pub(crate) mod http;
mod page;
mod service;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use prometheus::IntCounter;

use crate::error::{ApiError, Result};
use crate::state::Shared;
use http::HttpMetrics;
pub use page::MetricsPage;
use service::Service;

/// Adds the metrics of another part to a page. Must not block.
pub type Measure = Arc<dyn Fn(&mut MetricsPage) + Send + Sync>;

/// Where the page is.
pub(crate) const PATH: &str = "/metrics";

/// Counts of this server since its start.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) http: HttpMetrics,
    /// Bytes of files taken whole.
    pub(crate) upload_bytes: IntCounter,
    service: Service,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let upload_bytes = IntCounter::new("batch_upload_bytes_total", "Bytes of uploaded files that were taken");
        Self {
            http: HttpMetrics::new(),
            upload_bytes: upload_bytes.expect("the name and the help are valid"),
            service: Service::default(),
        }
    }
}

/// The page of a server.
pub(crate) async fn show(State(state): State<Shared>) -> Result<Response> {
    let mut page = begin(&state);
    state.metrics.service.show(&state, &mut page).await;
    page.collect(&state.metrics.upload_bytes);
    end(&state, page)
}

/// The page of a process without an API: what it counts itself. What the database says is
/// told by servers, so that sums over processes count nothing twice.
pub(crate) async fn show_process(State(state): State<Shared>) -> Result<Response> {
    let page = begin(&state);
    end(&state, page)
}

fn begin(state: &Shared) -> MetricsPage {
    let mut page = MetricsPage::default();
    page.gauge("build_info", "Always 1; the version of the binary", &[("version", &state.parts.version)], 1.0);
    if let Some(measure) = &state.parts.measure {
        measure(&mut page);
    }
    page
}

fn end(state: &Shared, mut page: MetricsPage) -> Result<Response> {
    state.metrics.http.show(&mut page);
    let text = page.text().map_err(|error| ApiError::internal(format!("the page of metrics: {error}")))?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static(prometheus::TEXT_FORMAT))], text).into_response())
}
