//! Brings a database to this binary's schema, or says why it will not.
//!
//! Invariant: all missing files run in one immediate transaction, so that two
//! processes that start at once do not meet, and a killed start leaves the old schema.

use std::path::Path;

use overnight_store::Error;
use sqlx::migrate::Migrator;
use sqlx::{Row, SqliteConnection, SqlitePool};

use crate::error::{damaged, failed};
use crate::{Options, SqliteStore};

static MIGRATOR: Migrator = sqlx::migrate!();

/// Where a database's schema stands against this binary's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchemaState {
    /// Number of the last file applied; 0 for an empty database.
    pub found: i64,
    /// Number of this binary's last file.
    pub needed: i64,
}

impl SchemaState {
    /// Whether nothing is to be done.
    pub fn is_current(&self) -> bool {
        self.found == self.needed
    }
}

/// Creates or migrates the file; returns where the schema stood before.
pub async fn migrate(path: &Path) -> Result<SchemaState, Error> {
    let before = if path.exists() { schema_state(path).await? } else { SchemaState { found: 0, needed: needed() } };
    SqliteStore::open(path, Options::default()).await?.close().await;
    Ok(before)
}

/// Reads a file's schema version without changing it. A missing file is [`Error::Missing`].
pub async fn schema_state(path: &Path) -> Result<SchemaState, Error> {
    let doing = "read the schema version";
    if !path.exists() {
        return Err(Error::Missing { what: "database", id: path.display().to_string() });
    }
    let options = Options::default().connect(path).create_if_missing(false);
    let pool = SqlitePool::connect_with(options).await.map_err(failed(doing))?;
    let found = async { found(&mut *pool.acquire().await.map_err(failed(doing))?).await }.await;
    pool.close().await;
    Ok(SchemaState { found: found?, needed: needed() })
}

/// Before first use: refuses a newer schema, applies what is missing if `migrate`.
pub(crate) async fn prepare(writer: &SqlitePool, migrate: bool) -> Result<(), Error> {
    let doing = "migrate the database";
    let mut write = writer.begin_with("begin immediate").await.map_err(failed(doing))?;
    let state = SchemaState { found: found(&mut write).await?, needed: needed() };
    if state.found > state.needed {
        return Err(Error::NewerSchema { found: state.found, needed: state.needed });
    }
    if !migrate && !state.is_current() {
        return Err(Error::Schema { found: state.found, needed: state.needed });
    }
    // `run` would do, were its future `Send` for every lifetime.
    MIGRATOR.run_direct(None, &mut *write, false).await.map_err(|err| Error::Refused { doing, source: err.into() })?;
    write.commit().await.map_err(failed(doing))
}

/// Number of this binary's last file.
pub(crate) fn needed() -> i64 {
    MIGRATOR.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Number of the last file applied.
pub(crate) async fn found(connection: &mut SqliteConnection) -> Result<i64, Error> {
    let doing = "read the schema version";
    let known: i64 =
        sqlx::query_scalar("select count(*) from sqlite_schema where type = 'table' and name = 'overnight_migrations'")
            .fetch_one(&mut *connection)
            .await
            .map_err(failed(doing))?;
    if known == 0 {
        return Ok(0);
    }
    let row = sqlx::query(
        "select coalesce(max(version), 0) as version, coalesce(min(success), 1) as whole from overnight_migrations",
    )
    .fetch_one(connection)
    .await
    .map_err(failed(doing))?;
    let whole: bool = row.try_get("whole").map_err(failed(doing))?;
    let version = row.try_get("version").map_err(failed(doing))?;
    if whole { Ok(version) } else { Err(damaged("overnight_migrations.success", version)) }
}
