//! `GET /v1/files/{file_id}/content`: the stored bytes unchanged, streamed, by range.

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::TryStreamExt;
use overnight_blobs::ObjectName;

use super::object::hex;
use crate::error::{ApiError, Result};
use crate::state::Shared;

/// The bytes. `Range` takes one range; several are answered with the whole.
pub(crate) async fn content(
    State(state): State<Shared>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response> {
    let file = super::find(&state, &id).await?;
    let name = ObjectName::file(file.id);
    match state.parts.blobs.size(&name).await? {
        Some(size) if size == file.bytes => {}
        other => {
            return Err(ApiError::internal(format!("object {name} has size {other:?}, its row says {}", file.bytes)));
        }
    }
    let etag = format!("\"{}\"", hex(&file.sha256));
    let mut response = match wanted(&headers, &etag, file.bytes) {
        Wanted::NotModified => StatusCode::NOT_MODIFIED.into_response(),
        Wanted::Unsatisfiable => {
            let message = format!("the file has {} bytes, the range lies outside", file.bytes);
            let mut response =
                ApiError::new(StatusCode::RANGE_NOT_SATISFIABLE, message).code("range_not_satisfiable").into_response();
            set(&mut response, header::CONTENT_RANGE, &format!("bytes */{}", file.bytes));
            return Ok(response);
        }
        Wanted::Bytes { start, end, partial } => {
            let pieces = state.parts.blobs.stream(&name, start..end);
            let pieces = pieces.inspect_err(|error| {
                tracing::error!(cause = overnight_types::chain(error), "download cut short");
            });
            let mut response = Body::from_stream(pieces).into_response();
            set(&mut response, header::CONTENT_LENGTH, &(end - start).to_string());
            set(&mut response, header::CONTENT_TYPE, "application/octet-stream");
            set(&mut response, header::CONTENT_DISPOSITION, &disposition(&file.filename));
            if partial {
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
                set(&mut response, header::CONTENT_RANGE, &format!("bytes {start}-{}/{}", end - 1, file.bytes));
            }
            response
        }
    };
    set(&mut response, header::ETAG, &etag);
    set(&mut response, header::ACCEPT_RANGES, "bytes");
    Ok(response)
}

fn set(response: &mut Response, name: header::HeaderName, value: &str) {
    let value =
        HeaderValue::from_str(value).expect("digits, hexadecimal and percent-encoded text are header characters");
    response.headers_mut().insert(name, value);
}

/// What the request's conditions come to.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    NotModified,
    Unsatisfiable,
    Bytes { start: u64, end: u64, partial: bool },
}

fn wanted(headers: &HeaderMap, etag: &str, size: u64) -> Wanted {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let names_ours = |list: &str| list.split(',').any(|tag| matches!(tag.trim(), tag if tag == etag || tag == "*"));
    if text(header::IF_NONE_MATCH).is_some_and(names_ours) {
        return Wanted::NotModified;
    }
    let whole = Wanted::Bytes { start: 0, end: size, partial: false };
    if text(header::IF_RANGE).is_some_and(|tag| tag.trim() != etag) {
        return whole;
    }
    match text(header::RANGE).and_then(|range| parse_range(range, size)) {
        None => whole,
        Some((start, end)) if start < end => Wanted::Bytes { start, end, partial: true },
        Some(_) => Wanted::Unsatisfiable,
    }
}

/// One `bytes=a-b`, `bytes=a-` or `bytes=-n` (RFC 9110, 14.1.2) as a half-open range, empty
/// when it lies outside. `None` for anything that is to be ignored.
fn parse_range(text: &str, size: u64) -> Option<(u64, u64)> {
    let (first, last) = text.trim().strip_prefix("bytes=")?.split_once('-')?;
    let number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u64>().ok())?;
    let (first, last) = (first.trim(), last.trim());
    match (first.is_empty(), last.is_empty()) {
        (true, true) => None,
        (true, false) => Some((size.saturating_sub(number(last)?), size)),
        (false, true) => Some((number(first)?, size)),
        (false, false) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then(|| (first, size.min(last.saturating_add(1))))
        }
    }
}

/// RFC 6266: an ASCII fallback, and the true name in RFC 8187 form.
fn disposition(filename: &str) -> String {
    let plain = |char: char| (char.is_ascii_graphic() || char == ' ') && !matches!(char, '"' | '\\' | '%');
    let fallback: String = filename.chars().map(|char| if plain(char) { char } else { '_' }).collect();
    let unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&byte);
    let mut encoded = String::new();
    for byte in filename.bytes() {
        match unreserved(byte) {
            true => encoded.push(char::from(byte)),
            false => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    format!("attachment; filename=\"{fallback}\"; filename*=UTF-8''{encoded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_is_read_as_the_rfc_says() {
        for (text, range) in [
            ("bytes=0-0", Some((0, 1))),
            ("bytes=2-", Some((2, 10))),
            ("bytes=-3", Some((7, 10))),
            ("bytes=-30", Some((0, 10))),
            ("bytes=5-100", Some((5, 10))),
            ("bytes=10-", Some((10, 10))),
            ("bytes=-0", Some((10, 10))),
            ("bytes=12-20", Some((12, 10))),
            ("bytes=5-4", None),
            ("bytes=-", None),
            ("bytes=0-1,3-4", None),
            ("items=0-1", None),
            ("bytes=+1-2", None),
        ] {
            assert_eq!(parse_range(text, 10), range, "{text}");
        }
    }

    #[test]
    fn any_file_name_fits_into_the_header() {
        let header = disposition("é \"日\"\u{7f};%.jsonl");
        assert_eq!(
            header,
            "attachment; filename=\"_ ____;_.jsonl\"; filename*=UTF-8''%C3%A9%20%22%E6%97%A5%22%7F%3B%25.jsonl"
        );
        assert!(HeaderValue::from_str(&header).is_ok());
    }
}
