//! The address of a store: which service, bucket and prefix a URL means.
//!
//! Invariant: a prefix is plain segments, so that every name under it stays under it
//! on every service. A URL that carries a password is refused, and never shown whole.

use std::fmt;

use object_store::ObjectStoreScheme;
use object_store::path::Path;
use url::Url;

use crate::Error;

/// Longest prefix, in characters: S3 names end at 1,024 bytes, ours need 100 of them.
const PREFIX_CHARS_MAX: usize = 512;

/// Who serves the objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    /// Amazon S3 and whatever speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
}

/// A bucket or container, and the prefix within it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) service: Service,
    /// As the driver takes it, without the prefix.
    pub(crate) bucket_url: String,
    /// Empty for the whole bucket.
    pub(crate) prefix: Path,
    shown: String,
}

impl Address {
    /// Reads `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, and the
    /// longer forms that name account or region.
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let refused = |why: &str| Error::Unsupported { url: without_password(text), why: why.to_owned() };
        let url = Url::parse(text).map_err(|err| refused(&format!("it is not a URL: {err}")))?;
        if url.password().is_some() {
            return Err(refused("a password does not belong into it; credentials come from the environment"));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(refused("nothing may follow ? or #; credentials and options come from the environment"));
        }
        let unknown = "use file:///absolute/folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix";
        let service = service_of(&url).ok_or_else(|| refused(unknown))?;
        let segments: Vec<&str> = url.path().split('/').skip(1).collect();
        let segments = segments.strip_suffix(&[""]).unwrap_or(&segments);
        let (bucket, prefix) = segments.split_at(usize::from(has_bucket_in_path(&url)).min(segments.len()));
        if has_bucket_in_path(&url) && bucket.first().is_none_or(|bucket| bucket.is_empty()) {
            return Err(refused("it names no bucket"));
        }
        if !prefix.iter().all(|segment| is_plain(segment)) || url.path().len() > PREFIX_CHARS_MAX {
            return Err(refused("a prefix is made of letters, digits and . _ - = between single slashes, 512 at most"));
        }
        let mut bucket_url = url.clone();
        bucket_url.set_path(&bucket.join("/"));
        let shown = std::iter::once(bucket_url.as_str().trim_end_matches('/')).chain(prefix.iter().copied());
        Ok(Self {
            service,
            shown: shown.collect::<Vec<_>>().join("/"),
            bucket_url: bucket_url.to_string(),
            prefix: prefix.iter().copied().collect(),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

fn service_of(url: &Url) -> Option<Service> {
    // The driver reads the path too, which is judged later and by stricter rules.
    let mut bare = url.clone();
    bare.set_path("/bucket");
    match ObjectStoreScheme::parse(&bare).ok()?.0 {
        ObjectStoreScheme::AmazonS3 => Some(Service::S3),
        ObjectStoreScheme::GoogleCloudStorage => Some(Service::Google),
        ObjectStoreScheme::MicrosoftAzure => Some(Service::Azure),
        _ => None,
    }
}

/// Whether the first segment of the path is the bucket, and not the host.
fn has_bucket_in_path(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let in_host = host.ends_with("amazonaws.com") && !host.starts_with("s3.") && !host.starts_with("s3-");
    url.scheme() == "https" && !in_host
}

/// Neither `.` nor `..`, and nothing that a service or a driver would spell otherwise.
fn is_plain(segment: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'=');
    !segment.is_empty() && !segment.starts_with('.') && segment.bytes().all(plain)
}

/// A URL as it may be shown: whatever could be a secret is cut out.
pub(crate) fn without_password(text: &str) -> String {
    let head = text.split(['?', '#']).next().unwrap_or_default();
    match head.split_once("://") {
        Some((scheme, rest)) => match rest.split_once('@') {
            Some((user, host)) if user.contains(':') => format!("{scheme}://***@{host}"),
            _ => head.to_owned(),
        },
        None => head.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_usual_form_names_service_bucket_and_prefix() {
        let cases = [
            ("s3://nightly", Service::S3, "s3://nightly", ""),
            ("s3://nightly/", Service::S3, "s3://nightly", ""),
            ("s3a://nightly/a/b=2/", Service::S3, "s3a://nightly", "a/b=2"),
            (
                "https://s3.eu-west-1.amazonaws.com/nightly/a",
                Service::S3,
                "https://s3.eu-west-1.amazonaws.com/nightly",
                "a",
            ),
            (
                "https://nightly.s3.eu-west-1.amazonaws.com/a",
                Service::S3,
                "https://nightly.s3.eu-west-1.amazonaws.com/",
                "a",
            ),
            (
                "https://acc.r2.cloudflarestorage.com/nightly/a",
                Service::S3,
                "https://acc.r2.cloudflarestorage.com/nightly",
                "a",
            ),
            ("gs://nightly/a/b", Service::Google, "gs://nightly", "a/b"),
            ("az://nightly/a", Service::Azure, "az://nightly", "a"),
            (
                "abfss://nightly@acc.dfs.core.windows.net/a",
                Service::Azure,
                "abfss://nightly@acc.dfs.core.windows.net",
                "a",
            ),
            (
                "https://acc.blob.core.windows.net/nightly/a",
                Service::Azure,
                "https://acc.blob.core.windows.net/nightly",
                "a",
            ),
        ];
        for (text, service, bucket_url, prefix) in cases {
            let address = Address::parse(text).unwrap();
            assert_eq!((address.service, address.bucket_url.as_str()), (service, bucket_url), "{text}");
            assert_eq!(address.prefix.as_ref(), prefix, "{text}");
            assert_eq!(address.to_string(), text.trim_end_matches('/'), "it is shown as it was given");
        }
    }

    #[test]
    fn wrong_forms_are_refused_with_what_would_do() {
        let cases = [
            ("nightly/a", "not a URL"),
            ("ftp://host/a", "s3://bucket/prefix"),
            ("https://example.com/a", "s3://bucket/prefix"),
            ("https://s3.eu-west-1.amazonaws.com/", "no bucket"),
            ("s3://nightly/a//b", "single slashes"),
            ("s3://nightly/a%2F..%2Fb", "single slashes"),
            ("s3://nightly/.hidden", "single slashes"),
            ("s3://nightly/a?versionId=1", "nothing may follow"),
            ("s3://nightly/ä", "single slashes"),
        ];
        for (text, words) in cases {
            let err = Address::parse(text).unwrap_err().to_string();
            assert!(err.contains(words), "{text}: {err}");
        }
    }

    #[test]
    fn refused_url_shows_no_secret() {
        for text in ["s3://key:hunter2@nightly/a", "https://acc.blob.core.windows.net/c?sig=hunter2"] {
            let err = Address::parse(text).unwrap_err().to_string();
            assert!(!err.contains("hunter2"), "{err}");
        }
    }

    proptest! {
        // Whatever is typed: what is taken stays below the bucket, segment by segment.
        #[test]
        fn prefix_that_is_taken_is_plain(tail in "[a-zA-Z0-9./%#?\\\\ _=-]{0,24}") {
            if let Ok(address) = Address::parse(&format!("s3://nightly/{tail}")) {
                prop_assert_eq!(&address.bucket_url, "s3://nightly");
                for part in address.prefix.parts() {
                    prop_assert!(is_plain(part.as_ref()), "{:?}", part);
                }
            }
        }
    }
}
