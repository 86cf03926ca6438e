//! Remote object stores for tests: memory that is used as one, and the servers that
//! `tests/with_services.sh` has started.

use std::time::Duration;

use overnight_blobs::{Blobs, Options};
use overnight_types::JobId;

use crate::setting;

/// The bucket or container that the servers are started with.
pub const BUCKET: &str = "overnight";

/// A server: its name, the URL of a new store on it, and the variables of its clients.
#[derive(Debug, Clone)]
pub struct ObjectServer {
    /// As a failing test tells it.
    pub name: &'static str,
    /// With a prefix that no other test has.
    pub url: String,
    /// What a process needs to reach it.
    pub environment: Vec<(String, String)>,
}

impl ObjectServer {
    /// Opens its store.
    pub async fn open(&self) -> Blobs {
        let environment = self.environment.clone();
        let options = Options { environment, retry_for: Duration::from_secs(5), ..Options::default() };
        let opened = Blobs::open(&self.url, &options).await;
        opened.unwrap_or_else(|err| panic!("{}: {}", self.name, overnight_types::chain(&err)))
    }
}

/// Every server that is there. Says so when one is not; panics when it is required.
pub fn servers() -> Vec<ObjectServer> {
    let known = [
        ("moto", "s3", "OVERNIGHT_TEST_S3_MOTO"),
        ("s3s-fs", "s3", "OVERNIGHT_TEST_S3_FS"),
        ("garage", "garage", "OVERNIGHT_TEST_GARAGE"),
        ("azurite", "azurite", "OVERNIGHT_TEST_AZURITE"),
    ];
    let found = known.into_iter().filter_map(|(name, what, variable)| {
        let Some(endpoint) = setting(variable) else {
            let required = setting("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|name| name == what), "{variable} is not set, and {what} is required");
            eprintln!("{variable} is not set: nothing is tried on {name} (tests/with_services.sh sets it)");
            return None;
        };
        let (scheme, environment) = match name {
            "azurite" => ("az", azure_environment(endpoint)),
            _ => ("s3", s3_environment(endpoint)),
        };
        // Any id will do, as long as it is new.
        Some(ObjectServer { name, url: format!("{scheme}://{BUCKET}/test/{}", JobId::new()), environment })
    });
    found.collect()
}

/// A new store of every remote kind that is there, memory first, with its name.
pub async fn remote_stores() -> Vec<(&'static str, Blobs)> {
    let memory = Blobs::remote_memory(&Options::default()).await.expect("memory can be marked");
    let mut stores = vec![("memory", memory)];
    for server in servers() {
        stores.push((server.name, server.open().await));
    }
    stores
}

fn s3_environment(endpoint: String) -> Vec<(String, String)> {
    let key = |name: &str| setting(name).unwrap_or_else(|| panic!("{name} is set with the endpoint"));
    let pairs = [
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ACCESS_KEY_ID", key("OVERNIGHT_TEST_S3_ACCESS_KEY")),
        ("AWS_SECRET_ACCESS_KEY", key("OVERNIGHT_TEST_S3_SECRET_KEY")),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

/// The account and key that every emulator has.
fn azure_environment(endpoint: String) -> Vec<(String, String)> {
    let key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
    let pairs = [
        ("AZURE_STORAGE_ENDPOINT", endpoint.as_str()),
        ("AZURE_ALLOW_HTTP", "true"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1"),
        ("AZURE_STORAGE_ACCOUNT_KEY", key),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
}
