//! `waiting_for`: why nothing of a batch runs now, and what would help.

use overnight_store::{Job, LiveWorker, Progress};
use overnight_types::JobState;

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
    Ok(why_idle(job, progress, &workers))
}

fn why_idle(job: &Job, progress: &Progress, workers: &[LiveWorker]) -> Option<String> {
    if workers.is_empty() {
        return Some("no worker is alive; start `batch serve` or `batch worker`".to_owned());
    }
    let model = job.model.as_deref()?;
    let mut served: Vec<&str> = workers.iter().flat_map(|live| &live.worker.models).map(String::as_str).collect();
    if served.iter().any(|name| *name == model || *name == "*") {
        let retry = progress.items_waiting > 0 && progress.items_waiting == progress.counts.unfinished();
        return retry.then(|| "every request that is left waits for a retry after an error".to_owned());
    }
    served.sort_unstable();
    served.dedup();
    let others = if served.is_empty() { "none".to_owned() } else { served.join(", ") };
    Some(format!("no live worker has the model {model}; start one that has it (live workers have: {others})"))
}
