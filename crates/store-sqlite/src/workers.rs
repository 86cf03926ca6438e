//! Rows of workers.

use async_trait::async_trait;
use overnight_store::{Error, LiveWorker, NewWorker, Workers};
use overnight_types::WorkerId;
use sqlx::sqlite::SqliteRow;

use crate::SqliteStore;
use crate::error::damaged;
use crate::row::{Read, key};
use crate::statement::Statement;

/// A worker whose last report is older is not live.
pub(crate) const LIVE_US: i64 = 60_000_000;

/// A worker's row goes this long after its last report.
const KEPT_US: i64 = 24 * 3_600_000_000;

#[async_trait]
impl Workers for SqliteStore {
    async fn report_worker(&self, worker: &NewWorker) -> Result<(), Error> {
        let mut write = self.write("report a worker").await?;
        sqlx::query("delete from workers where seen_at < ?1").bind(write.now - KEPT_US).change(&mut write).await?;
        sqlx::query(
            "insert into workers (worker_id, host, pid, models, may_load, started_at, seen_at)
            values (?1, ?2, ?3, ?4, ?5, ?6, ?6)
            on conflict (worker_id) do update
                set models = excluded.models, may_load = excluded.may_load, seen_at = excluded.seen_at",
        )
        .bind(key(worker.id.uuid()))
        .bind(&worker.host)
        .bind(worker.pid)
        .bind(serde_json::json!(worker.models).to_string())
        .bind(serde_json::json!(worker.may_load).to_string())
        .bind(write.now)
        .change(&mut write)
        .await?;
        self.commit(write).await
    }

    async fn remove_worker(&self, id: WorkerId) -> Result<(), Error> {
        let mut write = self.write("remove a worker").await?;
        sqlx::query("delete from workers where worker_id = ?1").bind(key(id.uuid())).change(&mut write).await?;
        self.commit(write).await
    }

    async fn list_live_workers(&self) -> Result<Vec<LiveWorker>, Error> {
        let doing = "list live workers";
        let now = self.read_now(doing).await?;
        sqlx::query("select * from workers where seen_at >= ?1 order by started_at, worker_id")
            .bind(now - LIVE_US)
            .list(&self.readers, doing, |row| {
                Ok(LiveWorker { worker: read(row)?, started_at: row.at("started_at")?, seen_at: row.at("seen_at")? })
            })
            .await
    }

    async fn list_workers_on_host(&self, host: &str) -> Result<Vec<NewWorker>, Error> {
        sqlx::query("select * from workers where host = ?1 order by started_at, worker_id")
            .bind(host)
            .list(&self.readers, "list workers of a host", read)
            .await
    }
}

fn read(row: &SqliteRow) -> Result<NewWorker, Error> {
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
