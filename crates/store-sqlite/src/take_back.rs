//! Taking leases back: lost ones (expired, or their worker is dead) and fenced ones.
//!
//! Invariant: a lease that is taken back can commit nothing any more, since its
//! shard is no longer `leased` and its next lease has a higher epoch.

use overnight_store::{AttemptEnd, Error};
use overnight_types::{JobId, ShardIndex};
use sqlx::sqlite::SqliteRow;

use crate::SqliteStore;
use crate::row::{Read, key};
use crate::statement::Statement;
use crate::transaction::Write;

/// Names of shards, as the JSON that the statements below take.
pub(crate) struct ShardList {
    json: String,
    len: usize,
}

impl ShardList {
    /// From rows with `job_id` and `shard_index`.
    pub(crate) fn from_rows(rows: &[SqliteRow]) -> Result<Self, Error> {
        let names: Vec<serde_json::Value> = rows
            .iter()
            .map(|row| Ok(serde_json::json!([row.job_id()?.uuid().simple().to_string(), row.u32("shard_index")?])))
            .collect::<Result<_, Error>>()?;
        Ok(Self { len: names.len(), json: serde_json::Value::from(names).to_string() })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.len).unwrap_or(u32::MAX)
    }
}

impl SqliteStore {
    /// Takes back the leases that these rows name and commits; says how many.
    pub(crate) async fn commit_lost(&self, mut write: Write, rows: &[SqliteRow]) -> Result<u32, Error> {
        let shards = ShardList::from_rows(rows)?;
        if shards.is_empty() {
            return Ok(0);
        }
        lost(&mut write, &shards).await?;
        self.commit(write).await?;
        Ok(shards.len())
    }
}

/// Ends leases whose worker is gone: each counts as a crash unless it committed,
/// and as a death of the item that ran alone under it.
pub(crate) async fn lost(write: &mut Write, shards: &ShardList) -> Result<(), Error> {
    if shards.is_empty() {
        return Ok(());
    }
    let now = write.now;
    end_attempts(write, shards, AttemptEnd::Lost).await?;
    sqlx::query(
        "update shards set state = 'ready', owner = null, lease_until = null, not_before = ?2,
            crashes = crashes + not exists (select 1 from segments g
                where g.job_id = shards.job_id and g.shard_index = shards.shard_index
                    and g.seq = shards.next_seq - 1 and g.epoch = shards.epoch),
            probe_deaths = probe_deaths + coalesce(probe_epoch = epoch, 0)
        where state = 'leased'
            and (job_id, shard_index) in (select unhex(value ->> 0), value ->> 1 from json_each(?1))",
    )
    .bind(&shards.json)
    .bind(now)
    .change(write)
    .await?;
    finalize_drained(write, shards).await?;
    write.wakes();
    Ok(())
}

/// Ends leases on purpose and raises their epochs; counts against nobody.
pub(crate) async fn fence(write: &mut Write, job: JobId) -> Result<(), Error> {
    let now = write.now;
    let rows = sqlx::query(
        "select job_id, shard_index from shards indexed by shards_leased where job_id = ?1 and state = 'leased'",
    )
    .bind(key(job.uuid()))
    .rows(write)
    .await?;
    let shards = ShardList::from_rows(&rows)?;
    if shards.is_empty() {
        return Ok(());
    }
    end_attempts(write, &shards, AttemptEnd::Fenced).await?;
    sqlx::query(
        "update shards indexed by shards_leased
        set state = 'ready', owner = null, lease_until = null, not_before = ?2, epoch = epoch + 1
        where job_id = ?1 and state = 'leased'",
    )
    .bind(key(job.uuid()))
    .bind(now)
    .change(write)
    .await?;
    Ok(())
}

/// Makes the finalize of a cancelling job due once nothing of it is leased.
pub(crate) async fn finalize_if_drained(write: &mut Write, job: JobId, shard: ShardIndex) -> Result<(), Error> {
    let name = serde_json::json!([[job.uuid().simple().to_string(), shard.0]]).to_string();
    finalize_drained(write, &ShardList { json: name, len: 1 }).await
}

async fn finalize_drained(write: &mut Write, shards: &ShardList) -> Result<(), Error> {
    let now = write.now;
    let drained = sqlx::query(
        "update jobs set step_due_at = ?2
        where state = 'cancelling' and step_due_at > ?2 and step_until is null
            and job_id in (select unhex(value ->> 0) from json_each(?1))
            and not exists (select 1 from shards s indexed by shards_leased
                where s.job_id = jobs.job_id and s.state = 'leased')",
    )
    .bind(&shards.json)
    .bind(now)
    .change(write)
    .await?;
    if drained > 0 {
        write.wakes();
    }
    Ok(())
}

async fn end_attempts(write: &mut Write, shards: &ShardList, end: AttemptEnd) -> Result<(), Error> {
    let now = write.now;
    sqlx::query(
        "update attempts set ended_at = ?2, end = ?3
        where ended_at is null and (job_id, shard_index, epoch) in (
            select s.job_id, s.shard_index, s.epoch from json_each(?1) k
            join shards s on s.job_id = unhex(k.value ->> 0) and s.shard_index = k.value ->> 1
            where s.state = 'leased')",
    )
    .bind(&shards.json)
    .bind(now)
    .bind(end.as_str())
    .change(write)
    .await?;
    Ok(())
}
