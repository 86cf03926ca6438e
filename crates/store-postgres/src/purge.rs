//! Deleting the rows of deleted jobs, in bounded pieces.

use overnight_store::{Error, Purged};
use overnight_types::JobId;

use crate::PostgresStore;
use crate::row::Read;
use crate::statement::Statement;
use crate::transaction::Write;

/// What goes, piece by piece, before the job's own row. Children of a job only.
const PIECES: &[&str] = &[
    "delete from item_faults where (job_id, item_index) in
        (select job_id, item_index from item_faults where job_id = $1 limit $2)",
    "delete from segments where (job_id, shard_index, seq) in
        (select job_id, shard_index, seq from segments where job_id = $1 limit $2)",
    "delete from attempts where (job_id, shard_index, epoch) in
        (select job_id, shard_index, epoch from attempts where job_id = $1 limit $2)",
    "delete from events where seq in (select seq from events where job_id = $1 limit $2)",
    "delete from outbox where event_id in (select event_id from outbox where job_id = $1 limit $2)",
    "delete from idempotency_keys where key in (select key from idempotency_keys where job_id = $1 limit $2)",
    "delete from shards where (job_id, shard_index) in
        (select job_id, shard_index from shards where job_id = $1 limit $2)",
    "delete from jobs where job_id = $1 and $2 > 0",
];

impl PostgresStore {
    pub(crate) async fn purge(&self, limit: u32) -> Result<Purged, Error> {
        let doing = "purge deleted jobs";
        let mut write = self.write(doing).await?;
        // Two sweeps at once purge different jobs.
        let rows = sqlx::query(
            "select job_id from jobs where deleted_at is not null order by deleted_at, job_id limit $1
            for update skip locked",
        )
        .bind(i64::from(limit))
        .rows(&mut write)
        .await?;
        let (mut left, mut gone) = (limit, Vec::new());
        for row in &rows {
            let job = row.job_id()?;
            if purge_one(&mut write, job, &mut left).await? {
                gone.push(job);
            }
            if left == 0 {
                break;
            }
        }
        self.commit(write).await?;
        Ok(Purged { jobs: gone, has_more: left == 0 })
    }
}

/// Deletes up to `left` rows of a job, its own last, and lowers `left` by them.
/// True when its own went.
async fn purge_one(write: &mut Write, job: JobId, left: &mut u32) -> Result<bool, Error> {
    let mut deleted = 0;
    for &piece in PIECES {
        if *left == 0 {
            return Ok(false);
        }
        deleted = sqlx::query(piece).bind(job.uuid()).bind(i64::from(*left)).change(write).await?;
        *left = left.saturating_sub(u32::try_from(deleted).unwrap_or(u32::MAX));
    }
    Ok(deleted == 1)
}
