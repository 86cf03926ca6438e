//! `batch db`: migrate, check, back up and shrink the database.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use overnight_store::Store;
use overnight_store_sqlite::{migrate, schema_state};
use serde_json::{Value, json};

use crate::App;
use crate::config::{Config, Loaded};
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::service;

/// Arguments of `batch db`.
#[derive(Debug, Args)]
pub(crate) struct DbArgs {
    #[command(subcommand)]
    command: DbCommand,
}

#[derive(Debug, Subcommand)]
enum DbCommand {
    /// Create the database, or bring its schema up to date
    Migrate,
    /// Look for damage and for the schema's version
    Check,
    /// Write a consistent, compact copy, also while servers run
    Backup {
        /// The copy; it must not be there yet
        to: PathBuf,
    },
    /// Give the room of deleted batches back to the disk; servers wait meanwhile
    Vacuum,
}

pub(crate) async fn run(args: DbArgs, app: &App) -> Result {
    let config = Loaded::read(&app.globals, Vec::new())?.config;
    let path = config.database_path();
    match args.command {
        DbCommand::Migrate => {
            if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                std::fs::create_dir_all(folder)?;
            }
            let before = migrate(&path)
                .await
                .map_err(|err| Failure::from_error(&format!("migrate {}", path.display()), &err))?;
            let text = if before.is_current() {
                format!("{} is at version {} already", path.display(), before.needed)
            } else {
                format!("{} went from version {} to {}", path.display(), before.found, before.needed)
            };
            answer(
                app,
                json!({"database": path.to_string_lossy(), "before": before.found, "version": before.needed}),
                &text,
            )
        }
        DbCommand::Check => check(&config, app).await,
        DbCommand::Backup { to } => {
            there(&config)?;
            if to.exists() {
                return Err(Failure::usage(format!("{} is there already and is not overwritten", to.display())));
            }
            let store = service::open_store(&config, false).await?;
            store
                .backup(&to)
                .await
                .map_err(|err| Failure::from_error(&format!("copy the database to {}", to.display()), &err))?;
            store.close().await;
            let bytes = std::fs::metadata(&to)?.len();
            let record = json!({"database": path.to_string_lossy(), "backup": to.to_string_lossy(), "bytes": bytes});
            answer(app, record, &format!("{} in {}; objects are not in it", human::bytes(bytes), to.display()))
        }
        DbCommand::Vacuum => vacuum(&config, app).await,
    }
}

async fn vacuum(config: &Config, app: &App) -> Result {
    there(config)?;
    let path = config.database_path();
    let fail = |err: overnight_store::Error| {
        Failure::from_error(&format!("shrink {}", path.display()), &err)
            .hint("nothing was changed; it needs room for a second copy, and a moment without other writers")
    };
    let store = service::open_store(config, false).await?;
    let before = store.size_bytes().await.map_err(fail)?;
    store.vacuum().await.map_err(fail)?;
    let after = store.size_bytes().await.map_err(fail)?;
    store.close().await;
    let record = json!({"database": path.to_string_lossy(), "bytes_before": before, "bytes": after});
    answer(app, record, &format!("{}: {}, before {}", path.display(), human::bytes(after), human::bytes(before)))
}

fn there(config: &Config) -> Result {
    let path = config.database_path();
    if path.is_file() {
        return Ok(());
    }
    Err(Failure::new(Exit::NotFound, format!("no database at {}", path.display()))
        .hint("`batch serve` and `batch db migrate` make one; --data-dir says where"))
}

async fn check(config: &Config, app: &App) -> Result {
    there(config)?;
    let path = config.database_path();
    let unreadable = |err: overnight_store::Error| {
        Failure::from_error(&format!("read {}", path.display()), &err).hint(safe_step(&config.data_dir()))
    };
    let state = schema_state(&path).await.map_err(unreadable)?;
    let mut findings = Vec::new();
    let mut bytes = None;
    if state.is_current() {
        let store =
            service::open_store(config, false).await.map_err(|failure| failure.hint(safe_step(&config.data_dir())))?;
        let damaged = |err: overnight_store::Error| {
            Failure::from_error(&format!("check {}", path.display()), &err).hint(safe_step(&config.data_dir()))
        };
        findings = store.check().await.map_err(damaged)?;
        bytes = store.size_bytes().await.ok();
        store.close().await;
    } else {
        findings.push(format!(
            "the schema is at version {}, this binary needs {}: run `batch db migrate`",
            state.found, state.needed
        ));
    }
    let record = json!({"database": path.to_string_lossy(), "version": state.found, "needed": state.needed,
        "bytes": bytes, "findings": findings});
    if findings.is_empty() {
        let size = bytes.map_or(String::new(), |bytes| format!(", {}", human::bytes(bytes)));
        return answer(app, record, &format!("{} is sound: version {}{size}", path.display(), state.found));
    }
    if app.ui.is_json() {
        app.ui.data(&format!("{record}\n"))?;
    }
    let mut failure = Failure::new(Exit::Failure, format!("{} has problems: {}", path.display(), findings[0]));
    for finding in findings.iter().skip(1) {
        failure = failure.note(format!("= {finding}"));
    }
    if !state.is_current() {
        return Err(failure);
    }
    Err(failure.hint(safe_step(&config.data_dir())))
}

/// The one thing that cannot make damage worse, and what comes after it.
fn safe_step(data_dir: &Path) -> String {
    let folder = data_dir.display();
    format!(
        "stop the server and keep what is there before anything else: `cp -a {folder} {folder}.kept`; then restore the \
         last `batch db backup`, see docs/operations.md; published files are objects and are not touched"
    )
}

fn answer(app: &App, record: Value, text: &str) -> Result {
    if app.ui.is_json() { app.ui.data(&format!("{record}\n")) } else { app.ui.data(&format!("{text}\n")) }
}
