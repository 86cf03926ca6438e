//! `GET /v1/batches/{batch_id}/events`: changes and counts as server-sent events.
//!
//! `status` events are the audit trail, each with its id; `Last-Event-ID` goes on after
//! it. `counts` events hold the batch object whenever it differs from the last one sent.
//! The stream ends with the batch, with the server's drain, or at trouble with the
//! store; a client that comes back after the end of an ended batch gets 204, which
//! tells an `EventSource` to stop.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use overnight_store::Event;
use overnight_types::{JobId, chain};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::error::{ApiError, Result};
use crate::state::Shared;

/// Events read at a time.
const PAGE: u32 = 100;
/// Longest silence; a comment keeps proxies from cutting the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// A stream of what happens to one batch.
pub(crate) async fn events(
    State(state): State<Shared>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response> {
    let place = state.event_streams.enter()?;
    let job = super::find(&state, &id).await?;
    let last =
        headers.get("last-event-id").map(|value| value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()));
    let after = match last {
        None => 0,
        Some(Some(seq)) => seq,
        Some(None) => {
            return Err(
                ApiError::invalid("Last-Event-ID", "Last-Event-ID must be an id of this stream").code("invalid_value")
            );
        }
    };
    let nothing_new = || state.parts.store.list_events(job.id, after, 1);
    if last.is_some() && job.state.is_terminal() && nothing_new().await?.is_empty() {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let watcher = Watcher {
        state,
        job: job.id,
        after,
        shown: String::new(),
        ready: VecDeque::from(["retry: 2000\n\n".to_owned()]),
        over: false,
        _place: place,
    };
    let body = stream::unfold(watcher, |mut watcher| async {
        let text = watcher.next().await?;
        Some((Ok::<String, Infallible>(text), watcher))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, [("x-accel-buffering", "no")], Body::from_stream(body)).into_response())
}

struct Watcher {
    state: Shared,
    job: JobId,
    after: u64,
    shown: String,
    ready: VecDeque<String>,
    over: bool,
    _place: OwnedSemaphorePermit,
}

impl Watcher {
    async fn next(&mut self) -> Option<String> {
        let quiet_until = Instant::now() + KEEP_ALIVE;
        let draining = self.state.parts.draining.clone();
        loop {
            if let Some(text) = self.ready.pop_front() {
                return Some(text);
            }
            if self.over {
                return None;
            }
            if let Err(error) = self.look().await {
                let cause = error.cause.as_deref().unwrap_or(&error.message);
                tracing::warn!(job.id = %self.job, cause, "event stream ends early");
                return None;
            }
            if self.ready.is_empty() && !self.over {
                if Instant::now() >= quiet_until {
                    return Some(": nothing new\n\n".to_owned());
                }
                tokio::select! {
                    () = draining.cancelled() => return None,
                    () = tokio::time::sleep(self.state.parts.config.events_poll_every) => {}
                }
            }
        }
    }

    /// Reads what is new into `ready`.
    async fn look(&mut self) -> Result<()> {
        let store = &self.state.parts.store;
        // Job before events: an event of the final change is then never missed.
        let Some(job) = store.find_job(self.job).await? else {
            self.over = true;
            return Ok(());
        };
        let events = store.list_events(self.job, self.after, PAGE).await?;
        self.after = events.last().map_or(self.after, |event| event.seq);
        self.ready.extend(events.iter().map(status_event));
        let axum::Json(object) = super::show(&self.state, &job).await?;
        let object = serde_json::to_string(&object).map_err(|error| ApiError::internal(chain(&error)))?;
        if object != self.shown {
            self.ready.push_back(format!("event: counts\ndata: {object}\n\n"));
            self.shown = object;
        }
        self.over = job.state.is_terminal() && events.len() < PAGE as usize;
        Ok(())
    }
}

fn status_event(event: &Event) -> String {
    let data = json!({"object": "batch.event", "id": event.seq, "batch_id": event.job, "what": event.what,
        "note": event.note, "created_at": event.at.unix_seconds()});
    format!("id: {}\nevent: status\ndata: {data}\n\n", event.seq)
}
