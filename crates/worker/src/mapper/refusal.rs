//! Error bodies in OpenAI's form.

use bytes::Bytes;
use serde::Serialize;

use crate::generate::Failure;

/// The `error` object: all four keys, always.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// What is wrong, with the numbers.
    pub message: String,
    /// `invalid_request_error`, `server_error`, …
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field at fault, dotted.
    pub param: Option<String>,
    /// Stable code where a program could act on it.
    pub code: Option<String>,
}

impl ErrorBody {
    /// `{"error":{…}}`.
    pub fn to_bytes(&self) -> Bytes {
        #[derive(Serialize)]
        struct Envelope<'a> {
            error: &'a ErrorBody,
        }
        Bytes::from(serde_json::to_vec(&Envelope { error: self }).expect("strings always serialize"))
    }
}

/// A body that is not run: an HTTP answer by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// What is wrong.
    pub error: ErrorBody,
}

impl Refusal {
    /// The finished answer body.
    pub fn body(&self) -> Bytes {
        self.error.to_bytes()
    }

    /// 400 about the body as a whole.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(400, None, None, message)
    }

    /// 400 about one field.
    pub(super) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(400, Some(param.into()), None, message)
    }

    /// The same with a code.
    pub(super) fn with_code(mut self, code: &str) -> Self {
        self.error.code = Some(code.to_owned());
        self
    }

    /// 404 for a model that nobody here serves.
    pub(super) fn model_not_found(model: &str, names: &[String]) -> Self {
        let message = format!("model {model:?} is not served here; served: {}", names.join(", "));
        Self::new(404, Some("model".to_owned()), Some("model_not_found".to_owned()), message)
    }

    fn new(status: u16, param: Option<String>, code: Option<String>, message: impl Into<String>) -> Self {
        Self { status, error: ErrorBody { message: message.into(), kind: "invalid_request_error", param, code } }
    }
}

/// The answer to a request that failed for good: its HTTP status and error object.
pub(super) fn of_failure(failure: &Failure) -> (u16, ErrorBody) {
    let server = |code: &str, message: &str| ErrorBody {
        message: message.to_owned(),
        kind: "server_error",
        param: None,
        code: Some(code.to_owned()),
    };
    match failure {
        Failure::Refused { status, code, param, message } => {
            let code = Some(code.clone()).filter(|code| !code.is_empty());
            let error =
                ErrorBody { message: message.clone(), kind: "invalid_request_error", param: param.clone(), code };
            (*status, error)
        }
        Failure::EngineTrouble { message } => (503, server("engine_unavailable", message)),
        Failure::Transient { code, message } => (500, server(code, message)),
        Failure::Timeout => (504, server("request_timeout", "the request ran past its time limit")),
        Failure::Cancelled => (499, server("request_cancelled", "the request was cancelled")),
    }
}
