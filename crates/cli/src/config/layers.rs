//! Reads the layers of settings, each with its origin: files, environment, flags.
//! Knows nothing about what a key means.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use toml::de::{DeTable, DeValue};

use crate::args::Globals;
use crate::environment;
use crate::error::{Exit, Failure, Result};

/// Names that are not `OVERNIGHT_SECTION__KEY` and yet ours.
const OTHER_NAMES: &[(&str, Option<&str>)] = &[
    ("OVERNIGHT_DATA_DIR", Some("data_dir")),
    ("OVERNIGHT_MODEL_DIR", Some("model_dir")),
    ("OVERNIGHT_KERNEL_DIR", None),
];

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Nobody set it.
    Default,
    /// A line of a file.
    File { path: PathBuf, line: usize },
    /// A variable.
    Environment(String),
    /// A flag, as typed.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// One value for one key.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Setting {
    /// Dotted.
    pub(crate) key: String,
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

impl Setting {
    /// A command's own flag.
    pub(crate) fn flag(flag: &str, key: &str, value: impl Into<Value>) -> Self {
        Self { key: key.to_owned(), value: value.into(), origin: Origin::Flag(flag.to_owned()) }
    }
}

/// All settings, weakest first.
pub(crate) fn collect(globals: &Globals, flags: Vec<Setting>) -> Result<Vec<Setting>> {
    let mut settings = Vec::new();
    for (path, required) in files_read(globals) {
        match std::fs::read_to_string(&path) {
            Ok(text) => settings.extend(parse_file(&path, &text)?),
            Err(err) if !required && err.kind() == std::io::ErrorKind::NotFound => {}
            Err(err) => {
                return Err(Failure::usage(format!("could not read the configuration {}: {err}", path.display())));
            }
        }
    }
    settings.extend(from_environment()?);
    settings.extend(flags);
    if let Some(path) = &globals.data_dir {
        settings.push(Setting::flag("--data-dir", "data_dir", path_text(path)?));
    }
    if globals.verbose > 0 {
        let level = if globals.verbose == 1 { "debug" } else { "trace" };
        settings.push(Setting::flag("--verbose", "log.filter", level));
    }
    for text in &globals.set {
        let (key, value) = text.split_once('=').ok_or_else(|| {
            Failure::usage(format!("--set wants KEY=VALUE: {text}")).hint("for example --set engine.block_size=32")
        })?;
        settings.push(Setting::flag(&format!("--set {text}"), key.trim(), loose_value(value.trim())));
    }
    Ok(settings)
}

/// The files that would be read, weakest first, and whether each must be there.
pub(crate) fn files_read(globals: &Globals) -> Vec<(PathBuf, bool)> {
    if let Some(path) = &globals.config {
        return vec![(path.clone(), true)];
    }
    let mut files = vec![(PathBuf::from("/etc/overnight/config.toml"), false)];
    files.extend(
        environment::xdg("XDG_CONFIG_HOME", ".config")
            .map(|folder| (folder.join("overnight").join("config.toml"), false)),
    );
    files.push((PathBuf::from("overnight.toml"), false));
    files
}

pub(crate) fn path_text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| Failure::usage(format!("the path is not UTF-8: {}", path.display())))
}

/// Settings of one file, each with its line.
pub(crate) fn parse_file(path: &Path, text: &str) -> Result<Vec<Setting>> {
    let root = DeTable::parse(text).map_err(|err| {
        let line = err.span().map_or(1, |span| line_of(text, span.start));
        Failure::new(Exit::Usage, format!("the configuration is not valid TOML: {}", err.message()))
            .code("invalid_config")
            .note(format!("--> {}:{line}", path.display()))
    })?;
    let mut settings = Vec::new();
    flatten(root.get_ref(), "", &mut |key, value, at| {
        let origin = Origin::File { path: path.to_owned(), line: line_of(text, at) };
        settings.push(Setting { key, value, origin });
    });
    Ok(settings)
}

fn flatten(table: &DeTable<'_>, prefix: &str, emit: &mut impl FnMut(String, Value, usize)) {
    for (key, value) in table {
        let path = if prefix.is_empty() { key.get_ref().to_string() } else { format!("{prefix}.{}", key.get_ref()) };
        match value.get_ref() {
            DeValue::Table(inner) => flatten(inner, &path, emit),
            other => emit(path, to_json(other), key.span().start),
        }
    }
}

fn to_json(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Boolean(flag) => Value::from(*flag),
        DeValue::Integer(number) => {
            let digits = number.as_str().trim_start_matches('+');
            i64::from_str_radix(digits, number.radix()).map_or_else(|_| Value::from(digits), Value::from)
        }
        DeValue::Float(number) => {
            number.as_str().parse::<f64>().map_or_else(|_| Value::from(number.as_str()), Value::from)
        }
        DeValue::Datetime(moment) => Value::from(moment.to_string()),
        DeValue::Array(list) => Value::Array(list.iter().map(|item| to_json(item.get_ref())).collect()),
        DeValue::Table(table) => Value::Object(
            table.iter().map(|(key, value)| (key.get_ref().to_string(), to_json(value.get_ref()))).collect(),
        ),
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|&&byte| byte == b'\n').count() + 1
}

fn from_environment() -> Result<Vec<Setting>> {
    let mut settings = Vec::new();
    if let Some(url) = environment::text("DATABASE_URL") {
        let origin = Origin::Environment("DATABASE_URL".to_owned());
        settings.push(Setting { key: "database.url".to_owned(), value: Value::from(url), origin });
    }
    if let Some(filter) = environment::text("RUST_LOG") {
        let origin = Origin::Environment("RUST_LOG".to_owned());
        settings.push(Setting { key: "log.filter".to_owned(), value: Value::from(filter), origin });
    }
    for (name, value) in environment::with_prefix("OVERNIGHT_") {
        let value = value.into_string().map_err(|_| Failure::usage(format!("the value of {name} is not UTF-8")))?;
        let origin = Origin::Environment(name.clone());
        if let Some((_, key)) = OTHER_NAMES.iter().find(|(other, _)| *other == name) {
            if let (Some(key), false) = (key, value.is_empty()) {
                settings.push(Setting { key: (*key).to_owned(), value: Value::from(value), origin });
            }
        } else if let Some((section, key)) = name["OVERNIGHT_".len()..].split_once("__") {
            let key = format!("{}.{}", section.to_lowercase(), key.to_lowercase().replace("__", "."));
            settings.push(Setting { key, value: loose_value(&value), origin });
        } else if !name.starts_with("OVERNIGHT_TEST_") {
            return Err(Failure::usage(format!("unknown variable {name}"))
                .code("invalid_config")
                .note("--> environment")
                .hint("settings are OVERNIGHT_SECTION__KEY, for example OVERNIGHT_WORKER__LEASE_TTL; unset it or correct it"));
        }
    }
    Ok(settings)
}

/// A value as typed on a command line or in a variable: TOML when it is a number,
/// a truth value, a list, a table or a quoted text; else the text itself.
pub(crate) fn loose_value(text: &str) -> Value {
    match DeValue::parse(text) {
        Ok(value) if !matches!(value.get_ref(), DeValue::Datetime(_)) => to_json(value.get_ref()),
        _ => Value::from(text),
    }
}
