//! `batch errors`: failures grouped by code, with one example each and the command
//! that runs that group again.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};

use crate::App;
use crate::client::{Client, ids, wait};
use crate::error::Result;
use crate::output::table::Column;
use crate::output::{Field, human, plain};
use crate::{batches, progress::short_id};

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

#[derive(Debug, Default)]
struct Group {
    count: u64,
    first: Option<u64>,
}

pub(crate) async fn run(args: ErrorsArgs, app: &App) -> Result {
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let batch = client.get(&format!("/v1/batches/{id}"), &[]).await?;
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for state in ["failed", "expired", "cancelled"] {
        count(&client, &id, state, &mut groups).await?;
    }
    let mut rows = Vec::new();
    for (code, group) in &groups {
        let example = match group.first {
            Some(index) => example(&client, &id, index).await?,
            None => Value::Null,
        };
        rows.push(json!({"id": code, "code": code, "count": group.count, "example": example,
            "retry": format!("batch retry {} --error-code {code}", wait::lookup_id(&id))}));
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row["count"].as_u64()));
    app.ui.rows(&rows, COLUMNS)?;
    if !batch["errors"].is_null() {
        app.ui.summary(format!("{} never ran: its file is not valid\n{}", short_id(&id), batches::problems(&batch)));
    } else if rows.is_empty() {
        app.ui.say(format!("no failure in {}", short_id(&id)));
    }
    for row in &rows {
        app.ui.say(format!("run again: {}", plain(&row["retry"])));
    }
    Ok(())
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
            group.first = group.first.or(item["index"].as_u64());
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
