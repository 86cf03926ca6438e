//! `GET /v1/batches/{batch_id}/results`: lines as they are committed, page by page.

use axum::extract::{Path, State};
use axum::http::{HeaderValue, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use overnight_worker::items::{ResultsCursor, ResultsOrder, ResultsQuery, results as read_results};

use crate::body::Query;
use crate::error::{ApiError, Result};
use crate::state::Shared;

const LIMIT_MAX: u32 = 10_000;
const LIMIT_DEFAULT: u32 = 1_000;

/// JSON lines, with the cursor to read on from in `X-Next-Cursor`. Reading on from it
/// neither repeats nor skips a line, also across restarts.
pub(crate) async fn results(State(state): State<Shared>, Path(id): Path<String>, uri: Uri) -> Result<Response> {
    let query = Query::of(&uri);
    let limit = query.limit(LIMIT_MAX, LIMIT_DEFAULT)?;
    let order = match query.get("order") {
        None | Some("completion") => ResultsOrder::Completion,
        Some("input") => ResultsOrder::Input,
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("order must be completion or input, it is: {shown}");
            return Err(ApiError::invalid("order", message).code("invalid_value"));
        }
    };
    let after = query.get("after").map(str::parse::<ResultsCursor>).transpose()?;
    let job = super::find(&state, &id).await?;
    let wanted = ResultsQuery { after, limit, order };
    let page = read_results(state.parts.store.as_ref(), &state.parts.blobs, &job, &wanted).await?;
    let mut body = BytesMut::with_capacity(page.lines.iter().map(|line| line.len() + 1).sum());
    for line in &page.lines {
        body.extend_from_slice(line);
        body.extend_from_slice(b"\n");
    }
    let cursor = page.next.to_string();
    let cursor =
        HeaderValue::from_str(&cursor).map_err(|error| ApiError::internal(format!("cursor {cursor:?}: {error}")))?;
    let incomplete = HeaderValue::from_static(if page.incomplete { "true" } else { "false" });
    let mut response = ([(header::CONTENT_TYPE, "application/jsonl")], body.freeze()).into_response();
    response.headers_mut().insert("x-next-cursor", cursor);
    response.headers_mut().insert("x-incomplete", incomplete);
    Ok(response)
}
