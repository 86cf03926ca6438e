//! `batch show`: one request of a batch.

use clap::Args;
use serde_json::Value;

use crate::App;
use crate::client::{Client, ids};
use crate::error::{Exit, Failure, Result};
use crate::output::table::Column;
use crate::output::{Field, escape, human, plain};
use crate::progress::short_id;

/// Arguments of `batch show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A batch
    id: String,
    /// A custom id, else a line number of the input file
    #[arg(value_name = "ITEM")]
    item: String,
    /// ITEM is a physical line number, counted from 1, even where a custom id says the same
    #[arg(long)]
    line: bool,
}

const COLUMNS: &[Field] = &[
    Field { column: Column::shrink("CUSTOM_ID"), cell: |item, _| plain(&item["custom_id"]) },
    Field { column: Column::right("LINE"), cell: |item, _| plain(&item["line"]) },
    Field { column: Column::left("STATE"), cell: |item, _| plain(&item["state"]) },
    Field { column: Column::right("STATUS"), cell: |item, _| plain(&item["http_status"]) },
    Field { column: Column::left("CODE"), cell: |item, _| plain(&item["error_code"]) },
    Field { column: Column::right("ATTEMPTS"), cell: |item, _| plain(&item["attempts"]) },
];

pub(crate) async fn run(args: ShowArgs, app: &App) -> Result {
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let index = match by_custom_id(&client, &id, &args).await? {
        Some(index) => index,
        None => by_line(&client, &id, &args).await?,
    };
    let item = client.get(&format!("/v1/batches/{id}/items/{index}"), &[]).await?;
    app.ui.card(&item, COLUMNS, || card(&item))
}

async fn by_custom_id(client: &Client, id: &str, args: &ShowArgs) -> Result<Option<u64>> {
    if args.line {
        return Ok(None);
    }
    let query = [("custom_id", args.item.clone()), ("limit", "1".to_owned())];
    let page = client.get(&format!("/v1/batches/{id}/items"), &query).await?;
    Ok(page["data"][0]["index"].as_u64())
}

/// Index and line rise together, the line never below index + 1, so the item of a line
/// is found by bisection, whatever blank lines lie before it.
async fn by_line(client: &Client, id: &str, args: &ShowArgs) -> Result<u64> {
    let Some(wanted) = human::parse_count(&args.item).ok().filter(|&line| line > 0) else {
        if args.line {
            return Err(Failure::usage(format!("not a line number: {}", args.item)));
        }
        let missing = format!("no request of {} has the custom id {:?}", short_id(id), args.item);
        return Err(Failure::new(Exit::NotFound, missing));
    };
    let batch = client.get(&format!("/v1/batches/{id}"), &[]).await?;
    let total = batch["request_counts"]["total"].as_u64().unwrap_or(0);
    let (mut low, mut high) = (0, total.min(wanted));
    // Without blank lines the first look finds it.
    let mut look = high.saturating_sub(1);
    while low < high {
        let page = client.get(&format!("/v1/batches/{id}/items"), &at_index(look)).await?;
        match page["data"][0]["line"].as_u64().map(|line| line.cmp(&wanted)) {
            Some(std::cmp::Ordering::Equal) => return Ok(look),
            Some(std::cmp::Ordering::Less) => low = look + 1,
            Some(std::cmp::Ordering::Greater) | None => high = look,
        }
        look = low + (high - low) / 2;
    }
    let or_id = if args.line { "" } else { ", nor has one this custom id" };
    Err(Failure::new(Exit::NotFound, format!("line {wanted} of {} holds no request{or_id}", short_id(id))))
}

/// The page that holds this one item.
fn at_index(index: u64) -> Vec<(&'static str, String)> {
    let mut query = vec![("limit", "1".to_owned())];
    query.extend(index.checked_sub(1).map(|before| ("after", before.to_string())));
    query
}

fn card(item: &Value) -> String {
    let mut text = format!("{}  {}\n", escape(&plain(&item["custom_id"])), plain(&item["state"]));
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            text.push_str(&format!("  {name:<10} {}\n", escape(&value)));
        }
    };
    line("item", format!("{} · line {}", plain(&item["index"]), plain(&item["line"])));
    line("status", plain(&item["http_status"]));
    line("code", plain(&item["error_code"]));
    line("attempts", plain(&item["attempts"]));
    line("finish", plain(&item["finish_reason"]));
    let usage = &item["usage"];
    if usage.is_object() {
        line("tokens", format!("{} in · {} out", plain(&usage["input_tokens"]), plain(&usage["output_tokens"])));
    }
    for key in ["started_at", "finished_at"] {
        if let Some(at) = item[key].as_i64() {
            line(key.trim_end_matches("_at"), human::absolute(at));
        }
    }
    for key in ["input", "output", "last_error"] {
        let value = &item[key];
        if !value.is_null() {
            let body = serde_json::to_string_pretty(value).unwrap_or_default();
            text.push_str(&format!("{key}:\n"));
            for row in body.lines() {
                text.push_str(&format!("  {}\n", escape(row)));
            }
        }
    }
    for tried in item["failed_attempts"].as_array().into_iter().flatten() {
        let status = tried["http_status"].as_u64().map_or(String::new(), |status| format!(" ({status})"));
        let words = format!("{}{status}: {}", plain(&tried["code"]), plain(&tried["message"]));
        text.push_str(&format!("try {} failed: {}\n", plain(&tried["number"]), escape(&words)));
    }
    for attempt in item["attempt_log"].as_array().into_iter().flatten() {
        text.push_str(&format!("attempt: {}\n", escape(&attempt.to_string())));
    }
    text
}
