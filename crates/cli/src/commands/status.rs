//! `batch status`: one batch, or the newest ones.

use std::time::Duration;

use clap::Args;

use crate::App;
use crate::batches;
use crate::client::ids::{self, FIRST_STEPS};
use crate::client::wait::{self, Waiting};
use crate::commands::list;
use crate::error::Result;
use crate::output::{human, plain};
use crate::state;

/// Arguments of `batch status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// A batch: its id, a unique prefix of it, `last`, or @{1} for the one before
    id: Option<String>,
    /// Show progress until it has ended; optionally how often to look
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "1s",
          value_parser = human::parse_duration)]
    watch: Option<Duration>,
    /// Wait until it has ended; the exit code says how
    #[arg(long)]
    wait: bool,
    /// Let the exit code say how the batch stands: 3 some failed, 8 not completed
    #[arg(long)]
    exit_status: bool,
}

pub(crate) async fn run(args: StatusArgs, app: &App) -> Result {
    let client = app.client()?;
    let Some(id) = &args.id else {
        if args.wait || args.watch.is_some() || args.exit_status {
            let id = ids::resolve(&client, "last").await?;
            return one(&id, &args, app, &client).await;
        }
        let newest = list::newest(&client, 10).await?;
        app.ui.rows(&newest, batches::COLUMNS)?;
        if newest.is_empty() {
            app.ui.say(format!("no batches; {FIRST_STEPS}"));
        } else {
            let last = newest_of_ours(&newest, &state::all_of(client.base()));
            app.ui.say(format!("next: batch status {}", wait::lookup_id(&last)));
        }
        return Ok(());
    };
    let id = ids::resolve(&client, id).await?;
    one(&id, &args, app, &client).await
}

/// The newest of these batches that was made from here, else the newest.
fn newest_of_ours(newest: &[serde_json::Value], ours: &[String]) -> String {
    let ids: Vec<String> = newest.iter().map(|batch| plain(&batch["id"])).collect();
    let own = ids.iter().find(|id| ours.contains(id));
    own.or(ids.first()).cloned().unwrap_or_default()
}

async fn one(id: &str, args: &StatusArgs, app: &App, client: &crate::client::Client) -> Result {
    let mut batch = client.get(&format!("/v1/batches/{id}"), &[]).await?;
    let waits = args.wait || args.watch.is_some();
    if waits {
        let interval = args.watch.unwrap_or(wait::INTERVAL).max(Duration::from_millis(50));
        batch = wait::until_ended(client, app, id, Waiting { interval, timeout: app.globals.timeout }).await?;
        app.ui.summary(batches::summary(&batch));
    }
    app.ui.record(&batch, batches::COLUMNS, || batches::card(&batch))?;
    if !app.ui.shows_cards() {
        // The line of cells has no room for these, and without them nothing says what to do.
        if batch["status"] == "failed" {
            app.ui.summary(batches::problems(&batch).trim_end());
        } else if let Some(reason) = batch["waiting_for"].as_str() {
            app.ui.say(format!("waiting for: {reason}"));
        }
    }
    app.ui.say(format!("next: {}", batches::next_step(&batch)));
    if args.exit_status || waits {
        return wait::finish_with(&batch);
    }
    Ok(())
}
