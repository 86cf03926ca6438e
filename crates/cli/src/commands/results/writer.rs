//! How a line of the results is written: as it is, one field of it, or CSV.

use serde_json::Value;

use super::{Only, ResultFormat, ResultsArgs};
use crate::App;
use crate::client::download::for_terminal;
use crate::error::{Failure, Result};
use crate::output::{escape, lookup, plain};

/// Turns a line of an output or error file into what was asked for.
pub(super) struct Writer<'a> {
    args: &'a ResultsArgs,
    /// Control characters are made visible.
    terminal: bool,
    /// Each line is a JSON value.
    json: bool,
    /// Lines written of `--field`, and how many had it.
    num_lines: u64,
    num_with_field: u64,
}

impl<'a> Writer<'a> {
    pub(super) fn new(args: &'a ResultsArgs, to_stdout: bool, app: &App) -> Self {
        let json = to_stdout && app.ui.is_json();
        Self { args, terminal: to_stdout && !json && app.ui.stdout_is_terminal, json, num_lines: 0, num_with_field: 0 }
    }

    /// What stands before the first line.
    pub(super) fn head(&mut self) -> Result<Vec<u8>> {
        if self.args.format != ResultFormat::Csv {
            return Ok(Vec::new());
        }
        match &self.args.field {
            Some(field) => csv_row(&["custom_id", field]),
            None => csv_row(&["custom_id", "status", "text", "finish_reason", "error"]),
        }
    }

    /// Whether `--only` keeps the line; published files are of one kind already.
    pub(super) fn wants(&self, line: &[u8]) -> bool {
        let Some(only) = self.args.only else { return true };
        let line: Value = serde_json::from_slice(line).unwrap_or(Value::Null);
        let ok = line["response"]["status_code"].as_u64().is_some_and(|status| (200..300).contains(&status));
        ok == (only == Only::Ok)
    }

    /// Says when `--field` names what no line has: a slip of the pen, most likely.
    pub(super) fn warn_of_field(&self, app: &App) {
        if let (Some(field), true) = (&self.args.field, self.num_lines > 0 && self.num_with_field == 0) {
            app.ui.warn(format!("no line has the field {field:?}"));
        }
    }

    /// The line as it is written.
    pub(super) fn line(&mut self, line: &[u8]) -> Result<Vec<u8>> {
        if self.args.is_raw() {
            return Ok(if self.terminal { (for_terminal(line) + "\n").into_bytes() } else { [line, b"\n"].concat() });
        }
        let record: Value =
            serde_json::from_slice(line).map_err(|err| Failure::from_error("read a result line", &err))?;
        let id = plain(&record["custom_id"]);
        if let Some(field) = &self.args.field {
            self.num_lines += 1;
            self.num_with_field += u64::from(lookup(&record, field).is_some());
        }
        if self.args.format == ResultFormat::Csv {
            if let Some(field) = &self.args.field {
                return csv_row(&[&id, &lookup(&record, field).map(plain).unwrap_or_default()]);
            }
            let response = &record["response"];
            return csv_row(&[
                &id,
                &plain(&response["status_code"]),
                &text_of(&response["body"]),
                &plain(&response["body"]["choices"][0]["finish_reason"]),
                &error_of(&record),
            ]);
        }
        let field = self.args.field.as_deref().unwrap_or_default();
        if self.json {
            return Ok(format!("{}\n", lookup(&record, field).unwrap_or(&Value::Null)).into_bytes());
        }
        // One line per request, whatever the text holds.
        let value = lookup(&record, field).map(plain).unwrap_or_default();
        let value = if self.terminal {
            escape(&value).into_owned()
        } else {
            value.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r")
        };
        Ok((value + "\n").into_bytes())
    }
}

/// The answer's text, whichever endpoint it came from.
fn text_of(body: &Value) -> String {
    let choice = &body["choices"][0];
    if choice["text"].is_string() { plain(&choice["text"]) } else { plain(&choice["message"]["content"]) }
}

fn error_of(record: &Value) -> String {
    let error = if record["error"].is_null() { &record["response"]["body"]["error"] } else { &record["error"] };
    match (plain(&error["code"]), plain(&error["message"])) {
        (code, message) if code.is_empty() => message,
        (code, message) => format!("{code}: {message}"),
    }
}

fn csv_row(cells: &[&str]) -> Result<Vec<u8>> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(cells).map_err(|err| Failure::from_error("write CSV", &err))?;
    Ok(writer.into_inner().expect("a vector takes every byte"))
}
