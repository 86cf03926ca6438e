//! `batch errors`: failures grouped by code, with one example each and what to do.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};

use crate::App;
use crate::client::{Client, ids, wait};
use crate::error::Result;
use crate::output::table::Column;
use crate::output::{Field, human, plain};
use crate::{batches, progress::short_id, remedy};

/// Items in a page.
const PAGE: u64 = 1_000;

/// Arguments of `batch errors`.
#[derive(Debug, Args)]
pub(crate) struct ErrorsArgs {
    /// A batch
    id: String,
}

const COLUMNS: &[Field] = &[
    Field { column: Column::left("CODE"), cell: |group, _| plain(&group["code"]) },
    Field {
        column: Column::right("COUNT"),
        cell: |group, people| {
            let count = group["count"].as_u64().unwrap_or(0);
            if people { human::count(count) } else { count.to_string() }
        },
    },
    Field { column: Column::shrink("EXAMPLE"), cell: |group, _| plain(&group["example"]["custom_id"]) },
    Field { column: Column::shrink("MESSAGE"), cell: |group, _| plain(&group["example"]["message"]) },
];

/// Requests that ended with one code.
#[derive(Debug, Default)]
pub(crate) struct Group {
    count: u64,
    /// Index and HTTP status of the first one.
    first: Option<u64>,
    status: Option<u64>,
}

pub(crate) async fn run(args: ErrorsArgs, app: &App) -> Result {
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let batch = client.get(&format!("/v1/batches/{id}"), &[]).await?;
    let groups = groups(&client, &id).await?;
    let mut rows = Vec::new();
    for (code, group) in &groups {
        let example = match group.first {
            Some(index) => example(&client, &id, index).await?,
            None => Value::Null,
        };
        let retry = format!("batch retry {} --error-code {code}", wait::lookup_id(&id));
        let remedy = remedy::of(code, group.status, &retry);
        rows.push(json!({"id": code, "code": code, "count": group.count, "http_status": group.status,
            "example": example, "remedy": remedy, "retry": remedy.contains(&retry).then_some(retry)}));
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row["count"].as_u64()));
    // An empty table's head above the reason would hide it.
    if !rows.is_empty() || app.ui.format.is_some() || app.ui.fields.is_some() {
        app.ui.rows(&rows, COLUMNS)?;
    }
    if !batch["errors"].is_null() {
        app.ui.summary(format!("{} never ran: its file is not valid\n{}", short_id(&id), batches::problems(&batch)));
    } else if rows.is_empty() {
        app.ui.say(format!("no failure in {}", short_id(&id)));
    }
    for row in &rows {
        app.ui.say(format!("{}: {}", plain(&row["code"]), plain(&row["remedy"])));
    }
    Ok(())
}

/// The failures of a batch by their code.
pub(crate) async fn groups(client: &Client, id: &str) -> Result<BTreeMap<String, Group>> {
    let mut groups = BTreeMap::new();
    for state in ["failed", "expired", "cancelled"] {
        count(client, id, state, &mut groups).await?;
    }
    Ok(groups)
}

async fn count(client: &Client, id: &str, state: &str, groups: &mut BTreeMap<String, Group>) -> Result {
    let mut after: Option<String> = None;
    loop {
        let mut query = vec![("state", state.to_owned()), ("limit", PAGE.to_string())];
        query.extend(after.take().map(|index| ("after", index)));
        let page = client.get(&format!("/v1/batches/{id}/items"), &query).await?;
        let items = page["data"].as_array().map(Vec::as_slice).unwrap_or_default();
        for item in items {
            let code = match (item["error_code"].as_str(), item["http_status"].as_u64()) {
                (Some(code), _) => code.to_owned(),
                (None, Some(status)) => format!("http_{status}"),
                (None, None) => state.to_owned(),
            };
            let group = groups.entry(code).or_default();
            group.count += 1;
            if group.first.is_none() {
                (group.first, group.status) = (item["index"].as_u64(), item["http_status"].as_u64());
            }
        }
        let last = items.last().and_then(|item| item["index"].as_u64());
        match last {
            Some(last) if page["has_more"] == Value::Bool(true) => after = Some(last.to_string()),
            _ => return Ok(()),
        }
    }
}

async fn example(client: &Client, id: &str, index: u64) -> Result<Value> {
    let item = client.get(&format!("/v1/batches/{id}/items/{index}"), &[]).await?;
    let output = &item["output"];
    let message =
        [&output["response"]["body"]["error"]["message"], &output["error"]["message"], &item["last_error"]["message"]]
            .into_iter()
            .find(|message| message.is_string())
            .cloned()
            .unwrap_or(Value::Null);
    Ok(json!({"custom_id": item["custom_id"], "line": item["line"], "index": item["index"], "message": message}))
}
