//! Leases of shards: claim, renew, release, take back; and reads of shards.

use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{
    AttemptEnd, ClaimShard, Committed, Error, Fault, Guarded, JobSignal, NewFault, NewSegment, NewShard, Shard,
    ShardKey, ShardLease, Shards,
};
use overnight_types::{Epoch, ItemIndex, JobId, ShardIndex, ShardState, WorkerId};

use crate::PostgresStore;
use crate::error::{refused, settling_conflicts};
use crate::row::{Read, int, micros, short, uuids};
use crate::statement::Statement;
use crate::take_back::lost;
use crate::transaction::clock;

/// The columns that `read` reads, each with a prefix; named as those of jobs are.
macro_rules! shard_columns {
    ($of:literal) => {
        concat!(
            $of,
            "job_id, ",
            $of,
            "shard_index, ",
            $of,
            "first_item, ",
            $of,
            "num_items, ",
            $of,
            "first_line, ",
            $of,
            "byte_offset, ",
            $of,
            "byte_len, ",
            $of,
            "lines_hash, ",
            $of,
            "state, ",
            $of,
            "not_before, ",
            $of,
            "epoch, ",
            $of,
            "owner, ",
            $of,
            "lease_until, ",
            $of,
            "crashes, ",
            $of,
            "probe_item, ",
            $of,
            "probe_deaths, ",
            $of,
            "next_seq, ",
            $of,
            "done, ",
            $of,
            "failed, ",
            $of,
            "input_tokens, ",
            $of,
            "cached_tokens, ",
            $of,
            "output_tokens, ",
            $of,
            "reasoning_tokens"
        )
    };
}
pub(crate) use shard_columns;

#[async_trait]
impl Shards for PostgresStore {
    async fn claim_shard(&self, claim: &ClaimShard) -> Result<Option<ShardLease>, Error> {
        self.claim(claim).await
    }

    async fn extend_shards(&self, worker: WorkerId, keys: &[ShardKey], ttl: Duration) -> Result<Vec<ShardKey>, Error> {
        let rows = settling_conflicts!(
            sqlx::query(concat!(
                "with clock as materialized (select ",
                clock!(),
                " as now),
                held as materialized (
                    select s.job_id, s.shard_index from shards s
                    join unnest($2::uuid[], $3::integer[], $4::bigint[]) k (job_id, shard_index, epoch)
                        on s.job_id = k.job_id and s.shard_index = k.shard_index and s.epoch = k.epoch
                    where s.state = 'leased' and s.owner = $5
                    order by s.job_id, s.shard_index for no key update of s)
                update shards s set lease_until = clock.now + $6 from held h, clock
                where s.job_id = h.job_id and s.shard_index = h.shard_index
                returning s.job_id, s.shard_index, s.epoch"
            ))
            .bind(self.clock_offset.micros())
            .bind(uuids(keys.iter().map(|key| key.job.uuid())))
            .bind(keys.iter().map(|key| short(key.shard.0)).collect::<Vec<_>>())
            .bind(keys.iter().map(|key| int(key.epoch.0)).collect::<Vec<_>>())
            .bind(worker.uuid())
            .bind(micros(ttl))
            .rows_of(self, "extend leases")
        )?;
        let mut lost = keys.to_vec();
        for row in &rows {
            let held = (row.job_id()?, row.u32("shard_index")?, row.u64("epoch")?);
            // By epoch too: a worker may hold again what it has lost, and not know it yet.
            lost.retain(|key| (key.job, key.shard.0, key.epoch.0) != held);
        }
        Ok(lost)
    }

    async fn commit_segment_if_leased(
        &self,
        key: ShardKey,
        segment: &NewSegment,
    ) -> Result<Guarded<ShardState, Committed>, Error> {
        self.commit_segment(key, segment).await
    }

    async fn record_faults_if_leased(
        &self,
        key: ShardKey,
        faults: &[NewFault],
    ) -> Result<Guarded<ShardState, u64>, Error> {
        self.record_faults(key, faults).await
    }

    async fn release_shard_if_leased(
        &self,
        shard: ShardKey,
        delay: Duration,
        why: AttemptEnd,
    ) -> Result<Guarded<ShardState, ()>, Error> {
        let doing = "release a shard";
        if why == AttemptEnd::Done {
            return Err(refused(doing, "only a commit ends a shard as done"));
        }
        let released = settling_conflicts!(
            sqlx::query(concat!(
                "with clock as materialized (select ",
                clock!(),
                " as now),
                released as (
                    update shards s set state = 'ready', owner = null, lease_until = null,
                        not_before = clock.now + $5,
                        crashes = s.crashes + ($6 = 'lost' and not exists (select 1 from segments g
                            where g.job_id = s.job_id and g.shard_index = s.shard_index
                                and g.seq = s.next_seq - 1 and g.epoch = s.epoch))::integer,
                        probe_deaths = s.probe_deaths
                            + ($6 = 'lost' and coalesce(s.probe_epoch = s.epoch, false))::integer
                    from clock
                    where s.job_id = $2 and s.shard_index = $3 and s.epoch = $4 and s.state = 'leased'
                    returning s.job_id, s.shard_index, s.epoch),
                ended as (
                    update attempts a set ended_at = clock.now, \"end\" = $6 from released r, clock
                    where a.job_id = r.job_id and a.shard_index = r.shard_index and a.epoch = r.epoch
                        and a.ended_at is null)
                select job_id from released"
            ))
            .bind(self.clock_offset.micros())
            .bind(shard.job.uuid())
            .bind(short(shard.shard.0))
            .bind(int(shard.epoch.0))
            .bind(micros(delay))
            .bind(why.as_str())
            .row_of(self, doing)
        )?;
        // Also when it is lost: perhaps an earlier try was carried out, and its connection broke
        // before a cancelled job that it was the last of was made due.
        self.settle(&[shard.job]).await?;
        if released.is_none() {
            return self.shard_state_now(shard, doing).await;
        }
        self.wake_all();
        Ok(Guarded::Applied(()))
    }

    async fn set_probe_if_leased(
        &self,
        shard: ShardKey,
        item: Option<ItemIndex>,
    ) -> Result<Guarded<ShardState, ()>, Error> {
        let doing = "name the item that runs alone";
        let set = settling_conflicts!(
            sqlx::query(
                "update shards set probe_item = $4, probe_epoch = case when $4::bigint is not null then epoch end,
                    probe_deaths = case when probe_item is not distinct from $4 then probe_deaths else 0 end
                where job_id = $1 and shard_index = $2 and epoch = $3 and state = 'leased'",
            )
            .bind(shard.job.uuid())
            .bind(short(shard.shard.0))
            .bind(int(shard.epoch.0))
            .bind(item.map(|item| int(item.0)))
            .change_of(self, doing)
        )?;
        if set == 0 { self.shard_state_now(shard, doing).await } else { Ok(Guarded::Applied(())) }
    }

    async fn release_leases_of_dead(&self, workers: &[WorkerId]) -> Result<u32, Error> {
        let doing = "release leases of dead workers";
        let dead = uuids(workers.iter().map(WorkerId::uuid));
        let rows = settling_conflicts!(
            sqlx::query(lost!(
                "select s.job_id, s.shard_index, s.epoch from shards s
                where s.state = 'leased' and s.owner = any($2)
                order by s.job_id, s.shard_index for no key update of s"
            ))
            .bind(self.clock_offset.micros())
            .bind(&dead)
            .rows_of(self, doing)
        )?;
        let shards = self.after_loss(&rows).await?;
        let steps = settling_conflicts!(
            sqlx::query(
                "update jobs set step_owner = null, step_until = null
                where step_due_at is not null and step_owner = any($1)"
            )
            .bind(&dead)
            .change_of(self, doing)
        )?;
        self.wake_all();
        Ok(shards + u32::try_from(steps).unwrap_or(u32::MAX))
    }

    async fn release_expired_leases(&self, limit: u32) -> Result<u32, Error> {
        // What is locked is being committed, renewed or claimed this moment.
        let rows = settling_conflicts!(
            sqlx::query(lost!(
                "select s.job_id, s.shard_index, s.epoch from shards s
                where s.state = 'leased' and s.lease_until <= (select now from clock)
                order by s.lease_until limit $2 for no key update of s skip locked"
            ))
            .bind(self.clock_offset.micros())
            .bind(i64::from(limit))
            .rows_of(self, "release expired leases")
        )?;
        self.after_loss(&rows).await
    }

    async fn find_job_signals(&self, jobs: &[JobId]) -> Result<Vec<JobSignal>, Error> {
        sqlx::query(
            "select job_id, state, paused_at, cancel_mode, round from jobs
            where job_id = any($1) and deleted_at is null",
        )
        .bind(uuids(jobs.iter().map(JobId::uuid)))
        .list(self, "read job signals", |row| {
            Ok(JobSignal {
                job: row.job_id()?,
                state: row.word("state")?,
                paused: row.int_or_null("paused_at")?.is_some(),
                cancel_mode: row.word("cancel_mode")?,
                round: row.u32("round")?,
            })
        })
        .await
    }

    async fn find_shard(&self, job: JobId, shard: ShardIndex) -> Result<Option<Shard>, Error> {
        sqlx::query(concat!("select ", shard_columns!(""), " from shards where job_id = $1 and shard_index = $2"))
            .bind(job.uuid())
            .bind(short(shard.0))
            .find(self, "find a shard", read)
            .await
    }

    async fn find_shard_of_item(&self, job: JobId, item: ItemIndex) -> Result<Option<Shard>, Error> {
        let shard = sqlx::query(concat!(
            "select ",
            shard_columns!(""),
            " from shards where job_id = $1 and first_item <= $2 order by first_item desc limit 1"
        ))
        .bind(job.uuid())
        .bind(int(item.0))
        .find(self, "find the shard of an item", read)
        .await?;
        Ok(shard.filter(|shard| item.0 < shard.cut.first_item.0 + u64::from(shard.cut.num_items)))
    }

    async fn list_shards(&self, job: JobId, from: ShardIndex, limit: u32) -> Result<Vec<Shard>, Error> {
        sqlx::query(concat!(
            "select ",
            shard_columns!(""),
            " from shards where job_id = $1 and shard_index >= $2 order by shard_index limit $3"
        ))
        .bind(job.uuid())
        .bind(short(from.0))
        .bind(i64::from(limit))
        .list(self, "list shards", read)
        .await
    }

    async fn list_faults(&self, job: JobId, from: ItemIndex, to: ItemIndex, limit: u32) -> Result<Vec<Fault>, Error> {
        self.faults_between(job, from, to, limit).await
    }
}

impl PostgresStore {
    /// The answer of a lost guard.
    async fn shard_state_now(&self, shard: ShardKey, doing: &'static str) -> Result<Guarded<ShardState, ()>, Error> {
        let now = sqlx::query("select state from shards where job_id = $1 and shard_index = $2")
            .bind(shard.job.uuid())
            .bind(short(shard.shard.0))
            .find(self, doing, |row| row.word("state"))
            .await?;
        Ok(Guarded::Lost { now })
    }
}

pub(crate) fn read(row: &impl Read) -> Result<Shard, Error> {
    let num_items = row.u32("num_items")?;
    Ok(Shard {
        job: row.job_id()?,
        cut: NewShard {
            shard: ShardIndex(row.u32("shard_index")?),
            first_item: ItemIndex(row.u64("first_item")?),
            num_items,
            first_line: row.u64("first_line")?,
            byte_offset: row.u64("byte_offset")?,
            byte_len: row.u64("byte_len")?,
            lines_hash: row.u64_of_bytes_or_null("lines_hash")?,
        },
        state: row.word("state")?,
        not_before: row.at("not_before")?,
        epoch: Epoch(row.u64("epoch")?),
        owner: row.uuid_or_null("owner")?.map(WorkerId::from_uuid),
        lease_until: row.at_or_null("lease_until")?,
        crashes: row.u32("crashes")?,
        probe_item: row.int_or_null("probe_item")?.map(|item| ItemIndex(item.unsigned_abs())),
        probe_deaths: row.u32("probe_deaths")?,
        next_seq: row.u32("next_seq")?,
        done: row.bitmap("done", num_items)?,
        failed: row.bitmap("failed", num_items)?,
        usage: row.usage()?,
    })
}
