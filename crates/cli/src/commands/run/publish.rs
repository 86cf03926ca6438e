//! The end of a run: its files where they were asked for, and its last words.

use std::path::Path;

use futures::StreamExt;
use overnight_blobs::{Blobs, ObjectName};
use overnight_store::{Files, Job};
use overnight_types::{FileId, JobState};
use serde_json::{Value, json};

use super::{counts_of, store_error};
use crate::App;
use crate::batches;
use crate::client::download::{Sink, Target};
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::service::Place;

/// Copies the published files to where they were asked for.
pub(super) async fn publish(
    blobs: &Blobs,
    place: &Place,
    job: &Job,
    output: &Path,
    errors: &Path,
    app: &App,
) -> Result {
    if job.state == JobState::Failed {
        let errors: Value =
            job.errors.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null);
        let batch = json!({"errors": errors});
        let mut failure = Failure::new(Exit::InvalidInput, "the input is not valid, nothing ran");
        for problem in batches::problems(&batch).lines() {
            failure = failure.note(format!("={}", problem.trim_start().replacen("", " ", 1)));
        }
        return Err(failure);
    }
    let counts = counts_of(place, job).await?;
    copy(blobs, place, job.output_file_id, output).await?;
    let without_answer = counts.total - counts.completed;
    if without_answer > 0 {
        copy(blobs, place, job.error_file_id, errors).await?;
    } else if errors.is_file() && output.as_os_str() != "-" {
        // Those of an earlier round of this run, all of which have an answer now.
        std::fs::remove_file(errors)?;
    }
    let place = if output.as_os_str() == "-" { "stdout".to_owned() } else { output.display().to_string() };
    let mut text = format!("{} answers in {place}", human::count(counts.completed));
    if without_answer > 0 {
        text.push_str(&format!(" · {} without an answer in {}", human::count(without_answer), errors.display()));
    }
    app.ui.summary(&text);
    if app.ui.is_json() {
        let record = json!({"id": job.id, "status": job.state.as_str(), "output": output.to_string_lossy(),
            "errors": (without_answer > 0).then(|| errors.to_string_lossy().into_owned()),
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed}});
        app.ui.data(&format!("{record}\n"))?;
    }
    match job.state {
        JobState::Completed if counts.failed == 0 => Ok(()),
        JobState::Completed => Err(Failure::shown(Exit::RequestsFailed, text)),
        _ => Err(Failure::shown(Exit::JobFailed, text)),
    }
}

async fn copy(blobs: &Blobs, place: &Place, id: Option<FileId>, to: &Path) -> Result {
    let (mut sink, _) = Sink::open(&Target::new(to, false)?, |_| false)?;
    let file = match id {
        Some(id) => place.store.find_file(id).await.map_err(store_error("find the results"))?,
        None => None,
    };
    if let Some(file) = file {
        let mut stream = blobs.stream(&ObjectName::file(file.id), 0..file.bytes);
        while let Some(piece) = stream.next().await {
            sink.write(&piece.map_err(|err| Failure::from_error("read the results", &err))?)?;
        }
    }
    sink.finish()
}
