//! Taking leases back: lost ones (expired, or their worker is dead) and fenced ones.
//!
//! Invariant: a lease that is taken back can commit nothing any more, since its
//! shard is no longer `leased` and its next lease has a higher epoch.

use overnight_store::Error;
use overnight_types::JobId;
use sqlx::postgres::PgRow;

use crate::PostgresStore;
use crate::row::Read;
use crate::statement::Statement;
use crate::transaction::Write;

/// Ends the leases that `picked` names and has locked (columns `job_id, shard_index, epoch`
/// of shards): their workers are gone. Each counts as a crash unless it committed, and as a
/// death of the item that ran alone under it. `$1` moves the clock. Gives back `job_id`.
macro_rules! lost {
    ($picked:literal) => {
        concat!(
            "with clock as materialized (select ",
            crate::transaction::clock!(),
            " as now),
            picked as materialized (",
            $picked,
            "),
            ended as (
                update attempts a set ended_at = clock.now, \"end\" = 'lost' from picked p, clock
                where a.job_id = p.job_id and a.shard_index = p.shard_index and a.epoch = p.epoch
                    and a.ended_at is null)
            update shards s set state = 'ready', owner = null, lease_until = null, not_before = clock.now,
                crashes = s.crashes + (not exists (select 1 from segments g
                    where g.job_id = s.job_id and g.shard_index = s.shard_index
                        and g.seq = s.next_seq - 1 and g.epoch = s.epoch))::integer,
                probe_deaths = s.probe_deaths + coalesce((s.probe_epoch = s.epoch)::integer, 0)
            from picked p, clock
            where s.job_id = p.job_id and s.shard_index = p.shard_index and s.epoch = p.epoch and s.state = 'leased'
            returning s.job_id"
        )
    };
}
pub(crate) use lost;

impl PostgresStore {
    /// After leases were taken back: moves their jobs on and wakes; says how many there were.
    pub(crate) async fn after_loss(&self, rows: &[PgRow]) -> Result<u32, Error> {
        if rows.is_empty() {
            return Ok(0);
        }
        let jobs: Vec<JobId> = rows.iter().map(Read::job_id).collect::<Result<_, _>>()?;
        self.settle(&jobs).await?;
        self.wake_all();
        Ok(u32::try_from(rows.len()).unwrap_or(u32::MAX))
    }
}

/// Ends leases on purpose and raises their epochs; counts against nobody. The job's row
/// is locked, so no new lease comes in between.
pub(crate) async fn fence(write: &mut Write, job: JobId) -> Result<(), Error> {
    let now = write.now;
    sqlx::query(
        "with picked as materialized (
            select s.job_id, s.shard_index, s.epoch from shards s
            where s.job_id = $1 and s.state = 'leased' order by s.shard_index for no key update),
        ended as (
            update attempts a set ended_at = $2, \"end\" = 'fenced' from picked p
            where a.job_id = p.job_id and a.shard_index = p.shard_index and a.epoch = p.epoch
                and a.ended_at is null)
        update shards s
        set state = 'ready', owner = null, lease_until = null, not_before = $2, epoch = s.epoch + 1
        from picked p where s.job_id = p.job_id and s.shard_index = p.shard_index and s.state = 'leased'",
    )
    .bind(job.uuid())
    .bind(now)
    .change(write)
    .await?;
    Ok(())
}
