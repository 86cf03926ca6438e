//! Leases of shards: claim, renew, release, take back; and reads of shards.

use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{
    AttemptEnd, ClaimShard, Committed, Error, Fault, Guarded, JobSignal, NewFault, NewSegment, NewShard, Shard,
    ShardKey, ShardLease, Shards,
};
use overnight_types::{Epoch, ItemIndex, JobId, ShardIndex, ShardState, WorkerId};
use sqlx::sqlite::SqliteRow;

use crate::error::{damaged, failed, refused};
use crate::row::{Read, after, hex_list, int, key};
use crate::statement::Statement;
use crate::take_back::{self, ShardList};
use crate::transaction::Write;
use crate::{SqliteStore, attempts, faults, jobs};

#[async_trait]
impl Shards for SqliteStore {
    async fn claim_shard(&self, claim: &ClaimShard) -> Result<Option<ShardLease>, Error> {
        let mut write = self.write("lease a shard").await?;
        let Some((job, shard)) = choose(&mut write, claim).await? else { return Ok(None) };
        let shard = lease(&mut write, claim, job, shard).await?;
        attempts::begin(&mut write, job, shard.cut.shard, shard.epoch, claim.worker).await?;
        let row = jobs::find_row(&mut write, job).await?;
        let row = row.ok_or_else(|| damaged("shards.job_id", job))?;
        let end = ItemIndex(shard.cut.first_item.0 + u64::from(shard.cut.num_items));
        let faults = faults::list(&mut write, job, shard.cut.first_item, end, shard.cut.num_items).await?;
        let lease = ShardLease { job: jobs::read(&row)?, shard, faults, retries_used: row.u64("retries_used")? };
        self.commit(write).await?;
        Ok(Some(lease))
    }

    async fn extend_shards(&self, worker: WorkerId, keys: &[ShardKey], ttl: Duration) -> Result<Vec<ShardKey>, Error> {
        let names: Vec<_> = keys
            .iter()
            .map(|key| serde_json::json!([key.job.uuid().simple().to_string(), key.shard.0, key.epoch.0]))
            .collect();
        let mut write = self.write("extend leases").await?;
        let rows = sqlx::query(
            "update shards set lease_until = ?3
            where state = 'leased' and owner = ?2 and (job_id, shard_index, epoch) in
                (select unhex(value ->> 0), value ->> 1, value ->> 2 from json_each(?1))
            returning job_id, shard_index, epoch",
        )
        .bind(serde_json::Value::from(names).to_string())
        .bind(key(worker.uuid()))
        .bind(after(write.now, ttl))
        .rows(&mut write)
        .await?;
        self.commit(write).await?;
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
        let mut write = self.write(doing).await?;
        let released = sqlx::query(
            "update shards set state = 'ready', owner = null, lease_until = null, not_before = ?4,
                crashes = crashes + (?5 and not exists (select 1 from segments g
                    where g.job_id = shards.job_id and g.shard_index = shards.shard_index
                        and g.seq = shards.next_seq - 1 and g.epoch = shards.epoch)),
                probe_deaths = probe_deaths + (?5 and coalesce(probe_epoch = epoch, 0))
            where job_id = ?1 and shard_index = ?2 and epoch = ?3 and state = 'leased'",
        )
        .bind(key(shard.job.uuid()))
        .bind(shard.shard.0)
        .bind(int(shard.epoch.0))
        .bind(after(write.now, delay))
        .bind(why == AttemptEnd::Lost)
        .change(&mut write)
        .await?;
        if released == 0 {
            return state_now(&mut write, shard).await;
        }
        attempts::end(&mut write, shard.job, shard.shard, shard.epoch, why).await?;
        take_back::finalize_if_drained(&mut write, shard.job, shard.shard).await?;
        write.wakes();
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn set_probe_if_leased(
        &self,
        shard: ShardKey,
        item: Option<ItemIndex>,
    ) -> Result<Guarded<ShardState, ()>, Error> {
        let mut write = self.write("name the item that runs alone").await?;
        let set = sqlx::query(
            "update shards set probe_item = ?4, probe_epoch = iif(?4 is null, null, epoch),
                probe_deaths = iif(probe_item is ?4, probe_deaths, 0)
            where job_id = ?1 and shard_index = ?2 and epoch = ?3 and state = 'leased'",
        )
        .bind(key(shard.job.uuid()))
        .bind(shard.shard.0)
        .bind(int(shard.epoch.0))
        .bind(item.map(|item| int(item.0)))
        .change(&mut write)
        .await?;
        if set == 0 {
            return state_now(&mut write, shard).await;
        }
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn release_leases_of_dead(&self, workers: &[WorkerId]) -> Result<u32, Error> {
        let dead = hex_list(workers.iter().map(WorkerId::uuid));
        let mut write = self.write("release leases of dead workers").await?;
        let rows = sqlx::query(
            "select job_id, shard_index from shards indexed by shards_leased
            where state = 'leased' and owner in (select unhex(value) from json_each(?1))",
        )
        .bind(&dead)
        .rows(&mut write)
        .await?;
        let shards = ShardList::from_rows(&rows)?;
        take_back::lost(&mut write, &shards).await?;
        let steps = sqlx::query(
            "update jobs set step_owner = null, step_until = null
            where step_due_at is not null and step_owner in (select unhex(value) from json_each(?1))",
        )
        .bind(&dead)
        .change(&mut write)
        .await?;
        write.wakes();
        self.commit(write).await?;
        Ok(shards.len() + u32::try_from(steps).unwrap_or(u32::MAX))
    }

    async fn release_expired_leases(&self, limit: u32) -> Result<u32, Error> {
        let mut write = self.write("release expired leases").await?;
        let rows = sqlx::query(
            "select job_id, shard_index from shards where state = 'leased' and lease_until <= ?1
            order by lease_until limit ?2",
        )
        .bind(write.now)
        .bind(limit)
        .rows(&mut write)
        .await?;
        self.commit_lost(write, &rows).await
    }

    async fn find_job_signals(&self, jobs: &[JobId]) -> Result<Vec<JobSignal>, Error> {
        sqlx::query(
            "select job_id, state, paused_at, cancel_mode, round from jobs
            where job_id in (select unhex(value) from json_each(?1)) and deleted_at is null",
        )
        .bind(hex_list(jobs.iter().map(JobId::uuid)))
        .list(&self.readers, "read job signals", |row| {
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
        sqlx::query("select * from shards where job_id = ?1 and shard_index = ?2")
            .bind(key(job.uuid()))
            .bind(shard.0)
            .find(&self.readers, "find a shard", read)
            .await
    }

    async fn find_shard_of_item(&self, job: JobId, item: ItemIndex) -> Result<Option<Shard>, Error> {
        let shard =
            sqlx::query("select * from shards where job_id = ?1 and first_item <= ?2 order by first_item desc limit 1")
                .bind(key(job.uuid()))
                .bind(int(item.0))
                .find(&self.readers, "find the shard of an item", read)
                .await?;
        Ok(shard.filter(|shard| item.0 < shard.cut.first_item.0 + u64::from(shard.cut.num_items)))
    }

    async fn list_shards(&self, job: JobId, from: ShardIndex, limit: u32) -> Result<Vec<Shard>, Error> {
        sqlx::query("select * from shards where job_id = ?1 and shard_index >= ?2 order by shard_index limit ?3")
            .bind(key(job.uuid()))
            .bind(from.0)
            .bind(limit)
            .list(&self.readers, "list shards", read)
            .await
    }

    async fn list_faults(&self, job: JobId, from: ItemIndex, to: ItemIndex, limit: u32) -> Result<Vec<Fault>, Error> {
        let mut connection = self.readers.acquire().await.map_err(failed("list faults"))?;
        faults::list(&mut connection, job, from, to, limit).await
    }
}

/// Walks runnable jobs in an order until the first with a shard to lease; a job
/// whose shards are all held or waiting stands in nobody's way. The indexes are
/// named because the planner, without statistics, would walk every shard of a job
/// by its key at each claim.
macro_rules! runnable {
    ($order:literal) => {
        concat!(
            "select j.job_id, min(
                coalesce((select s.shard_index from shards s indexed by shards_ready
                    where s.job_id = j.job_id and s.state = 'ready'
                    and s.not_before <= ?1 order by s.shard_index limit 1), 9e18),
                coalesce((select min(s.shard_index) from shards s indexed by shards_leased
                    where s.job_id = j.job_id and s.state = 'leased'
                    and s.lease_until <= ?1), 9e18)) as shard
            from jobs j indexed by jobs_runnable
            where j.state = 'in_progress' and j.paused_at is null and j.expires_at > ?1
                and (?2 is null or j.model in (select value from json_each(?2)))
                and (exists (select 1 from shards s indexed by shards_ready where s.job_id = j.job_id and s.state = 'ready'
                        and s.not_before <= ?1)
                    or exists (select 1 from shards s indexed by shards_leased where s.job_id = j.job_id and s.state = 'leased'
                        and s.lease_until <= ?1))
            order by ",
            $order,
            " limit 1"
        )
    };
}

/// The job to serve now and its first shard that may be leased.
async fn choose(write: &mut Write, claim: &ClaimShard) -> Result<Option<(JobId, ShardIndex)>, Error> {
    let now = write.now;
    let statement = if claim.oldest {
        runnable!("j.created_at, j.job_id")
    } else {
        runnable!("j.priority, j.expires_at, j.created_at, j.job_id")
    };
    let row = sqlx::query(statement)
        .bind(now)
        .bind(claim.models.as_ref().map(|models| serde_json::json!(models).to_string()))
        .row_if_any(write)
        .await?;
    row.map(|row| Ok((row.job_id()?, ShardIndex(row.u32("shard")?)))).transpose()
}

/// Takes the shard under a new epoch; a lease that ran out is taken back first.
async fn lease(write: &mut Write, claim: &ClaimShard, job: JobId, shard: ShardIndex) -> Result<Shard, Error> {
    let now = write.now;
    let expired = sqlx::query(
        "select job_id, shard_index from shards where job_id = ?1 and shard_index = ?2 and state = 'leased'",
    )
    .bind(key(job.uuid()))
    .bind(shard.0)
    .rows(write)
    .await?;
    take_back::lost(write, &ShardList::from_rows(&expired)?).await?;
    let row = sqlx::query(
        "update shards set state = 'leased', epoch = epoch + 1, owner = ?3, lease_until = ?4
        where job_id = ?1 and shard_index = ?2 and state = 'ready' returning *",
    )
    .bind(key(job.uuid()))
    .bind(shard.0)
    .bind(key(claim.worker.uuid()))
    .bind(after(now, claim.ttl))
    .row(write)
    .await?;
    read(&row)
}

/// The answer of a lost guard.
async fn state_now(write: &mut Write, shard: ShardKey) -> Result<Guarded<ShardState, ()>, Error> {
    let row = sqlx::query("select state from shards where job_id = ?1 and shard_index = ?2")
        .bind(key(shard.job.uuid()))
        .bind(shard.shard.0)
        .row_if_any(write)
        .await?;
    Ok(Guarded::Lost { now: row.map(|row| row.word("state")).transpose()? })
}

pub(crate) fn read(row: &SqliteRow) -> Result<Shard, Error> {
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
