//! Waiting for a batch: polls, shows progress, outlives a restart of the server,
//! and says how it ended.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::Client;
use crate::App;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::progress::{Beside, Counts, Display, Rate, line, short_id};

/// Longest pause between looks.
pub(crate) const INTERVAL: Duration = Duration::from_secs(1);
/// A server that is gone may come back within this time (it resumes by itself).
const GONE_MAX: Duration = Duration::from_secs(600);

/// How to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiting {
    pub(crate) interval: Duration,
    pub(crate) timeout: Option<Duration>,
}

/// Whether a status is one that only a resume leaves.
pub(crate) fn is_terminal(status: &str) -> bool {
    matches!(status, "completed" | "failed" | "expired" | "cancelled")
}

/// Waits until the batch has ended and returns it as it is then.
/// Ctrl-C and the time limit end the waiting, never the batch.
pub(crate) async fn until_ended(client: &Client, app: &App, id: &str, waiting: Waiting) -> Result<Value> {
    app.interrupts.listen()?;
    let mut display = Display::new(&app.ui);
    let watching = watch(client, id, waiting, &mut display);
    let ended = tokio::select! {
        batch = watching => Some(batch),
        () = app.interrupts.wait() => None,
    };
    display.clear();
    ended.unwrap_or_else(|| Err(interrupted(app, id)))
}

/// Says that Ctrl-C ended the waiting and not the batch.
pub(crate) fn interrupted(app: &App, id: &str) -> Failure {
    let text = format!("still running on the server; \"batch status {}\" to look again", lookup_id(id));
    app.ui.summary(&text);
    Failure::shown(Exit::Interrupted, text)
}

/// A prefix that finds the batch again.
pub(crate) fn lookup_id(id: &str) -> String {
    short_id(id).trim_end_matches('…').to_owned()
}

async fn watch(client: &Client, id: &str, waiting: Waiting, display: &mut Display) -> Result<Value> {
    let start = Instant::now();
    let mut rate = Rate::default();
    let mut pause = Duration::from_millis(100).min(waiting.interval);
    let mut gone_since: Option<Instant> = None;
    let path = format!("/v1/batches/{id}");
    loop {
        match client.get(&path, &[]).await {
            Ok(batch) => {
                gone_since = None;
                let counts = Counts::of(&batch);
                if is_terminal(&counts.status) {
                    return Ok(batch);
                }
                rate.push(start.elapsed(), counts.done, counts.tokens);
                let kv_cache_usage = if display.is_shown() { client.kv_cache_usage().await } else { None };
                let beside = Beside { waiting_for: batch["waiting_for"].as_str(), kv_cache_usage };
                let text = line(&counts, &rate, beside);
                display.show(start.elapsed(), &counts.status, &text);
            }
            Err(failure) if failure.exit == Exit::Unreachable => {
                let since = *gone_since.get_or_insert_with(Instant::now);
                if since.elapsed() > GONE_MAX {
                    return Err(failure);
                }
                let text = format!("{} server not reachable, trying again", short_id(id));
                display.show(start.elapsed(), "unreachable", &text);
            }
            Err(failure) => return Err(failure),
        }
        if let Some(limit) = waiting.timeout
            && start.elapsed() + pause > limit
        {
            tokio::time::sleep(limit.saturating_sub(start.elapsed())).await;
            let text = format!("{} did not end within {}", short_id(id), human::duration(limit));
            return Err(Failure::new(Exit::TimedOut, text)
                .hint(format!("the batch goes on; `batch status {}` to look again", lookup_id(id))));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 3 / 2).min(waiting.interval);
    }
}

/// The exit code that a batch asks for: 0, 3 (some failed) or 8 (not completed).
pub(crate) fn exit_of(batch: &Value) -> Exit {
    let counts = Counts::of(batch);
    match counts.status.as_str() {
        "completed" if counts.failed == 0 => Exit::Success,
        "completed" => Exit::RequestsFailed,
        "failed" | "expired" | "cancelled" => Exit::JobFailed,
        _ => Exit::Success,
    }
}

/// Ends a command with the batch's exit code; what it means was shown already.
pub(crate) fn finish_with(batch: &Value) -> Result {
    match exit_of(batch) {
        Exit::Success => Ok(()),
        exit => Err(Failure::shown(exit, crate::batches::summary(batch))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ending_has_its_exit_code() {
        let batch = |status: &str, failed: u64| {
            serde_json::json!({"id": "batch_1", "status": status, "paused_at": null,
                "request_counts": {"total": 10, "completed": 10 - failed, "failed": failed}})
        };
        assert_eq!(exit_of(&batch("completed", 0)), Exit::Success);
        assert_eq!(exit_of(&batch("completed", 10)), Exit::RequestsFailed);
        assert_eq!(exit_of(&batch("expired", 0)), Exit::JobFailed);
        assert_eq!(exit_of(&batch("cancelled", 0)), Exit::JobFailed);
        assert_eq!(exit_of(&batch("failed", 0)), Exit::JobFailed);
        assert_eq!(exit_of(&batch("in_progress", 3)), Exit::Success);
    }
}
