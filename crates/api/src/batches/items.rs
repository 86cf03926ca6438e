//! `GET /v1/batches/{batch_id}/items` and `/items/{index}`: each request of a batch,
//! its state, and for one of them its input, output and attempts.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::Uri;
use bytes::Bytes;
use overnight_store::{Attempt, Fault};
use overnight_types::{BatchRequestId, FailedTry, ItemIndex, ItemState};
use overnight_worker::items::{self, ItemDetail, ItemQuery, ItemRef, ItemView};
use serde::Serialize;
use serde_json::value::RawValue;

use super::object::UsageObject;
use crate::body::Query;
use crate::error::{ApiError, Result};
use crate::list_object::ListObject;
use crate::state::Shared;

const LIMIT_MAX: u32 = 1_000;
const LIMIT_DEFAULT: u32 = 100;

/// The wire's item. The order of the fields is the order on the wire.
#[derive(Debug, Serialize)]
pub(crate) struct ItemObject {
    object: &'static str,
    id: String,
    index: u64,
    line: Option<u64>,
    custom_id: Option<Box<RawValue>>,
    state: &'static str,
    attempts: u32,
    http_status: Option<u16>,
    error_code: Option<String>,
    finish_reason: Option<String>,
    usage: Option<UsageObject>,
    started_at: Option<i64>,
    finished_at: Option<i64>,
}

/// The single form: the item and everything known of it.
#[derive(Debug, Serialize)]
pub(crate) struct ItemDetailObject {
    #[serde(flatten)]
    item: ItemObject,
    input: Option<Box<RawValue>>,
    output: Option<Box<RawValue>>,
    last_error: Option<LastError>,
    failed_attempts: Vec<FailedAttempt>,
    attempt_log: Vec<AttemptObject>,
}

/// The last try that failed of an item that waits for a retry.
#[derive(Debug, Serialize)]
struct LastError {
    code: String,
    message: String,
    http_status: Option<u16>,
    retry_at: i64,
}

/// One try of the item that failed and was, or will be, followed by another.
#[derive(Debug, Serialize)]
struct FailedAttempt {
    number: u32,
    code: String,
    message: String,
    http_status: Option<u16>,
}

impl From<FailedTry> for FailedAttempt {
    fn from(tried: FailedTry) -> Self {
        Self { number: tried.number, code: tried.code, message: tried.message, http_status: tried.http_status }
    }
}

/// One try at the item's shard.
#[derive(Debug, Serialize)]
struct AttemptObject {
    number: u64,
    worker: String,
    started_at: i64,
    ended_at: Option<i64>,
    end: Option<&'static str>,
}

impl From<ItemView> for ItemObject {
    fn from(view: ItemView) -> Self {
        Self {
            object: "batch.item",
            id: view.id.to_string(),
            index: view.index,
            line: view.line,
            custom_id: view.custom_id,
            state: view.state.as_str(),
            attempts: view.attempts,
            http_status: view.http_status,
            error_code: view.error_code,
            finish_reason: view.finish_reason,
            usage: view.usage.map(UsageObject::from),
            started_at: view.started_at.map(|at| at.unix_seconds()),
            finished_at: view.finished_at.map(|at| at.unix_seconds()),
        }
    }
}

impl From<Fault> for LastError {
    fn from(fault: Fault) -> Self {
        let retry_at = fault.not_before.unix_seconds();
        Self { code: fault.code, message: fault.message, http_status: fault.http_status, retry_at }
    }
}

impl From<Attempt> for AttemptObject {
    fn from(attempt: Attempt) -> Self {
        Self {
            number: attempt.epoch.0,
            worker: attempt.worker.to_string(),
            started_at: attempt.started_at.unix_seconds(),
            ended_at: attempt.ended_at.map(|at| at.unix_seconds()),
            end: attempt.end.map(|end| end.as_str()),
        }
    }
}

/// A page of items by index; `?custom_id=` finds one.
pub(crate) async fn items(
    State(state): State<Shared>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<ListObject<ItemObject>>> {
    let query = Query::of(&uri);
    let limit = query.limit(LIMIT_MAX, LIMIT_DEFAULT)?;
    let wanted = ItemQuery {
        state: query.get("state").map(parse_state).transpose()?,
        code: query.get("code").map(str::to_owned),
        after: query.get("after").map(parse_after).transpose()?,
        limit,
    };
    let job = super::find(&state, &id).await?;
    let (store, blobs) = (state.parts.store.as_ref(), &state.parts.blobs);
    let page = match query.get("custom_id") {
        None => items::list(store, blobs, &job, &wanted).await?,
        Some(custom_id) => {
            let found = items::find(store, blobs, &job, &ItemRef::CustomId(custom_id.to_owned())).await?;
            items::ItemPage { items: found.map(|found| found.view).into_iter().collect(), has_more: false }
        }
    };
    let data: Vec<ItemObject> = page.items.into_iter().map(ItemObject::from).collect();
    let (first, last) = (data.first().map(|item| item.id.clone()), data.last().map(|item| item.id.clone()));
    Ok(Json(ListObject::new(data, first, last, page.has_more)))
}

/// One item by its index.
pub(crate) async fn item(
    State(state): State<Shared>,
    Path((id, index)): Path<(String, String)>,
) -> Result<Json<ItemDetailObject>> {
    let no_such_item = || ApiError::no_such("item", &index).param("index");
    let item = parse_index(&index).ok_or_else(no_such_item)?;
    let job = super::find(&state, &id).await?;
    let found = items::find(state.parts.store.as_ref(), &state.parts.blobs, &job, &ItemRef::Index(item)).await?;
    let ItemDetail { view, input, output, fault, failed_tries, attempts } = found.ok_or_else(no_such_item)?;
    Ok(Json(ItemDetailObject {
        item: view.into(),
        input: input.map(raw).transpose()?,
        output: output.map(raw).transpose()?,
        last_error: fault.map(LastError::from),
        failed_attempts: failed_tries.into_iter().map(FailedAttempt::from).collect(),
        attempt_log: attempts.into_iter().map(AttemptObject::from).collect(),
    }))
}

fn parse_state(word: &str) -> Result<ItemState> {
    word.parse().map_err(|_| {
        let known = ItemState::ALL.iter().map(ItemState::as_str).collect::<Vec<_>>().join(", ");
        let shown: String = word.chars().take(40).collect();
        ApiError::invalid("state", format!("state must be one of {known}; it is: {shown}")).code("invalid_value")
    })
}

/// An index, or an item's id, so that clients may page by `last_id` as everywhere.
fn parse_after(text: &str) -> Result<ItemIndex> {
    let by_id = || text.parse::<BatchRequestId>().ok().map(|id| id.item);
    parse_index(text).or_else(by_id).ok_or_else(|| {
        let shown: String = text.chars().take(80).collect();
        ApiError::invalid("after", format!("after must be an index or an item's id, it is: {shown}"))
            .code("invalid_value")
    })
}

fn parse_index(text: &str) -> Option<ItemIndex> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok().map(ItemIndex))?
}

/// A stored line as it is; lines are valid JSON since validation.
fn raw(line: Bytes) -> Result<Box<RawValue>> {
    let text = String::from_utf8(line.to_vec())
        .map_err(|error| ApiError::internal(format!("a line is not UTF-8: {error}")))?;
    RawValue::from_string(text).map_err(|error| ApiError::internal(format!("a line is not JSON: {error}")))
}
