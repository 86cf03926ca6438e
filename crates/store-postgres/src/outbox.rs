//! Rows of the outbox.

use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{Error, Guarded, Outbox, OutboxEvent, OutboxState};
use overnight_types::EventId;

use crate::PostgresStore;
use crate::error::settling_conflicts;
use crate::row::{Read, micros, short, text};
use crate::statement::Statement;
use crate::transaction::clock;

#[async_trait]
impl Outbox for PostgresStore {
    async fn claim_event(&self, hold: Duration) -> Result<Option<OutboxEvent>, Error> {
        settling_conflicts!(
            sqlx::query(concat!(
                "with clock as materialized (select ",
                clock!(),
                " as now),
                due as materialized (
                    select event_id from outbox where due_at <= (select now from clock)
                    order by due_at, event_id limit 1 for update skip locked)
                update outbox o set attempts = o.attempts + 1, due_at = clock.now + $2 from due, clock
                where o.event_id = due.event_id
                returning o.event_id, o.job_id, o.kind, o.created_at, o.attempts, clock.now - o.created_at as age"
            ))
            .bind(self.clock_offset.micros())
            .bind(micros(hold))
            .find(self, "claim an event", |row| {
                Ok(OutboxEvent {
                    id: EventId::from_uuid(row.uuid("event_id")?),
                    job: row.job_id()?,
                    kind: row.text("kind")?,
                    created_at: row.at("created_at")?,
                    age: Duration::from_micros(row.int("age")?.max(0).unsigned_abs()),
                    attempts: row.u32("attempts")?,
                })
            })
        )
    }

    async fn deliver_event_if_undelivered(&self, event: EventId) -> Result<Guarded<OutboxState>, Error> {
        let doing = "record a delivered event";
        let changed = settling_conflicts!(
            sqlx::query(concat!(
                "update outbox set delivered_at = ",
                clock!(),
                ", due_at = null where event_id = $2 and delivered_at is null"
            ))
            .bind(self.clock_offset.micros())
            .bind(event.uuid())
            .change_of(self, doing)
        )?;
        self.answer(changed, event, doing).await
    }

    async fn retry_event_if_claimed(
        &self,
        event: &OutboxEvent,
        delay: Duration,
    ) -> Result<Guarded<OutboxState>, Error> {
        let doing = "put an event off";
        let changed = settling_conflicts!(
            sqlx::query(concat!(
                "update outbox set due_at = ",
                clock!(),
                " + $4
                where event_id = $2 and attempts = $3 and delivered_at is null and due_at is not null"
            ))
            .bind(self.clock_offset.micros())
            .bind(event.id.uuid())
            .bind(short(event.attempts))
            .bind(micros(delay))
            .change_of(self, doing)
        )?;
        self.answer(changed, event.id, doing).await
    }

    async fn give_up_event_if_claimed(&self, event: &OutboxEvent, reason: &str) -> Result<Guarded<OutboxState>, Error> {
        let doing = "give an event up";
        let changed = settling_conflicts!(
            sqlx::query(concat!(
                "with job as materialized (select job_id from jobs where job_id = $4 for no key update),
                given_up as (
                    update outbox o set due_at = null from job
                    where o.event_id = $2 and o.attempts = $3 and o.delivered_at is null and o.due_at is not null
                    returning o.job_id)
                insert into events (job_id, at, what, note)
                select job_id, ",
                clock!(),
                ", 'webhook_given_up', $5 from given_up"
            ))
            .bind(self.clock_offset.micros())
            .bind(event.id.uuid())
            .bind(short(event.attempts))
            .bind(event.job.uuid())
            .bind(text(reason))
            .change_of(self, doing)
        )?;
        self.answer(changed, event.id, doing).await
    }
}

impl PostgresStore {
    async fn answer(&self, changed: u64, event: EventId, doing: &'static str) -> Result<Guarded<OutboxState>, Error> {
        if changed > 0 {
            return Ok(Guarded::Applied(()));
        }
        let now = sqlx::query(
            "select due_at is not null as is_open, delivered_at is not null as is_delivered from outbox
            where event_id = $1",
        )
        .bind(event.uuid())
        .find(self, doing, |row| {
            Ok(match (row.flag("is_delivered")?, row.flag("is_open")?) {
                (true, _) => OutboxState::Delivered,
                (false, true) => OutboxState::Open,
                (false, false) => OutboxState::GivenUp,
            })
        })
        .await?;
        Ok(Guarded::Lost { now })
    }
}
