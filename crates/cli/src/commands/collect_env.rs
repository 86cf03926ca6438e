//! `batch collect-env`: what a bug report should say of this machine and this binary.
//!
//! Invariant: no secret is in it; settings are shown as `batch config show` shows them.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::App;
use crate::commands::doctor;
use crate::config::{Loaded, Origin};
use crate::error::Result;
use crate::output::{escape, human, plain};

/// CPU features that the engine asks for or could use.
const CPU_FEATURES: &[&str] =
    &["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "sve"];

pub(crate) async fn run(app: &App) -> Result {
    let report = collect(app).await?;
    if app.ui.json_record(&report)? {
        return Ok(());
    }
    app.ui.data(&text(&report))
}

async fn collect(app: &App) -> Result<Value> {
    let loaded = Loaded::read(&app.globals, Vec::new())?;
    let changed = loaded.shown().into_iter().filter(|setting| setting.origin != Origin::Default);
    let settings: serde_json::Map<_, _> = changed
        .map(|setting| (setting.key.clone(), json!({"value": setting.value, "origin": setting.origin.to_string()})))
        .collect();
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (cpus, memory, system) = (read("/proc/cpuinfo"), read("/proc/meminfo"), read("/etc/os-release"));
    let flags = field(&cpus, "flags").or_else(|| field(&cpus, "Features")).unwrap_or_default();
    let features: Vec<&str> = flags.split_whitespace().filter(|flag| CPU_FEATURES.contains(flag)).collect();
    let memory_bytes = |key| -> Option<u64> {
        let kib: u64 = field(&memory, key)?.trim_end_matches(" kB").parse().ok()?;
        Some(kib * 1024)
    };
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
        "architecture": std::env::consts::ARCH,
        "system": system.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).map(|name| name.trim_matches('"')),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "cpu": field(&cpus, "model name"),
        "cpu_features": features,
        "num_threads": std::thread::available_parallelism().map_or(1, usize::from),
        "memory_bytes": memory_bytes("MemTotal"),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "settings": settings,
        "checks": doctor::report_of_machine(&loaded.config).await,
    }))
}

/// The value of the first `key : value` line.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim())
    })
}

/// For a bug report: one fact a line.
fn text(report: &Value) -> String {
    let mut text = String::new();
    for (key, value) in report.as_object().into_iter().flatten() {
        let shown = match (key.as_str(), value) {
            ("settings" | "checks", _) | (_, Value::Null) => continue,
            (key, Value::Number(bytes)) if key.ends_with("_bytes") => human::bytes(bytes.as_u64().unwrap_or(0)),
            (_, Value::Array(list)) => list.iter().map(plain).collect::<Vec<_>>().join(" "),
            (_, value) => plain(value),
        };
        let _ = writeln!(text, "{:<24} {}", key.trim_end_matches("_bytes"), escape(&shown));
    }
    for (key, setting) in report["settings"].as_object().into_iter().flatten() {
        let shown = format!("{} ({})", plain(&setting["value"]), plain(&setting["origin"]));
        let _ = writeln!(text, "setting {key:<16} {}", escape(&shown));
    }
    for (name, check) in report["checks"].as_object().into_iter().flatten() {
        let _ = writeln!(text, "{} {name:<19} {}", plain(&check["result"]), escape(&plain(&check["found"])));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "model\t\t: 85\nmodel name\t: Some CPU @ 2: GHz\nflags\t\t: fpu avx2\n";
        assert_eq!(field(text, "model name"), Some("Some CPU @ 2: GHz"));
        assert_eq!(field(text, "flags"), Some("fpu avx2"));
        assert_eq!(field(text, "name"), None);
    }
}
