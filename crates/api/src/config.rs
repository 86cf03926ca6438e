//! The `[api]` section: where the server listens, who may call, and every limit
//! of a request. Times and sizes are written as people do: `30s`, `2GiB`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use overnight_types::humane;
use serde::{Deserialize, Serialize, Serializer};

/// Settings of the REST server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Address to listen on. Anything but loopback wants a key.
    pub host: String,
    /// TCP port; 0 takes a free one.
    pub port: u16,
    /// TCP port of `batch worker` for probes and metrics; 0 takes a free one, `None`: no door.
    pub worker_port: Option<u16>,
    /// Keys that may do everything. Prefer `api_keys_file`.
    pub api_keys: Vec<Secret>,
    /// Keys that may only read; a writing route answers 403.
    pub read_only_api_keys: Vec<Secret>,
    /// A file with one key a line; `read-only KEY` for one that may only read,
    /// `#` starts a comment.
    pub api_keys_file: Option<PathBuf>,
    /// `/metrics` answers without a key too.
    pub open_metrics: bool,
    /// Largest batch input file.
    #[serde(with = "humane::bytes")]
    pub batch_file_bytes_max: u64,
    /// Largest file of another purpose.
    #[serde(with = "humane::bytes")]
    pub other_file_bytes_max: u64,
    /// Largest JSON body of a request.
    #[serde(with = "humane::bytes")]
    pub body_bytes_max: u64,
    /// Longest that a JSON body may take to arrive.
    #[serde(with = "humane::duration")]
    pub body_timeout: Duration,
    /// Longest that a request other than an upload, a download, a stream or a completion may take.
    #[serde(with = "humane::duration")]
    pub request_timeout: Duration,
    /// Longest silence in the middle of an upload.
    #[serde(with = "humane::duration")]
    pub upload_idle_timeout: Duration,
    /// Longest that an online completion may take.
    #[serde(with = "humane::duration")]
    pub online_timeout: Duration,
    /// Most online completions at once; more are answered 429.
    pub online_requests_max: u32,
    /// Most event streams at once; more are answered 429.
    pub event_streams_max: u32,
    /// Most uploads at once; more are answered 429.
    pub uploads_max: u32,
    /// Most connections at once; more wait until one ends.
    pub connections_max: u32,
    /// Longest that a client may take to send a request's head, an idle connection's next
    /// one included, or to take the next piece of an answer; then it is cut.
    #[serde(with = "humane::duration")]
    pub connection_timeout: Duration,
    /// Time between looks at the store in an event stream.
    #[serde(with = "humane::duration")]
    pub events_poll_every: Duration,
    /// How long a batch input file stays unless the upload says otherwise; `0s` keeps it.
    #[serde(with = "humane::duration")]
    pub batch_file_expires_after: Duration,
    /// Uploads and creates are answered 503 while less than this is free on disk; 0 turns the guard off.
    #[serde(with = "humane::bytes")]
    pub free_disk_bytes_min: u64,
    /// What `Retry-After` says in 429 and 503 answers.
    #[serde(with = "humane::duration")]
    pub retry_after: Duration,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            worker_port: None,
            api_keys: Vec::new(),
            read_only_api_keys: Vec::new(),
            api_keys_file: None,
            open_metrics: false,
            batch_file_bytes_max: 64 << 30,
            other_file_bytes_max: 512 << 20,
            body_bytes_max: 64 << 20,
            body_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(60),
            upload_idle_timeout: Duration::from_secs(60),
            online_timeout: Duration::from_secs(1_800),
            online_requests_max: 256,
            event_streams_max: 256,
            uploads_max: 64,
            connections_max: 4_096,
            // Above the idle time of clients' pools, so that they let go first.
            connection_timeout: Duration::from_secs(120),
            events_poll_every: Duration::from_secs(1),
            batch_file_expires_after: 30 * DAY,
            free_disk_bytes_min: 1 << 30,
            retry_after: Duration::from_secs(5),
        }
    }
}

const DAY: Duration = Duration::from_secs(86_400);

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
        let sizes: [(&'static str, u64, u64, u64); 4] = [
            ("batch_file_bytes_max", self.batch_file_bytes_max, 1, 1 << 50),
            ("other_file_bytes_max", self.other_file_bytes_max, 1, 1 << 50),
            ("body_bytes_max", self.body_bytes_max, 1 << 10, 1 << 31),
            ("free_disk_bytes_min", self.free_disk_bytes_min, 0, 1 << 50),
        ];
        for (key, value, min, max) in sizes {
            if !(min..=max).contains(&value) {
                let [value, min, max] = [value, min, max].map(humane::format_bytes);
                return invalid(key, value, &format!("{min} to {max}"));
            }
        }
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3_600));
        let times: [(&'static str, Duration, Duration, Duration); 8] = [
            ("body_timeout", self.body_timeout, second, hour),
            ("request_timeout", self.request_timeout, second, hour),
            ("upload_idle_timeout", self.upload_idle_timeout, Duration::from_millis(10), DAY),
            ("online_timeout", self.online_timeout, Duration::from_millis(10), DAY),
            ("connection_timeout", self.connection_timeout, Duration::from_millis(10), hour),
            ("events_poll_every", self.events_poll_every, Duration::from_millis(10), Duration::from_secs(60)),
            ("batch_file_expires_after", self.batch_file_expires_after, Duration::ZERO, 3_650 * DAY),
            ("retry_after", self.retry_after, second, hour),
        ];
        for (key, value, min, max) in times {
            if !(min..=max).contains(&value) {
                let [value, min, max] = [value, min, max].map(humane::format_duration);
                return invalid(key, value, &format!("{min} to {max}"));
            }
        }
        let counts = [
            ("online_requests_max", self.online_requests_max),
            ("event_streams_max", self.event_streams_max),
            ("uploads_max", self.uploads_max),
            ("connections_max", self.connections_max),
        ];
        for (key, value) in counts {
            if !(1..=1 << 20).contains(&value) {
                return invalid(key, value.to_string(), "1 to 1048576");
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
        let text = serde_json::to_string(&ApiConfig::default()).unwrap();
        assert_eq!(serde_json::from_str::<ApiConfig>(&text).unwrap(), ApiConfig::default());
    }

    #[test]
    fn value_out_of_range_is_named_with_its_range() {
        let config = ApiConfig { request_timeout: Duration::ZERO, ..ApiConfig::default() };
        let refused = config.validate().unwrap_err();
        assert_eq!(refused.to_string(), "api.request_timeout is 0ms, allowed is 1s to 1h");
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
