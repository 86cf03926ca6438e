//! What follows for a job when a shard of it is no longer leased: the last one to be done
//! takes it to `finalizing`; the last one to be given back makes a cancelling job due.
//!
//! Invariant: looked at after the change of the shard is durable, in a statement of its
//! own, so that whoever comes last sees every other one's, and no job's lock is waited for
//! with a shard's in hand. A process that dies in between leaves it to
//! [`PostgresStore::settle_forgotten`], which every look for due jobs calls.

use overnight_store::Error;
use overnight_types::{FileId, JobId, JobState};

use crate::PostgresStore;
use crate::error::settling_conflicts;
use crate::row::{Read, uuids};
use crate::statement::Statement;
use crate::transaction::clock;

/// Forgotten jobs settled at a time.
const FORGOTTEN_MAX: i64 = 100;

impl PostgresStore {
    /// Moves on those of these jobs that have no shard leased; those moved, with their state.
    pub(crate) async fn settle(&self, jobs: &[JobId]) -> Result<Vec<(JobId, JobState)>, Error> {
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let mut jobs = jobs.to_vec();
        jobs.sort_unstable();
        jobs.dedup();
        let draw = || uuids(jobs.iter().map(|_| FileId::new().uuid()));
        let (outputs, errors) = (draw(), draw());
        let moved = settling_conflicts!(
            sqlx::query(concat!(
                "with clock as materialized (select ",
                clock!(),
                " as now),
                idle as materialized (
                    select k.job_id, k.output_file_id, k.error_file_id,
                        exists (select 1 from shards s where s.job_id = k.job_id and s.state = 'ready') as has_ready
                    from unnest($2::uuid[], $3::uuid[], $4::uuid[]) k (job_id, output_file_id, error_file_id)
                    where not exists (select 1 from shards s where s.job_id = k.job_id and s.state = 'leased')),
                -- The latest version, so that a cancel or an expiry at the same moment is seen.
                held as materialized (
                    select j.job_id, j.state, j.step_due_at, j.step_until, idle.output_file_id, idle.error_file_id,
                        idle.has_ready
                    from jobs j join idle on idle.job_id = j.job_id
                    where j.state = 'cancelling' or (j.state = 'in_progress' and not idle.has_ready)
                    order by j.job_id for no key update of j),
                finalizing as (
                    update jobs j set state = 'finalizing', ending = 'completed', finalizing_at = clock.now,
                        paused_at = null, output_file_id = h.output_file_id, error_file_id = h.error_file_id,
                        step_due_at = clock.now, step_owner = null, step_until = null
                    from held h, clock where j.job_id = h.job_id and h.state = 'in_progress' and not h.has_ready
                    returning j.job_id, j.state),
                told as (
                    insert into events (job_id, at, what, note)
                    select f.job_id, clock.now, 'finalizing', 'completed' from finalizing f, clock),
                drained as (
                    update jobs j set step_due_at = clock.now from held h, clock
                    where j.job_id = h.job_id and h.state = 'cancelling' and h.step_until is null
                        and h.step_due_at > clock.now
                    returning j.job_id, j.state)
                select job_id, state from finalizing union all select job_id, state from drained"
            ))
            .bind(self.clock_offset.micros())
            .bind(uuids(jobs.iter().map(JobId::uuid)))
            .bind(&outputs)
            .bind(&errors)
            .list(self, "move a job on", |row| Ok((row.job_id()?, row.word("state")?)))
        )?;
        if !moved.is_empty() {
            self.wake_all();
        }
        Ok(moved)
    }

    /// The same for running jobs that have nothing left to run: whoever ended their last
    /// shard died before it could say so.
    pub(crate) async fn settle_forgotten(&self) -> Result<(), Error> {
        let forgotten = sqlx::query(
            "select j.job_id from jobs j where j.state = 'in_progress'
                and not exists (select 1 from shards s where s.job_id = j.job_id and s.state = 'ready')
                and not exists (select 1 from shards s where s.job_id = j.job_id and s.state = 'leased')
            limit $1",
        )
        .bind(FORGOTTEN_MAX)
        .list(self, "find jobs that nobody moved on", Read::job_id)
        .await?;
        self.settle(&forgotten).await.map(drop)
    }
}
