//! The end of a run: its files where they were asked for, and its last words.

use std::collections::BTreeMap;
use std::path::Path;

use futures::StreamExt;
use overnight_blobs::ObjectName;
use overnight_store::Job;
use overnight_types::{FileId, JobState};
use serde_json::{Value, json};

use super::{counts_of, store_error};
use crate::App;
use crate::batches;
use crate::client::download::{Sink, Target};
use crate::commands::results::Lines;
use crate::error::{Exit, Failure, Result};
use crate::output::{human, plain};
use crate::outputs;
use crate::remedy::{self, Group};
use crate::service::Place;

/// Codes that are told apart; those beyond are told together.
const CODES_MAX: usize = 20;

/// Copies the published files to where they were asked for.
pub(super) async fn publish(place: &Place, job: &Job, output: &Path, errors: &Path, app: &App) -> Result {
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
    copy(place, job.output_file_id, output, |_| {}).await?;
    let without_answer = counts.total - counts.completed;
    let mut groups = BTreeMap::new();
    if without_answer > 0 {
        copy(place, job.error_file_id, errors, |line| count(line, &mut groups)).await?;
    } else if output.as_os_str() != "-" {
        outputs::remove_failures(errors, &app.ui)?;
    }
    let to = if output.as_os_str() == "-" { "stdout".to_owned() } else { output.display().to_string() };
    let mut text = format!("{} in {to}", human::counted(counts.completed, "answer"));
    if without_answer > 0 {
        text.push_str(&format!(" · {} without an answer in {}", human::count(without_answer), errors.display()));
    }
    app.ui.summary(&text);
    for (code, group) in &groups {
        app.ui.summary(format!("  {} {code}: {}", human::count(group.count), remedy::shown(&group.message)));
        app.ui.say(format!("    {}", remedy::of(code, group.status, "the same command with --retry-failed")));
    }
    if app.ui.is_json() {
        let codes = groups.iter().map(|(code, group)| (code.clone(), json!(group.count)));
        let record = json!({"id": job.id, "status": job.state.as_str(), "output": output.to_string_lossy(),
            "errors": (without_answer > 0).then(|| errors.to_string_lossy().into_owned()),
            "error_codes": codes.collect::<serde_json::Map<_, _>>(),
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed}});
        app.ui.data(&format!("{record}\n"))?;
    }
    match job.state {
        JobState::Completed if counts.failed == 0 => Ok(()),
        JobState::Completed => Err(Failure::shown(Exit::RequestsFailed, text)),
        _ => Err(Failure::shown(Exit::JobFailed, text)),
    }
}

/// Adds a line of the error file to its code's group.
fn count(line: &[u8], groups: &mut BTreeMap<String, Group>) {
    let line: Value = serde_json::from_slice(line).unwrap_or(Value::Null);
    let response = &line["response"];
    let error = if line["error"].is_null() { &response["body"]["error"] } else { &line["error"] };
    let status = response["status_code"].as_u64();
    let code = match (plain(&error["code"]), status) {
        (code, _) if !code.is_empty() => remedy::shown(&code),
        (_, Some(status)) => format!("http_{status}"),
        (_, None) => "no code".to_owned(),
    };
    let code = if groups.len() >= CODES_MAX && !groups.contains_key(&code) { "other codes".to_owned() } else { code };
    let first = || Group { count: 0, status, message: plain(&error["message"]) };
    groups.entry(code).or_insert_with(first).count += 1;
}

async fn copy(place: &Place, id: Option<FileId>, to: &Path, mut each_line: impl FnMut(&[u8])) -> Result {
    let (mut sink, _) = Sink::open(&Target::new(to, false)?, |_| false)?;
    let file = match id {
        Some(id) => place.store.find_file(id).await.map_err(store_error("find the results"))?,
        None => None,
    };
    if let Some(file) = file {
        let mut lines = Lines::default();
        let mut stream = place.blobs.stream(&ObjectName::file(file.id), 0..file.bytes);
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|err| Failure::from_error("read the results", &err))?;
            sink.write(&piece)?;
            lines.push(&piece).iter().for_each(|line| each_line(line));
        }
    }
    sink.finish()
}
