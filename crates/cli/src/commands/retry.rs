//! `batch retry`: a selective resume.

use clap::Args;
use serde_json::{Value, json};

use crate::App;
use crate::batches;
use crate::client::{ids, wait};
use crate::error::{Failure, Result};
use crate::output::{human, plain};
use crate::progress::{Counts, short_id};
use crate::state;

/// Arguments of `batch retry`.
#[derive(Debug, Args)]
pub(crate) struct RetryArgs {
    /// A batch that has ended
    id: String,
    /// Requests that failed
    #[arg(long)]
    failed: bool,
    /// Requests that the window's end left undone
    #[arg(long)]
    expired: bool,
    /// These custom ids, comma-separated
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    ids: Vec<String>,
    /// Requests that ended with this code; may be given several times
    #[arg(long, value_name = "CODE")]
    error_code: Vec<String>,
    /// Leave the old batch alone and make a new one from those lines
    #[arg(long)]
    new_batch: bool,
    /// The new window, for example 24h
    #[arg(long, value_name = "DURATION")]
    window: Option<String>,
    /// Only say what would run
    #[arg(short = 'n', long)]
    dry_run: bool,
}

pub(crate) async fn run(args: RetryArgs, app: &App) -> Result {
    let nothing_chosen = !args.failed && !args.expired && args.ids.is_empty() && args.error_code.is_empty();
    if nothing_chosen {
        return Err(Failure::usage("say which requests run again")
            .hint("--failed, --expired, --ids A,B or --error-code CODE; `batch errors ID` lists the codes"));
    }
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let before = client.get(&format!("/v1/batches/{id}"), &[]).await?;
    if !wait::is_terminal(&Counts::of(&before).status) {
        return Err(Failure::new(crate::error::Exit::Failure, format!("{} has not ended yet", short_id(&id)))
            .code("batch_busy")
            .hint(format!("batch status {} --wait, then retry", wait::lookup_id(&id))));
    }
    let chosen = describe(&args, &before);
    if args.dry_run {
        app.ui.summary(format!("would run: {chosen}; nothing was changed"));
        return app.ui.record(&before, batches::COLUMNS, || batches::card(&before));
    }
    let mut outcomes = Vec::new();
    if args.failed {
        outcomes.push("errored");
    }
    if args.expired {
        outcomes.push("expired");
    }
    let mut body = json!({
        "outcomes": outcomes, "error_codes": args.error_code, "custom_ids": args.ids, "new_batch": args.new_batch,
    });
    if let Some(window) = &args.window {
        body["completion_window"] = Value::from(window.as_str());
    }
    let batch = client.post(&format!("/v1/batches/{id}/retry"), &body, None).await?;
    let new_id = plain(&batch["id"]);
    if new_id != id {
        state::remember(client.base(), &new_id);
    }
    app.ui.summary(format!("will run: {chosen}"));
    app.ui.record(&batch, batches::COLUMNS, || batches::card(&batch))?;
    app.ui.say(format!("next: batch status {} --watch", wait::lookup_id(&new_id)));
    Ok(())
}

/// What the choice comes to, with the counts that are known beforehand.
fn describe(args: &RetryArgs, batch: &Value) -> String {
    let outcome = |key: &str| human::count(batch["outcome_counts"][key].as_u64().unwrap_or(0));
    let mut parts = Vec::new();
    if args.failed {
        parts.push(format!("{} failed", outcome("errored")));
    }
    if args.expired {
        parts.push(format!("{} expired", outcome("expired")));
    }
    if !args.ids.is_empty() {
        parts.push(format!("{} chosen by id", human::count(args.ids.len() as u64)));
    }
    parts.extend(args.error_code.iter().map(|code| format!("those that ended with {code}")));
    parts.join(", ")
}
