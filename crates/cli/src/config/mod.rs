//! The whole configuration: sections, defaults, and the rules across sections.
//!
//! Invariant: a [`Loaded`] is valid as a whole, and every value in it has an origin.
//! An unknown key, a wrong type or a value out of range stops the start; nothing
//! wrong ever becomes a default. How layers are read is in [`layers`].

mod layers;
mod sections;
mod show;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use overnight_api::ApiConfig;
use overnight_worker::WorkerConfig;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

pub(crate) use layers::{Origin, Setting, files_read, parse_file, path_text};
pub(crate) use sections::{
    DatabaseSection, DatabaseUrl, EngineKind, EngineSection, EngineSource, LogFormat, LogSection, Mirror, ModelEntry,
    ModelFile, ObjectsSection, WebhookSection,
};
pub(crate) use show::ShownSetting;

use crate::args::Globals;
use crate::environment;
use crate::error::{Exit, Failure, Result};

/// Everything that can be set.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Config {
    /// Database, objects and locks; `None`: `./overnight-data`.
    pub(crate) data_dir: Option<PathBuf>,
    /// Pulled models; `None`: `overnight/models` in the user's cache folder.
    pub(crate) model_dir: Option<PathBuf>,
    pub(crate) database: DatabaseSection,
    pub(crate) objects: ObjectsSection,
    pub(crate) engine: EngineSection,
    pub(crate) models: Vec<ModelEntry>,
    pub(crate) worker: WorkerConfig,
    pub(crate) api: ApiConfig,
    pub(crate) webhook: WebhookSection,
    pub(crate) log: LogSection,
}

/// A valid configuration and where its values come from.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    settings: Vec<Setting>,
}

impl Loaded {
    /// Reads all layers. `flags` are the command's own flags as settings.
    pub(crate) fn read(globals: &Globals, flags: Vec<Setting>) -> Result<Self> {
        let mut loaded = Self::from_settings(layers::collect(globals, flags)?)?;
        loaded.read_database_url()?;
        Ok(loaded)
    }

    /// Puts the URL that `database.url_file` holds in its place.
    fn read_database_url(&mut self) -> Result {
        let key = "database.url_file";
        let Some(path) = &self.config.database.url_file else { return Ok(()) };
        let text = std::fs::read_to_string(path).map_err(|err| self.out_of_range(key, &err.to_string()))?;
        let url = DatabaseUrl::of(&text);
        if let Some(problem) = url.problem() {
            return Err(self.out_of_range(key, &format!("its text {problem}")));
        }
        self.config.database.url = Some(url);
        Ok(())
    }

    /// Builds and checks; later settings win.
    pub(crate) fn from_settings(settings: Vec<Setting>) -> Result<Self> {
        let known = known_keys();
        for setting in &settings {
            if !known.contains(&setting.key) {
                return Err(unknown_key(setting, &known));
            }
        }
        let settings: Vec<Setting> = settings.into_iter().map(read_units).collect();
        // Each alone first, so that a wrong one is named with its own origin.
        for setting in &settings {
            if let Err(err) = assemble(std::slice::from_ref(setting)) {
                return Err(invalid(setting, &err.to_string()));
            }
        }
        let config = assemble(&settings).map_err(|err| Failure::usage(format!("invalid configuration: {err}")))?;
        let loaded = Self { config, settings };
        loaded.check_ranges()?;
        Ok(loaded)
    }

    /// The setting that decides a key; `None` when it has its default.
    pub(crate) fn setting(&self, key: &str) -> Option<&Setting> {
        self.settings.iter().rev().find(|setting| setting.key == key)
    }

    /// Where a key's value comes from.
    pub(crate) fn origin(&self, key: &str) -> Origin {
        self.setting(key).map_or(Origin::Default, |setting| setting.origin.clone())
    }

    fn check_ranges(&self) -> Result {
        let config = &self.config;
        if let Err(err) = config.engine.local.validate() {
            return Err(match err {
                overnight_engine::Error::Config { key, what } => self.out_of_range(&format!("engine.{key}"), &what),
                other => Failure::from_error("check [engine]", &other),
            });
        }
        if let Err(err) = config.worker.validate() {
            return Err(match err {
                overnight_worker::Error::Config { key, what } => self.out_of_range(&format!("worker.{key}"), &what),
                other => Failure::from_error("check [worker]", &other),
            });
        }
        if let Err(err) = config.api.validate() {
            let what = format!("{} is not allowed, allowed is {}", err.value, err.allowed);
            return Err(self.out_of_range(&format!("api.{}", err.key), &what));
        }
        match sections::problems(config).first() {
            Some((key, what)) => Err(self.out_of_range(key, what)),
            None => Ok(()),
        }
    }

    fn out_of_range(&self, key: &str, what: &str) -> Failure {
        match self.setting(key) {
            Some(setting) => invalid(setting, what),
            None => Failure::usage(format!("invalid setting {key} (its default): {what}")).code("invalid_config"),
        }
    }
}

impl Config {
    /// The data folder.
    pub(crate) fn data_dir(&self) -> PathBuf {
        self.data_dir.clone().unwrap_or_else(|| PathBuf::from("overnight-data"))
    }

    /// Where pulled models are kept.
    pub(crate) fn model_dir(&self) -> PathBuf {
        let cache = || environment::xdg("XDG_CACHE_HOME", ".cache").map(|cache| cache.join("overnight").join("models"));
        self.model_dir.clone().or_else(cache).unwrap_or_else(|| self.data_dir().join("models"))
    }

    /// The database's file.
    pub(crate) fn database_path(&self) -> PathBuf {
        match &self.database.url {
            Some(url) => PathBuf::from(sqlite_path(url.expose()).unwrap_or(url.expose())),
            None => self.data_dir().join("overnight.db"),
        }
    }

    /// The object store's address; a folder is made absolute.
    pub(crate) fn objects_url(&self) -> Result<String> {
        if let Some(url) = &self.objects.url {
            return Ok(url.clone());
        }
        let path = std::path::absolute(self.data_dir().join("objects"))?;
        let path = path.to_str().ok_or_else(|| not_utf8(&path))?;
        Ok(format!("file://{path}"))
    }
}

fn not_utf8(path: &Path) -> Failure {
    Failure::usage(format!("the data folder's path is not UTF-8: {}", path.display()))
        .hint("give another one with --data-dir")
}

/// The path in `sqlite:…`, `sqlite://…`; `None` for another scheme.
pub(crate) fn sqlite_path(url: &str) -> Option<&str> {
    let rest = url.strip_prefix("sqlite:")?;
    let rest = rest.strip_prefix("//").unwrap_or(rest);
    Some(rest.split_once('?').map_or(rest, |(path, _)| path))
}

/// Where clients find the server when nobody says: a live server of the data
/// folder, else the address in `[api]`.
pub(crate) fn server_address(globals: &Globals) -> Result<String> {
    let loaded = Loaded::read(globals, Vec::new())?;
    let config = &loaded.config;
    let said = loaded.setting("api.port").is_some() || loaded.setting("api.host").is_some();
    if !said && let Some(url) = crate::host::live_server(&config.data_dir()) {
        return Ok(url);
    }
    let host = config.api.host.trim_start_matches('[').trim_end_matches(']');
    let host = match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) if address.is_unspecified() => "127.0.0.1".to_owned(),
        Ok(IpAddr::V6(address)) if address.is_unspecified() => "[::1]".to_owned(),
        Ok(IpAddr::V6(address)) => format!("[{address}]"),
        _ => host.to_owned(),
    };
    Ok(format!("http://{host}:{}", config.api.port))
}

/// Every key, dotted, in the order of the sections.
pub(crate) fn known_keys() -> Vec<String> {
    show::tree(&Config::default()).into_iter().map(|(key, _)| key).collect()
}

fn unknown_key(setting: &Setting, known: &[String]) -> Failure {
    let mut failure = Failure::usage(format!("unknown setting {}", setting.key))
        .code("invalid_config")
        .note(format!("--> {}", setting.origin));
    let nearest = known.iter().map(|key| (edit_distance(key, &setting.key), key)).min();
    match nearest {
        // A short word is a few letters away from many keys and means none of them.
        Some((distance, key)) if distance <= (setting.key.len() / 3).min(4) => {
            failure = failure.hint(format!("did you mean {key}?"))
        }
        _ => failure = failure.hint("`batch config show` lists every key"),
    }
    failure
}

fn invalid(setting: &Setting, what: &str) -> Failure {
    let what = what.split(" at line ").next().unwrap_or(what);
    let secret = sections::is_secret(&setting.key);
    let value = if secret || sections::holds_password(&setting.key, &setting.value) {
        "***".to_owned()
    } else {
        sections::shown(&setting.key, &setting.value)
    };
    // A parser's words may quote the value.
    let what = if secret { "not of the right form" } else { what };
    Failure::new(Exit::Usage, format!("invalid setting {} = {value}: {what}", setting.key))
        .code("invalid_config")
        .note(format!("--> {}", setting.origin))
}

/// Lets `2GiB` and `1k` stand where a plain number is expected, so that every key takes human units.
fn read_units(mut setting: Setting) -> Setting {
    use crate::output::human;
    let wants_number = show::tree(&Config::default()).into_iter().any(|(key, value)| {
        key == setting.key && (value.is_u64() || sections::OPTIONAL_NUMBERS.contains(&key.as_str()))
    });
    if let (true, Value::String(text)) = (wants_number, &setting.value) {
        let number = if setting.key.contains("bytes") { human::parse_bytes(text) } else { human::parse_count(text) };
        if let Ok(number) = number {
            setting.value = Value::from(number);
        }
    }
    setting
}

fn assemble(settings: &[Setting]) -> Result<Config, serde_json::Error> {
    let mut tree: Map<String, Value> = Map::new();
    for setting in settings {
        let mut parts = setting.key.split('.').peekable();
        let mut place = &mut tree;
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                place.insert(part.to_owned(), setting.value.clone());
            } else {
                let inner = place.entry(part).or_insert_with(|| Value::Object(Map::new()));
                let Value::Object(inner) = inner else { break };
                place = inner;
            }
        }
    }
    let mut engine = take_object(&mut tree, "engine");
    let source: Map<String, Value> =
        EngineSource::KEYS.iter().filter_map(|key| Some(((*key).to_owned(), engine.remove(*key)?))).collect();
    Ok(Config {
        data_dir: take(&mut tree, "data_dir")?,
        model_dir: take(&mut tree, "model_dir")?,
        database: take(&mut tree, "database")?,
        objects: take(&mut tree, "objects")?,
        engine: EngineSection {
            source: serde_json::from_value(Value::Object(source))?,
            local: serde_json::from_value(Value::Object(engine))?,
        },
        models: take(&mut tree, "models")?,
        worker: take(&mut tree, "worker")?,
        api: take(&mut tree, "api")?,
        webhook: take(&mut tree, "webhook")?,
        log: take(&mut tree, "log")?,
    })
}

fn take<T: DeserializeOwned + Default>(tree: &mut Map<String, Value>, key: &str) -> Result<T, serde_json::Error> {
    tree.remove(key).map_or_else(|| Ok(T::default()), serde_json::from_value)
}

fn take_object(tree: &mut Map<String, Value>, key: &str) -> Map<String, Value> {
    match tree.remove(key) {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let cost = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests;
