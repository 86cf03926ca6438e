//! Rows of item faults.

use overnight_store::{Error, Fault, Guarded, NewFault, ShardKey};
use overnight_types::{FailedTry, ItemIndex, JobId, ShardState};
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use crate::SqliteStore;
use crate::error::{damaged, failed, refused};
use crate::row::{Read, after, int, key};
use crate::statement::Statement;

/// Longest message kept, characters.
const MESSAGE_CHARS_MAX: usize = 1_000;

impl SqliteStore {
    pub(crate) async fn record_faults(
        &self,
        shard: ShardKey,
        faults: &[NewFault],
    ) -> Result<Guarded<ShardState, u64>, Error> {
        let doing = "record faults";
        let mut write = self.write(doing).await?;
        let row = sqlx::query("select * from shards where job_id = ?1 and shard_index = ?2")
            .bind(key(shard.job.uuid()))
            .bind(shard.shard.0)
            .row_if_any(&mut write)
            .await?;
        let Some(row) = row else { return Ok(Guarded::Lost { now: None }) };
        let state: ShardState = row.word("state")?;
        if state != ShardState::Leased || row.u64("epoch")? != shard.epoch.0 {
            return Ok(Guarded::Lost { now: Some(state) });
        }
        let (first, num_items) = (row.u64("first_item")?, row.u32("num_items")?);
        let done = row.bitmap("done", num_items)?;
        for fault in faults {
            let bit = fault.item.0.checked_sub(first).and_then(|bit| u32::try_from(bit).ok());
            let bit = bit.filter(|bit| *bit < num_items);
            let bit = bit.ok_or_else(|| refused(doing, format!("item {} is not of this shard", fault.item)))?;
            if done.get(bit) {
                return Ok(Guarded::Lost { now: Some(state) });
            }
        }
        let rows: Vec<_> = faults.iter().map(|fault| as_json(fault, write.now)).collect();
        sqlx::query(
            "insert into item_faults (job_id, item_index, attempts, not_before, http_status, code, message)
            select ?1, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5
            from json_each(?2) where true
            on conflict (job_id, item_index) do update set attempts = excluded.attempts,
                not_before = excluded.not_before, http_status = excluded.http_status,
                code = excluded.code, message = excluded.message,
                earlier = json_insert(
                    case when json_array_length(earlier) < ?3 then earlier else json_remove(earlier, '$[0]') end,
                    '$[#]', json_array(attempts, http_status, code, substr(message, 1, ?4)))",
        )
        .bind(key(shard.job.uuid()))
        .bind(serde_json::Value::from(rows).to_string())
        .bind(int(FailedTry::KEPT_MAX as u64))
        .bind(int(FailedTry::MESSAGE_CHARS_MAX as u64))
        .change(&mut write)
        .await?;
        let used =
            sqlx::query("update jobs set retries_used = retries_used + ?2 where job_id = ?1 returning retries_used")
                .bind(key(shard.job.uuid()))
                .bind(int(faults.len() as u64))
                .row(&mut write)
                .await?
                .u64("retries_used")?;
        self.commit(write).await?;
        Ok(Guarded::Applied(used))
    }
}

fn as_json(fault: &NewFault, now: i64) -> serde_json::Value {
    let message: String = fault.message.chars().take(MESSAGE_CHARS_MAX).collect();
    serde_json::json!([fault.item.0, fault.attempts, after(now, fault.delay), fault.http_status, fault.code, message])
}

/// Faults of a job's items from `from` up to but not with `to`, by index.
pub(crate) async fn list(
    connection: &mut SqliteConnection,
    job: JobId,
    from: ItemIndex,
    to: ItemIndex,
    limit: u32,
) -> Result<Vec<Fault>, Error> {
    let rows = sqlx::query(
        "select * from item_faults where job_id = ?1 and item_index >= ?2 and item_index < ?3
        order by item_index limit ?4",
    )
    .bind(key(job.uuid()))
    .bind(int(from.0))
    .bind(int(to.0))
    .bind(limit)
    .fetch_all(connection)
    .await
    .map_err(failed("list faults"))?;
    rows.iter().map(read).collect()
}

fn read(row: &SqliteRow) -> Result<Fault, Error> {
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
