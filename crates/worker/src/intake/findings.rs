//! What intake found wrong: every error counted, the first ones kept word for
//! word in line order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Why an input does not validate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IntakeCode {
    /// Not JSON, not an object, not UTF-8, over the line limit, a repeated envelope key.
    InvalidJsonLine,
    /// A field is missing or of the wrong type or value.
    InvalidRequest,
    /// An earlier line has the same custom id.
    DuplicateCustomId,
    /// `url` differs from the endpoint.
    UrlMismatch,
    /// The model differs from the first one in the file.
    ModelMismatch,
    /// The model is not served here.
    ModelNotFound,
    /// No request in the file.
    EmptyFile,
    /// More requests than the limit.
    TooManyTasks,
    /// The input cannot be read with our rights.
    InputNoPermissions,
    /// The input's bytes are not those that were recorded.
    InputModified,
}

impl IntakeCode {
    /// Every code.
    pub const ALL: &'static [Self] = &[
        Self::InvalidJsonLine,
        Self::InvalidRequest,
        Self::DuplicateCustomId,
        Self::UrlMismatch,
        Self::ModelMismatch,
        Self::ModelNotFound,
        Self::EmptyFile,
        Self::TooManyTasks,
        Self::InputNoPermissions,
        Self::InputModified,
    ];

    /// The word on the wire.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::InvalidJsonLine => "invalid_json_line",
            Self::InvalidRequest => "invalid_request",
            Self::DuplicateCustomId => "duplicate_custom_id",
            Self::UrlMismatch => "url_mismatch",
            Self::ModelMismatch => "model_mismatch",
            Self::ModelNotFound => "model_not_found",
            Self::EmptyFile => "empty_file",
            Self::TooManyTasks => "too_many_tasks",
            Self::InputNoPermissions => "input_no_permissions",
            Self::InputModified => "input_modified",
        }
    }
}

/// One error, with the wire's four keys in its order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Which.
    pub code: IntakeCode,
    /// Physical line from 1; `None` when it is the file's.
    pub line: Option<u64>,
    /// In words.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
}

/// All errors of an input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Findings {
    kept_max: usize,
    /// The first ones: those of the file, then by line.
    pub kept: Vec<Finding>,
    /// How many there are in all.
    pub total: u64,
    /// How many of each code.
    pub counts: BTreeMap<IntakeCode, u64>,
}

impl Findings {
    /// None yet; at most `kept_max` will be kept.
    pub fn new(kept_max: usize) -> Self {
        Self { kept_max: kept_max.max(1), kept: Vec::new(), total: 0, counts: BTreeMap::new() }
    }

    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Adds an error. Its message is made only when it is kept.
    pub fn add(&mut self, code: IntakeCode, line: Option<u64>, param: Option<&str>, message: impl FnOnce() -> String) {
        self.count(code, 1);
        // Mostly errors come in line order, so this is the end.
        let at = self.kept.partition_point(|kept| kept.line <= line);
        if at >= self.kept_max {
            return;
        }
        self.kept.insert(at, Finding { code, line, message: message(), param: param.map(str::to_owned) });
        self.kept.truncate(self.kept_max);
    }

    /// Counts errors that are not kept.
    pub fn count(&mut self, code: IntakeCode, more: u64) {
        if more > 0 {
            self.total += more;
            *self.counts.entry(code).or_default() += more;
        }
    }

    /// The wire's `errors` object.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({"object": "list", "data": self.kept, "total": self.total, "counts": self.counts})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Field report 19: all four keys, and the truth about what is not kept.
    #[test]
    fn first_errors_by_line_are_kept_and_all_are_counted() {
        let mut findings = Findings::new(3);
        for line in [5, 7, 9, 11] {
            findings.add(IntakeCode::InvalidJsonLine, Some(line), None, || "x".into());
        }
        findings.add(IntakeCode::DuplicateCustomId, Some(6), Some("custom_id"), || "y".into());
        findings.add(IntakeCode::TooManyTasks, None, None, || "z".into());
        let lines: Vec<_> = findings.kept.iter().map(|kept| kept.line).collect();
        assert_eq!(lines, [None, Some(5), Some(6)]);
        let json = findings.to_json();
        assert_eq!(json["total"], 6);
        assert_eq!(json["counts"]["invalid_json_line"], 4);
        let text = json["data"][2].to_string();
        assert_eq!(text, r#"{"code":"duplicate_custom_id","line":6,"message":"y","param":"custom_id"}"#);
        assert_eq!(json["data"][0]["param"], serde_json::Value::Null);
    }

    #[test]
    fn every_code_is_stored_as_its_wire_word() {
        for code in IntakeCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
        }
    }
}
