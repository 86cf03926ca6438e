//! Objects in S3, Google Cloud Storage or Azure Blob Storage: the address, the client
//! with its limits, the store's mark, and uploads in parts.
//!
//! Invariants: nothing depends on conditional writes; every name lies under the
//! prefix; retries live in the driver alone and end before a lease does.
//! Does not read the environment: whoever opens the store hands its variables in.

pub(crate) mod address;
pub(crate) mod answer;
#[cfg(test)]
mod bounds_tests;
#[cfg(test)]
mod fault_tests;
mod http;
pub(crate) mod mark;
#[cfg(test)]
mod own_store;
#[cfg(test)]
mod proxy;
pub(crate) mod upload;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::HttpConnector;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};
use tokio::sync::Semaphore;

use self::address::{Address, Service};
use self::http::Connector;
use self::mark::RemoteMark;
use crate::Error;

/// A connection that takes longer is tried again.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// An answer, or the next bytes of one, that takes longer is asked for again.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// Tries after the first.
const RETRIES_MAX: usize = 8;
/// Calls under way at once, each on a connection of its own.
const CALLS_MAX: usize = 64;
/// Parts of uploads under way at once, over all writers: they are held in memory.
const PARTS_MAX: usize = 8;

/// How a store is opened.
#[derive(Clone)]
pub struct Options {
    /// Variables by which a remote store's client is set up, with their usual names:
    /// those that start with `AWS_`, `AZURE_` or `GOOGLE_`, and `IDENTITY_ENDPOINT`.
    pub environment: Vec<(String, String)>,
    /// For how long a call is tried again; below half a lease, so that no call outlives one.
    pub retry_for: Duration,
    /// What to do with a remote store that has no mark of ours.
    pub unmarked: Unmarked,
}

/// What a remote store without our mark means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmarked {
    /// A new store: it is marked. Right while no row names an object.
    IsNew,
    /// The wrong bucket or prefix: opening fails with [`Error::NotOurs`].
    IsWrong,
    /// Nothing: it is looked at without leaving anything in it.
    IsFine,
}

impl Default for Options {
    fn default() -> Self {
        Self { environment: Vec::new(), retry_for: Duration::from_secs(7), unmarked: Unmarked::IsNew }
    }
}

impl fmt::Debug for Options {
    // The values are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.environment.iter().map(|(name, _)| name.as_str()).collect();
        let Self { retry_for, unmarked, .. } = self;
        f.debug_struct("Options")
            .field("environment", &names)
            .field("retry_for", retry_for)
            .field("unmarked", unmarked)
            .finish()
    }
}

/// What a remote store has beside its driver.
#[derive(Clone)]
pub(crate) struct Remote {
    pub(crate) multipart: Arc<dyn MultipartStore>,
    /// All our names lie below it.
    pub(crate) prefix: Path,
    /// As an operator knows the store.
    pub(crate) shown: String,
    pub(crate) mark: Option<RemoteMark>,
    pub(crate) calls: Arc<Semaphore>,
    pub(crate) parts: Arc<Semaphore>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("shown", &self.shown).finish_non_exhaustive()
    }
}

impl Remote {
    pub(crate) fn new(multipart: Arc<dyn MultipartStore>, prefix: Path, shown: String) -> Self {
        let [calls, parts] = [CALLS_MAX, PARTS_MAX].map(|permits| Arc::new(Semaphore::new(permits)));
        Self { multipart, prefix, shown, mark: None, calls, parts }
    }

    /// The whole path of a name below the prefix.
    pub(crate) fn path(&self, name: &str) -> Path {
        self.prefix.parts().chain(Path::from(name).parts()).collect()
    }

    /// The name of a path below the prefix; `None` when it is not below it.
    pub(crate) fn name_of<'a>(&self, path: &'a Path) -> Option<&'a str> {
        match self.prefix.as_ref() {
            "" => Some(path.as_ref()),
            prefix => path.as_ref().strip_prefix(prefix)?.strip_prefix('/'),
        }
    }
}

/// A driver and what it knows beside objects.
pub(crate) type Drivers = (Arc<dyn ObjectStore>, Remote);

/// The longest that one call may take, retries and all.
pub(crate) fn call_limit(options: &Options) -> Duration {
    options.retry_for + CONNECT_MAX + ANSWER_MAX
}

/// Sets up the client of a store, over connections of `inner`. Nothing is sent yet.
pub(crate) fn connect(address: &Address, options: &Options, inner: Arc<dyn HttpConnector>) -> Result<Drivers, Error> {
    let refused = |err: object_store::Error| Error::Unsupported { url: address.to_string(), why: err.to_string() };
    let retry = RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(2),
            base: 2.0,
        },
        max_retries: RETRIES_MAX,
        retry_timeout: options.retry_for,
    };
    let connector = Connector { inner };
    let url = address.bucket_url.clone();
    let settings = Settings { address, environment: &options.environment };
    match address.service {
        Service::S3 => {
            settings.require_encryption("AWS_", &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])?;
            let mut builder = AmazonS3Builder::new().with_url(url).with_retry(retry).with_http_connector(connector);
            for (key, value) in settings.of::<AmazonS3ConfigKey>("AWS_", AmazonS3ConfigKey::Client) {
                builder = builder.with_config(key, value);
            }
            let driver = Arc::new(builder.build().map_err(refused)?);
            Ok((driver.clone(), Remote::new(driver, address.prefix.clone(), address.to_string())))
        }
        Service::Google => {
            let mut builder =
                GoogleCloudStorageBuilder::new().with_url(url).with_retry(retry).with_http_connector(connector);
            for (key, value) in settings.of::<GoogleConfigKey>("GOOGLE_", GoogleConfigKey::Client) {
                builder = builder.with_config(key, value);
            }
            let driver = Arc::new(builder.build().map_err(refused)?);
            Ok((driver.clone(), Remote::new(driver, address.prefix.clone(), address.to_string())))
        }
        Service::Azure => {
            settings.require_encryption("AZURE_", &["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"])?;
            let mut builder =
                MicrosoftAzureBuilder::new().with_url(url).with_retry(retry).with_http_connector(connector);
            for (key, value) in settings.of::<AzureConfigKey>("AZURE_", AzureConfigKey::Client) {
                builder = builder.with_config(key, value);
            }
            let driver = Arc::new(builder.build().map_err(refused)?);
            Ok((driver.clone(), Remote::new(driver, address.prefix.clone(), address.to_string())))
        }
    }
}

/// Our limits, then the environment.
struct Settings<'a> {
    address: &'a Address,
    environment: &'a [(String, String)],
}

impl Settings<'_> {
    fn of<K: std::str::FromStr>(&self, start: &str, client: impl Fn(ClientConfigKey) -> K) -> Vec<(K, String)> {
        let seconds = |limit: Duration| format!("{} s", limit.as_secs());
        let ours = [
            (ClientConfigKey::ConnectTimeout, seconds(CONNECT_MAX)),
            (ClientConfigKey::ReadTimeout, seconds(ANSWER_MAX)),
            // Of a whole answer; the one of a call is shorter.
            (ClientConfigKey::Timeout, "10 min".to_owned()),
            (ClientConfigKey::PoolMaxIdlePerHost, CALLS_MAX.to_string()),
            (ClientConfigKey::PoolIdleTimeout, "30 s".to_owned()),
            (ClientConfigKey::UserAgent, concat!("overnight/", env!("CARGO_PKG_VERSION")).to_owned()),
        ];
        let ours = ours.into_iter().map(|(key, value)| (client(key), value));
        let theirs = self.environment.iter().filter_map(|(name, value)| {
            // How Azure names the endpoint of a machine's role.
            let name = if name == "IDENTITY_ENDPOINT" { "AZURE_IDENTITY_ENDPOINT" } else { name };
            let key = name.starts_with(start).then(|| name.to_ascii_lowercase().parse().ok())?;
            Some((key?, value.clone()))
        });
        ours.chain(theirs).collect()
    }

    /// A plain endpoint is taken only on purpose: the driver's own refusal names no remedy.
    fn require_encryption(&self, start: &str, endpoints: &[&str]) -> Result<(), Error> {
        let value =
            |wanted: &str| self.environment.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
        let allowed = value(&format!("{start}ALLOW_HTTP"))
            .is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1");
        match endpoints.iter().find(|name| value(name).is_some_and(|value| value.starts_with("http://"))) {
            Some(name) if !allowed => Err(Error::Unsupported {
                url: self.address.to_string(),
                why: format!(
                    "{name} is not encrypted; use https://, or set {start}ALLOW_HTTP=true where the network is trusted"
                ),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use overnight_types::{Epoch, FileId, JobId, ShardIndex};
    use proptest::prelude::*;

    use super::*;
    use crate::ObjectName;

    proptest! {
        // Whatever text is given for a name: what is taken for one stays under the prefix,
        // and comes back from a listing as it went.
        #[test]
        fn no_name_leaves_its_folder(
            prefix in "([a-z]{1,4}/){0,2}",
            text in prop_oneof![
                (any::<u64>(), any::<u32>(), any::<[u8; 32]>()).prop_map(|(epoch, seq, sha)| {
                    ObjectName::segment(JobId::new(), ShardIndex(seq), Epoch(epoch), seq, &sha).to_string()
                }),
                Just(ObjectName::file(FileId::new()).to_string()),
                "(files|jobs|probes)/[-a-z0-9./%#_]{0,60}",
                "files/file-[0-9a-f]{32}(/../x|%2f..|#1)?",
                "jobs/batch_[0-9a-f]{32}/(segments/[0-9.]{1,8}/[0-9a-f.-]{1,30}\\.jsonl|intake/[0-9./]{1,8}\\.run|\\.\\./x)",
            ],
        ) {
            let prefix = Path::from(prefix.trim_end_matches('/'));
            let remote = Remote::new(Arc::new(InMemory::new()), prefix.clone(), String::new());
            if let Ok(name) = text.parse::<ObjectName>() {
                let path = remote.path(&text);
                prop_assert!(path.prefix_matches(&prefix), "{path}");
                prop_assert_eq!(path.parts().count(), prefix.parts().count() + text.split('/').count());
                prop_assert!(path.parts().all(|part| !part.as_ref().starts_with('.')), "{path}");
                prop_assert_eq!(remote.name_of(&path), Some(text.as_str()));
                prop_assert_eq!(path, remote.path(&name.to_string()));
            }
        }
    }

    #[test]
    fn names_of_a_neighbouring_prefix_are_not_ours() {
        let remote = Remote::new(Arc::new(InMemory::new()), "a/b".into(), String::new());
        assert_eq!(remote.name_of(&"a/b/files/x".into()), Some("files/x"));
        for other in ["a/bc/files/x", "a/b", "files/x", "a/files/x"] {
            assert_eq!(remote.name_of(&other.into()), None, "{other}");
        }
    }
}
