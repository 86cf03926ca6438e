//! Rows of events.

use async_trait::async_trait;
use overnight_store::{Error, Event, Events};
use overnight_types::JobId;

use crate::PostgresStore;
use crate::row::{Read, int};
use crate::statement::Statement;

#[async_trait]
impl Events for PostgresStore {
    async fn list_events(&self, job: JobId, after: u64, limit: u32) -> Result<Vec<Event>, Error> {
        sqlx::query(
            "select seq, job_id, at, what, note from events where job_id = $1 and seq > $2 order by seq limit $3",
        )
        .bind(job.uuid())
        .bind(int(after))
        .bind(i64::from(limit))
        .list(self, "list events", |row| {
            Ok(Event {
                seq: row.u64("seq")?,
                job: row.job_id()?,
                at: row.at("at")?,
                what: row.text("what")?,
                note: row.text("note")?,
            })
        })
        .await
    }
}
