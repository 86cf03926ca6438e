//! Brings a database to this binary's schema, or says why it will not.
//!
//! Invariant: all missing files run in one transaction under one advisory lock, so that
//! processes that start at once do not meet, and a killed start leaves the old schema.

use std::time::Duration;

use overnight_store::Error;
use sqlx::migrate::Migrator;
use sqlx::{PgConnection, PgPool, Row};

use crate::error::{damaged, failed, refused};
use crate::statement::in_time;
use crate::{Options, PostgresStore, Url};

/// This binary's files. Their lock is ours, see `LOCK`.
fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!();
    migrator.set_locking(false);
    migrator
}

/// Key of the advisory lock; a number of our own ("overnight" in the alphabet's places).
const LOCK: i64 = 0x6f76_6572_6e69_6768;

/// How long a start waits for another one's migration.
const LOCK_WAIT: &str = "set local lock_timeout = '10min'";

/// How long a change of structure waits for those who use the table.
const STRUCTURE_WAIT: &str = "set local lock_timeout = '10s'";

/// A migration takes the time that it takes.
const NO_LIMIT: &str = "set local statement_timeout = 0";

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

/// Migrates the database; returns where the schema stood before.
pub async fn migrate(url: &Url) -> Result<SchemaState, Error> {
    let before = schema_state(url).await?;
    PostgresStore::open(url, Options { listen: false, ..brief() }).await?.close().await;
    Ok(before)
}

/// Reads a database's schema version without changing it.
pub async fn schema_state(url: &Url) -> Result<SchemaState, Error> {
    let doing = "read the schema version";
    let pool = crate::pool(url, &brief());
    let look = async { found(&mut *pool.acquire().await.map_err(failed(doing))?).await };
    let found = in_time(brief().call_max(), doing, look).await;
    pool.close().await;
    Ok(SchemaState { found: found?, needed: needed() })
}

fn brief() -> Options {
    Options { connections: 2, ..Options::default() }
}

/// Before first use: refuses a newer schema, applies what is missing if `migrate`.
/// No call but the migration itself takes longer than `call_max`.
pub(crate) async fn prepare(pool: &PgPool, migrate: bool, call_max: Duration) -> Result<(), Error> {
    let doing = "migrate the database";
    // Without the lock first: an up-to-date start then waits for nobody.
    let look = async {
        let mut connection = pool.acquire().await.map_err(failed(doing))?;
        Ok(SchemaState { found: found(&mut connection).await?, needed: needed() })
    };
    let state = in_time(call_max, doing, look).await?;
    check(state, migrate)?;
    let mut write = in_time(call_max, doing, async { pool.begin().await.map_err(failed(doing)) }).await?;
    if state.is_current() {
        // No statement that changes a structure: a role without that right may start too.
        in_time(call_max, doing, compare(&mut write)).await?;
    } else {
        for statement in [LOCK_WAIT, NO_LIMIT] {
            sqlx::query(statement).execute(&mut *write).await.map_err(failed(doing))?;
        }
        sqlx::query("select pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *write).await.map_err(failed(doing))?;
        // A change of structure that waits behind a long read stops everybody behind itself.
        sqlx::query(STRUCTURE_WAIT).execute(&mut *write).await.map_err(failed(doing))?;
        // Somebody else may have been here meanwhile.
        check(SchemaState { found: found(&mut write).await?, needed: needed() }, migrate)?;
        // `run` would do, were its future `Send` for every lifetime.
        migrator().run_direct(None, &mut *write, false).await.map_err(as_error(doing))?;
    }
    in_time(call_max, doing, move_commit_order(&mut write)).await?;
    in_time(call_max, doing, async { write.commit().await.map_err(failed(doing)) }).await
}

/// Refuses a database to which a file was applied that is another one here.
async fn compare(connection: &mut PgConnection) -> Result<(), Error> {
    let doing = "compare the migrations";
    let rows = sqlx::query("select version, checksum from overnight_migrations order by version")
        .fetch_all(connection)
        .await
        .map_err(failed(doing))?;
    let migrator = migrator();
    for row in rows {
        let version: i64 = row.try_get("version").map_err(failed(doing))?;
        let checksum: Vec<u8> = row.try_get("checksum").map_err(failed(doing))?;
        let ours = migrator.iter().find(|file| file.version == version);
        if ours.is_none_or(|file| file.checksum != checksum) {
            return Err(refused(doing, format!("migration {version} was applied in another form than this binary's")));
        }
    }
    Ok(())
}

fn check(state: SchemaState, migrate: bool) -> Result<(), Error> {
    if state.found > state.needed {
        return Err(Error::NewerSchema { found: state.found, needed: state.needed });
    }
    if !migrate && !state.is_current() {
        return Err(Error::Schema { found: state.found, needed: state.needed });
    }
    Ok(())
}

fn as_error(doing: &'static str) -> impl Fn(sqlx::migrate::MigrateError) -> Error {
    move |err| match err {
        sqlx::migrate::MigrateError::Execute(err) => failed(doing)(err),
        err => Error::Refused { doing, source: err.into() },
    }
}

/// Rows of another server, restored into this one, have higher transaction numbers than
/// it gives: raises the base by the difference, so that the order of commits goes on.
async fn move_commit_order(write: &mut PgConnection) -> Result<(), Error> {
    let doing = "go on with the order of commits";
    let behind: Option<i64> = sqlx::query_scalar(
        // By the index of each job's segments: they are too many to be read at every start.
        "select max(g.committed) - pg_snapshot_xmax(pg_current_snapshot())::text::bigint
            - (select last_value from segments_committed_base)
        from jobs j cross join lateral (
            select s.committed from segments s where s.job_id = j.job_id order by s.committed desc limit 1) g",
    )
    .fetch_one(&mut *write)
    .await
    .map_err(failed(doing))?;
    if let Some(behind @ 0..) = behind {
        // Others that start at once raise it as well; the largest counts, and a gap costs nothing.
        sqlx::query("select setval('segments_committed_base', (select last_value from segments_committed_base) + $1)")
            .bind(behind + 1)
            .execute(write)
            .await
            .map_err(failed(doing))?;
        tracing::warn!("this server's transaction numbers are below those of the rows in it: restored from a backup?");
    }
    Ok(())
}

/// Number of this binary's last file.
pub(crate) fn needed() -> i64 {
    migrator().iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Number of the last file applied.
pub(crate) async fn found(connection: &mut PgConnection) -> Result<i64, Error> {
    let doing = "read the schema version";
    let known: bool = sqlx::query_scalar("select to_regclass('overnight_migrations') is not null")
        .fetch_one(&mut *connection)
        .await
        .map_err(failed(doing))?;
    if !known {
        return Ok(0);
    }
    let row = sqlx::query(
        "select coalesce(max(version), 0) as version, coalesce(bool_and(success), true) as whole
        from overnight_migrations",
    )
    .fetch_one(connection)
    .await
    .map_err(failed(doing))?;
    let whole: bool = row.try_get("whole").map_err(failed(doing))?;
    let version = row.try_get("version").map_err(failed(doing))?;
    if whole { Ok(version) } else { Err(damaged("overnight_migrations.success", version)) }
}
