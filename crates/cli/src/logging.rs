//! Sends the log to stderr, once per process.

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogSection};
use crate::error::{Failure, Result};

/// Starts the log as `[log]` says.
pub(crate) fn start(section: &LogSection) -> Result {
    let filter = EnvFilter::try_new(&section.filter)
        .map_err(|err| Failure::usage(format!("log.filter = {:?} is not valid: {err}", section.filter)))?;
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr()) && crate::environment::text("NO_COLOR").is_none();
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi);
    let started = match section.format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    // A log that is there already (a second start in one process) stays.
    drop(started);
    Ok(())
}
