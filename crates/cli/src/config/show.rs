//! The effective configuration as a list of keys, values and origins.

use serde_json::{Map, Value};

use super::{Config, Loaded, Origin};

/// One line of `batch config show`.
#[derive(Debug, Clone)]
pub(crate) struct ShownSetting {
    pub(crate) key: String,
    /// As in effect; secrets are `***`.
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

impl Loaded {
    /// Every key with its value in effect and where that comes from.
    pub(crate) fn shown(&self) -> Vec<ShownSetting> {
        tree(&self.config)
            .into_iter()
            .map(|(key, value)| ShownSetting { origin: self.origin(&key), key, value })
            .collect()
    }
}

/// Every key and value, in the order of sections and fields; `models` is one value.
pub(super) fn tree(config: &Config) -> Vec<(String, Value)> {
    let to_value = |result: Result<Value, serde_json::Error>| result.expect("sections are plain data");
    let mut engine = to_value(serde_json::to_value(&config.engine.source));
    let local = to_value(serde_json::to_value(&config.engine.local));
    if let (Value::Object(engine), Value::Object(local)) = (&mut engine, local) {
        engine.extend(local);
    }
    let mut root = Map::new();
    root.insert("data_dir".to_owned(), to_value(serde_json::to_value(&config.data_dir)));
    root.insert("model_dir".to_owned(), to_value(serde_json::to_value(&config.model_dir)));
    root.insert("database".to_owned(), to_value(serde_json::to_value(&config.database)));
    root.insert("objects".to_owned(), to_value(serde_json::to_value(&config.objects)));
    root.insert("engine".to_owned(), engine);
    root.insert("models".to_owned(), to_value(serde_json::to_value(&config.models)));
    root.insert("worker".to_owned(), to_value(serde_json::to_value(&config.worker)));
    root.insert("api".to_owned(), to_value(serde_json::to_value(&config.api)));
    root.insert("webhook".to_owned(), to_value(serde_json::to_value(&config.webhook)));
    root.insert("log".to_owned(), to_value(serde_json::to_value(&config.log)));
    let mut leaves = Vec::new();
    for (name, value) in root {
        match value {
            Value::Object(section) => {
                leaves.extend(section.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)));
            }
            other => leaves.push((name, other)),
        }
    }
    leaves
}
