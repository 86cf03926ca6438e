//! Copies of the database: SQLite's own copy, or `pg_dump` of a server.
//!
//! Invariant: the copy has its name only once it is whole; the password is in no
//! argument, where every user of the machine could read it.

use std::path::Path;
use std::process::Stdio;

use overnight_store_postgres::Url;
use overnight_store_sqlite::{Options, SqliteStore};

use crate::error::{Exit, Failure, Result};
use crate::service::database::Database;

/// Writes the copy; an existing file is refused.
pub(super) async fn write(database: &Database, to: &Path) -> Result {
    if to.exists() {
        return Err(Failure::usage(format!("{} is there already and is not overwritten", to.display())));
    }
    match database {
        Database::Sqlite(path) => of_file(path, to).await,
        Database::Postgres(url) => of_server(url, to).await,
    }
}

async fn of_file(path: &Path, to: &Path) -> Result {
    let fail =
        |err: overnight_store::Error| Failure::from_error(&format!("copy the database to {}", to.display()), &err);
    let store = SqliteStore::open(path, Options { migrate: false, ..Options::default() }).await.map_err(fail)?;
    let copied = store.backup(to).await;
    store.close().await;
    copied.map_err(fail)
}

async fn of_server(url: &Url, to: &Path) -> Result {
    let mut unfinished = to.as_os_str().to_owned();
    unfinished.push(".part");
    let (uri, password) = url.without_password();
    let mut command = tokio::process::Command::new("pg_dump");
    command.args(["--format=custom", "--no-owner", "--no-privileges", "--no-password"]);
    command.arg("--file").arg(&unfinished).arg("--dbname").arg(uri);
    if let Some(password) = password {
        command.env("PGPASSWORD", password);
    }
    let output = command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true).output().await;
    let output = match output {
        Ok(output) => output,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => {
            return Err(Failure::new(Exit::Failure, "pg_dump is not on this machine")
                .hint("install PostgreSQL's client programs (Debian: postgresql-client) of the server's version or newer, or use your provider's snapshots"));
        }
        Err(err) => return Err(Failure::new(Exit::Failure, format!("could not start pg_dump: {err}"))),
    };
    if !output.status.success() {
        let _ = std::fs::remove_file(&unfinished);
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::new(Exit::Failure, format!("pg_dump failed: {}", words.trim()))
            .hint("a pg_dump that is older than the server refuses; nothing was changed"));
    }
    // Synced by pg_dump itself, the name by us.
    std::fs::rename(&unfinished, to)?;
    if let Some(folder) = to.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::File::open(folder)?.sync_all()?;
    }
    Ok(())
}
