//! `batch resume`: continue, or re-open what ended with something left.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use crate::App;
use crate::batches;
use crate::client::wait::{self, Waiting};
use crate::client::{Client, ids};
use crate::commands::list;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::progress::{Counts, short_id};

/// Arguments of `batch resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// A batch
    #[arg(required_unless_present = "all_interrupted")]
    id: Option<String>,
    /// Put the unfinished requests of every interrupted batch back to work at once
    #[arg(long, conflicts_with = "id")]
    all_interrupted: bool,
    /// The new window of a re-opened batch, for example 24h
    #[arg(long, value_name = "DURATION", value_parser = super::submit::window)]
    window: Option<String>,
    /// Wait until it has ended; the exit code says how
    #[arg(long)]
    wait: bool,
    /// Like --wait, with progress
    #[arg(long)]
    watch: bool,
}

pub(crate) async fn run(args: ResumeArgs, app: &App) -> Result {
    let client = app.client()?;
    let Some(id) = &args.id else {
        return all_interrupted(&client, app).await;
    };
    let id = ids::resolve(&client, id).await?;
    let path = format!("/v1/batches/{id}");
    let before = client.get(&path, &[]).await?;
    let plan = plan(&before)?;
    let body = args.window.as_ref().map_or_else(|| json!({}), |window| json!({"completion_window": window}));
    let batch = client.post(&format!("{path}/resume"), &body, None).await?;
    app.ui.summary(plan);
    if args.wait || args.watch {
        let waiting = Waiting { interval: wait::INTERVAL, timeout: app.globals.timeout };
        let batch = wait::until_ended(&client, app, &id, waiting).await?;
        app.ui.summary(batches::summary(&batch));
        app.ui.record(&batch, batches::COLUMNS, || batches::card(&batch))?;
        return wait::finish_with(&batch);
    }
    app.ui.record(&batch, batches::COLUMNS, || batches::card(&batch))?;
    app.ui.say(format!("next: batch status {} --watch", wait::lookup_id(&id)));
    Ok(())
}

/// What a resume of this batch does, in words, or why it does nothing.
fn plan(batch: &Value) -> Result<String> {
    let counts = Counts::of(batch);
    let outcome = |key: &str| batch["outcome_counts"][key].as_u64().unwrap_or(0);
    let kept = human::count(outcome("succeeded"));
    let failed = outcome("errored");
    let unfinished = counts.total.saturating_sub(outcome("succeeded")).saturating_sub(failed);
    let id = short_id(&counts.id);
    match counts.status.as_str() {
        "failed" => {
            Err(Failure::new(Exit::InvalidInput, format!("{id} never validated, so there is nothing to resume"))
                .code("batch_invalid")
                .hint("correct the file and submit it: `batch validate FILE` shows every problem"))
        }
        "validating" | "in_progress" if counts.paused => {
            Ok(format!("{kept} kept; {} unfinished go on", human::count(counts.total.saturating_sub(counts.done))))
        }
        "validating" | "in_progress" => Ok(format!("{id} is running: nothing to resume but what a lost worker held")),
        "cancelling" | "finalizing" => Err(Failure::new(Exit::Failure, format!("{id} is {} just now", counts.status))
            .code("batch_busy")
            .hint(format!("batch status {} --wait, then resume", wait::lookup_id(&counts.id)))),
        "completed" if failed == 0 => {
            Err(Failure::new(Exit::Failure, format!("{id} completed without a failure: nothing to resume"))
                .code("nothing_to_resume"))
        }
        _ => Ok(format!(
            "{kept} kept; {} failed and {} unfinished will run",
            human::count(failed),
            human::count(unfinished)
        )),
    }
}

async fn all_interrupted(client: &Client, app: &App) -> Result {
    let mut resumed = Vec::new();
    for batch in list::newest(client, 10_000).await? {
        let counts = Counts::of(&batch);
        if counts.paused || !matches!(counts.status.as_str(), "validating" | "in_progress") {
            continue;
        }
        resumed.push(client.post(&format!("/v1/batches/{}/resume", counts.id), &json!({}), None).await?);
        // Many batches must not become a burst.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    app.ui.rows(&resumed, batches::COLUMNS)?;
    app.ui.summary(format!("{} running batches looked at; what lost workers held is free again", resumed.len()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_says_what_is_kept_and_what_runs() {
        let batch = json!({"id": "batch_1", "status": "expired", "paused_at": null,
            "request_counts": {"total": 100_000, "completed": 41_208, "failed": 39},
            "outcome_counts": {"processing": 0, "succeeded": 41_208, "errored": 39, "canceled": 0, "expired": 58_753}});
        assert_eq!(
            plan(&batch).expect("expired can be resumed"),
            "41,208 kept; 39 failed and 58,753 unfinished will run"
        );
    }

    #[test]
    fn batch_that_never_validated_explains_itself() {
        let failure = plan(&json!({"id": "batch_1", "status": "failed"})).expect_err("failed cannot be resumed");
        assert_eq!(failure.exit, Exit::InvalidInput);
    }
}
