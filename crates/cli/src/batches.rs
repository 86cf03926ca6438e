//! How a batch object looks to people: glyph and word, the table's columns, the card.

use overnight_types::Timestamp;
use serde_json::Value;

use crate::client::wait::lookup_id;
use crate::output::table::Column;
use crate::output::{Field, escape, human, plain};
use crate::progress::{Counts, short_id};

/// A glyph and a word: never one without the other.
pub(crate) fn status_text(batch: &Value) -> String {
    let status = plain(&batch["status"]);
    if !batch["paused_at"].is_null() && !crate::client::wait::is_terminal(&status) {
        return format!("‖ paused ({status})");
    }
    let glyph = match status.as_str() {
        "validating" => "○",
        "in_progress" => "▶",
        "finalizing" => "◐",
        "completed" => "✓",
        "failed" => "✗",
        "expired" => "◷",
        "cancelling" => "◌",
        "cancelled" => "⊘",
        _ => "?",
    };
    format!("{glyph} {status}")
}

fn moment(value: &Value, people: bool) -> String {
    match value.as_i64() {
        None => String::new(),
        Some(at) if people => human::relative(at, Timestamp::now()),
        Some(at) => human::absolute(at),
    }
}

/// The columns of lists.
pub(crate) const COLUMNS: &[Field] = &[
    Field {
        column: Column::left("BATCH"),
        cell: |batch, people| {
            let id = plain(&batch["id"]);
            if people { short_id(&id) } else { id }
        },
    },
    Field {
        column: Column::left("STATUS"),
        cell: |batch, people| if people { status_text(batch) } else { plain(&batch["status"]) },
    },
    Field {
        column: Column::right("DONE"),
        cell: |batch, people| {
            let counts = Counts::of(batch);
            // What was given up is no work that was done.
            let ran = counts.ran();
            if people {
                format!("{}/{}", human::count(ran), human::count(counts.total))
            } else {
                format!("{ran}/{}", counts.total)
            }
        },
    },
    Field {
        column: Column::right("FAILED"),
        cell: |batch, people| {
            let failed = Counts::of(batch).failed;
            if people { human::count(failed) } else { failed.to_string() }
        },
    },
    Field { column: Column::left("CREATED"), cell: |batch, people| moment(&batch["created_at"], people) },
    Field { column: Column::shrink("MODEL"), cell: |batch, _| plain(&batch["model"]) },
    Field { column: Column::shrink("NAME"), cell: |batch, _| plain(&batch["name"]) },
    Field { column: Column::right("QUEUE"), cell: |batch, _| plain(&batch["queue_position"]) },
];

/// One batch for people, several lines.
pub(crate) fn card(batch: &Value) -> String {
    let counts = Counts::of(batch);
    let mut text = format!("{}  {}\n", plain(&batch["id"]), status_text(batch));
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            text.push_str(&format!("  {name:<10} {}\n", escape(&value)));
        }
    };
    line("name", plain(&batch["name"]));
    line("model", plain(&batch["model"]));
    line("endpoint", plain(&batch["endpoint"]));
    let ran = counts.ran();
    if let Some(percent) = (ran * 100).checked_div(counts.total) {
        let (ran, total) = (human::count(ran), human::count(counts.total));
        let mut text = format!("{ran}/{total} {percent}% · {} failed", human::count(counts.failed));
        if counts.given_up > 0 {
            text.push_str(&format!(" · {} not run", human::count(counts.given_up)));
        }
        line("requests", text);
    }
    if counts.tokens > 0 {
        let usage = &batch["usage"];
        let number = |value: &Value| human::count(value.as_u64().unwrap_or(0));
        line(
            "tokens",
            format!(
                "{} in ({} cached) · {} out",
                number(&usage["input_tokens"]),
                number(&usage["input_tokens_details"]["cached_tokens"]),
                number(&usage["output_tokens"])
            ),
        );
    }
    line("waiting", plain(&batch["waiting_for"]));
    line("queue", batch["queue_position"].as_u64().map_or(String::new(), place));
    if batch["round"].as_u64().is_some_and(|round| round > 1) {
        line("round", plain(&batch["round"]));
    }
    line("created", moment(&batch["created_at"], true));
    let ended = ["completed_at", "failed_at", "expired_at", "cancelled_at"];
    match ended.iter().find_map(|key| batch[*key].as_i64()) {
        Some(at) => {
            let took = at.saturating_sub(batch["created_at"].as_i64().unwrap_or(at));
            let took = human::duration(std::time::Duration::from_secs(took.unsigned_abs()));
            line("ended", format!("{}, {took} after it was created", human::relative(at, Timestamp::now())));
        }
        None => line("expires", moment(&batch["expires_at"], true)),
    }
    line("output", plain(&batch["output_file_id"]));
    line("errors", plain(&batch["error_file_id"]));
    text.push_str(&problems(batch));
    text
}

/// A place in the queue, in words.
fn place(position: u64) -> String {
    match position {
        1 => "next".to_owned(),
        _ => format!("place {}", human::count(position)),
    }
}

/// The validation errors of a failed batch, the first few, in words.
pub(crate) fn problems(batch: &Value) -> String {
    let errors = &batch["errors"];
    let list = errors["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut text = String::new();
    for error in list.iter().take(5) {
        let place = error["line"].as_u64().map_or(String::new(), |line| format!("line {}: ", human::count(line)));
        text.push_str(&format!("  {place}{} ({})\n", escape(&plain(&error["message"])), plain(&error["code"])));
    }
    let total = errors["total"].as_u64().unwrap_or(list.len() as u64);
    if total > 5 {
        text.push_str(&format!("  … and {} more problems\n", human::count(total - 5)));
    }
    text
}

/// The line that stays after waiting.
pub(crate) fn summary(batch: &Value) -> String {
    let counts = Counts::of(batch);
    let completed = counts.ran().saturating_sub(counts.failed);
    let mut text = format!("{} {}", short_id(&counts.id), status_text(batch));
    if counts.total > 0 {
        text.push_str(&format!("  {} completed · {} failed", human::count(completed), human::count(counts.failed)));
        if counts.given_up > 0 {
            text.push_str(&format!(" · {} not run", human::count(counts.given_up)));
        }
    }
    text
}

/// The command that comes next, in words.
pub(crate) fn next_step(batch: &Value) -> String {
    let id = lookup_id(&plain(&batch["id"]));
    let counts = Counts::of(batch);
    match counts.status.as_str() {
        "failed" => format!("batch errors {id} shows every problem; correct the file and submit it again"),
        "completed" if counts.failed > 0 => {
            format!("batch errors {id} (why, and what to do)   or   batch results {id} -o out.jsonl")
        }
        "completed" => format!("batch results {id} -o out.jsonl"),
        "expired" | "cancelled" => format!("batch resume {id}   or   batch results {id} -o out.jsonl"),
        _ => format!("batch status {id} --watch"),
    }
}
