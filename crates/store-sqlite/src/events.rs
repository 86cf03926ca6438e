//! Rows of events.

use async_trait::async_trait;
use overnight_store::{Error, Event, Events};
use overnight_types::JobId;

use crate::SqliteStore;
use crate::row::{Read, int, key};
use crate::statement::Statement;

#[async_trait]
impl Events for SqliteStore {
    async fn list_events(&self, job: JobId, after: u64, limit: u32) -> Result<Vec<Event>, Error> {
        sqlx::query("select * from events where job_id = ?1 and seq > ?2 order by seq limit ?3")
            .bind(key(job.uuid()))
            .bind(int(after))
            .bind(limit)
            .list(&self.readers, "list events", |row| {
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
