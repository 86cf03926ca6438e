//! `batch db`: migrate, check, back up and shrink the database, and let it forget its objects.

mod backup;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::App;
use crate::config::{Config, Loaded};
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::service::database::{Database, Opening};
use crate::service::objects::ID_FILE;

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
    /// Give the room of deleted batches back: SQLite's to the disk, while servers wait; Postgres's to
    /// new rows, while they go on
    Vacuum,
    /// Let the next start take the objects that it finds for this database's: after they were
    /// replaced, or moved without their mark, on purpose
    ForgetObjects,
}

pub(crate) async fn run(args: DbArgs, app: &App) -> Result {
    let config = Loaded::read(&app.globals, Vec::new())?.config;
    let database = Database::of(&config)?;
    let name = database.to_string();
    match args.command {
        DbCommand::Migrate => {
            let before = database.make().await?;
            let text = if before.is_current() {
                format!("{name} is at version {} already", before.needed)
            } else {
                format!("{name} went from version {} to {}", before.found, before.needed)
            };
            answer(app, json!({"database": name, "before": before.found, "version": before.needed}), &text)
        }
        DbCommand::Check => check(&config, &database, app).await,
        DbCommand::Backup { to } => {
            database.is_there()?;
            backup::write(&database, &to).await?;
            let bytes = std::fs::metadata(&to)?.len();
            let record = json!({"database": name, "backup": to.to_string_lossy(), "bytes": bytes});
            answer(app, record, &format!("{} in {}; objects are not in it", human::bytes(bytes), to.display()))
        }
        DbCommand::Vacuum => vacuum(&database, app).await,
        DbCommand::ForgetObjects => forget_objects(&config, &database, app).await,
    }
}

async fn vacuum(database: &Database, app: &App) -> Result {
    database.is_there()?;
    let fail = |err: overnight_store::Error| {
        Failure::from_error(&format!("shrink {database}"), &err)
            .hint("nothing was changed; SQLite needs room for a second copy and a moment without other writers, Postgres the right to vacuum the tables")
    };
    let before = size(database).await?;
    database.vacuum().await.map_err(fail)?;
    let after = size(database).await?;
    let record = json!({"database": database.to_string(), "bytes_before": before, "bytes": after});
    answer(app, record, &format!("{database}: {}, before {}", human::bytes(after), human::bytes(before)))
}

async fn forget_objects(config: &Config, database: &Database, app: &App) -> Result {
    database.is_there()?;
    let store = database.open(Opening::Look).await?;
    let forgotten = store.forget_objects_id().await;
    store.close().await;
    let forgotten = forgotten.map_err(|err| Failure::from_error(&format!("write to {database}"), &err))?;
    // What this data folder knows of them too; other machines' folders refuse by themselves.
    let path = config.data_dir().join(ID_FILE);
    let removed = match std::fs::remove_file(&path) {
        Ok(()) => true,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => false,
        Err(err) => return Err(Failure::new(Exit::Failure, format!("could not remove {}: {err}", path.display()))),
    };
    let text = match forgotten || removed {
        true => "forgotten: the next start keeps the objects that it finds",
        false => "no objects were kept",
    };
    answer(app, json!({"database": database.to_string(), "forgotten": forgotten || removed}), text)
}

async fn size(database: &Database) -> Result<u64> {
    let store = database.open(Opening::Look).await?;
    let bytes = store.size_bytes().await;
    store.close().await;
    bytes.map_err(|err| Failure::from_error(&format!("measure {database}"), &err))
}

async fn check(config: &Config, database: &Database, app: &App) -> Result {
    database.is_there()?;
    let safe_step = safe_step(database, &config.data_dir());
    let unreadable = |err: overnight_store::Error| match database {
        // A server that is down, or a wrong password, is no damage.
        Database::Postgres(_) => database.failure(&err),
        Database::Sqlite(_) => Failure::from_error(&format!("read {database}"), &err).hint(safe_step.clone()),
    };
    let state = database.schema().await.map_err(unreadable)?;
    let mut findings = Vec::new();
    let mut bytes = None;
    if state.is_current() {
        let store = database.open(Opening::Look).await.map_err(|failure| match database {
            Database::Postgres(_) => failure,
            Database::Sqlite(_) => failure.hint(safe_step.clone()),
        })?;
        let damaged = |err: overnight_store::Error| {
            Failure::from_error(&format!("check {database}"), &err).hint(safe_step.clone())
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
    let record = json!({"database": database.to_string(), "version": state.found, "needed": state.needed,
        "bytes": bytes, "findings": findings});
    if findings.is_empty() {
        let size = bytes.map_or(String::new(), |bytes| format!(", {}", human::bytes(bytes)));
        return answer(app, record, &format!("{database} is sound: version {}{size}", state.found));
    }
    if app.ui.is_json() {
        app.ui.data(&format!("{record}\n"))?;
    }
    let mut failure = Failure::new(Exit::Failure, format!("{database} has problems: {}", findings[0]));
    for finding in findings.iter().skip(1) {
        failure = failure.note(format!("= {finding}"));
    }
    if !state.is_current() {
        return Err(failure);
    }
    Err(failure.hint(safe_step))
}

/// The one thing that cannot make damage worse, and what comes after it.
fn safe_step(database: &Database, data_dir: &Path) -> String {
    let folder = data_dir.display();
    let keep = match database {
        Database::Sqlite(_) => {
            format!("stop the server and keep what is there before anything else: `cp -a {folder} {folder}.kept`")
        }
        Database::Postgres(_) => {
            "stop every server and worker and keep what is there before anything else: `pg_dump`, or a copy of the \
             stopped server's data folder"
                .to_owned()
        }
    };
    format!(
        "{keep}; then restore the last `batch db backup`, see docs/operations.md; published files are objects and are \
         not touched"
    )
}

fn answer(app: &App, record: Value, text: &str) -> Result {
    if app.ui.is_json() { app.ui.data(&format!("{record}\n")) } else { app.ui.data(&format!("{text}\n")) }
}
