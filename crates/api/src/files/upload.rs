//! `POST /v1/files`: a multipart form streamed into an object, in constant memory.
//!
//! Invariant: a row exists only for an upload that was taken whole and whose bytes are
//! durable; a refused or broken one leaves no row, no object and no temporary file.
//! The work runs in its own task, so a client that leaves cannot stop the clean-up.
//! Does not look at the content: that is validation's.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use overnight_blobs::{BlobWriter, ObjectName};
use overnight_store::{File, FilePurpose, NewFile};
use overnight_types::{FileId, chain, humane};

use super::multipart::{FormError, Multipart, Part, boundary_of};
use super::object::FileObject;
use crate::batches::window::{check_anchor, check_expiry_seconds};
use crate::body::content_length;
use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared};

/// Most parts of a form; four have a meaning.
const PARTS_MAX: usize = 16;
/// Most bytes of a field that is not the file.
const FIELD_BYTES_MAX: usize = 4 << 10;
const FILENAME_CHARS_MAX: usize = 255;
/// Room for delimiters, headers and small fields on top of a file's limit.
const FORM_OVERHEAD_BYTES: u64 = 256 << 10;
/// How much of a refused body is still read, so that the client gets to read the answer.
const DRAIN_BYTES_MAX: usize = 16 << 20;
/// Room on the disk is looked at again after so many bytes: other uploads fill it too.
const LOOK_EVERY_BYTES: u64 = 4 << 20;
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Stores one file. Its fields may come in any order.
pub(crate) async fn upload(State(state): State<Shared>, headers: HeaderMap, body: Body) -> Result<Json<FileObject>> {
    let place = state.uploads.enter()?;
    let declared = content_length(&headers).unwrap_or(0);
    // What is too large anyway gets the answer that says so.
    let to_come = if declared > largest(&state) + FORM_OVERHEAD_BYTES { 0 } else { declared };
    state.check_free_disk_for(to_come)?;
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let boundary = boundary_of(content_type).map_err(refused_form)?;
    let form = Multipart::new(body, &boundary);
    let state = Arc::clone(&state);
    let task = tokio::spawn(async move {
        let _place = place;
        receive(&state, form, declared).await
    });
    let file = task.await.map_err(|error| ApiError::internal(format!("upload task ended: {error}")))??;
    Ok(Json(file.into()))
}

/// What has come of the form so far.
#[derive(Debug, Default)]
struct Received {
    file: Option<(FileId, BlobWriter)>,
    filename: Option<String>,
    purpose: Option<FilePurpose>,
    anchor: Option<String>,
    seconds: Option<u64>,
}

async fn receive(state: &Inner, mut form: Multipart, declared: u64) -> Result<File> {
    let mut received = Received::default();
    let read = match declared > largest(state) + FORM_OVERHEAD_BYTES {
        true => Err(too_large(state, None)),
        false => read_form(state, &mut form, &mut received).await,
    };
    let checked = read.and_then(|()| check(state, &received));
    match (checked, received.file) {
        (Ok(new), Some((id, writer))) => {
            let file = store(state, id, writer, new).await?;
            state.metrics.upload_bytes.inc_by(file.bytes);
            Ok(file)
        }
        (Ok(_), None) => Err(missing("file")),
        (Err(error), file) => {
            if let Some((id, writer)) = file {
                writer.abort().await.unwrap_or_else(|abort| {
                    tracing::warn!(file.id = %id, cause = chain(&abort), "leftover of a refused upload stays for the sweep");
                });
            }
            let _ = tokio::time::timeout(DRAIN_TIME_MAX, form.drain(DRAIN_BYTES_MAX)).await;
            Err(error)
        }
    }
}

async fn read_form(state: &Inner, form: &mut Multipart, received: &mut Received) -> Result<()> {
    for _ in 0..PARTS_MAX {
        let Some(part) = bounded(state, form.next_part()).await? else { return Ok(()) };
        match part.name.as_str() {
            "file" => read_file(state, form, received, part).await?,
            "purpose" => {
                let text = read_field(state, form, "purpose", received.purpose.is_some()).await?;
                received.purpose = Some(parse_purpose(&text)?);
            }
            "expires_after[anchor]" => {
                let text = read_field(state, form, "expires_after.anchor", received.anchor.is_some()).await?;
                check_anchor("expires_after", &text)?;
                received.anchor = Some(text);
            }
            "expires_after[seconds]" => {
                let text = read_field(state, form, "expires_after.seconds", received.seconds.is_some()).await?;
                let seconds = text.parse().map_err(|_| {
                    ApiError::invalid("expires_after.seconds", "expires_after.seconds must be an integer")
                        .code("invalid_type")
                })?;
                received.seconds = Some(check_expiry_seconds("expires_after", seconds)?);
            }
            other => {
                let name: String = other.chars().take(80).collect();
                return Err(
                    ApiError::invalid(name.clone(), format!("unknown form field: {name}")).code("unknown_parameter")
                );
            }
        }
    }
    Err(ApiError::bad_request("malformed_form", format!("the form has more than {PARTS_MAX} parts")))
}

/// Streams the file's bytes into its object.
async fn read_file(state: &Inner, form: &mut Multipart, received: &mut Received, part: Part) -> Result<()> {
    if received.file.is_some() {
        return Err(given_twice("file"));
    }
    received.filename = Some(check_filename(part.filename)?);
    check_extension(received)?;
    let id = FileId::new();
    let writer = state.parts.blobs.writer(&ObjectName::file(id)).await?;
    let (_, writer) = received.file.insert((id, writer));
    let mut looked_at = 0;
    while let Some(chunk) = bounded(state, form.chunk()).await? {
        let limit = received.purpose.map_or_else(|| largest(state), |purpose| limit_of(state, purpose));
        if writer.num_bytes() + chunk.len() as u64 > limit {
            return Err(too_large(state, received.purpose));
        }
        if writer.num_bytes() - looked_at >= LOOK_EVERY_BYTES {
            looked_at = writer.num_bytes();
            state.check_free_disk()?;
        }
        writer.write(chunk).await?;
    }
    Ok(())
}

async fn read_field(state: &Inner, form: &mut Multipart, name: &'static str, again: bool) -> Result<String> {
    if again {
        return Err(given_twice(name));
    }
    let mut bytes = Vec::new();
    while let Some(chunk) = bounded(state, form.chunk()).await? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > FIELD_BYTES_MAX {
            return Err(
                ApiError::invalid(name, format!("{name} is longer than {FIELD_BYTES_MAX} bytes")).code("invalid_value")
            );
        }
    }
    String::from_utf8(bytes).map_err(|_| ApiError::invalid(name, format!("{name} is not UTF-8")).code("invalid_value"))
}

/// What the row will say, once everything has come.
fn check(state: &Inner, received: &Received) -> Result<NewFile> {
    let Some((id, writer)) = &received.file else { return Err(missing("file")) };
    let purpose = received.purpose.ok_or_else(|| missing("purpose"))?;
    check_extension(received)?;
    if writer.num_bytes() > limit_of(state, purpose) {
        return Err(too_large(state, Some(purpose)));
    }
    let expires_after_s = match (&received.anchor, received.seconds) {
        (Some(_), Some(seconds)) => Some(seconds),
        (None, None) => default_expiry(state, purpose),
        (None, Some(_)) => return Err(missing("expires_after.anchor")),
        (Some(_), None) => return Err(missing("expires_after.seconds")),
    };
    let filename = received.filename.clone().ok_or_else(|| missing("file"))?;
    Ok(NewFile { id: *id, filename, purpose, bytes: writer.num_bytes(), sha256: [0; 32], expires_after_s })
}

/// Makes the bytes durable, then records the row.
async fn store(state: &Inner, id: FileId, writer: BlobWriter, new: NewFile) -> Result<File> {
    let name = ObjectName::file(id);
    let remove = async |error: ApiError| {
        if let Err(delete) = state.parts.blobs.delete(&name).await {
            tracing::warn!(file.id = %id, cause = chain(&delete), "object of a failed upload stays for the sweep");
        }
        error
    };
    let written = match writer.finish().await {
        Ok(written) => written,
        Err(error) => return Err(remove(error.into()).await),
    };
    match state.parts.store.insert_file(NewFile { bytes: written.bytes, sha256: written.sha256, ..new }).await {
        Ok(file) => Ok(file),
        // The row may be there although its answer was lost; then its object must stay.
        Err(error) => match state.parts.store.find_file(id).await {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(remove(error.into()).await),
            Err(_) => Err(error.into()),
        },
    }
}

fn default_expiry(state: &Inner, purpose: FilePurpose) -> Option<u64> {
    let seconds = state.parts.config.batch_file_expires_after.as_secs();
    (purpose == FilePurpose::Batch && seconds > 0).then_some(seconds)
}

fn parse_purpose(text: &str) -> Result<FilePurpose> {
    let uploadable = |purpose: &FilePurpose| *purpose != FilePurpose::BatchOutput;
    FilePurpose::parse(text).filter(uploadable).ok_or_else(|| {
        let known: Vec<_> =
            FilePurpose::ALL.iter().filter(|purpose| uploadable(purpose)).map(FilePurpose::as_str).collect();
        let shown: String = text.chars().take(40).collect();
        ApiError::invalid("purpose", format!("purpose must be one of {}; it is: {shown}", known.join(", ")))
            .code("invalid_value")
    })
}

fn check_filename(name: Option<String>) -> Result<String> {
    let name = name.filter(|name| !name.is_empty());
    let name =
        name.ok_or_else(|| ApiError::invalid("file", "the file part needs a file name").code("invalid_filename"))?;
    let num_chars = name.chars().count();
    if num_chars > FILENAME_CHARS_MAX {
        let message = format!("a file name may have {FILENAME_CHARS_MAX} characters, this one has {num_chars}");
        return Err(ApiError::invalid("file", message).code("invalid_filename"));
    }
    Ok(name)
}

/// Judged as soon as both purpose and name are known.
fn check_extension(received: &Received) -> Result<()> {
    let (Some(FilePurpose::Batch), Some(name)) = (received.purpose, &received.filename) else { return Ok(()) };
    match name.ends_with(".jsonl") {
        true => Ok(()),
        false => Err(ApiError::invalid("file", format!("the Batch API takes .jsonl files, this one is named: {name}"))
            .code("invalid_file_format")),
    }
}

fn limit_of(state: &Inner, purpose: FilePurpose) -> u64 {
    match purpose {
        FilePurpose::Batch => state.parts.config.batch_file_bytes_max,
        _ => state.parts.config.other_file_bytes_max,
    }
}

fn largest(state: &Inner) -> u64 {
    state.parts.config.batch_file_bytes_max.max(state.parts.config.other_file_bytes_max)
}

fn too_large(state: &Inner, purpose: Option<FilePurpose>) -> ApiError {
    let config = &state.parts.config;
    let as_batch = match purpose {
        Some(purpose) => purpose == FilePurpose::Batch,
        None => config.batch_file_bytes_max >= config.other_file_bytes_max,
    };
    let error = match as_batch {
        true => ApiError::too_large("the batch input file", config.batch_file_bytes_max, "api.batch_file_bytes_max"),
        false => ApiError::too_large("the file", config.other_file_bytes_max, "api.other_file_bytes_max"),
    };
    error.param("file")
}

fn missing(name: &'static str) -> ApiError {
    ApiError::invalid(name, format!("missing required form field: {name}")).code("missing_required_parameter")
}

fn given_twice(name: &'static str) -> ApiError {
    ApiError::invalid(name, format!("form field given twice: {name}")).code("invalid_value")
}

fn refused_form(error: FormError) -> ApiError {
    let code = match error {
        FormError::Truncated => "truncated_body",
        FormError::Malformed(_) => "malformed_form",
    };
    ApiError::bad_request(code, error.to_string())
}

/// One wait for the network, within the idle limit.
async fn bounded<T>(state: &Inner, read: impl Future<Output = Result<T, FormError>>) -> Result<T> {
    let limit = state.parts.config.upload_idle_timeout;
    match tokio::time::timeout(limit, read).await {
        Ok(read) => read.map_err(refused_form),
        Err(_) => {
            let limit = humane::format_duration(limit);
            let message = format!("nothing of the upload arrived for {limit}, set by api.upload_idle_timeout");
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("upload_timeout"))
        }
    }
}
