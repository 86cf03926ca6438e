//! Rows of attempts. They begin and end in the statements of claims, commits and releases.

use async_trait::async_trait;
use overnight_store::{Attempt, AttemptEnd, Attempts, Error};
use overnight_types::{Epoch, JobId, ShardIndex};

use crate::PostgresStore;
use crate::error::{damaged, settling_conflicts};
use crate::row::{Read, short};
use crate::statement::Statement;
use crate::transaction::clock;

/// Attempts are kept this long after their job's end.
const KEPT_US: i64 = 7 * 24 * 3_600_000_000;

#[async_trait]
impl Attempts for PostgresStore {
    async fn list_attempts(&self, job: JobId, shard: ShardIndex, limit: u32) -> Result<Vec<Attempt>, Error> {
        sqlx::query(
            "select job_id, shard_index, epoch, worker_id, started_at, ended_at, \"end\" from attempts
            where job_id = $1 and shard_index = $2 order by epoch desc limit $3",
        )
        .bind(job.uuid())
        .bind(short(shard.0))
        .bind(i64::from(limit))
        .list(self, "list attempts", |row| {
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
        let pruned = settling_conflicts!(
            sqlx::query(concat!(
                "delete from attempts where (job_id, shard_index, epoch) in (
                    select a.job_id, a.shard_index, a.epoch from jobs j join attempts a on a.job_id = j.job_id
                    where coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) < ",
                clock!(),
                " - $2 limit $3)"
            ))
            .bind(self.clock_offset.micros())
            .bind(KEPT_US)
            .bind(i64::from(limit))
            .change_of(self, "prune attempts")
        )?;
        Ok(u32::try_from(pruned).unwrap_or(u32::MAX))
    }
}
