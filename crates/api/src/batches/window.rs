//! `completion_window` and `output_expires_after`: texts and seconds into lengths.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::body::wrong_type;
use crate::error::{ApiError, Result};

const WINDOW_MIN: Duration = Duration::from_secs(5 * 60);
const WINDOW_MAX: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Shortest and longest expiry of a file, seconds.
const EXPIRY_S: std::ops::RangeInclusive<u64> = 3_600..=2_592_000;

/// Whether a batch takes this window; else why not. For clients that ask before they upload.
pub fn check_window(text: &str) -> Result<(), String> {
    parse_window(text).map(drop).map_err(|refused| refused.message.into_owned())
}

/// `24h`, or any `<n>m`, `<n>h`, `<n>d` from 5 minutes to 30 days.
pub(crate) fn parse_window(text: &str) -> Result<Duration> {
    let refused = || {
        let shown: String = text.chars().take(40).collect();
        let message =
            format!("completion_window must be <n>m, <n>h or <n>d from 5m to 30d, for example 24h; it is: {shown}");
        ApiError::invalid("completion_window", message).code("invalid_value")
    };
    let (digits, unit_s) = [('m', 60), ('h', 3_600), ('d', 86_400)]
        .into_iter()
        .find_map(|(unit, seconds)| text.strip_suffix(unit).map(|digits| (digits, seconds)))
        .ok_or_else(refused)?;
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = digits.parse::<u64>().ok().filter(|_| plain).and_then(|number| number.checked_mul(unit_s));
    let window = Duration::from_secs(seconds.ok_or_else(refused)?);
    if (WINDOW_MIN..=WINDOW_MAX).contains(&window) { Ok(window) } else { Err(refused()) }
}

/// `{"anchor": "created_at", "seconds": 3600…2592000}` of a JSON body.
pub(crate) fn parse_expiry(param: &'static str, map: &Map<String, Value>) -> Result<u64> {
    if let Some(key) = map.keys().find(|key| !["anchor", "seconds"].contains(&key.as_str())) {
        let name = format!("{param}.{}", key.chars().take(40).collect::<String>());
        return Err(ApiError::invalid(name.clone(), format!("unknown parameter: {name}")).code("unknown_parameter"));
    }
    let anchor = map.get("anchor").unwrap_or(&Value::Null);
    let anchor = anchor.as_str().ok_or_else(|| wrong_type(format!("{param}.anchor"), "\"created_at\"", anchor))?;
    check_anchor(param, anchor)?;
    let seconds = map.get("seconds").unwrap_or(&Value::Null);
    let number = seconds.as_u64().ok_or_else(|| wrong_type(format!("{param}.seconds"), "an integer", seconds))?;
    check_expiry_seconds(param, number)
}

/// The only anchor there is.
pub(crate) fn check_anchor(param: &str, anchor: &str) -> Result<()> {
    if anchor == "created_at" {
        return Ok(());
    }
    let shown: String = anchor.chars().take(40).collect();
    let message = format!("{param}.anchor must be created_at, it is: {shown}");
    Err(ApiError::invalid(format!("{param}.anchor"), message).code("invalid_value"))
}

/// Seconds within the range.
pub(crate) fn check_expiry_seconds(param: &str, seconds: u64) -> Result<u64> {
    if EXPIRY_S.contains(&seconds) {
        return Ok(seconds);
    }
    let message = format!("{param}.seconds must be {} to {}, it is: {seconds}", EXPIRY_S.start(), EXPIRY_S.end());
    Err(ApiError::invalid(format!("{param}.seconds"), message).code("invalid_value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_is_taken_from_five_minutes_to_thirty_days() {
        for (text, seconds) in [("24h", 86_400), ("5m", 300), ("30d", 2_592_000), ("720h", 2_592_000)] {
            assert_eq!(parse_window(text).unwrap(), Duration::from_secs(seconds), "{text}");
        }
        for text in ["4m", "31d", "721h", "24", "h", "", "+24h", "24 h", "24H", "1.5h", "99999999999999999999h", "é"] {
            let refused = parse_window(text).unwrap_err();
            assert_eq!(refused.param.as_deref(), Some("completion_window"), "{text}");
        }
    }

    #[test]
    fn expiry_is_checked_at_both_ends() {
        for (seconds, ok) in [(3_599, false), (3_600, true), (2_592_000, true), (2_592_001, false)] {
            assert_eq!(check_expiry_seconds("expires_after", seconds).is_ok(), ok, "{seconds}");
        }
    }
}
