//! What reaches stdout (data) and stderr (talk).
//!
//! Invariant: nothing but the asked-for data goes to stdout; no control character
//! that a user wrote reaches a terminal; colour and motion are decided per stream.

pub(crate) mod human;
pub(crate) mod table;

use std::borrow::Cow;
use std::io::{IsTerminal, Write};

use clap::ValueEnum;
use serde_json::Value;

use crate::args::{ColorWhen, Globals};
use crate::environment;
use crate::error::{Failure, Result};
use table::Column;

/// How records are written to stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns with a head.
    Table,
    /// One object, or one array.
    Json,
    /// One object per line.
    Jsonl,
    /// Comma-separated with a head.
    Csv,
    /// Ids only, one per line.
    Id,
}

/// Where and how a command talks.
#[derive(Debug, Clone)]
pub(crate) struct Ui {
    /// `None`: a table on a terminal, tab-separated lines elsewhere.
    pub(crate) format: Option<Format>,
    /// Dotted paths to show; an empty list asks which there are.
    pub(crate) fields: Option<Vec<String>>,
    pub(crate) quiet: u8,
    pub(crate) stdout_is_terminal: bool,
    pub(crate) stderr_is_terminal: bool,
    pub(crate) color_out: bool,
    pub(crate) color_err: bool,
    /// Whether a progress line may be shown at all.
    pub(crate) progress: bool,
    /// Whether a question may be asked.
    pub(crate) may_ask: bool,
    /// Whether questions are answered with yes.
    pub(crate) yes: bool,
    pub(crate) width: usize,
}

impl Ui {
    /// Decides from flags, environment and what the streams are.
    pub(crate) fn new(globals: &Globals) -> Self {
        let stdout_is_terminal = std::io::stdout().is_terminal();
        let stderr_is_terminal = std::io::stderr().is_terminal();
        let dumb = environment::text("TERM").is_some_and(|term| term == "dumb");
        let plain = dumb || globals.no_color || environment::text("NO_COLOR").is_some();
        let color = |is_terminal: bool| match globals.color {
            ColorWhen::Always => true,
            ColorWhen::Never => false,
            ColorWhen::Auto => is_terminal && !plain,
        };
        let stdin_is_terminal = std::io::stdin().is_terminal();
        let format = if globals.json { Some(Format::Json) } else { globals.output };
        // Then stderr holds an error object or nothing: no progress and no question.
        let json = format == Some(Format::Json);
        Self {
            format,
            fields: globals
                .fields
                .as_ref()
                .map(|list| list.split(',').map(str::trim).filter(|f| !f.is_empty()).map(str::to_owned).collect()),
            quiet: globals.quiet,
            stdout_is_terminal,
            // A dumb terminal gets no carriage returns, like a file.
            stderr_is_terminal: stderr_is_terminal && !dumb,
            color_out: color(stdout_is_terminal),
            color_err: color(stderr_is_terminal),
            progress: !globals.no_progress && globals.quiet == 0 && !json,
            may_ask: stdin_is_terminal && stderr_is_terminal && !globals.no_input && !json,
            yes: globals.yes,
            width: terminal_width().unwrap_or(80).max(40),
        }
    }

    /// Whether stdout is JSON, so that errors are JSON too.
    pub(crate) fn is_json(&self) -> bool {
        self.format == Some(Format::Json)
    }

    /// Whether a record goes to stdout as people read it.
    pub(crate) fn shows_cards(&self) -> bool {
        self.fields.is_none()
            && (self.format == Some(Format::Table) || (self.format.is_none() && self.stdout_is_terminal))
    }

    /// Writes data to stdout as it is.
    pub(crate) fn data(&self, text: &str) -> Result {
        self.bytes(text.as_bytes())
    }

    /// Under `--json`, writes this object; says whether it did.
    pub(crate) fn json_record(&self, record: &Value) -> Result<bool> {
        if self.is_json() {
            self.data(&format!("{record}\n"))?;
        }
        Ok(self.is_json())
    }

    /// Writes data bytes to stdout as they are.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> Result {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()?;
        Ok(())
    }

    /// Says something on stderr; silenced by `-q`, and by `--json`, under which stderr
    /// holds an error object or nothing.
    pub(crate) fn say(&self, text: impl AsRef<str>) {
        if self.quiet == 0 && !self.is_json() {
            self.stderr(text.as_ref());
        }
    }

    /// A summary that only `-qq` and `--json` silence.
    pub(crate) fn summary(&self, text: impl AsRef<str>) {
        if self.quiet < 2 && !self.is_json() {
            self.stderr(text.as_ref());
        }
    }

    /// A warning on stderr; only `-qq` and `--json` silence it.
    pub(crate) fn warn(&self, text: impl AsRef<str>) {
        if self.quiet < 2 && !self.is_json() {
            let (yellow, end) = if self.color_err { ("\x1b[33;1m", "\x1b[0m") } else { ("", "") };
            self.stderr(&format!("{yellow}warning:{end} {}", text.as_ref()));
        }
    }

    fn stderr(&self, text: &str) {
        // With nobody to read it there is nobody to tell.
        let _ = writeln!(std::io::stderr().lock(), "{text}");
    }

    /// Asks before something that cannot be undone; `flag` answers without asking.
    pub(crate) fn confirm(&self, question: &str) -> Result {
        if self.yes {
            return Ok(());
        }
        if !self.may_ask {
            return Err(Failure::usage(format!("{question}: not confirmed")).hint("say --yes"));
        }
        let _ = write!(std::io::stderr().lock(), "{question}? [y/N] ");
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer)?;
        if matches!(answer.trim(), "y" | "Y" | "yes") {
            return Ok(());
        }
        Err(Failure::usage("not confirmed, nothing was changed"))
    }

    /// One record: an object under `--json`, else what `people` renders.
    pub(crate) fn record(&self, record: &Value, columns: &[Field], people: impl FnOnce() -> String) -> Result {
        match (self.format, &self.fields) {
            (Some(Format::Json), None) => self.data(&format!("{record}\n")),
            (Some(Format::Json), Some(fields)) if !fields.is_empty() => {
                self.check_fields(std::slice::from_ref(record), fields)?;
                self.data(&format!("{}\n", chosen(record, fields)))
            }
            (None, None) if self.stdout_is_terminal => self.data(&people()),
            (Some(Format::Table), None) => self.data(&people()),
            _ => self.rows(std::slice::from_ref(record), columns),
        }
    }

    /// The same for a record that is asked for to be read, whose form for people goes into
    /// a pipe (`| less`) too: no line of cells holds it.
    pub(crate) fn card(&self, record: &Value, columns: &[Field], people: impl FnOnce() -> String) -> Result {
        match (self.format, &self.fields) {
            (None, None) => self.data(&people()),
            _ => self.record(record, columns, people),
        }
    }

    /// Several records in the format asked for.
    pub(crate) fn rows(&self, records: &[Value], columns: &[Field]) -> Result {
        if let Some(fields) = &self.fields {
            return self.chosen_fields(records, fields);
        }
        let cells = |shown: bool| -> Vec<Vec<String>> {
            records.iter().map(|record| columns.iter().map(|field| (field.cell)(record, shown)).collect()).collect()
        };
        let aligned = || {
            let heads: Vec<Column> = columns.iter().map(|field| field.column).collect();
            let text = table::aligned(&heads, &cells(true), self.width);
            match text.split_once('\n') {
                Some((head, rows)) if self.color_out => format!("\x1b[1m{head}\x1b[0m\n{rows}"),
                _ => text,
            }
        };
        match self.format {
            Some(Format::Json) => self.data(&format!("{}\n", Value::Array(records.to_vec()))),
            Some(Format::Jsonl) => records.iter().try_for_each(|record| self.data(&format!("{record}\n"))),
            Some(Format::Csv) => {
                let heads: Vec<String> = columns.iter().map(|field| field.column.title.to_lowercase()).collect();
                self.csv(&heads, &cells(false))
            }
            Some(Format::Id) => records
                .iter()
                .try_for_each(|record| self.data(&format!("{}\n", record["id"].as_str().unwrap_or_default()))),
            Some(Format::Table) => self.data(&aligned()),
            None if self.stdout_is_terminal => self.data(&aligned()),
            None => self.data(&table::tab_separated(&cells(false))),
        }
    }

    fn chosen_fields(&self, records: &[Value], fields: &[String]) -> Result {
        if fields.is_empty() {
            let mut names = Vec::new();
            if let Some(first) = records.first() {
                list_paths(first, "", &mut names);
            }
            return self.data(&names.iter().map(|name| format!("{name}\n")).collect::<String>());
        }
        self.check_fields(records, fields)?;
        let cell = |record: &Value, field: &String| lookup(record, field).map(plain).unwrap_or_default();
        let rows: Vec<Vec<String>> =
            records.iter().map(|record| fields.iter().map(|field| cell(record, field)).collect()).collect();
        match self.format {
            Some(Format::Json) => {
                let objects = records.iter().map(|record| chosen(record, fields)).collect();
                self.data(&format!("{}\n", Value::Array(objects)))
            }
            Some(Format::Jsonl) => {
                records.iter().try_for_each(|record| self.data(&format!("{}\n", chosen(record, fields))))
            }
            Some(Format::Csv) => self.csv(fields, &rows),
            _ => self.data(&table::tab_separated(&rows)),
        }
    }

    /// A field whose first part no record has is a slip of the pen; what lies deeper may be
    /// there in other records.
    fn check_fields(&self, records: &[Value], fields: &[String]) -> Result {
        for field in fields.iter().filter(|_| !records.is_empty()) {
            let first = field.split('.').next().unwrap_or_default();
            if !records.iter().any(|record| record.get(first).is_some()) {
                return Err(Failure::usage(format!("no field {field:?} here"))
                    .hint("`--fields` without a value lists the fields"));
            }
            if records.iter().all(|record| lookup(record, field).is_none()) {
                self.warn(format!("no record has the field {field:?}"));
            }
        }
        Ok(())
    }

    fn csv(&self, heads: &[String], rows: &[Vec<String>]) -> Result {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let wrote = writer.write_record(heads).and_then(|()| rows.iter().try_for_each(|row| writer.write_record(row)));
        wrote.map_err(|err| Failure::from_error("write CSV", &err))?;
        self.bytes(&writer.into_inner().expect("a vector takes every byte"))
    }
}

/// A column together with how a record fills it: for people (`true`) or whole.
pub(crate) struct Field {
    pub(crate) column: Column,
    pub(crate) cell: fn(&Value, bool) -> String,
}

/// The chosen fields of a record as an object; missing ones are null.
fn chosen(record: &Value, fields: &[String]) -> Value {
    let pick = |field: &String| (field.clone(), lookup(record, field).cloned().unwrap_or(Value::Null));
    Value::Object(fields.iter().map(pick).collect())
}

/// Follows a dotted path; numbers index arrays.
pub(crate) fn lookup<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(value, |value, part| match value {
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        _ => value.get(part),
    })
}

/// A JSON value as text without quotes around strings; null is empty.
pub(crate) fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn list_paths(value: &Value, prefix: &str, names: &mut Vec<String>) {
    if let Value::Object(map) = value {
        for (key, inner) in map {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            if inner.as_object().is_some_and(|map| !map.is_empty()) {
                list_paths(inner, &path, names);
            } else {
                names.push(path);
            }
        }
    }
}

/// Makes control characters, line ends and direction overrides visible.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
    };
    if !text.chars().any(harmful) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\n' => safe.push_str("\\n"),
            '\r' => safe.push_str("\\r"),
            '\t' => safe.push_str("\\t"),
            c if harmful(c) => safe.push_str(&format!("\\u{{{:x}}}", u32::from(c))),
            c => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout())
        .or_else(|_| rustix::termios::tcgetwinsize(std::io::stderr()))
        .ok()?;
    (size.ws_col > 0).then(|| usize::from(size.ws_col))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_users_are_made_visible() {
        assert_eq!(escape("a\x1b[2Jb\u{202e}c\n"), "a\\u{1b}[2Jb\\u{202e}c\\n");
        assert!(matches!(escape("grüße 🙂"), Cow::Borrowed(_)));
    }

    #[test]
    fn dotted_path_reaches_into_arrays() {
        let value = serde_json::json!({"response": {"body": {"choices": [{"text": "x"}]}}});
        assert_eq!(lookup(&value, "response.body.choices.0.text"), Some(&Value::from("x")));
        assert_eq!(lookup(&value, "response.none"), None);
    }
}
