//! `POST /v1/batches`: records a job and answers at once; intake runs in the background.

use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use overnight_store::{FilePurpose, IdempotencyKey, InsertJob, NewJob};
use overnight_types::{Endpoint, FileId, JobId};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::object::BatchObject;
use super::window::{parse_expiry, parse_window};
use crate::body::{Fields, wrong_type};
use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared};

const KNOWN: [&str; 7] =
    ["input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "name", "priority"];
const METADATA_PAIRS_MAX: usize = 16;
const METADATA_KEY_CHARS_MAX: usize = 64;
const METADATA_VALUE_CHARS_MAX: usize = 512;
const NAME_CHARS_MAX: usize = 256;
const IDEMPOTENCY_KEY_CHARS_MAX: usize = 255;

/// Answers 200 with the new job, or with the first one when its `Idempotency-Key` was used before.
pub(crate) async fn create(State(state): State<Shared>, headers: HeaderMap, body: Body) -> Result<Json<BatchObject>> {
    state.check_free_disk()?;
    let fields = Fields::read(&state, &headers, body, &KNOWN).await?;
    let job = new_job(&fields)?;
    let key = idempotency_key(&headers, &fields)?;
    // A repeated create must find its first job even when the input is deleted by now,
    // so the store looks at the key first; without a key the purpose is checked here.
    match state.parts.store.find_file(job.input_file_id).await? {
        Some(file) if file.purpose != FilePurpose::Batch => {
            let message = format!("the purpose of the input file must be batch, it is: {}", file.purpose.as_str());
            return Err(ApiError::invalid("input_file_id", message).code("invalid_purpose"));
        }
        None if key.is_none() => return Err(no_input(job.input_file_id)),
        _ => {}
    }
    insert(&state, job, key).await
}

async fn insert(state: &Inner, job: NewJob, key: Option<IdempotencyKey>) -> Result<Json<BatchObject>> {
    let input = job.input_file_id;
    match state.parts.store.insert_job(job, key).await? {
        InsertJob::Created(job) | InsertJob::Existing(job) => super::show(state, &job).await,
        InsertJob::KeyReused => Err(ApiError::conflict(
            "idempotency_key_reused",
            "this Idempotency-Key was used before with other parameters",
        )),
        InsertJob::NoInput => Err(no_input(input)),
    }
}

fn no_input(id: FileId) -> ApiError {
    ApiError::invalid("input_file_id", format!("no such file: {id}")).code("file_not_found")
}

fn new_job(fields: &Fields) -> Result<NewJob> {
    let input = fields.required_text("input_file_id")?;
    let input_file_id: FileId = input.parse().map_err(|_| {
        let shown: String = input.chars().take(80).collect();
        ApiError::invalid("input_file_id", format!("no such file: {shown}")).code("file_not_found")
    })?;
    let endpoint = parse_endpoint(fields.required_text("endpoint")?)?;
    let completion_window = fields.required_text("completion_window")?;
    let window = parse_window(completion_window)?;
    let output_expires_after = fields.object("output_expires_after")?;
    let output_expires_after = output_expires_after.map(|map| parse_expiry("output_expires_after", map)).transpose()?;
    Ok(NewJob {
        id: JobId::new(),
        endpoint,
        input_file_id,
        completion_window: completion_window.to_owned(),
        window,
        metadata: metadata(fields)?,
        name: name(fields)?,
        priority: fields.int32("priority")?.unwrap_or(0),
        output_expires_after: output_expires_after.map(Duration::from_secs),
    })
}

/// One of the served endpoints; the refusal lists them.
pub(crate) fn parse_endpoint(text: &str) -> Result<Endpoint> {
    text.parse().map_err(|_| {
        let served = Endpoint::ALL.iter().map(Endpoint::as_str).collect::<Vec<_>>().join(", ");
        let shown: String = text.chars().take(80).collect();
        let message = format!("endpoint must be one of {served}; not served here: {shown}");
        ApiError::invalid("endpoint", message).code("invalid_value")
    })
}

fn metadata(fields: &Fields) -> Result<Option<String>> {
    let Some(map) = fields.object("metadata")? else { return Ok(None) };
    let refused = |param: String, message: String| Err(ApiError::invalid(param, message).code("invalid_value"));
    if map.len() > METADATA_PAIRS_MAX {
        let message = format!("metadata may have {METADATA_PAIRS_MAX} pairs, it has {}", map.len());
        return refused("metadata".to_owned(), message);
    }
    for (key, value) in map {
        let param = format!("metadata.{}", key.chars().take(METADATA_KEY_CHARS_MAX).collect::<String>());
        let num_chars = key.chars().count();
        if num_chars > METADATA_KEY_CHARS_MAX {
            let message =
                format!("a metadata key may have {METADATA_KEY_CHARS_MAX} characters, this one has {num_chars}");
            return refused(param, message);
        }
        let Value::String(text) = value else { return Err(wrong_type(param, "a string", value)) };
        let num_chars = text.chars().count();
        if num_chars > METADATA_VALUE_CHARS_MAX {
            let message =
                format!("a metadata value may have {METADATA_VALUE_CHARS_MAX} characters, this one has {num_chars}");
            return refused(param, message);
        }
    }
    Ok(Some(serde_json::to_string(map).expect("JSON values serialize")))
}

fn name(fields: &Fields) -> Result<Option<String>> {
    let Some(name) = fields.text("name")? else { return Ok(None) };
    let num_chars = name.chars().count();
    if num_chars == 0 || num_chars > NAME_CHARS_MAX || name.chars().any(char::is_control) {
        let message =
            format!("name must have 1 to {NAME_CHARS_MAX} characters and no control characters, it has {num_chars}");
        return Err(ApiError::invalid("name", message).code("invalid_value"));
    }
    Ok(Some(name.to_owned()))
}

fn idempotency_key(headers: &HeaderMap, fields: &Fields) -> Result<Option<IdempotencyKey>> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let key = value.to_str().ok().filter(|key| (1..=IDEMPOTENCY_KEY_CHARS_MAX).contains(&key.len()));
    let key = key.ok_or_else(|| {
        let message = format!("Idempotency-Key must have 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters");
        ApiError::invalid("Idempotency-Key", message).code("invalid_value")
    })?;
    let params_sha256 = Sha256::digest(fields.canonical().as_bytes()).into();
    Ok(Some(IdempotencyKey { key: key.to_owned(), params_sha256 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unserved_endpoint_of_openai_is_refused_with_what_is_served() {
        for endpoint in Endpoint::NOT_SERVED.iter().copied().chain(["/v1/rerank", "/v1/chat/completions/", "x"]) {
            let refused = parse_endpoint(endpoint).unwrap_err();
            assert_eq!(refused.param.as_deref(), Some("endpoint"));
            assert!(refused.message.contains("/v1/chat/completions, /v1/completions"), "{}", refused.message);
        }
    }
}
