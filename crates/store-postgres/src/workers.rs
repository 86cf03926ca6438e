//! Rows of workers.

use async_trait::async_trait;
use overnight_store::{Error, LiveWorker, NewWorker, Workers};
use overnight_types::WorkerId;
use sqlx::postgres::PgRow;

use crate::PostgresStore;
use crate::error::{damaged, settling_conflicts};
use crate::row::{Read, text};
use crate::statement::Statement;
use crate::transaction::clock;

/// A worker whose last report is older is not live.
pub(crate) const LIVE_US: i64 = 60_000_000;

/// A worker's row goes this long after its last report.
const KEPT_US: i64 = 24 * 3_600_000_000;

#[async_trait]
impl Workers for PostgresStore {
    async fn report_worker(&self, worker: &NewWorker) -> Result<(), Error> {
        settling_conflicts!(
            sqlx::query(concat!(
                "with clock as materialized (select ",
                clock!(),
                " as now),
                gone as (delete from workers where worker_id in (
                    select w.worker_id from workers w, clock where w.seen_at < clock.now - $2
                    for update of w skip locked))
                insert into workers (worker_id, host, pid, models, may_load, started_at, seen_at)
                select $3, $4, $5, $6, $7, clock.now, clock.now from clock
                on conflict (worker_id) do update
                    set models = excluded.models, may_load = excluded.may_load, seen_at = excluded.seen_at"
            ))
            .bind(self.clock_offset.micros())
            .bind(KEPT_US)
            .bind(worker.id.uuid())
            .bind(text(&worker.host))
            .bind(i64::from(worker.pid))
            .bind(serde_json::json!(worker.models).to_string())
            .bind(serde_json::json!(worker.may_load).to_string())
            .change_of(self, "report a worker")
        )
        .map(drop)
    }

    async fn remove_worker(&self, id: WorkerId) -> Result<(), Error> {
        settling_conflicts!(
            sqlx::query("delete from workers where worker_id = $1").bind(id.uuid()).change_of(self, "remove a worker")
        )
        .map(drop)
    }

    async fn list_live_workers(&self) -> Result<Vec<LiveWorker>, Error> {
        sqlx::query(concat!(
            "select worker_id, host, pid, models, may_load, started_at, seen_at from workers where seen_at >= ",
            clock!(),
            " - $2 order by started_at, worker_id"
        ))
        .bind(self.clock_offset.micros())
        .bind(LIVE_US)
        .list(self, "list live workers", |row| {
            Ok(LiveWorker { worker: read(row)?, started_at: row.at("started_at")?, seen_at: row.at("seen_at")? })
        })
        .await
    }

    async fn list_workers_on_host(&self, host: &str) -> Result<Vec<NewWorker>, Error> {
        sqlx::query(
            "select worker_id, host, pid, models, may_load from workers where host = $1
            order by started_at, worker_id",
        )
        .bind(text(host))
        .list(self, "list workers of a host", read)
        .await
    }
}

fn read(row: &PgRow) -> Result<NewWorker, Error> {
    let names = |column: &'static str| -> Result<Vec<String>, Error> {
        let json = row.text(column)?;
        serde_json::from_str(&json).map_err(|_| damaged(column, &json))
    };
    Ok(NewWorker {
        id: row.worker_id("worker_id")?,
        host: row.text("host")?,
        pid: row.u32("pid")?,
        models: names("models")?,
        may_load: names("may_load")?,
    })
}
