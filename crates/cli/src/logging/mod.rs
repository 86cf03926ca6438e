//! Sends the log to stderr and, for services, to files in the data folder; once per process.

mod files;

use std::path::PathBuf;
use std::sync::Mutex;

use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

use crate::config::{Config, LogFormat, LogSection};
use crate::error::{Failure, Result};
use files::LogFiles;

pub(crate) use files::list;

/// Starts the log as `[log]` says, on stderr alone.
pub(crate) fn start(section: &LogSection) -> Result {
    start_with(section, None)
}

/// The same for a service, whose log is kept in files as well; `batch logs` reads them.
pub(crate) fn start_service(config: &Config, role: &'static str) -> Result {
    let kept = config.log.files_bytes_max;
    start_with(&config.log, (kept > 0).then(|| LogFiles::new(folder(config), role, kept)))
}

/// Where the files of services are.
pub(crate) fn folder(config: &Config) -> PathBuf {
    config.data_dir().join("logs")
}

fn start_with(section: &LogSection, files: Option<LogFiles>) -> Result {
    let filter = EnvFilter::try_new(&section.filter)
        .map_err(|err| Failure::usage(format!("log.filter = {:?} is not valid: {err}", section.filter)))?;
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr()) && crate::environment::text("NO_COLOR").is_none();
    let to_stderr = fmt::layer().with_writer(std::io::stderr).with_ansi(ansi);
    let to_stderr = match section.format {
        LogFormat::Text => to_stderr.with_target(false).boxed(),
        LogFormat::Json => to_stderr.json().flatten_event(true).boxed(),
    };
    let to_files = files.map(|files| fmt::layer().json().flatten_event(true).with_writer(Mutex::new(files)));
    // A log that is there already (a second start in one process) stays.
    drop(tracing_subscriber::registry().with(filter).with(to_stderr).with(to_files).try_init());
    Ok(())
}
