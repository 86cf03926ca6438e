//! Rows of the outbox.

use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{Error, Guarded, Outbox, OutboxEvent, OutboxState};
use overnight_types::EventId;

use crate::SqliteStore;
use crate::row::{Read, after, key};
use crate::statement::Statement;
use crate::transaction::Write;

#[async_trait]
impl Outbox for SqliteStore {
    async fn claim_event(&self, hold: Duration) -> Result<Option<OutboxEvent>, Error> {
        let mut write = self.write("claim an event").await?;
        let row = sqlx::query(
            "update outbox set attempts = attempts + 1, due_at = ?2
            where event_id = (
                select event_id from outbox where due_at <= ?1 order by due_at, event_id limit 1)
            returning *",
        )
        .bind(write.now)
        .bind(after(write.now, hold))
        .row_if_any(&mut write)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let created_at = row.at("created_at")?;
        let event = OutboxEvent {
            id: EventId::from_uuid(row.uuid("event_id")?),
            job: row.job_id()?,
            kind: row.text("kind")?,
            created_at,
            age: write.moment().since(created_at),
            attempts: row.u32("attempts")?,
        };
        self.commit(write).await?;
        Ok(Some(event))
    }

    async fn deliver_event_if_undelivered(&self, event: EventId) -> Result<Guarded<OutboxState>, Error> {
        let mut write = self.write("record a delivered event").await?;
        let changed = sqlx::query(
            "update outbox set delivered_at = ?2, due_at = null where event_id = ?1 and delivered_at is null",
        )
        .bind(key(event.uuid()))
        .bind(write.now)
        .change(&mut write)
        .await?;
        if changed == 0 {
            return state_now(&mut write, event).await;
        }
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn retry_event_if_claimed(
        &self,
        event: &OutboxEvent,
        delay: Duration,
    ) -> Result<Guarded<OutboxState>, Error> {
        let mut write = self.write("put an event off").await?;
        let due = after(write.now, delay);
        if !set_due(&mut write, event, Some(due)).await? {
            return state_now(&mut write, event.id).await;
        }
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn give_up_event_if_claimed(&self, event: &OutboxEvent, reason: &str) -> Result<Guarded<OutboxState>, Error> {
        let mut write = self.write("give an event up").await?;
        if !set_due(&mut write, event, None).await? {
            return state_now(&mut write, event.id).await;
        }
        write.record_event(event.job, "webhook_given_up", reason).await?;
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }
}

/// Whether the try still holds the event; its next due time is then set.
async fn set_due(write: &mut Write, event: &OutboxEvent, due: Option<i64>) -> Result<bool, Error> {
    let changed = sqlx::query(
        "update outbox set due_at = ?3
        where event_id = ?1 and attempts = ?2 and delivered_at is null and due_at is not null",
    )
    .bind(key(event.id.uuid()))
    .bind(event.attempts)
    .bind(due)
    .change(write)
    .await?;
    Ok(changed > 0)
}

async fn state_now(write: &mut Write, event: EventId) -> Result<Guarded<OutboxState>, Error> {
    let row = sqlx::query("select due_at is not null as is_open, delivered_at is not null as is_delivered from outbox where event_id = ?1")
        .bind(key(event.uuid()))
        .row_if_any(write)
        .await?;
    let Some(row) = row else { return Ok(Guarded::Lost { now: None }) };
    let now = match (row.u32("is_delivered")?, row.u32("is_open")?) {
        (1.., _) => OutboxState::Delivered,
        (0, 1..) => OutboxState::Open,
        (0, 0) => OutboxState::GivenUp,
    };
    Ok(Guarded::Lost { now: Some(now) })
}
