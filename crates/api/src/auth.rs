//! API keys: `Authorization: Bearer …` on everything but `/health`, `/ping` and, by
//! `api.open_metrics`, `/metrics`.
//!
//! Keys are compared as SHA-256 digests in constant time, every known key each time,
//! so that neither length nor content of a key shows in the answer's timing.

use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};

use crate::config::{ApiConfig, Secret};
use crate::error::{ApiError, Error, Result};
use crate::metrics;
use crate::state::Shared;

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Everything.
    Full,
    /// Routes that change nothing.
    ReadOnly,
}

/// The known keys, as digests.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keys(Vec<([u8; 32], Access)>);

impl Keys {
    /// Keys of the configuration and of its key file.
    pub(crate) fn load(config: &ApiConfig) -> Result<Self, Error> {
        let mut keys = Keys::default();
        config.api_keys.iter().for_each(|key| keys.add(key, Access::Full));
        config.read_only_api_keys.iter().for_each(|key| keys.add(key, Access::ReadOnly));
        let Some(path) = &config.api_keys_file else { return Ok(keys) };
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| Error::KeyFile { path: shown.clone(), source })?;
        let num_before = keys.0.len();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match line.strip_prefix("read-only ") {
                Some(key) => keys.add(&Secret::new(key.trim()), Access::ReadOnly),
                None => keys.add(&Secret::new(line), Access::Full),
            }
        }
        if keys.0.len() == num_before {
            return Err(Error::NoKeys { path: shown });
        }
        Ok(keys)
    }

    fn add(&mut self, key: &Secret, access: Access) {
        self.0.push((Sha256::digest(key.expose().as_bytes()).into(), access));
    }

    /// What the presented key may do; `None` when it is not one of ours.
    fn access(&self, presented: &[u8]) -> Option<Access> {
        let digest: [u8; 32] = Sha256::digest(presented).into();
        let mut found = None;
        for (known, access) in &self.0 {
            let difference = known.iter().zip(&digest).fold(0_u8, |sum, (a, b)| sum | (a ^ b));
            if std::hint::black_box(difference) == 0 {
                found = Some(*access);
            }
        }
        found
    }
}

/// Paths that answer without a key.
pub(crate) const OPEN: [&str; 2] = ["/health", "/ping"];

/// Lets a request pass when its key allows it.
pub(crate) async fn guard(State(state): State<Shared>, request: Request, next: Next) -> Result<Response> {
    let path = request.uri().path();
    let is_open = OPEN.contains(&path) || (path == metrics::PATH && state.parts.config.open_metrics);
    if !state.keys.0.is_empty() && !is_open {
        check(&state.keys, &request)?;
    }
    Ok(next.run(request).await)
}

fn check(keys: &Keys, request: &Request) -> Result<()> {
    let unauthorized = |message: &'static str| ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key");
    let Some(value) = request.headers().get(header::AUTHORIZATION) else {
        return Err(unauthorized("no API key given; send it as `Authorization: Bearer KEY`"));
    };
    let bytes = value.as_bytes();
    let presented = match bytes.split_at_checked(7) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => key.trim_ascii(),
        _ => return Err(unauthorized("the Authorization header does not have the form `Bearer KEY`")),
    };
    match keys.access(presented) {
        None => Err(unauthorized("incorrect API key")),
        Some(Access::ReadOnly) if writes(request) => {
            Err(ApiError::new(StatusCode::FORBIDDEN, "this API key may only read").code("read_only_api_key"))
        }
        Some(_) => Ok(()),
    }
}

/// Whether the request may change something or costs engine time.
fn writes(request: &Request) -> bool {
    let reading_post = request.uri().path().starts_with("/v1/files/") && request.uri().path().ends_with("/validate");
    let safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    !(safe || (request.method() == Method::POST && reading_post))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_file_gives_full_and_read_only_keys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# ours\nsk-full\n\nread-only sk-read\n").unwrap();
        let keys = Keys::load(&ApiConfig { api_keys_file: Some(path), ..ApiConfig::default() }).unwrap();
        assert_eq!(keys.access(b"sk-full"), Some(Access::Full));
        assert_eq!(keys.access(b"sk-read"), Some(Access::ReadOnly));
        assert_eq!(keys.access(b"sk-ful"), None);
        assert_eq!(keys.access(b""), None);
    }

    #[test]
    fn empty_key_file_stops_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# nothing\n").unwrap();
        let config = ApiConfig { api_keys_file: Some(path), ..ApiConfig::default() };
        assert!(matches!(Keys::load(&config), Err(Error::NoKeys { .. })));
    }
}
