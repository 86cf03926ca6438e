//! `batch config`: every setting with where it comes from; changing one.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::App;
use crate::config::{Loaded, ShownSetting, files_read, known_keys};
use crate::error::{Exit, Failure, Result};
use crate::output::table::Column;
use crate::output::{Field, plain};

/// Arguments of `batch config`.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Every setting, its value and where that comes from
    Show {
        /// Leave out what has its default
        #[arg(long)]
        changed: bool,
    },
    /// The value of one key
    Get {
        /// For example worker.lease_ttl
        key: String,
    },
    /// Write one key into ./overnight.toml, or into the file of --config
    Set {
        /// For example worker.lease_ttl
        key: String,
        /// As in TOML; quotes around a text may be left out
        value: String,
    },
    /// The files that are read, weakest first
    Path,
}

const COLUMNS: &[Field] = &[
    Field { column: Column::left("KEY"), cell: |setting, _| plain(&setting["key"]) },
    Field { column: Column::shrink("VALUE"), cell: |setting, _| shown_value(&setting["value"]) },
    Field { column: Column::shrink("ORIGIN"), cell: |setting, _| plain(&setting["origin"]) },
];

const PATH_COLUMNS: &[Field] = &[
    Field { column: Column::left("FILE"), cell: |file, _| plain(&file["path"]) },
    Field { column: Column::left("STATE"), cell: |file, _| plain(&file["state"]) },
];

/// Unset is a dash; a text is shown without quotes.
fn shown_value(value: &Value) -> String {
    if value.is_null() { "–".to_owned() } else { plain(value) }
}

pub(crate) fn run(args: ConfigArgs, app: &App) -> Result {
    match args.command {
        ConfigCommand::Show { changed } => {
            let loaded = Loaded::read(&app.globals, Vec::new())?;
            let rows: Vec<Value> = loaded
                .shown()
                .iter()
                .filter(|setting| !changed || setting.origin != crate::config::Origin::Default)
                .map(record)
                .collect();
            app.ui.rows(&rows, COLUMNS)
        }
        ConfigCommand::Get { key } => {
            let loaded = Loaded::read(&app.globals, Vec::new())?;
            let setting = loaded.shown().into_iter().find(|setting| setting.key == key).ok_or_else(|| {
                Failure::new(Exit::NotFound, format!("no such setting: {key}")).hint("`batch config show` lists them")
            })?;
            if app.ui.format.is_none() && app.ui.fields.is_none() {
                return app.ui.data(&format!("{}\n", plain(&setting.value)));
            }
            app.ui.record(&record(&setting), COLUMNS, || format!("{}\n", plain(&setting.value)))
        }
        ConfigCommand::Set { key, value } => set(&key, &value, app),
        ConfigCommand::Path => {
            let rows: Vec<Value> = files_read(&app.globals)
                .into_iter()
                .map(|(path, _)| {
                    let state = if path.is_file() { "read" } else { "not there" };
                    json!({"id": path.display().to_string(), "path": path.display().to_string(), "state": state})
                })
                .collect();
            app.ui.rows(&rows, PATH_COLUMNS)
        }
    }
}

fn record(setting: &ShownSetting) -> Value {
    json!({"id": setting.key, "key": setting.key, "value": setting.value, "origin": setting.origin.to_string()})
}

/// Edits the file in place, keeping its comments; the result is checked before it is written.
fn set(key: &str, value: &str, app: &App) -> Result {
    if !known_keys().iter().any(|known| known == key) {
        return Err(Failure::usage(format!("unknown setting {key}")).hint("`batch config show` lists them"));
    }
    if key == "models" {
        return Err(Failure::usage("models is a list of tables: edit the file by hand"));
    }
    let path = app.globals.config.clone().unwrap_or_else(|| PathBuf::from("overnight.toml"));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(err) => return Err(Failure::new(Exit::Failure, format!("could not read {}: {err}", path.display()))),
    };
    let mut document: toml_edit::DocumentMut =
        text.parse().map_err(|err| Failure::usage(format!("{} is not valid TOML: {err}", path.display())))?;
    let value_text = value;
    let value: toml_edit::Value = value.parse().unwrap_or_else(|_| toml_edit::Value::from(value));
    let (section, name) = match key.split_once('.') {
        Some((section, name)) => {
            let table = document.entry(section).or_insert_with(toml_edit::table);
            (table.as_table_mut(), name)
        }
        None => (Some(document.as_table_mut()), key),
    };
    let table =
        section.ok_or_else(|| Failure::usage(format!("{key}: its section is not a table in {}", path.display())))?;
    match table.get_mut(name).and_then(toml_edit::Item::as_value_mut) {
        Some(old) => {
            let decor = old.decor().clone();
            *old = value;
            *old.decor_mut() = decor;
        }
        None => {
            table.insert(name, toml_edit::Item::Value(value));
        }
    }
    let fresh = document.to_string();
    let settings = crate::config::parse_file(&path, &fresh)?;
    Loaded::from_settings(settings)?;
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).map_or(PathBuf::from("."), PathBuf::from);
    let mut file = tempfile::NamedTempFile::new_in(&folder)?;
    std::io::Write::write_all(&mut file, fresh.as_bytes())?;
    file.persist(&path).map_err(|err| Failure::from(err.error))?;
    app.ui.say(format!("{key} is set in {}", path.display()));
    let record = json!({"key": key, "value": value_text, "origin": path.display().to_string()});
    app.ui.json_record(&record).map(drop)
}
