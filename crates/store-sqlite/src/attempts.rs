//! Rows of attempts.

use async_trait::async_trait;
use overnight_store::{Attempt, AttemptEnd, Attempts, Error};
use overnight_types::{Epoch, JobId, ShardIndex, WorkerId};

use crate::SqliteStore;
use crate::error::damaged;
use crate::row::{Read, int, key};
use crate::statement::Statement;
use crate::transaction::Write;

/// Attempts are kept this long after their job's end.
const KEPT_US: i64 = 7 * 24 * 3_600_000_000;

#[async_trait]
impl Attempts for SqliteStore {
    async fn list_attempts(&self, job: JobId, shard: ShardIndex, limit: u32) -> Result<Vec<Attempt>, Error> {
        sqlx::query("select * from attempts where job_id = ?1 and shard_index = ?2 order by epoch desc limit ?3")
            .bind(key(job.uuid()))
            .bind(shard.0)
            .bind(limit)
            .list(&self.readers, "list attempts", |row| {
                let end = row.text_or_null("end")?;
                let parse = |word: String| AttemptEnd::parse(&word).ok_or_else(|| damaged("attempts.end", word));
                Ok(Attempt {
                    job: row.job_id()?,
                    shard: ShardIndex(row.u32("shard_index")?),
                    epoch: Epoch(row.u64("epoch")?),
                    worker: row.worker_id("worker_id")?,
                    started_at: row.at("started_at")?,
                    ended_at: row.at_or_null("ended_at")?,
                    end: end.map(parse).transpose()?,
                })
            })
            .await
    }

    async fn prune_attempts(&self, limit: u32) -> Result<u32, Error> {
        let mut write = self.write("prune attempts").await?;
        let pruned = sqlx::query(
            "delete from attempts where (job_id, shard_index, epoch) in (
                select a.job_id, a.shard_index, a.epoch from jobs j join attempts a on a.job_id = j.job_id
                where coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) < ?1
                limit ?2)",
        )
        .bind(write.now - KEPT_US)
        .bind(limit)
        .change(&mut write)
        .await?;
        self.commit(write).await?;
        Ok(u32::try_from(pruned).unwrap_or(u32::MAX))
    }
}

/// Records the start of a lease.
pub(crate) async fn begin(
    write: &mut Write,
    job: JobId,
    shard: ShardIndex,
    epoch: Epoch,
    worker: WorkerId,
) -> Result<(), Error> {
    let now = write.now;
    sqlx::query("insert into attempts (job_id, shard_index, epoch, worker_id, started_at) values (?1, ?2, ?3, ?4, ?5)")
        .bind(key(job.uuid()))
        .bind(shard.0)
        .bind(int(epoch.0))
        .bind(key(worker.uuid()))
        .bind(now)
        .change(write)
        .await?;
    Ok(())
}

/// Records the end of a lease.
pub(crate) async fn end(
    write: &mut Write,
    job: JobId,
    shard: ShardIndex,
    epoch: Epoch,
    end: AttemptEnd,
) -> Result<(), Error> {
    let now = write.now;
    sqlx::query(
        "update attempts set ended_at = ?4, end = ?5
        where job_id = ?1 and shard_index = ?2 and epoch = ?3 and ended_at is null",
    )
    .bind(key(job.uuid()))
    .bind(shard.0)
    .bind(int(epoch.0))
    .bind(now)
    .bind(end.as_str())
    .change(write)
    .await?;
    Ok(())
}
