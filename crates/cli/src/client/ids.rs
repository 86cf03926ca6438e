//! Finding the batch that a person means: an id, a unique prefix, `last`, `@{1}`.

use serde_json::Value;

use super::Client;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::state;

/// Shortest prefix that is looked up, in characters after `batch_`.
const PREFIX_MIN: usize = 8;
/// Batches that `last` and `@{1}` are looked for in, when this machine does not know them.
const NEWEST_MAX: usize = 100;
/// Pages of 100 that a prefix is looked for in.
const PAGES_MAX: usize = 50;

/// The full id of the batch meant by `text`.
pub(crate) async fn resolve(client: &Client, text: &str) -> Result<String> {
    if let Some(back) = back_reference(text) {
        let known = state::all_of(client.base());
        return match known.get(back) {
            Some(id) if is_there(client, id).await? => Ok(id.clone()),
            _ => from_server(client, back, &known).await,
        };
    }
    let hex = prefix_of(text)?;
    if hex.len() == 32 {
        return Ok(format!("batch_{hex}"));
    }
    by_prefix(client, &format!("batch_{hex}")).await
}

/// The id or the prefix of one that `text` means, as far as this machine knows; for
/// what is looked up in files.
pub(crate) fn without_server(text: &str) -> Result<String> {
    let Some(back) = back_reference(text) else { return Ok(format!("batch_{}", prefix_of(text)?)) };
    state::recall_any(back).ok_or_else(|| {
        Failure::new(Exit::NotFound, "no batch was made from this machine yet").hint("give the id of the batch")
    })
}

/// The hexadecimal part of an id or of a prefix that is long enough.
fn prefix_of(text: &str) -> Result<String> {
    let hex = text.strip_prefix("batch_").unwrap_or(text);
    let hex = hex.trim_end_matches('…');
    if !hex.bytes().all(|b| b.is_ascii_hexdigit()) || hex.is_empty() || hex.len() > 32 {
        return Err(Failure::usage(format!("not an id of a batch: {text}"))
            .hint("ids look like batch_0193…; `batch list` shows them, `last` is the newest made from here"));
    }
    if hex.len() < PREFIX_MIN {
        return Err(Failure::usage(format!("too short to name a batch: {text}"))
            .hint(format!("give at least {PREFIX_MIN} characters of the id")));
    }
    Ok(hex.to_ascii_lowercase())
}

fn back_reference(text: &str) -> Option<usize> {
    if text == "last" {
        return Some(0);
    }
    text.strip_prefix("@{")?.strip_suffix('}')?.parse().ok()
}

/// Whether the server has this batch.
async fn is_there(client: &Client, id: &str) -> Result<bool> {
    match client.get(&format!("/v1/batches/{id}"), &[]).await {
        Ok(_) => Ok(true),
        Err(failure) if failure.exit == Exit::NotFound => Ok(false),
        Err(failure) => Err(failure),
    }
}

/// Looked up in the server's newest batches, for another data folder may be served at the
/// same address now: of those made from here if any is among them, else of all.
async fn from_server(client: &Client, back: usize, known: &[String]) -> Result<String> {
    let page = client.get("/v1/batches", &[("limit", NEWEST_MAX.to_string())]).await?;
    let newest: Vec<&str> = page["data"].as_array().into_iter().flatten().filter_map(|b| b["id"].as_str()).collect();
    let ours: Vec<&str> = newest.iter().copied().filter(|id| known.iter().any(|known| known == id)).collect();
    let (of, found) = if ours.is_empty() { ("", &newest) } else { (" made from here", &ours) };
    match found.get(back) {
        Some(id) => Ok((*id).to_owned()),
        None if newest.is_empty() => {
            Err(Failure::new(Exit::NotFound, "no batch was made at this server yet").hint(FIRST_STEPS))
        }
        None => Err(Failure::new(
            Exit::NotFound,
            format!(
                "@{{{back}}} is too far back among the {}{of}",
                human::counted_as(found.len() as u64, "batch", "batches")
            ),
        )
        .hint("`batch list` shows them; @{0} is the newest")),
    }
}

/// What to type when there is no batch yet.
pub(crate) const FIRST_STEPS: &str = "make one with `batch prepare IN -o items.jsonl --model M --template T.j2`, `batch validate items.jsonl`, `batch submit items.jsonl --watch`";

async fn by_prefix(client: &Client, prefix: &str) -> Result<String> {
    let mut found: Vec<String> = Vec::new();
    let mut after: Option<String> = None;
    for _ in 0..PAGES_MAX {
        let mut query = vec![("limit", "100".to_owned())];
        query.extend(after.take().map(|id| ("after", id)));
        let page = client.get("/v1/batches", &query).await?;
        let ids = page["data"].as_array().into_iter().flatten().filter_map(|batch| batch["id"].as_str());
        found.extend(ids.filter(|id| id.starts_with(prefix)).map(str::to_owned));
        if page["has_more"] != Value::Bool(true) {
            break;
        }
        after = page["last_id"].as_str().map(str::to_owned);
    }
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Failure::new(Exit::NotFound, format!("no batch has an id that starts with {prefix}"))
            .hint("`batch list` shows them")),
        several => Err(Failure::usage(format!("{} batches have ids that start with {prefix}", several.len()))
            .note(several.iter().take(5).map(|id| format!("= {id}")).collect::<Vec<_>>().join("\n  "))
            .hint("give more of the id")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_references_count_from_the_newest() {
        assert_eq!(back_reference("last"), Some(0));
        assert_eq!(back_reference("@{1}"), Some(1));
        assert_eq!(back_reference("@{x}"), None);
        assert_eq!(back_reference("batch_1"), None);
    }
}
