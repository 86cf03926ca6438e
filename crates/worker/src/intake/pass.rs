//! The pass over an input, in pieces after each of which it can be saved: lines,
//! checks, shards, hash, and the custom ids' hashes of the piece.
//!
//! Where a piece ends depends on the input and the options alone, never on chunk
//! edges or time, so that a run written by a killed intake is written again with
//! the same bytes.

use std::ops::ControlFlow;

use bytes::Bytes;
use futures::StreamExt;
use overnight_blobs::index::{self, Entry, IndexKey};
use overnight_blobs::lines::{Line, LineSplitter};
use overnight_blobs::sha::Sha256;
use overnight_store::NewShard;
use overnight_types::JobId;
use serde::{Deserialize, Serialize};

use super::IntakeOptions;
use super::check::{self, BodyCheck, BodyFinding, FirstModel, KnownModels};
use super::cut::Cutter;
use super::findings::{Findings, IntakeCode};
use super::source::{Source, SourceError};

/// Of the saved form.
const VERSION: u32 = 1;

/// A pass in progress.
#[derive(Debug)]
pub struct Pass {
    options: IntakeOptions,
    key: IndexKey,
    state: State,
    size: Option<u64>,
    body_findings: Vec<BodyFinding>,
    num_body_findings: u64,
}

/// What is saved between pieces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct State {
    version: u32,
    /// First byte and number of the next line.
    offset: u64,
    line: u64,
    /// Sorted runs written so far, bytes of each.
    runs: Vec<u64>,
    first_model: Option<FirstModel>,
    findings: Findings,
    cutter: Cutter,
    sha: Sha256,
    /// The pass is over: everything was found.
    finished: bool,
}

/// One piece of the input, checked.
#[derive(Debug)]
pub struct Piece {
    /// Shards that became certain.
    pub shards: Vec<NewShard>,
    /// Custom ids of the piece, in input order.
    pub entries: Vec<Entry>,
    /// The input ends here.
    pub at_end: bool,
}

impl Pass {
    /// From the start of an input.
    pub fn new(job: JobId, options: IntakeOptions) -> Self {
        let state = State {
            version: VERSION,
            offset: 0,
            line: 1,
            runs: Vec::new(),
            first_model: None,
            findings: Findings::new(options.limits.errors_kept_max),
            cutter: Cutter::new(&options.limits),
            sha: Sha256::default(),
            finished: false,
        };
        Self::over(job, options, state)
    }

    /// From where a killed intake was saved by [`Pass::save`], or from the start when
    /// nothing is saved. `None` when something is that this version cannot read: then
    /// what was recorded with it must go before a new pass.
    pub fn resume(job: JobId, options: IntakeOptions, offset: u64, notes: Option<&str>) -> Option<Self> {
        if offset == 0 && notes.is_none() {
            return Some(Self::new(job, options));
        }
        let state: State = serde_json::from_str(notes?).ok()?;
        let fits = state.version == VERSION && state.offset == offset;
        fits.then(|| Self::over(job, options, state))
    }

    fn over(job: JobId, options: IntakeOptions, state: State) -> Self {
        let key = IndexKey::of(job);
        Self { options, key, state, size: None, body_findings: Vec::new(), num_body_findings: 0 }
    }

    /// What the input is checked against.
    pub fn options(&self) -> &IntakeOptions {
        &self.options
    }

    /// The state as text, to be given to [`Pass::resume`].
    pub fn save(&self) -> String {
        serde_json::to_string(&self.state).expect("the state is plain data")
    }

    /// Bytes that are settled.
    pub fn offset(&self) -> u64 {
        self.state.offset
    }

    /// Items so far.
    pub fn num_items(&self) -> u64 {
        self.state.cutter.num_items()
    }

    /// Shards in all, once the input has ended.
    pub fn num_shards(&self) -> u32 {
        self.state.cutter.num_shards()
    }

    /// The first model that was named.
    pub fn model(&self) -> Option<&str> {
        self.state.first_model.as_ref().map(|first| first.name.as_str())
    }

    /// Errors so far.
    pub fn findings(&self) -> &Findings {
        &self.state.findings
    }

    /// Whether [`Pass::finish`] was called, here or before it was saved.
    pub fn is_finished(&self) -> bool {
        self.state.finished
    }

    /// Bytes of the runs written so far, by number.
    pub fn runs(&self) -> &[u64] {
        &self.state.runs
    }

    /// A run of so many bytes was written for the piece read last.
    pub fn add_run(&mut self, bytes: u64) {
        self.state.runs.push(bytes);
    }

    /// The runs as they are now, in place of those that were written.
    pub(crate) fn set_runs(&mut self, runs: Vec<u64>) {
        self.state.runs = runs;
    }

    /// The same pass over the input's first bytes only, which must end with a line.
    pub(crate) fn up_to(mut self, end: u64) -> Self {
        self.size = Some(end);
        self
    }

    /// Bodies that the check refused: the first ones, and how many in all.
    pub fn body_findings(&self) -> (Vec<BodyFinding>, u64) {
        (self.body_findings.clone(), self.num_body_findings)
    }

    /// Reads on to the end of the next piece.
    pub async fn read_piece(
        &mut self,
        source: &Source,
        body_check: Option<&dyn BodyCheck>,
    ) -> Result<Piece, SourceError> {
        let size = self.check_size(source).await?;
        let mut piece = Piece { shards: Vec::new(), entries: Vec::new(), at_end: false };
        let piece_end = self.state.offset.saturating_add(self.options.piece_bytes_max);
        let mut splitter =
            LineSplitter::starting_at(self.state.offset, self.state.line, self.options.limits.line_bytes_max);
        let mut chunks = source.stream(self.state.offset..size);
        let mut full = false;
        while let Some(chunk) = if full { None } else { chunks.next().await } {
            let chunk: Bytes = chunk?;
            let taken = splitter.feed(&chunk, |line| {
                self.take_line(&line, &mut piece.entries, body_check);
                full = piece.entries.len() >= self.options.run_items_max || line.end >= piece_end;
                if full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            self.state.sha.update(&chunk[..taken]);
        }
        if !full {
            splitter.finish(|line| self.take_line(&line, &mut piece.entries, body_check));
        }
        (self.state.offset, self.state.line) = splitter.position();
        piece.at_end = self.state.offset >= size;
        piece.shards = if piece.at_end { self.end()? } else { self.state.cutter.settled() };
        Ok(piece)
    }

    /// Ends the pass: what was found, with what only the whole input tells.
    pub fn finish(&mut self, models: &KnownModels, duplicates: super::duplicates::Duplicates) -> Findings {
        let findings = &mut self.state.findings;
        let num_items = self.state.cutter.num_items();
        if num_items == 0 {
            findings.add(IntakeCode::EmptyFile, None, None, || "the file holds no request".to_owned());
        }
        let limit = self.options.limits.job_items_max.unwrap_or(u64::MAX).min(index::ITEMS_MAX);
        if num_items > limit {
            findings.add(IntakeCode::TooManyTasks, None, None, || {
                format!("the file holds {num_items} requests, the limit is {limit}")
            });
        }
        check::check_served(self.state.first_model.as_ref(), models, findings);
        duplicates.add_to(findings);
        self.state.finished = true;
        findings.clone()
    }

    async fn check_size(&mut self, source: &Source) -> Result<u64, SourceError> {
        if let Some(size) = self.size {
            return Ok(size);
        }
        let size = source.size().await?;
        match self.options.expected {
            Some(expected) if expected.bytes != size => {
                Err(SourceError::Changed { what: format!("it has {size} bytes, recorded are {}", expected.bytes) })
            }
            _ => Ok(*self.size.insert(size)),
        }
    }

    fn end(&mut self) -> Result<Vec<NewShard>, SourceError> {
        let sha256 = self.state.sha.clone().finish();
        match self.options.expected {
            Some(expected) if expected.sha256 != sha256 => {
                Err(SourceError::Changed { what: "its sha256 is not the recorded one".to_owned() })
            }
            _ => Ok(self.state.cutter.finish()),
        }
    }

    fn take_line(&mut self, line: &Line<'_>, entries: &mut Vec<Entry>, body_check: Option<&dyn BodyCheck>) {
        if line.is_blank() {
            return;
        }
        let State { first_model, findings, cutter, .. } = &mut self.state;
        let IntakeOptions { endpoint, limits, .. } = &self.options;
        let num_before = findings.total;
        let checked = check::check_line(line, *endpoint, limits.line_bytes_max, first_model, findings);
        // Past the largest index the file fails for its number of items anyway.
        if let (Some(custom_id), Ok(item)) = (checked.custom_id, u32::try_from(cutter.num_items())) {
            entries.push(Entry { hash: self.key.hash(&custom_id.text()), item });
        }
        cutter.item(line);
        let (Some(body), Some(body_check)) = (checked.body, body_check) else { return };
        // A line that fails the whole batch needs no second reason.
        if findings.total > num_before {
            return;
        }
        if let Err(fault) = body_check.check(*endpoint, body.token) {
            self.num_body_findings += 1;
            if self.body_findings.len() < limits.errors_kept_max {
                self.body_findings.push(BodyFinding { line: line.number, fault });
            }
        }
    }
}
