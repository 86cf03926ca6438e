//! `batch pause`.

use clap::Args;
use serde_json::json;

use crate::App;
use crate::batches;
use crate::client::{ids, wait};
use crate::error::Result;

/// Arguments of `batch pause`.
#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    /// A batch
    id: String,
}

pub(crate) async fn run(args: PauseArgs, app: &App) -> Result {
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let batch = client.post(&format!("/v1/batches/{id}/pause"), &json!({}), None).await?;
    app.ui.record(&batch, batches::COLUMNS, || batches::card(&batch))?;
    app.ui.say(format!(
        "paused: nothing new starts, what runs finishes, the window keeps running; next: batch resume {}",
        wait::lookup_id(&id)
    ));
    Ok(())
}
