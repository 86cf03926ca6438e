//! Judges one line: its envelope, and of the body only `model` and `stream`.

use std::borrow::Cow;

use overnight_blobs::envelope::{Envelope, LineFault};
use overnight_blobs::json::{Kind, Raw};
use overnight_blobs::lines::Line;
use overnight_engine::request::Class;
use overnight_types::Endpoint;
use serde::{Deserialize, Serialize};

use super::findings::{Findings, IntakeCode};
use crate::mapper::{ErrorBody, Mapper, PrepareOptions, check_without_model};

/// Longest excerpt of user text in a message, characters.
const EXCERPT: usize = 80;
/// Longest name of a model; it is kept in the job's row and in intake's notes.
const MODEL_BYTES_MAX: usize = 1 << 10;

/// Names that a model may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KnownModels {
    /// Any name: a remote engine serves whatever it is asked for.
    Any,
    /// Only these.
    Named(Vec<String>),
}

impl KnownModels {
    fn serves(&self, model: &str) -> bool {
        match self {
            KnownModels::Any => true,
            KnownModels::Named(names) => names.iter().any(|name| name == model || name == "*"),
        }
    }
}

/// Why an endpoint would refuse a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyFault {
    /// Stable code.
    pub code: Option<String>,
    /// The field at fault.
    pub param: Option<String>,
    /// In words.
    pub message: String,
}

/// A request that would end with HTTP 400.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyFinding {
    /// Physical line.
    pub line: u64,
    /// Why.
    pub fault: BodyFault,
}

/// A typed parse of bodies, the mapper's.
pub trait BodyCheck: Sync {
    /// Judges one body, a JSON object.
    fn check(&self, endpoint: Endpoint, body: &[u8]) -> Result<(), BodyFault>;
}

/// The first model of a file, which all others must equal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstModel {
    /// As decoded text.
    pub name: String,
    /// The line that names it.
    pub line: u64,
}

/// What a line gives, beside errors.
#[derive(Debug)]
pub(crate) struct Checked<'a> {
    /// The custom id's token, when it is a string that is not empty.
    pub(crate) custom_id: Option<Raw<'a>>,
    /// The body, when it is an object.
    pub(crate) body: Option<Raw<'a>>,
}

/// Checks a line that is not blank; what is wrong goes into `findings`.
pub(crate) fn check_line<'a>(
    line: &Line<'a>,
    endpoint: Endpoint,
    line_bytes_max: u64,
    first_model: &mut Option<FirstModel>,
    findings: &mut Findings,
) -> Checked<'a> {
    let number = Some(line.number);
    let nothing = Checked { custom_id: None, body: None };
    let Some(content) = line.content else {
        findings.add(IntakeCode::InvalidJsonLine, number, None, || {
            format!("the line is longer than the limit of {line_bytes_max} bytes")
        });
        return nothing;
    };
    let envelope = match Envelope::parse(content) {
        Ok(envelope) => envelope,
        Err(fault) => {
            findings.add(IntakeCode::InvalidJsonLine, number, None, || fault_message(line, &fault));
            return nothing;
        }
    };
    let custom_id = check_custom_id(&envelope, number, findings);
    check_route(&envelope, number, endpoint, findings);
    let body = check_body(&envelope, line.number, first_model, findings);
    Checked { custom_id, body }
}

fn fault_message(line: &Line<'_>, fault: &LineFault) -> String {
    match fault.at() {
        Some(at) => format!("{fault} (byte {} of the file)", line.content_offset() + at as u64 + 1),
        None => fault.to_string(),
    }
}

fn check_custom_id<'a>(envelope: &Envelope<'a>, line: Option<u64>, findings: &mut Findings) -> Option<Raw<'a>> {
    let mut wrong = |message: String| findings.add(IntakeCode::InvalidRequest, line, Some("custom_id"), || message);
    match envelope.custom_id {
        Some(id) if id.kind != Kind::String => wrong(format!("custom_id must be a string, found {}", id.kind.as_str())),
        Some(id) if id.token.len() == 2 => wrong("custom_id must not be empty".to_owned()),
        Some(id) => return Some(id),
        None => wrong("custom_id is missing".to_owned()),
    }
    None
}

fn check_route(envelope: &Envelope<'_>, line: Option<u64>, endpoint: Endpoint, findings: &mut Findings) {
    if envelope.method.is_none_or(|method| &*method.text() != b"POST") {
        findings.add(IntakeCode::InvalidRequest, line, Some("method"), || {
            format!("method must be exactly \"POST\", found {}", shown(envelope.method))
        });
    }
    if envelope.url.is_none_or(|url| *url.text() != *endpoint.as_str().as_bytes()) {
        findings.add(IntakeCode::UrlMismatch, line, Some("url"), || {
            format!("url must equal the batch's endpoint {endpoint}, found {}", shown(envelope.url))
        });
    }
}

fn check_body<'a>(
    envelope: &Envelope<'a>,
    line: u64,
    first_model: &mut Option<FirstModel>,
    findings: &mut Findings,
) -> Option<Raw<'a>> {
    let number = Some(line);
    let Some(body) = envelope.body.filter(|body| body.kind == Kind::Object) else {
        findings.add(IntakeCode::InvalidRequest, number, Some("body"), || match envelope.body {
            Some(body) => format!("body must be a JSON object, found {}", body.kind.as_str()),
            None => "body is missing".to_owned(),
        });
        return None;
    };
    match envelope.model.map(|model| (model.kind, model.text())) {
        Some((Kind::String, name)) => check_model(&name, line, first_model, findings),
        _ => findings.add(IntakeCode::InvalidRequest, number, Some("body.model"), || match envelope.model {
            Some(model) => format!("body.model must be a string, found {}", model.kind.as_str()),
            None => "body.model is missing".to_owned(),
        }),
    }
    if !envelope.stream.is_none_or(|stream| matches!(stream.kind, Kind::Null | Kind::False)) {
        findings.add(IntakeCode::InvalidRequest, number, Some("body.stream"), || {
            "body.stream must be absent, null or false: a batch does not stream".to_owned()
        });
    }
    Some(body)
}

fn check_model(name: &[u8], line: u64, first_model: &mut Option<FirstModel>, findings: &mut Findings) {
    if name.len() > MODEL_BYTES_MAX {
        return findings.add(IntakeCode::InvalidRequest, Some(line), Some("body.model"), || {
            format!("body.model is {} bytes long, the limit is {MODEL_BYTES_MAX}", name.len())
        });
    }
    let name = text(name);
    match first_model {
        None => *first_model = Some(FirstModel { name: name.into_owned(), line }),
        Some(first) if first.name == name => {}
        Some(first) => findings.add(IntakeCode::ModelMismatch, Some(line), Some("body.model"), || {
            let FirstModel { name: wanted, line } = first;
            format!("the model is {:?}, but the file's first is {:?} (line {line})", cut(&name), cut(wanted))
        }),
    }
}

/// Adds `model_not_found` when the file's model is not served here.
pub(crate) fn check_served(first_model: Option<&FirstModel>, models: &KnownModels, findings: &mut Findings) {
    let (Some(first), KnownModels::Named(names)) = (first_model, models) else { return };
    if models.serves(&first.name) {
        return;
    }
    findings.add(IntakeCode::ModelNotFound, Some(first.line), Some("body.model"), || {
        let remedy = "name one of them, or start a worker with it";
        format!("the model {:?} is not served here; served are: {}; {remedy}", cut(&first.name), names.join(", "))
    });
}

fn shown(value: Option<Raw<'_>>) -> String {
    match value {
        None => "nothing".to_owned(),
        Some(value) if value.kind == Kind::String => format!("{:?}", cut(&text(&value.text()))),
        Some(value) => value.kind.as_str().to_owned(),
    }
}

/// Lone surrogates, the only text that is not UTF-8 here, become U+FFFD.
fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// The start of user text, for a message.
pub(crate) fn cut(text: &str) -> String {
    match text.char_indices().nth(EXCERPT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl BodyCheck for Mapper {
    fn check(&self, endpoint: Endpoint, body: &[u8]) -> Result<(), BodyFault> {
        let options =
            PrepareOptions { class: Class::Job, allow_stream: false, seed: 0, request_id: "validate", created: 0 };
        match self.prepare(endpoint, body, options) {
            Ok(_) => Ok(()),
            // A model that another engine serves: which ones there are is intake's to tell.
            Err(refusal) if refusal.status == 404 && self.text().is_some() => ModelFree.check(endpoint, body),
            Err(refusal) if refusal.status == 404 => Ok(()),
            Err(refusal) => Err(refusal.error.into()),
        }
    }
}

/// Judges by what every model of the local engine refuses, where none is loaded.
#[derive(Debug, Clone, Copy)]
pub struct ModelFree;

impl ModelFree {
    /// What it cannot judge, in words.
    pub const UNCHECKED: &'static str =
        "whether prompts fit the model's context, vocabulary, logprobs and chat template: no model is loaded here";
}

impl BodyCheck for ModelFree {
    fn check(&self, endpoint: Endpoint, body: &[u8]) -> Result<(), BodyFault> {
        check_without_model(endpoint, body).map_err(|refusal| refusal.error.into())
    }
}

impl From<ErrorBody> for BodyFault {
    fn from(error: ErrorBody) -> Self {
        let ErrorBody { message, param, code, .. } = error;
        Self { code, param, message }
    }
}
