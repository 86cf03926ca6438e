//! Rows of item faults.

use overnight_store::{Error, Fault, Guarded, NewFault, ShardKey};
use overnight_types::{FailedTry, ItemIndex, JobId, ShardState};
use sqlx::postgres::PgRow;

use crate::PostgresStore;
use crate::error::{damaged, refused, settling_conflicts};
use crate::row::{Read, int, micros, short, text};
use crate::statement::Statement;
use crate::transaction::clock;

/// Longest message kept, characters.
const MESSAGE_CHARS_MAX: usize = 1_000;

impl PostgresStore {
    /// One statement. The job's row is locked first, as everywhere, since its used retries move.
    pub(crate) async fn record_faults(
        &self,
        shard: ShardKey,
        faults: &[NewFault],
    ) -> Result<Guarded<ShardState, u64>, Error> {
        let doing = "record faults";
        let items: Vec<i64> = faults.iter().map(|fault| int(fault.item.0)).collect();
        let attempts: Vec<i32> = faults.iter().map(|fault| short(fault.attempts)).collect();
        let delays: Vec<i64> = faults.iter().map(|fault| micros(fault.delay)).collect();
        let statuses: Vec<Option<i32>> = faults.iter().map(|fault| fault.http_status.map(i32::from)).collect();
        let codes: Vec<String> = faults.iter().map(|fault| text(&fault.code).into_owned()).collect();
        let cut = |message: &str| text(message).chars().take(MESSAGE_CHARS_MAX).collect::<String>();
        let messages: Vec<String> = faults.iter().map(|fault| cut(&fault.message)).collect();
        let row = settling_conflicts!(
            sqlx::query(concat!(
                "with clock as materialized (select ",
                clock!(),
                " as now),
                job as materialized (select j.job_id from jobs j where j.job_id = $2 for no key update),
                held as materialized (
                    select s.job_id, s.state, s.epoch, s.done, s.first_item, s.num_items
                    from job join shards s on s.job_id = job.job_id
                    where s.shard_index = $3 for no key update of s),
                new as materialized (
                    select k.*, k.item_index >= h.first_item and k.item_index < h.first_item + h.num_items as is_in,
                        case when k.item_index >= h.first_item and k.item_index < h.first_item + h.num_items
                            then get_bit(h.done, (k.item_index - h.first_item)::integer) = 1 end as is_done
                    from held h, unnest($5::bigint[], $6::integer[], $7::bigint[], $8::integer[], $9::text[],
                        $10::text[]) k (item_index, attempts, delay, http_status, code, message)),
                verdict as materialized (
                    select h.job_id, h.state,
                        (select min(new.item_index) from new where not new.is_in) as stranger,
                        h.state = 'leased' and h.epoch = $4
                            and not exists (select 1 from new where not new.is_in or new.is_done) as holds
                    from held h),
                kept as (
                    insert into item_faults as f (job_id, item_index, attempts, not_before, http_status, code, message)
                    select v.job_id, n.item_index, n.attempts, clock.now + n.delay, n.http_status, n.code, n.message
                    from verdict v, clock, new n where v.holds
                    on conflict (job_id, item_index) do update set attempts = excluded.attempts,
                        not_before = excluded.not_before, http_status = excluded.http_status,
                        code = excluded.code, message = excluded.message,
                        earlier = ((case when jsonb_array_length(f.earlier::jsonb) < $11 then f.earlier::jsonb
                                else f.earlier::jsonb - 0 end)
                            || jsonb_build_array(jsonb_build_array(f.attempts, f.http_status, f.code,
                                left(f.message, $12))))::text),
                used as (
                    update jobs j set retries_used = j.retries_used + $13 from verdict v
                    where j.job_id = v.job_id and v.holds
                    returning j.retries_used)
                select v.state, v.stranger, used.retries_used from verdict v left join used on true"
            ))
            .bind(self.clock_offset.micros())
            .bind(shard.job.uuid())
            .bind(short(shard.shard.0))
            .bind(int(shard.epoch.0))
            .bind(&items)
            .bind(&attempts)
            .bind(&delays)
            .bind(&statuses)
            .bind(&codes)
            .bind(&messages)
            .bind(i32::try_from(FailedTry::KEPT_MAX).unwrap_or(i32::MAX))
            .bind(i32::try_from(FailedTry::MESSAGE_CHARS_MAX).unwrap_or(i32::MAX))
            .bind(int(faults.len() as u64))
            .row_of(self, doing)
        )?;
        let Some(row) = row else { return Ok(Guarded::Lost { now: None }) };
        let used = row.int_or_null("retries_used")?;
        match (used, row.int_or_null("stranger")?, row.word("state")?) {
            (Some(used), _, _) => Ok(Guarded::Applied(used.unsigned_abs())),
            (None, Some(item), ShardState::Leased) => Err(refused(doing, format!("item {item} is not of this shard"))),
            (None, _, now) => Ok(Guarded::Lost { now: Some(now) }),
        }
    }

    /// Faults of a job's items from `from` up to but not with `to`, by index.
    pub(crate) async fn faults_between(
        &self,
        job: JobId,
        from: ItemIndex,
        to: ItemIndex,
        limit: u32,
    ) -> Result<Vec<Fault>, Error> {
        sqlx::query(
            "select item_index, attempts, not_before, http_status, code, message, earlier from item_faults
            where job_id = $1 and item_index >= $2 and item_index < $3 order by item_index limit $4",
        )
        .bind(job.uuid())
        .bind(int(from.0))
        .bind(int(to.0))
        .bind(i64::from(limit))
        .list(self, "list faults", read)
        .await
    }
}

fn read(row: &PgRow) -> Result<Fault, Error> {
    let http_status = row.int_or_null("http_status")?;
    let as_status = |status: i64| u16::try_from(status).map_err(|_| damaged("item_faults.http_status", status));
    Ok(Fault {
        item: ItemIndex(row.u64("item_index")?),
        attempts: row.u32("attempts")?,
        not_before: row.at("not_before")?,
        http_status: http_status.map(as_status).transpose()?,
        code: row.text("code")?,
        message: row.text("message")?,
        earlier: earlier(&row.text("earlier")?)?,
    })
}

fn earlier(text: &str) -> Result<Vec<FailedTry>, Error> {
    let tries: Vec<(u32, Option<u16>, String, String)> =
        serde_json::from_str(text).map_err(|_| damaged("item_faults.earlier", text))?;
    let tries = tries.into_iter();
    Ok(tries.map(|(number, http_status, code, message)| FailedTry { number, http_status, code, message }).collect())
}
