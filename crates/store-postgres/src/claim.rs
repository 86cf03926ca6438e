//! The claim of a shard: one statement that passes over whatever another one holds.
//!
//! Invariant: the job's row is locked, in the mode that a move of the job waits for, while
//! its shard is leased: a move comes before, and the claim sees it, or after, and it sees
//! the lease. Locked rows of one job keep nobody from the others.

use std::time::Duration;

use overnight_store::{ClaimShard, Error, ShardLease};
use overnight_types::ItemIndex;
use sqlx::postgres::PgRow;

use crate::PostgresStore;
use crate::error::settling_conflicts;
use crate::job_row::{self, job_columns};
use crate::row::{Part, Read, micros};
use crate::shards::{self, shard_columns};
use crate::statement::Statement;
use crate::transaction::clock;

/// Runnable jobs that one claim looks at.
const JOBS_MAX: i64 = 64;

/// Waits before a claim looks again whose jobs were all locked, each by a move that is
/// done in a moment.
const LOOKS: [Duration; 3] = [Duration::from_millis(3), Duration::from_millis(15), Duration::from_millis(60)];

/// Runnable jobs in an order; of the first whose row is free its first shard that may be
/// leased and is free. A job whose shards are all held or waiting is no candidate. Every
/// look at a shard is by one of the two partial indexes. Always one row: nulls, with the
/// number of candidates, when nothing was leased.
macro_rules! claim {
    ($order:literal) => {
        concat!(
            "with clock as materialized (select ",
            clock!(),
            " as now),
            candidates as materialized (
                select j.job_id from jobs j, clock
                where j.state = 'in_progress' and j.paused_at is null and j.expires_at > clock.now
                    and ($2::text[] is null or j.model = any($2))
                    and (exists (select 1 from shards s where s.job_id = j.job_id and s.state = 'ready'
                            and s.not_before <= clock.now)
                        or exists (select 1 from shards s where s.job_id = j.job_id and s.state = 'leased'
                            and s.lease_until <= clock.now))
                order by ",
            $order,
            " limit $3),
            picked as materialized (
                select least(ready.shard_index, over.shard_index) as picked_index,
                    coalesce(over.shard_index < ready.shard_index, ready.shard_index is null) as was_leased, ",
            job_columns!("job."),
            "
                from clock, candidates c
                    cross join lateral (
                        select ",
            job_columns!("j."),
            " from jobs j
                        where j.job_id = c.job_id and j.state = 'in_progress' and j.paused_at is null
                            -- Written so that only the key finds it, whatever the statistics say.
                            and j.expires_at - clock.now > 0
                        for share skip locked) job
                    left join lateral (
                        select s.shard_index from shards s
                        where s.job_id = job.job_id and s.state = 'ready' and s.not_before <= clock.now
                        order by s.shard_index limit 1 for no key update skip locked) ready on true
                    left join lateral (
                        select s.shard_index from shards s
                        where s.job_id = job.job_id and s.state = 'leased' and s.lease_until <= clock.now
                        order by s.shard_index limit 1 for no key update skip locked) over on true
                where ready.shard_index is not null or over.shard_index is not null
                limit 1),
            lost as (
                update attempts a set ended_at = clock.now, \"end\" = 'lost' from picked p, shards s, clock
                where p.was_leased and s.job_id = p.job_id and s.shard_index = p.picked_index
                    and a.job_id = s.job_id and a.shard_index = s.shard_index and a.epoch = s.epoch
                    and a.ended_at is null),
            leased as (
                update shards s set state = 'leased', epoch = s.epoch + 1, owner = $4, lease_until = clock.now + $5,
                    not_before = case when p.was_leased then clock.now else s.not_before end,
                    crashes = s.crashes + (p.was_leased and not exists (select 1 from segments g
                        where g.job_id = s.job_id and g.shard_index = s.shard_index
                            and g.seq = s.next_seq - 1 and g.epoch = s.epoch))::integer,
                    probe_deaths = s.probe_deaths
                        + (p.was_leased and coalesce(s.probe_epoch = s.epoch, false))::integer
                from picked p, clock
                where s.job_id = p.job_id and s.shard_index = p.picked_index and s.state <> 'done'
                returning ",
            shard_columns!("s."),
            "),
            begun as (
                insert into attempts (job_id, shard_index, epoch, worker_id, started_at)
                select l.job_id, l.shard_index, l.epoch, $4, clock.now from leased l, clock)
            select ",
            shard_columns!("l."),
            ", exists (select 1 from item_faults f where f.job_id = l.job_id
                and f.item_index >= l.first_item and f.item_index < l.first_item + l.num_items) as has_faults,
                (select count(*) from candidates) as num_candidates, 0 as then, ",
            job_columns!("p."),
            " from (select 1) one left join leased l on true left join picked p on true"
        )
    };
}

impl PostgresStore {
    pub(crate) async fn claim(&self, claim: &ClaimShard) -> Result<Option<ShardLease>, Error> {
        let mut looks = LOOKS.iter();
        loop {
            let row = settling_conflicts!(self.claim_once(claim))?;
            let Some(row) = row else { return Ok(None) };
            let (shard, job) = Part::both(&row);
            if shard.uuid_or_null("job_id")?.is_some() {
                return self.leased(&shard, &job).await.map(Some);
            }
            if shard.int("num_candidates")? == 0 {
                return Ok(None);
            }
            let Some(wait) = looks.next() else { return Ok(None) };
            tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
        }
    }

    async fn claim_once(&self, claim: &ClaimShard) -> Result<Option<PgRow>, Error> {
        let statement = if claim.oldest {
            claim!("j.created_at, j.job_id")
        } else {
            claim!("j.priority, j.expires_at, j.created_at, j.job_id")
        };
        sqlx::query(statement)
            .bind(self.clock_offset.micros())
            .bind(&claim.models)
            .bind(JOBS_MAX)
            .bind(claim.worker.uuid())
            .bind(micros(claim.ttl))
            .row_of(self, "lease a shard")
            .await
    }

    async fn leased(&self, shard: &Part<'_>, job: &Part<'_>) -> Result<ShardLease, Error> {
        let has_faults = shard.flag("has_faults")?;
        let (shard, retries_used, job) = (shards::read(shard)?, job.u64("retries_used")?, job_row::read(job)?);
        let faults = if has_faults {
            let end = ItemIndex(shard.cut.first_item.0 + u64::from(shard.cut.num_items));
            self.faults_between(job.id, shard.cut.first_item, end, shard.cut.num_items).await?
        } else {
            Vec::new()
        };
        Ok(ShardLease { job, shard, faults, retries_used })
    }
}
