//! `waiting_for`: why nothing of a batch runs now, and what would help.

use std::collections::BTreeSet;

use overnight_store::{Job, LiveWorker, Progress};
use overnight_types::JobState;
use overnight_worker::generate::{EngineState, EngineStatus};

use super::object::queue_position;
use crate::error::Result;
use crate::state::Inner;

/// `None` when something runs, or when nothing should.
pub(crate) async fn reason(state: &Inner, job: &Job, progress: &Progress) -> Result<Option<String>> {
    if !matches!(job.state, JobState::Validating | JobState::InProgress) {
        return Ok(None);
    }
    if job.paused_at.is_some() {
        return Ok(Some("paused; resume the batch to go on".to_owned()));
    }
    if progress.shards_leased > 0 {
        return Ok(None);
    }
    let workers = state.live_workers().await?;
    let own = state.parts.generate.as_ref().map(|generate| generate.status());
    Ok(why_idle(job, progress, &workers, own.as_ref()))
}

/// `own` is the engine of this process, which may be on its way to a worker.
fn why_idle(job: &Job, progress: &Progress, workers: &[LiveWorker], own: Option<&EngineStatus>) -> Option<String> {
    if workers.is_empty() {
        return Some("no worker is alive; start `batch serve` or `batch worker`".to_owned());
    }
    let model = job.model.as_deref()?;
    let is_it = |name: &str| name == model || name == "*";
    // A worker's row holds what it can run now, so one without an engine has no model.
    let running: BTreeSet<&str> = workers.iter().flat_map(|live| &live.worker.models).map(String::as_str).collect();
    if running.iter().copied().any(is_it) {
        let retry = progress.items_waiting > 0 && progress.items_waiting == progress.counts.unfinished();
        if retry {
            return Some("every request that is left waits for a retry after an error".to_owned());
        }
        return its_turn(queue_position(job, progress)?);
    }
    let own = own.filter(|own| own.models.iter().any(|name| is_it(name)));
    match own.map(|own| &own.state) {
        Some(EngineState::Starting(_)) => return Some("the model is still loading".to_owned()),
        Some(EngineState::Poisoned(_) | EngineState::Stalled(_)) => {
            return Some("the engine of this server cannot answer; its log says why".to_owned());
        }
        Some(EngineState::Ready) | None => {}
    }
    if workers.iter().flat_map(|live| &live.worker.may_load).any(|name| is_it(name)) {
        return Some(format!("a worker that serves {model} still loads it, or builds its engine anew"));
    }
    if running.is_empty() {
        let remedy = "start `batch worker` or `batch serve` with the model";
        return Some(format!("no live worker has an engine that can answer; {remedy} {model}"));
    }
    let others = running.into_iter().collect::<Vec<_>>().join(", ");
    Some(format!("no live worker has the model {model}; start one that has it (live workers have: {others})"))
}

/// The first in the queue waits for a moment only.
fn its_turn(position: u32) -> Option<String> {
    let ahead = position.checked_sub(1).filter(|ahead| *ahead > 0)?;
    let batches = if ahead == 1 { "1 batch goes" } else { &format!("{ahead} batches go") };
    Some(format!("its turn; {batches} before it, by priority, deadline and age"))
}
