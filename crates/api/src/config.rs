//! The `[api]` section: where the server listens, who may call, and every limit
//! of a request. Times are whole seconds and sizes are bytes; the unit is in the name.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};

/// Settings of the REST server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Address to listen on. Anything but loopback wants a key.
    pub host: String,
    /// TCP port; 0 takes a free one.
    pub port: u16,
    /// Keys that may do everything. Prefer `api_keys_file`.
    pub api_keys: Vec<Secret>,
    /// Keys that may only read; a writing route answers 403.
    pub read_only_api_keys: Vec<Secret>,
    /// A file with one key a line; `read-only KEY` for one that may only read,
    /// `#` starts a comment.
    pub api_keys_file: Option<PathBuf>,
    /// Largest batch input file.
    pub batch_file_bytes_max: u64,
    /// Largest file of another purpose.
    pub other_file_bytes_max: u64,
    /// Largest JSON body of a request.
    pub body_bytes_max: u64,
    /// Longest that a JSON body may take to arrive.
    pub body_timeout_s: u64,
    /// Longest that a request other than an upload, a download, a stream or a completion may take.
    pub request_timeout_s: u64,
    /// Longest silence in the middle of an upload.
    pub upload_idle_timeout_s: u64,
    /// Longest that an online completion may take.
    pub online_timeout_s: u64,
    /// Most online completions at once; more are answered 429.
    pub online_requests_max: u32,
    /// Most event streams at once; more are answered 429.
    pub event_streams_max: u32,
    /// Most uploads at once; more are answered 429.
    pub uploads_max: u32,
    /// Time between looks at the store in an event stream, milliseconds.
    pub events_poll_ms: u64,
    /// How long running requests may go on after a cancel.
    pub cancel_drain_s: u64,
    /// Days that a batch input file stays unless the upload says otherwise; 0 keeps it.
    pub batch_file_expires_days: u32,
    /// Uploads and creates are answered 503 while less than this is free on disk; 0 turns the guard off.
    pub free_disk_bytes_min: u64,
    /// What `Retry-After` says in 429 and 503 answers.
    pub retry_after_s: u64,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            api_keys: Vec::new(),
            read_only_api_keys: Vec::new(),
            api_keys_file: None,
            batch_file_bytes_max: 64 << 30,
            other_file_bytes_max: 512 << 20,
            body_bytes_max: 64 << 20,
            body_timeout_s: 60,
            request_timeout_s: 60,
            upload_idle_timeout_s: 60,
            online_timeout_s: 1_800,
            online_requests_max: 256,
            event_streams_max: 256,
            uploads_max: 64,
            events_poll_ms: 1_000,
            cancel_drain_s: 600,
            batch_file_expires_days: 30,
            free_disk_bytes_min: 1 << 30,
            retry_after_s: 5,
        }
    }
}

/// A setting out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("api.{key} is {value}, allowed is {allowed}")]
pub struct InvalidConfig {
    /// The key within `[api]`.
    pub key: &'static str,
    /// The value as given.
    pub value: String,
    /// The range in words.
    pub allowed: String,
}

impl ApiConfig {
    /// Checks every value against its range; the first one outside is returned.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let invalid =
            |key, value: String, allowed: &str| Err(InvalidConfig { key, value, allowed: allowed.to_owned() });
        if self.host.is_empty() {
            return invalid("host", "\"\"".to_owned(), "an address or a host name");
        }
        let ranges: [(&'static str, u64, u64, u64); 15] = [
            ("batch_file_bytes_max", self.batch_file_bytes_max, 1, 1 << 50),
            ("other_file_bytes_max", self.other_file_bytes_max, 1, 1 << 50),
            ("body_bytes_max", self.body_bytes_max, 1 << 10, 1 << 31),
            ("body_timeout_s", self.body_timeout_s, 1, 3_600),
            ("request_timeout_s", self.request_timeout_s, 1, 3_600),
            ("upload_idle_timeout_s", self.upload_idle_timeout_s, 1, 86_400),
            ("online_timeout_s", self.online_timeout_s, 1, 86_400),
            ("online_requests_max", self.online_requests_max.into(), 1, 1 << 20),
            ("event_streams_max", self.event_streams_max.into(), 1, 1 << 20),
            ("uploads_max", self.uploads_max.into(), 1, 1 << 20),
            ("events_poll_ms", self.events_poll_ms, 10, 60_000),
            ("cancel_drain_s", self.cancel_drain_s, 0, 3_600),
            ("batch_file_expires_days", self.batch_file_expires_days.into(), 0, 3_650),
            ("free_disk_bytes_min", self.free_disk_bytes_min, 0, 1 << 50),
            ("retry_after_s", self.retry_after_s, 1, 3_600),
        ];
        for (key, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                return invalid(key, value.to_string(), &format!("{min} to {max}"));
            }
        }
        let keys = self.api_keys.iter().chain(&self.read_only_api_keys);
        if keys.into_iter().any(|key| key.expose().trim().is_empty()) {
            return invalid("api_keys", "an empty key".to_owned(), "keys of at least one character");
        }
        Ok(())
    }

    /// Whether a key is asked for at all.
    pub fn has_keys(&self) -> bool {
        !self.api_keys.is_empty() || !self.read_only_api_keys.is_empty() || self.api_keys_file.is_some()
    }

    /// Whether `host` names only this machine.
    pub fn is_loopback(&self) -> bool {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        bare == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

/// A text that is printed and serialized as `***`.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret itself, for the one place that compares it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_is_valid_and_unknown_keys_are_refused() {
        assert_eq!(ApiConfig::default().validate(), Ok(()));
        assert!(serde_json::from_str::<ApiConfig>(r#"{"prot": 1}"#).is_err());
        assert_eq!(serde_json::from_str::<ApiConfig>("{}").unwrap(), ApiConfig::default());
    }

    #[test]
    fn value_out_of_range_is_named_with_its_range() {
        let config = ApiConfig { request_timeout_s: 0, ..ApiConfig::default() };
        let refused = config.validate().unwrap_err();
        assert_eq!(refused.to_string(), "api.request_timeout_s is 0, allowed is 1 to 3600");
    }

    #[test]
    fn secret_is_never_shown() {
        let config = ApiConfig { api_keys: vec![Secret::new("sk-visible")], ..ApiConfig::default() };
        assert!(!format!("{config:?}").contains("visible"));
        assert!(!serde_json::to_string(&config).unwrap().contains("visible"));
    }

    #[test]
    fn only_loopback_hosts_count_as_loopback() {
        for (host, loopback) in [
            ("127.0.0.1", true),
            ("::1", true),
            ("[::1]", true),
            ("localhost", true),
            ("0.0.0.0", false),
            ("a.b", false),
        ] {
            assert_eq!(ApiConfig { host: host.to_owned(), ..ApiConfig::default() }.is_loopback(), loopback, "{host}");
        }
    }
}
