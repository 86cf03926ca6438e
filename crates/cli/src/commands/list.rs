//! `batch list`: batches, newest first.

use clap::Args;
use overnight_types::Timestamp;
use serde_json::Value;

use crate::App;
use crate::client::Client;
use crate::client::ids::{self, FIRST_STEPS};
use crate::error::{Failure, Result};
use crate::output::human;
use crate::{batches, output::plain};

/// Arguments of `batch list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only this status, for example in_progress
    #[arg(long, value_name = "STATUS", value_parser = known_status)]
    status: Option<String>,
    /// Only this model
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Only batches made within this time, for example 2h or 7d
    #[arg(long, value_name = "DURATION", value_parser = human::parse_duration)]
    since: Option<std::time::Duration>,
    /// Most batches to show
    #[arg(long, default_value = "20", value_parser = human::parse_count)]
    limit: u64,
    /// Go on after this batch
    #[arg(long, value_name = "ID")]
    cursor: Option<String>,
}

fn known_status(text: &str) -> Result<String, String> {
    text.parse::<overnight_types::JobState>().map(|state| state.to_string()).map_err(|_| {
        let words: Vec<&str> = overnight_types::JobState::ALL.iter().map(|state| state.as_str()).collect();
        format!("not a status; one of {}", words.join(", "))
    })
}

pub(crate) async fn run(args: ListArgs, app: &App) -> Result {
    let client = app.client()?;
    let after = match &args.cursor {
        Some(id) => Some(ids::resolve(&client, id).await?),
        None => None,
    };
    let (found, more) = collect(&client, &args, after).await?;
    app.ui.rows(&found, batches::COLUMNS)?;
    if found.is_empty() {
        app.ui.say(format!("no batches; {FIRST_STEPS}"));
    } else if more && let Some(last) = found.last() {
        app.ui.say(format!("more: batch list --cursor {}", plain(&last["id"])));
    }
    Ok(())
}

/// The newest batches, at most `limit`.
pub(crate) async fn newest(client: &Client, limit: u64) -> Result<Vec<Value>> {
    let args = ListArgs { status: None, model: None, since: None, limit, cursor: None };
    Ok(collect(client, &args, None).await?.0)
}

async fn collect(client: &Client, args: &ListArgs, mut after: Option<String>) -> Result<(Vec<Value>, bool)> {
    if args.limit == 0 {
        return Err(Failure::usage("--limit must be at least 1"));
    }
    let wanted = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let oldest = args.since.map(|since| Timestamp::now().unix_seconds() - i64::try_from(since.as_secs()).unwrap_or(0));
    let matches = |batch: &Value| {
        args.status.as_ref().is_none_or(|status| batch["status"] == status.as_str())
            && args.model.as_ref().is_none_or(|model| batch["model"] == model.as_str())
    };
    let mut found = Vec::new();
    loop {
        let mut query = vec![("limit", wanted.saturating_add(1).min(100).to_string())];
        query.extend(after.take().map(|id| ("after", id)));
        let page = client.get("/v1/batches", &query).await?;
        let batches = page["data"].as_array().cloned().unwrap_or_default();
        let too_old =
            |batch: &Value| oldest.is_some_and(|oldest| batch["created_at"].as_i64().is_some_and(|at| at < oldest));
        let reached_end = page["has_more"] != Value::Bool(true) || batches.last().is_none_or(too_old);
        after = page["last_id"].as_str().map(str::to_owned);
        found.extend(batches.into_iter().filter(|batch| !too_old(batch) && matches(batch)));
        if found.len() > wanted {
            found.truncate(wanted);
            return Ok((found, true));
        }
        if reached_end || after.is_none() {
            return Ok((found, false));
        }
    }
}
