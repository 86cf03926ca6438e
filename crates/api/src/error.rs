//! What goes wrong in a request, and its two forms on the wire.
//!
//! A handler returns [`ApiError`]; it rides as an extension of the response until
//! `request_id` renders it, because only there are the path (OpenAI form
//! under `/v1`, problem JSON elsewhere) and the request id known. A 5xx body never
//! says more than its code, what that code means, and the request id; the cause goes to
//! the log, once.

use std::borrow::Cow;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use overnight_types::chain;

/// Starting the server failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is out of range.
    #[error(transparent)]
    Config(#[from] crate::config::InvalidConfig),
    /// The key file could not be read.
    #[error("could not read the API key file {path}")]
    KeyFile {
        /// Its path.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The key file holds no key.
    #[error("the API key file has no key in it: {path}")]
    NoKeys {
        /// Its path.
        path: String,
    },
}

/// A request that is refused or failed.
#[derive(Debug, Clone)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Stable code, when a program could act on it.
    pub code: Option<Cow<'static, str>>,
    /// The parameter at fault, dotted.
    pub param: Option<Cow<'static, str>>,
    /// What is wrong and what to do; not shown for 5xx.
    pub message: Cow<'static, str>,
    /// Sent as `Retry-After`.
    pub retry_after: Option<Duration>,
    /// The cause, for the log only.
    pub cause: Option<String>,
}

/// What handlers return.
pub type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    /// An error with this status and message.
    pub fn new(status: StatusCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, code: None, param: None, message: message.into(), retry_after: None, cause: None }
    }

    /// 400 naming the parameter.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).param(param)
    }

    /// 400 without a parameter.
    pub fn bad_request(code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).code(code)
    }

    /// 404 for an id that names nothing here.
    pub fn no_such(what: &str, id: &str) -> Self {
        let shown: String = id.chars().take(80).collect();
        Self::new(StatusCode::NOT_FOUND, format!("no such {what}: {shown}")).param("id").code("not_found")
    }

    /// 409: the object's state does not allow this.
    pub fn conflict(code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::CONFLICT, message).code(code)
    }

    /// 413 naming the limit and the setting that holds it.
    pub fn too_large(what: &str, limit: u64, setting: &str) -> Self {
        let message = format!("{what} is larger than {limit} bytes, the limit set by {setting}");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("too_large")
    }

    /// 500; `cause` goes to the log.
    pub fn internal(cause: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error").code("internal_error");
        error.cause = Some(cause.into());
        error
    }

    /// 503 with `Retry-After`.
    pub fn unavailable(code: &'static str, retry_after: Duration) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable").code(code);
        error.retry_after = Some(retry_after);
        error
    }

    /// 429 with `Retry-After`.
    pub fn slow_down(message: impl Into<Cow<'static, str>>, retry_after: Duration) -> Self {
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, message).code("rate_limit_exceeded");
        error.retry_after = Some(retry_after);
        error
    }

    /// The same with a stable code.
    pub fn code(mut self, code: impl Into<Cow<'static, str>>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The same naming a parameter.
    pub fn param(mut self, param: impl Into<Cow<'static, str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The same with the cause for the log.
    pub fn cause(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// The message as a client sees it.
    pub(crate) fn shown(&self, request_id: &str) -> String {
        match (self.status, self.code.as_deref()) {
            (StatusCode::SERVICE_UNAVAILABLE, code) => unavailable_because(code.unwrap_or_default()).to_owned(),
            (status, _) if status.is_server_error() => {
                format!("the server could not answer; request id: {request_id}")
            }
            _ => self.message.to_string(),
        }
    }

    /// The wire's `type` of this status.
    pub fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }
}

/// What a code of 503 means and what to do; fixed words, so nothing of the inside gets out.
fn unavailable_because(code: &str) -> &'static str {
    match code {
        "draining" => "the server is stopping and takes nothing new; try again once it runs again",
        "disk_full" => "the server's disk is too full to take more; make room there, then try again",
        "database_unavailable" => "the server's database does not answer; try again",
        "storage_unavailable" => "the server's object store does not answer; try again",
        "engine_starting" => "the engine is still loading; try again",
        "engine_poisoned" => "the engine broke down and is being built anew; try again",
        "engine_stalled" => "the engine has work and makes no progress; try again once it goes on or is started again",
        "engine_not_accepting" => "the engine takes no more requests at the moment; try again",
        "request_timeout" => "the server did not get done in time; try again",
        _ => "the server cannot do this at the moment; try again",
    }
}

impl From<overnight_store::Error> for ApiError {
    fn from(error: overnight_store::Error) -> Self {
        let cause = chain(&error);
        match error.class() {
            overnight_types::Class::Transient => {
                ApiError::unavailable("database_unavailable", Duration::from_secs(5)).cause(cause)
            }
            _ => ApiError::internal(cause),
        }
    }
}

impl From<overnight_blobs::Error> for ApiError {
    fn from(error: overnight_blobs::Error) -> Self {
        let cause = chain(&error);
        match error.class() {
            overnight_types::Class::Transient => {
                ApiError::unavailable("storage_unavailable", Duration::from_secs(5)).cause(cause)
            }
            _ => ApiError::internal(cause),
        }
    }
}

impl From<overnight_worker::Error> for ApiError {
    fn from(error: overnight_worker::Error) -> Self {
        let cause = chain(&error);
        match error.class() {
            overnight_types::Class::Transient => {
                ApiError::unavailable("unavailable", Duration::from_secs(5)).cause(cause)
            }
            _ => ApiError::internal(cause),
        }
    }
}

impl From<overnight_worker::items::Error> for ApiError {
    fn from(error: overnight_worker::items::Error) -> Self {
        use overnight_worker::items::Error;
        match error {
            Error::BadCursor { .. } => ApiError::invalid("after", error.to_string()).code("invalid_value"),
            Error::EarlierRound { .. } => ApiError::conflict("earlier_round", error.to_string()).param("after"),
            Error::Worker(error) => error.into(),
            other => ApiError::internal(chain(&other)),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
