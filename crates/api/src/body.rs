//! JSON request bodies and query strings: read within bounds, checked key by key.
//!
//! Every refusal names the parameter; an unknown top-level key of a body is refused.
//! Unknown query parameters are ignored, as clients add their own.

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use overnight_types::humane;
use serde_json::{Map, Value};

use crate::error::{ApiError, Result};
use crate::state::Inner;

/// The body's bytes, at most `api.body_bytes_max` and within `api.body_timeout_s`.
pub(crate) async fn read(state: &Inner, headers: &HeaderMap, body: Body) -> Result<Bytes> {
    let config = &state.parts.config;
    let limit = config.body_bytes_max;
    let too_large = || ApiError::too_large("the request body", limit, "api.body_bytes_max");
    if content_length(headers).is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let collect = async {
        let mut stream = body.into_data_stream();
        let mut bytes = BytesMut::new();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|_| ApiError::bad_request("truncated_body", "the request body ended early"))?;
            if (bytes.len() + chunk.len()) as u64 > limit {
                return Err(too_large());
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes.freeze())
    };
    tokio::time::timeout(config.body_timeout, collect).await.map_err(|_| {
        let limit = humane::format_duration(config.body_timeout);
        let message = format!("the request body did not arrive within {limit}, set by api.body_timeout");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("body_timeout")
    })?
}

/// What `Content-Length` says, when it is there and a number.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Refuses a body that is declared as something else than JSON.
pub(crate) fn require_json(headers: &HeaderMap) -> Result<()> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = given.split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!(
        "the Content-Type must be application/json, it is: {}",
        if given.is_empty() { "missing" } else { given }
    );
    Err(ApiError::bad_request("invalid_content_type", message))
}

/// A JSON object of a request whose keys are taken one by one.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a JSON object with no other top-level keys than `known`.
    pub(crate) async fn read(state: &Inner, headers: &HeaderMap, body: Body, known: &[&str]) -> Result<Self> {
        require_json(headers)?;
        Self::parse(&read(state, headers, body).await?, known)
    }

    /// The same where the body may be left out.
    pub(crate) async fn read_optional(state: &Inner, headers: &HeaderMap, body: Body, known: &[&str]) -> Result<Self> {
        let bytes = read(state, headers, body).await?;
        if bytes.trim_ascii().is_empty() {
            return Ok(Self(Map::new()));
        }
        require_json(headers)?;
        Self::parse(&bytes, known)
    }

    fn parse(bytes: &[u8], known: &[&str]) -> Result<Self> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::bad_request("invalid_json", format!("the body is not valid JSON: {error}")))?;
        let Value::Object(map) = value else {
            return Err(ApiError::bad_request("invalid_json", "the body must be a JSON object"));
        };
        if let Some(key) = map.keys().find(|key| !known.contains(&key.as_str())) {
            let message = format!("unknown parameter: {}; known are: {}", shorten(key), known.join(", "));
            return Err(ApiError::invalid(shorten(key), message).code("unknown_parameter"));
        }
        Ok(Self(map))
    }

    /// The whole object with `null`s left out and keys sorted: equal for equal parameters.
    pub(crate) fn canonical(&self) -> String {
        let entries = self.0.iter().filter(|(_, value)| !value.is_null());
        let sorted: std::collections::BTreeMap<_, _> = entries.map(|(key, value)| (key, sorted(value))).collect();
        serde_json::to_string(&sorted).expect("JSON values serialize")
    }

    /// A value that is there and not null.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// A string, if given.
    pub(crate) fn text(&self, key: &'static str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(key, "a string", other)),
        }
    }

    /// A string that must be there.
    pub(crate) fn required_text(&self, key: &'static str) -> Result<&str> {
        self.text(key)?.ok_or_else(|| {
            ApiError::invalid(key, format!("missing required parameter: {key}")).code("missing_required_parameter")
        })
    }

    /// A boolean; false when not given.
    pub(crate) fn flag(&self, key: &'static str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong_type(key, "true or false", other)),
        }
    }

    /// An integer within 32 bits, if given.
    pub(crate) fn int32(&self, key: &'static str) -> Result<Option<i32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_i64().map(i32::try_from) {
            Some(Ok(number)) => Ok(Some(number)),
            _ => Err(wrong_type(key, "an integer of at most 32 bits", value)),
        }
    }

    /// A list of strings; empty when not given.
    pub(crate) fn texts(&self, key: &'static str) -> Result<Vec<String>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let Value::Array(values) = value else { return Err(wrong_type(key, "a list of strings", value)) };
        let text = |value: &Value| {
            value.as_str().map(str::to_owned).ok_or_else(|| wrong_type(key, "a list of strings", value))
        };
        values.iter().map(text).collect()
    }

    /// An object, if given.
    pub(crate) fn object(&self, key: &'static str) -> Result<Option<&Map<String, Value>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong_type(key, "an object", other)),
        }
    }
}

/// 400 for a value of the wrong type.
pub(crate) fn wrong_type(param: impl Into<String>, wanted: &str, given: &Value) -> ApiError {
    let param = param.into();
    let given = match given {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    let message = format!("{param} must be {wanted}, it is {given}");
    ApiError::invalid(param, message).code("invalid_type")
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| key.as_str());
            Value::Object(entries.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect())
        }
        Value::Array(values) => Value::Array(values.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

/// The parameters of a query string, decoded.
#[derive(Debug)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    /// Reads the query of a request's address.
    pub(crate) fn of(uri: &axum::http::Uri) -> Self {
        let pairs = uri.query().unwrap_or("").split('&').filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| {
                    let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                    (decode(key), decode(value))
                })
                .collect(),
        )
    }

    /// The first value of a key; an empty one counts as not given.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, value)| name == key && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    /// A page size within bounds.
    pub(crate) fn limit(&self, max: u32, default: u32) -> Result<u32> {
        let Some(text) = self.get("limit") else { return Ok(default) };
        match text.parse::<u32>() {
            Ok(limit) if (1..=max).contains(&limit) => Ok(limit),
            _ => Err(ApiError::invalid("limit", format!("limit must be 1 to {max}, it is: {}", shorten(text)))
                .code("invalid_value")),
        }
    }
}

/// Decoding of a query: `+` is a space.
fn decode(text: &str) -> String {
    percent_decode(&text.replace('+', " "))
}

/// Percent-decoding; bytes that are not UTF-8 become U+FFFD.
pub(crate) fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|digits| byte == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        match digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &after[2..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parameters_have_one_canonical_form() {
        let known = ["a", "b", "c"];
        let one = Fields::parse(br#"{"a":{"y":1,"x":[{"q":1,"p":2}]},"b":null}"#, &known).unwrap();
        let two = Fields::parse(br#"{"c":null,"a":{"x":[{"p":2,"q":1}],"y":1}}"#, &known).unwrap();
        assert_eq!(one.canonical(), two.canonical());
        let other = Fields::parse(br#"{"a":{"x":[{"p":2,"q":1}],"y":2}}"#, &known).unwrap();
        assert_ne!(one.canonical(), other.canonical());
    }

    #[test]
    fn query_is_decoded_and_bounded() {
        let query = Query::of(&"/x?after=a%2Fb+c&limit=0&empty=".parse().unwrap());
        assert_eq!(query.get("after"), Some("a/b c"));
        assert_eq!(query.get("empty"), None);
        assert_eq!(query.limit(100, 20).unwrap_err().param.as_deref(), Some("limit"));
        assert_eq!(Query::of(&"/x?limit=100".parse().unwrap()).limit(100, 20).unwrap(), 100);
        assert!(Query::of(&"/x?limit=101".parse().unwrap()).limit(100, 20).is_err());
        assert_eq!(Query::of(&"/x".parse().unwrap()).limit(100, 20).unwrap(), 20);
        assert_eq!(decode("%zz%"), "%zz%");
    }
}
