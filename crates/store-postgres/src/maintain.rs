//! Care of the database: check, size, vacuum.

use overnight_store::Error;
use sqlx::{Connection, PgConnection};

use crate::error::failed;
use crate::row::Read;
use crate::statement::{Statement, in_time};
use crate::{PostgresStore, audit, migrate};

/// What a row may name, and where it must be.
const REFERENCES: &[(&str, &str)] = &[
    (
        "segments",
        "select exists (select 1 from segments c where not exists (select 1 from jobs p where p.job_id = c.job_id))",
    ),
    (
        "attempts",
        "select exists (select 1 from attempts c where not exists (select 1 from jobs p where p.job_id = c.job_id))",
    ),
    (
        "shards",
        "select exists (select 1 from shards c where not exists (select 1 from jobs p where p.job_id = c.job_id))",
    ),
    (
        "item_faults",
        "select exists (select 1 from item_faults c where not exists (select 1 from jobs p where p.job_id = c.job_id))",
    ),
    (
        "events",
        "select exists (select 1 from events c where not exists (select 1 from jobs p where p.job_id = c.job_id))",
    ),
    (
        "outbox",
        "select exists (select 1 from outbox c where not exists (select 1 from jobs p where p.job_id = c.job_id))",
    ),
    (
        "idempotency_keys",
        "select exists (select 1 from idempotency_keys c where not exists (select 1 from jobs p where p.job_id = c.job_id))",
    ),
];

impl PostgresStore {
    /// Gives the room of deleted rows back to the server's files for new ones, and takes
    /// new statistics. Others go on meanwhile; the files themselves do not shrink.
    pub async fn vacuum(&self) -> Result<(), Error> {
        let doing = "vacuum the database";
        // On a connection of its own: no limit of a session's statements fits it.
        let connect = self.url.connect();
        let own = async { PgConnection::connect_with(&connect).await.map_err(failed(doing)) };
        let mut own = in_time(self.call_max, doing, own).await?;
        for statement in VACUUM {
            sqlx::query(*statement).execute(&mut own).await.map_err(failed(doing))?;
        }
        own.close().await.map_err(failed(doing))
    }

    /// Reads one snapshot of the whole, while others go on.
    pub(crate) async fn find_faults_of_structure(&self) -> Result<Vec<String>, Error> {
        let doing = "check the database";
        let begin = self.pool.begin_with("begin isolation level repeatable read read only");
        let mut read = in_time(self.call_max, doing, Box::pin(async { begin.await.map_err(failed(doing)) })).await?;
        sqlx::query("set local statement_timeout = 0").execute(&mut *read).await.map_err(failed(doing))?;
        let mut findings = Vec::new();
        let broken: Vec<String> = sqlx::query_scalar(
            "select c.relname::text from pg_index i join pg_class c on c.oid = i.indexrelid
            where not i.indisvalid
            union all select conname::text from pg_constraint where not convalidated limit 20",
        )
        .fetch_all(&mut *read)
        .await
        .map_err(failed(doing))?;
        findings.extend(broken.iter().map(|name| format!("{name} is not valid")));
        for (table, statement) in REFERENCES {
            let strays: bool = sqlx::query_scalar(*statement).fetch_one(&mut *read).await.map_err(failed(doing))?;
            if strays {
                findings.push(format!("a row of {table} names a row of jobs that is not there"));
            }
        }
        let found = migrate::found(&mut read).await?;
        let needed = migrate::needed();
        if found == needed {
            findings.extend(audit::find_open_accounting(&mut read).await?);
        } else {
            findings.push(format!("schema is at version {found}, this binary needs {needed}"));
        }
        Ok(findings)
    }

    /// Of our tables and their indexes; the server's log is everybody's and not in it.
    pub(crate) async fn bytes_on_disk(&self) -> Result<u64, Error> {
        let doing = "measure the database";
        let row = sqlx::query(
            "select coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as bytes from pg_class c
            where c.relkind = 'r' and c.relnamespace = current_schema()::regnamespace",
        )
        .row_of(self, doing);
        let row = in_time(self.call_max, doing, row).await?;
        row.map_or(Ok(0), |row| row.u64("bytes"))
    }
}

/// The tables that grow and shrink.
const VACUUM: &[&str] = &[
    "vacuum (analyze) shards",
    "vacuum (analyze) segments",
    "vacuum (analyze) attempts",
    "vacuum (analyze) item_faults",
    "vacuum (analyze) jobs",
    "vacuum (analyze) files",
    "vacuum (analyze) workers",
    "vacuum (analyze) events",
    "vacuum (analyze) idempotency_keys",
    "vacuum (analyze) outbox",
];
