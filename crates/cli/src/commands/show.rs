//! `batch show`: one request of a batch.

use clap::Args;
use serde_json::Value;

use crate::App;
use crate::client::{Client, ids};
use crate::error::{Exit, Failure, Result};
use crate::output::table::Column;
use crate::output::{Field, escape, human, plain};
use crate::progress::short_id;

/// Blank lines make line and index differ; this many looks close any gap met in practice.
const LOOKS_MAX: u32 = 32;

/// Arguments of `batch show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A batch
    id: String,
    /// A custom id; with --line a line number of the input file
    #[arg(value_name = "ITEM")]
    item: String,
    /// ITEM is a physical line number, counted from 1
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
    let index = if args.line {
        by_line(&client, &id, &args.item).await?
    } else {
        by_custom_id(&client, &id, &args.item).await?
    };
    let item = client.get(&format!("/v1/batches/{id}/items/{index}"), &[]).await?;
    app.ui.record(&item, COLUMNS, || card(&item))
}

async fn by_custom_id(client: &Client, id: &str, custom_id: &str) -> Result<u64> {
    let query = [("custom_id", custom_id.to_owned()), ("limit", "1".to_owned())];
    let page = client.get(&format!("/v1/batches/{id}/items"), &query).await?;
    page["data"][0]["index"].as_u64().ok_or_else(|| {
        let missing = format!("no request of {} has the custom id {custom_id:?}", short_id(id));
        let failure = Failure::new(Exit::NotFound, missing);
        match custom_id.parse::<u64>() {
            Ok(_) => failure.hint(format!("to show line {custom_id} of the input: add --line")),
            Err(_) => failure,
        }
    })
}

async fn by_line(client: &Client, id: &str, line: &str) -> Result<u64> {
    let wanted = human::parse_count(line)
        .ok()
        .filter(|&line| line > 0)
        .ok_or_else(|| Failure::usage(format!("not a line number: {line}")))?;
    let no_item = || Failure::new(Exit::NotFound, format!("line {wanted} of {} holds no request", short_id(id)));
    let mut index = wanted - 1;
    for _ in 0..LOOKS_MAX {
        let query = [("limit", "1".to_owned()), ("after", index.saturating_sub(1).to_string())];
        let query = if index == 0 { &query[..1] } else { &query[..] };
        let page = client.get(&format!("/v1/batches/{id}/items"), query).await?;
        let Some(item) = page["data"].get(0) else {
            // Past the end: blank lines came before; look nearer to the start.
            if index == 0 {
                return Err(no_item());
            }
            index /= 2;
            continue;
        };
        let (found, at) = (item["index"].as_u64().unwrap_or(0), item["line"].as_u64().unwrap_or(0));
        match at.cmp(&wanted) {
            std::cmp::Ordering::Equal => return Ok(found),
            std::cmp::Ordering::Greater if found == 0 || found < at - wanted => return Err(no_item()),
            std::cmp::Ordering::Greater => index = found - (at - wanted),
            std::cmp::Ordering::Less => index = found + 1,
        }
    }
    Err(no_item())
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
    for attempt in item["attempt_log"].as_array().into_iter().flatten() {
        text.push_str(&format!("attempt: {}\n", escape(&attempt.to_string())));
    }
    text
}
