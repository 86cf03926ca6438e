//! Lengths of time and sizes as people write them in settings: `15s`, `250ms`,
//! `10m`, `24h`, `7d`; `512`, `64KiB`, `4MiB`, `2GiB`.
//!
//! [`duration`] and [`bytes`] are for `#[serde(with = …)]`.

use std::time::Duration;

/// A text that is not a length of time or a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}, found {found:?}")]
pub struct ParseHumaneError {
    /// The form wanted, with examples.
    pub expected: &'static str,
    /// The text as given.
    pub found: String,
}

const DURATION_UNITS: &[(&str, u64)] =
    &[("ms", 1), ("s", 1_000), ("m", 60_000), ("min", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
const BYTE_UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = units.iter().find(|(name, _)| *name == unit.trim())?.1;
    number.parse::<u64>().ok()?.checked_mul(scale)
}

/// Reads a length of time: a whole number and one of `ms s m h d`.
pub fn parse_duration(text: &str) -> Result<Duration, ParseHumaneError> {
    parse(text, DURATION_UNITS).map(Duration::from_millis).ok_or_else(|| ParseHumaneError {
        expected: "a length of time such as \"250ms\", \"15s\", \"10m\", \"24h\" or \"7d\"",
        found: text.to_owned(),
    })
}

/// Writes a length of time in the largest unit that divides it.
pub fn format_duration(value: Duration) -> String {
    let millis = u64::try_from(value.as_millis()).unwrap_or(u64::MAX);
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)];
    match units.iter().find(|(_, scale)| millis > 0 && millis.is_multiple_of(*scale)) {
        Some((unit, scale)) => format!("{}{unit}", millis / scale),
        None => format!("{millis}ms"),
    }
}

/// Reads a size: a whole number of bytes, or one with `KiB MiB GiB TiB` or `KB MB GB`.
pub fn parse_bytes(text: &str) -> Result<u64, ParseHumaneError> {
    parse(text, BYTE_UNITS).ok_or_else(|| ParseHumaneError {
        expected: "a size such as \"512\", \"64KiB\", \"4MiB\" or \"2GiB\"",
        found: text.to_owned(),
    })
}

/// Writes a size in the largest unit that divides it.
pub fn format_bytes(value: u64) -> String {
    let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.iter().find(|(_, scale)| value > 0 && value.is_multiple_of(*scale)) {
        Some((unit, scale)) => format!("{}{unit}", value / scale),
        None => value.to_string(),
    }
}

/// Serde form of a [`Duration`] as text.
pub mod duration {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the text.
    pub fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::format_duration(*value))
    }

    /// Reads the text.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)?;
        super::parse_duration(&text).map_err(serde::de::Error::custom)
    }
}

/// Serde form of a size as text or a plain number of bytes.
pub mod bytes {
    use serde::{Deserialize, Deserializer, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum NumberOrText {
        Number(u64),
        Text(String),
    }

    /// Writes the text.
    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::format_bytes(*value))
    }

    /// Reads the text or the number.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        match NumberOrText::deserialize(deserializer)? {
            NumberOrText::Number(bytes) => Ok(bytes),
            NumberOrText::Text(text) => super::parse_bytes(&text).map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_of_time_reads_back_from_its_text() {
        for millis in [0, 1, 250, 1_000, 15_000, 90_000, 600_000, 86_400_000, 90_061_001] {
            let value = Duration::from_millis(millis);
            assert_eq!(parse_duration(&format_duration(value)), Ok(value), "{}", format_duration(value));
        }
        for wrong in ["", "15", "s", "1.5s", "-1s", "15 years", "99999999999999999999s"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn size_reads_back_from_its_text() {
        for bytes in [0, 1, 1023, 1024, 4 << 20, 256 << 20, (1 << 40) + 1] {
            assert_eq!(parse_bytes(&format_bytes(bytes)), Ok(bytes), "{}", format_bytes(bytes));
        }
        assert_eq!(parse_bytes("2 GiB"), Ok(2 << 30));
        assert!(parse_bytes("2 gigs").is_err());
    }
}
