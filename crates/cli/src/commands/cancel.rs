//! `batch cancel`.

use clap::Args;
use serde_json::json;

use crate::App;
use crate::batches;
use crate::client::{ids, wait};
use crate::error::{Failure, Result};
use crate::output::{human, plain};
use crate::progress::{Counts, short_id};

/// Arguments of `batch cancel`.
#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    /// A batch
    id: String,
    /// Let running requests finish, for up to 10 minutes (default)
    #[arg(long, conflicts_with = "now")]
    drain: bool,
    /// Stop running requests at once
    #[arg(long)]
    now: bool,
}

pub(crate) async fn run(args: CancelArgs, app: &App) -> Result {
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let path = format!("/v1/batches/{id}");
    let batch = client.get(&path, &[]).await?;
    let counts = Counts::of(&batch);
    if matches!(counts.status.as_str(), "completed" | "failed" | "expired" | "finalizing") {
        return Err(Failure::new(
            crate::error::Exit::Failure,
            format!("{} is {} and cannot be cancelled", short_id(&id), counts.status),
        )
        .code("batch_ended"));
    }
    if counts.status != "cancelled" {
        let unfinished = human::counted(counts.total.saturating_sub(counts.done), "request");
        app.ui.confirm(&format!("cancel {} ({unfinished} unfinished)", short_id(&id)))?;
    }
    let mode = if args.now { "now" } else { "drain" };
    let batch = client.post(&format!("{path}/cancel"), &json!({"mode": mode}), None).await?;
    app.ui.record(&batch, batches::COLUMNS, || batches::card(&batch))?;
    let lookup = wait::lookup_id(&id);
    app.ui.say(format!(
        "{}: finished results are kept; next: batch status {lookup} --wait   or later   batch resume {lookup}",
        plain(&batch["status"])
    ));
    Ok(())
}
