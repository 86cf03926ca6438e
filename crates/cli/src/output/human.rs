//! Numbers, sizes, durations and times as people write and read them.

use std::time::Duration;

use overnight_types::Timestamp;

/// `41208` → `41,208`.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 request`, `41,208 requests`.
pub(crate) fn counted(value: u64, one: &str) -> String {
    counted_as(value, one, &format!("{one}s"))
}

/// The same for a word whose plural is another.
pub(crate) fn counted_as(value: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(value), if value == 1 { one } else { many })
}

/// A rate or another rough number: `412`, `51.3k`, `2.2M`.
pub(crate) fn rough(value: f64) -> String {
    match value {
        v if !v.is_finite() || v < 0.0 => "–".to_owned(),
        v if v < 10.0 => format!("{v:.1}"),
        v if v < 1_000.0 => format!("{v:.0}"),
        v if v < 1_000_000.0 => format!("{:.1}k", v / 1e3),
        v => format!("{:.1}M", v / 1e6),
    }
}

/// `253113024` → `241.4 MiB`.
pub(crate) fn bytes(value: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = value as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value} B") } else { format!("{size:.1} {}", UNITS[unit]) }
}

/// `2m23s`, `1h05m`, `3d04h`, `0.4s`.
pub(crate) fn duration(value: Duration) -> String {
    let secs = value.as_secs();
    match secs {
        0 => format!("{:.1}s", value.as_secs_f64()),
        1..60 => format!("{secs}s"),
        60..3_600 => format!("{}m{:02}s", secs / 60, secs % 60),
        3_600..86_400 => format!("{}h{:02}m", secs / 3_600, secs % 3_600 / 60),
        _ => format!("{}d{:02}h", secs / 86_400, secs % 86_400 / 3_600),
    }
}

/// Unix seconds as `3m12s ago` or `in 2h05m`.
pub(crate) fn relative(unix_seconds: i64, now: Timestamp) -> String {
    let ahead = unix_seconds.saturating_sub(now.unix_seconds());
    let length = duration(Duration::from_secs(ahead.unsigned_abs()));
    match ahead {
        0 => "now".to_owned(),
        1.. => format!("in {length}"),
        _ => format!("{length} ago"),
    }
}

/// Unix seconds as RFC 3339 in UTC.
pub(crate) fn absolute(unix_seconds: i64) -> String {
    let at = Timestamp::from_micros(unix_seconds.saturating_mul(1_000_000));
    at.datetime().to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

/// Reads `1k` = 1000, `1K` = 1024, `25.6k`, `41,208`, `1_000`.
pub(crate) fn parse_count(text: &str) -> Result<u64, String> {
    let wrong = || format!("not a whole number: {text:?} (1000, 1k = 1000, 1K = 1024 and 25.6k are understood)");
    let plain: String = text.trim().chars().filter(|c| !matches!(c, ',' | '_')).collect();
    if let Ok(value) = plain.parse() {
        return Ok(value);
    }
    let unit = plain.chars().next_back().ok_or_else(wrong)?;
    let factor = match unit {
        'k' => 1e3,
        'm' => 1e6,
        'g' => 1e9,
        'K' => 1024.0,
        'M' => 1024.0 * 1024.0,
        'G' => 1024.0 * 1024.0 * 1024.0,
        _ => return Err(wrong()),
    };
    let number: f64 = plain[..plain.len() - unit.len_utf8()].parse().map_err(|_| wrong())?;
    let value = (number * factor).round();
    if value.is_finite() && (0.0..1.8e19).contains(&value) { Ok(value as u64) } else { Err(wrong()) }
}

/// Reads `64MiB`, `2GiB`, `10MB`, `512`, `1.5GiB`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("not a size: {text:?} (512, 64MiB, 2GiB and 10MB are understood)");
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" | "K" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "TiB" | "T" => 1 << 40,
        _ => return Err(wrong()),
    };
    let number = number.replace('_', "");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(wrong);
    }
    let value = number.parse::<f64>().map_err(|_| wrong())? * factor as f64;
    if value.is_finite() && (0.0..1.8e19).contains(&value) { Ok(value as u64) } else { Err(wrong()) }
}

/// Reads `90s`, `2h`, `1d`, `250ms`, `1h30m`; a bare number is seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("not a duration: {text:?} (90s, 5m, 2h, 1d, 250ms and 1h30m are understood)");
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(wrong());
    }
    if let Ok(secs) = rest.parse::<f64>() {
        return Duration::try_from_secs_f64(secs).map_err(|_| wrong());
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|&at| at > 0).ok_or_else(wrong)?;
        let (number, after) = rest.split_at(digits);
        let unit_len = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_len);
        let secs = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3_600.0,
            "d" => 86_400.0,
            _ => return Err(wrong()),
        };
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let part = Duration::try_from_secs_f64(number * secs).map_err(|_| wrong())?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        rest = after;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn human_numbers_read_as_operators_write_them() {
        for (text, value) in
            [("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("41,208", 41_208), ("0", 0), ("2M", 2 << 20)]
        {
            assert_eq!(parse_count(text), Ok(value), "{text}");
        }
        for text in ["", "k", "1x", "-1", "1.5", "NaN"] {
            assert!(parse_count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_and_durations_read_as_written() {
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("10MB"), Ok(10_000_000));
        assert_eq!(parse_bytes("1.5GiB"), Ok(3 << 29));
        assert!(parse_bytes("five").is_err());
        assert_eq!(parse_duration("1h30m"), Ok(Duration::from_secs(5_400)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        for text in ["", "h", "1y", "-3s", "1h-3m"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_are_shown_with_their_separators() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_000), "1,000");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(rough(51_312.0), "51.3k");
        assert_eq!(bytes(253_113_024), "241.4 MiB");
        assert_eq!(duration(Duration::from_secs(143)), "2m23s");
        assert_eq!(duration(Duration::from_secs(3_900)), "1h05m");
    }
}
