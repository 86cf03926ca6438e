//! Intake: reads an input once, checks the envelope of every line, proves custom
//! ids unique, and cuts the lines into shards.
//!
//! Invariants: memory is bounded whatever the input holds; every error is found
//! and the first of them are kept, with physical line numbers; an intake that was
//! killed goes on from its last record and ends with the same result. The body is
//! not judged here, but for its `model` and `stream`.
//! Start with [`validate`], which is the whole of it without side effects; the
//! step of a job is in `lifecycle`.

pub mod check;
pub mod cut;
pub mod duplicates;
pub mod findings;
pub mod pass;
pub mod source;

#[cfg(test)]
mod tests;

use overnight_blobs::Blobs;
use overnight_blobs::index::{self, Runs};
use overnight_store::Store;
use overnight_types::{Endpoint, JobId, Limits};

pub use check::{BodyCheck, BodyFault, BodyFinding, KnownModels, ModelFree};
pub use findings::{Findings, IntakeCode};
pub use pass::{Pass, Piece};
pub use source::{Source, SourceError};

/// What an input is checked against.
#[derive(Clone)]
pub struct IntakeOptions {
    /// What every line's `url` must be.
    pub endpoint: Endpoint,
    /// The models that are served.
    pub models: KnownModels,
    /// Limits of lines, items and shards.
    pub limits: Limits,
    /// The bytes as recorded at upload; `None` skips the comparison.
    pub expected: Option<Expected>,
    /// Custom ids of one sorted run.
    pub run_items_max: usize,
    /// Input bytes between two records of progress.
    pub piece_bytes_max: u64,
}

/// An input as it was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Its size.
    pub bytes: u64,
    /// Of its bytes.
    pub sha256: [u8; 32],
}

impl IntakeOptions {
    /// With default limits and sizes.
    pub fn new(endpoint: Endpoint, models: KnownModels) -> Self {
        let (run_items_max, piece_bytes_max) = (1_000_000, 1 << 30);
        Self { endpoint, models, limits: Limits::default(), expected: None, run_items_max, piece_bytes_max }
    }
}

impl std::fmt::Debug for IntakeOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IntakeOptions").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// What a validation found.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidationReport {
    /// Lines that hold a request: not blank.
    pub requests: u64,
    /// The model that the lines name; the first one when they differ.
    pub model: Option<String>,
    /// What makes a batch of this input fail.
    pub findings: Findings,
    /// Requests that would end with HTTP 400, when bodies were checked: the first ones.
    pub body_findings: Vec<BodyFinding>,
    /// How many there are in all.
    pub num_body_findings: u64,
}

impl ValidationReport {
    /// Whether a batch of this input would run.
    pub fn is_valid(&self) -> bool {
        self.findings.is_empty()
    }

    /// Whether it would run and no request be refused for its body, as far as bodies were checked.
    pub fn is_clean(&self) -> bool {
        self.is_valid() && self.num_body_findings == 0
    }

    /// The wire's `batch_validation` object; `unchecked` says what nobody looked at.
    pub fn to_json(&self, unchecked: Option<&str>) -> serde_json::Value {
        let body_errors: Vec<serde_json::Value> = self
            .body_findings
            .iter()
            .map(|BodyFinding { line, fault }| {
                serde_json::json!({"code": fault.code, "line": line, "message": fault.message,
                    "param": fault.param})
            })
            .collect();
        serde_json::json!({
            "object": "batch_validation", "valid": self.is_clean(), "requests": self.requests, "model": self.model,
            "errors": self.findings.to_json(),
            "body_errors": {"object": "list", "data": body_errors, "total": self.num_body_findings},
            "unchecked": unchecked,
        })
    }
}

/// Checks an input as intake would, with no side effect: used by the validate
/// route, `batch validate` and `batch submit`. `body_check` adds a typed parse of
/// each body. Errors only when the input cannot be read to its end for reasons
/// that are not the input's.
pub async fn validate(
    source: &Source,
    options: IntakeOptions,
    body_check: Option<&dyn BodyCheck>,
) -> Result<ValidationReport, SourceError> {
    // Keyed like a job of its own that never exists.
    let job = JobId::new();
    let models = options.models.clone();
    let mut pass = Pass::new(job, options);
    let mut scratch: Option<Blobs> = None;
    let mut written = Vec::new();
    let mut cuts = Vec::new();
    loop {
        let mut piece = match pass.read_piece(source, body_check).await {
            Ok(piece) => piece,
            Err(err) => {
                let findings = unreadable(err)?;
                return Ok(report(pass, findings));
            }
        };
        cuts.append(&mut piece.shards);
        let run = index::encode_run(&mut piece.entries);
        if piece.at_end {
            let nowhere = Blobs::memory();
            let blobs = scratch.as_ref().unwrap_or(&nowhere);
            let runs = Runs { blobs, written, last: &piece.entries };
            let twins = index::merge(runs, None, pass.options().limits.errors_kept_max).await?;
            let duplicates = duplicates::verify(source, &cuts, twins, &pass.options().limits).await?;
            let findings = pass.finish(&models, duplicates);
            return Ok(report(pass, findings));
        }
        let blobs = match &mut scratch {
            Some(blobs) => blobs,
            none => none.insert(Blobs::scratch()?),
        };
        let name = overnight_blobs::ObjectName::intake_run(job, u32::try_from(written.len()).unwrap_or(u32::MAX));
        written.push((name, run.len() as u64));
        blobs.put(&name, run).await?;
    }
}

/// Models that a job may name: those configured here and those that a live worker
/// has or may load. While nobody says what is served (no worker lives, or all of them still
/// load) a name cannot be judged, and is taken: the batch waits, and says for what.
pub async fn known_models(store: &dyn Store, configured: &[String]) -> Result<KnownModels, crate::Error> {
    let workers = store.list_live_workers().await.map_err(crate::Error::store("list live workers"))?;
    let mut names = configured.to_vec();
    names.extend(workers.into_iter().flat_map(|live| [live.worker.models, live.worker.may_load]).flatten());
    if names.is_empty() || names.iter().any(|name| name == "*") {
        return Ok(KnownModels::Any);
    }
    names.sort_unstable();
    names.dedup();
    Ok(KnownModels::Named(names))
}

/// Turns trouble that is the input's own into its finding; passes other trouble on.
pub(crate) fn unreadable(err: SourceError) -> Result<Findings, SourceError> {
    let mut findings = Findings::new(1);
    match err {
        SourceError::Denied { .. } => {
            findings.add(IntakeCode::InputNoPermissions, None, None, || {
                "the input cannot be read with the rights of this process".to_owned()
            });
        }
        SourceError::Changed { what } => findings.add(IntakeCode::InputModified, None, None, || what),
        other => return Err(other),
    }
    Ok(findings)
}

fn report(pass: Pass, findings: Findings) -> ValidationReport {
    let (body_findings, num_body_findings) = pass.body_findings();
    ValidationReport {
        requests: pass.num_items(),
        model: pass.model().map(str::to_owned),
        findings,
        body_findings,
        num_body_findings,
    }
}
