//! Typed access to a JSON object.

use serde_json::{Map, Value};

use super::ConfigError;

/// Typed access that tells a missing key from one of the wrong type.
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl Fields<'_> {
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| ConfigError::Wrong(format!("{key} is not a number"))),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                value.as_bool().map(Some).ok_or_else(|| ConfigError::Wrong(format!("{key} is not a boolean")))
            }
        }
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Err(ConfigError::Wrong(format!("{key} is missing"))),
            Some(value) => value
                .as_u64()
                .map(|v| v as usize)
                .ok_or_else(|| ConfigError::Wrong(format!("{key} is not a whole number"))),
        }
    }

    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(_) => self.size(key),
        }
    }
}

/// One id, a list of them, or none.
pub(crate) fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}
