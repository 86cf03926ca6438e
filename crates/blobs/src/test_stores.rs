//! The storages that tests run on: a folder, memory, memory used as a remote store is,
//! and every server that `tests/with_services.sh` has started.

use uuid::Uuid;

use crate::Blobs;
use crate::remote::{Options, Unmarked};

/// The bucket or container that the services are started with.
pub(crate) const BUCKET: &str = "overnight";

#[expect(clippy::disallowed_methods, reason = "tests read their own variables here")]
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a service is there. Fails when it is not and must be, and says so when it is not.
#[track_caller]
pub(crate) fn service(what: &str, variable: &str) -> Option<String> {
    let found = setting(variable);
    let required = setting("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
    if found.is_none() {
        assert!(!required.split(',').any(|name| name == what), "{variable} is not set, and {what} is required");
        eprintln!("{variable} is not set: nothing is tried on it (tests/with_services.sh sets it)");
    }
    found
}

/// The variables by which a client reaches an S3 server at this endpoint.
pub(crate) fn s3_environment(endpoint: &str) -> Vec<(String, String)> {
    let key = |name: &str| setting(name).unwrap_or_else(|| "unknown".to_owned());
    let pairs = [
        ("AWS_ENDPOINT_URL", endpoint.to_owned()),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ACCESS_KEY_ID", key("OVERNIGHT_TEST_S3_ACCESS_KEY")),
        ("AWS_SECRET_ACCESS_KEY", key("OVERNIGHT_TEST_S3_SECRET_KEY")),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

/// The variables for Azurite, whose account and key every emulator shares.
pub(crate) fn azurite_environment(endpoint: &str) -> Vec<(String, String)> {
    let key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
    let pairs = [
        ("AZURE_STORAGE_ENDPOINT", endpoint),
        ("AZURE_ALLOW_HTTP", "true"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1"),
        ("AZURE_STORAGE_ACCOUNT_KEY", key),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
}

/// A prefix that no other test has.
pub(crate) fn new_url(scheme: &str) -> String {
    format!("{scheme}://{BUCKET}/test/{}", Uuid::now_v7().simple())
}

/// A store and the name by which a failing test tells it.
pub(crate) struct TestStore {
    pub(crate) name: &'static str,
    pub(crate) blobs: Blobs,
    _dir: Option<tempfile::TempDir>,
}

/// Every remote service that is there: its name, a new URL in it, how to open it.
pub(crate) fn services() -> Vec<(&'static str, String, Options)> {
    let of = |environment| Options { environment, ..Options::default() };
    let s3 = [
        ("moto", "s3", "OVERNIGHT_TEST_S3_MOTO"),
        ("s3s-fs", "s3", "OVERNIGHT_TEST_S3_FS"),
        ("garage", "garage", "OVERNIGHT_TEST_GARAGE"),
    ];
    let mut found: Vec<_> = s3
        .into_iter()
        .filter_map(|(name, what, variable)| Some((name, new_url("s3"), of(s3_environment(&service(what, variable)?)))))
        .collect();
    if let Some(endpoint) = service("azurite", "OVERNIGHT_TEST_AZURITE") {
        found.push(("azurite", new_url("az"), of(azurite_environment(&endpoint))));
    }
    found
}

/// A new store of each kind.
pub(crate) async fn all() -> Vec<TestStore> {
    let dir = tempfile::tempdir().unwrap();
    let local = Blobs::local(&dir.path().join("made/on/the/way")).unwrap();
    let mut stores = vec![
        TestStore { name: "folder", blobs: local, _dir: Some(dir) },
        TestStore { name: "memory", blobs: Blobs::memory(), _dir: None },
    ];
    stores.extend(remote().await);
    stores
}

/// A new store of each remote kind.
pub(crate) async fn remote() -> Vec<TestStore> {
    let options = Options { unmarked: Unmarked::IsNew, ..Options::default() };
    let memory = Blobs::remote_memory(&options).await.unwrap();
    let mut stores = vec![TestStore { name: "remote memory", blobs: memory, _dir: None }];
    for (name, url, options) in services() {
        let blobs =
            Blobs::open(&url, &options).await.unwrap_or_else(|err| panic!("{name}: {}", overnight_types::chain(&err)));
        stores.push(TestStore { name, blobs, _dir: None });
    }
    stores
}
