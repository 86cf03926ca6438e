//! Leases of jobs for lifecycle steps, and what steps write.

use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{
    Error, Guarded, IntakeEnd, IntakeProgress, Job, NewShard, Published, StepKind, StepLease, Steps,
};
use overnight_types::{Ending, Epoch, EventId, FileId, JobId, JobState, OutcomeCounts, WorkerId};

use crate::error::refused;
use crate::row::{Read, after, int, key};
use crate::statement::Statement;
use crate::transaction::Write;
use crate::{SqliteStore, files, jobs, take_back};

#[async_trait]
impl Steps for SqliteStore {
    async fn claim_step(&self, worker: WorkerId, ttl: Duration) -> Result<Option<StepLease>, Error> {
        let mut write = self.write("lease a step").await?;
        let now = write.now;
        // A claimed step goes to the end of the line, so that one that kills its
        // worker again and again lets the others through.
        let row = sqlx::query(
            "update jobs set step_epoch = step_epoch + 1, step_owner = ?2, step_until = ?3, step_due_at = ?1
            where job_id = (
                select j.job_id from jobs j
                where j.step_due_at <= ?1 and (j.step_until is null or j.step_until <= ?1)
                    and (j.state <> 'validating' or j.paused_at is null)
                order by j.step_due_at limit 1)
            returning *",
        )
        .bind(now)
        .bind(key(worker.uuid()))
        .bind(after(now, ttl))
        .row_if_any(&mut write)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let job = jobs::read(&row)?;
        let kind = if job.state == JobState::Validating { StepKind::Intake } else { StepKind::Finalize };
        let lease =
            StepLease { kind, worker, epoch: Epoch(row.u64("step_epoch")?), lease_until: row.at("step_until")?, job };
        self.commit(write).await?;
        Ok(Some(lease))
    }

    async fn extend_step_if_leased(&self, lease: &StepLease, ttl: Duration) -> Result<Guarded<JobState, ()>, Error> {
        let mut write = self.write("extend a step's lease").await?;
        if let Err(now) = hold(&mut write, lease).await? {
            return Ok(Guarded::Lost { now });
        }
        let until = after(write.now, ttl);
        sqlx::query("update jobs set step_until = ?2 where job_id = ?1")
            .bind(key(lease.job.id.uuid()))
            .bind(until)
            .change(&mut write)
            .await?;
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn release_step_if_leased(&self, lease: &StepLease, delay: Duration) -> Result<Guarded<JobState, ()>, Error> {
        let mut write = self.write("release a step").await?;
        if let Err(now) = hold(&mut write, lease).await? {
            return Ok(Guarded::Lost { now });
        }
        let due = after(write.now, delay);
        sqlx::query("update jobs set step_due_at = ?2, step_owner = null, step_until = null where job_id = ?1")
            .bind(key(lease.job.id.uuid()))
            .bind(due)
            .change(&mut write)
            .await?;
        write.wakes();
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn record_intake_if_leased(
        &self,
        lease: &StepLease,
        progress: IntakeProgress,
        shards: Vec<NewShard>,
    ) -> Result<Guarded<JobState, ()>, Error> {
        let doing = "record intake";
        let mut write = self.write(doing).await?;
        let job = match hold_as(StepKind::Intake, &mut write, lease).await? {
            Ok(job) => job,
            Err(now) => return Ok(Guarded::Lost { now }),
        };
        if progress.offset < job.intake_offset {
            return Err(refused(doing, format!("intake went back from {} to {}", job.intake_offset, progress.offset)));
        }
        insert_shards(&mut write, job.id, &shards).await?;
        sqlx::query("update jobs set intake_offset = ?2, intake_notes = ?3 where job_id = ?1")
            .bind(key(job.id.uuid()))
            .bind(int(progress.offset))
            .bind(progress.notes)
            .change(&mut write)
            .await?;
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn restart_intake_if_leased(&self, lease: &StepLease) -> Result<Guarded<JobState, Job>, Error> {
        let mut write = self.write("start intake over").await?;
        let job = match hold_as(StepKind::Intake, &mut write, lease).await? {
            Ok(job) => job,
            Err(now) => return Ok(Guarded::Lost { now }),
        };
        drop_shards(&mut write, job.id).await?;
        let row = sqlx::query("update jobs set intake_offset = 0, intake_notes = null where job_id = ?1 returning *")
            .bind(key(job.id.uuid()))
            .row(&mut write)
            .await?;
        let job = jobs::read(&row)?;
        self.commit(write).await?;
        Ok(Guarded::Applied(job))
    }

    async fn finish_intake_if_leased(
        &self,
        lease: &StepLease,
        end: IntakeEnd,
    ) -> Result<Guarded<JobState, Job>, Error> {
        let mut write = self.write("end intake").await?;
        let job = match hold_as(StepKind::Intake, &mut write, lease).await? {
            Ok(job) => job,
            Err(now) => return Ok(Guarded::Lost { now }),
        };
        match end {
            IntakeEnd::Valid { model, num_items, num_shards } => {
                begin_running(&mut write, &job, &model, num_items, num_shards).await?;
            }
            IntakeEnd::Invalid { errors } => fail(&mut write, job.id, &errors).await?,
        }
        write.wakes();
        let job = jobs::find(&mut write, job.id).await?.expect("the job was held in this transaction");
        self.commit(write).await?;
        Ok(Guarded::Applied(job))
    }

    async fn fence_shards_if_leased(&self, lease: &StepLease) -> Result<Guarded<JobState, ()>, Error> {
        let mut write = self.write("fence a job's shards").await?;
        if let Err(now) = hold(&mut write, lease).await? {
            return Ok(Guarded::Lost { now });
        }
        take_back::fence(&mut write, lease.job.id).await?;
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn finish_job_if_leased(
        &self,
        lease: &StepLease,
        published: Published,
    ) -> Result<Guarded<JobState, Job>, Error> {
        let mut write = self.write("end a job").await?;
        let job = match hold_as(StepKind::Finalize, &mut write, lease).await? {
            Ok(job) => job,
            Err(now) => return Ok(Guarded::Lost { now }),
        };
        check_accounting(&mut write, &job, &published).await?;
        take_back::fence(&mut write, job.id).await?;
        record_published(&mut write, &job, &published).await?;
        let job = end(&mut write, &job, &published).await?;
        write.wakes();
        self.commit(write).await?;
        self.fold_log().await;
        Ok(Guarded::Applied(job))
    }
}

/// The job, if this lease still holds it; else its state now.
async fn hold(write: &mut Write, lease: &StepLease) -> Result<Result<Job, Option<JobState>>, Error> {
    let Some(row) = jobs::find_row(write, lease.job.id).await? else { return Ok(Err(None)) };
    let job = jobs::read(&row)?;
    let owner = row.uuid_or_null("step_owner")?.map(WorkerId::from_uuid);
    let fits = match lease.kind {
        StepKind::Intake => job.state == JobState::Validating,
        StepKind::Finalize => matches!(job.state, JobState::Finalizing | JobState::Cancelling),
    };
    let held = fits && owner == Some(lease.worker) && row.u64("step_epoch")? == lease.epoch.0;
    Ok(if held { Ok(job) } else { Err(Some(job.state)) })
}

/// The same for a call that only this kind of step makes.
async fn hold_as(kind: StepKind, write: &mut Write, lease: &StepLease) -> Result<Result<Job, Option<JobState>>, Error> {
    Ok(hold(write, lease).await?.and_then(|job| if lease.kind == kind { Ok(job) } else { Err(Some(job.state)) }))
}

async fn insert_shards(write: &mut Write, job: JobId, shards: &[NewShard]) -> Result<(), Error> {
    let now = write.now;
    for part in shards.chunks(1_000) {
        let rows: Vec<_> = part
            .iter()
            .map(|cut| {
                let NewShard { shard, first_item, num_items, first_line, byte_offset, byte_len, lines_hash } = cut;
                // As hex, because the upper half of its range is no integer to SQLite.
                let lines_hash = lines_hash.map(|hash| format!("{hash:016x}"));
                serde_json::json!([shard.0, first_item.0, num_items, first_line, byte_offset, byte_len, lines_hash])
            })
            .collect();
        sqlx::query(
            "insert into shards (job_id, shard_index, first_item, num_items, first_line, byte_offset, byte_len,
                lines_hash, not_before, done)
            select ?1, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
                unhex(value ->> 6), ?2, zeroblob(((value ->> 2) + 7) / 8)
            from json_each(?3)",
        )
        .bind(key(job.uuid()))
        .bind(now)
        .bind(serde_json::Value::from(rows).to_string())
        .change(write)
        .await?;
    }
    Ok(())
}

/// The input is sound: the job runs, or ends at once when its window has closed
/// or nothing is in it.
async fn begin_running(
    write: &mut Write,
    job: &Job,
    model: &str,
    num_items: u64,
    num_shards: u32,
) -> Result<(), Error> {
    let (doing, now) = (write.doing(), write.now);
    let row = sqlx::query(
        "select count(*) as num_shards, coalesce(sum(num_items), 0) as num_items,
            coalesce(max(first_item + num_items), 0) as end_item from shards where job_id = ?1",
    )
    .bind(key(job.id.uuid()))
    .row(write)
    .await?;
    let cut = (row.u64("num_shards")?, row.u64("num_items")?, row.u64("end_item")?);
    if cut != (u64::from(num_shards), num_items, num_items) {
        return Err(refused(doing, format!("{num_items} items in {num_shards} shards, but recorded are {cut:?}")));
    }
    sqlx::query(
        "update jobs set state = 'in_progress', model = ?2, num_items = ?3, num_shards = ?4, in_progress_at = ?5,
            step_due_at = null, step_owner = null, step_until = null
        where job_id = ?1",
    )
    .bind(key(job.id.uuid()))
    .bind(model)
    .bind(int(num_items))
    .bind(num_shards)
    .bind(now)
    .change(write)
    .await?;
    write.record_event(job.id, "in_progress", "").await?;
    if num_items == 0 {
        jobs::enter_finalizing(write, job.id, Ending::Completed).await?;
    } else if job.expires_at.micros() <= now {
        jobs::enter_finalizing(write, job.id, Ending::Expired).await?;
    }
    Ok(())
}

/// The input is faulty: nothing ran, nothing of it stays but the errors.
async fn fail(write: &mut Write, job: JobId, errors: &str) -> Result<(), Error> {
    let now = write.now;
    drop_shards(write, job).await?;
    sqlx::query(
        "update jobs set state = 'failed', failed_at = ?2, errors = ?3, intake_notes = null, paused_at = null,
            step_due_at = null, step_owner = null, step_until = null
        where job_id = ?1",
    )
    .bind(key(job.uuid()))
    .bind(now)
    .bind(errors)
    .change(write)
    .await?;
    write.record_event(job, "failed", "").await?;
    tell(write, job, JobState::Failed).await
}

/// Drops what intake has cut; nothing has run of it.
async fn drop_shards(write: &mut Write, job: JobId) -> Result<(), Error> {
    sqlx::query("delete from shards where job_id = ?1").bind(key(job.uuid())).change(write).await?;
    Ok(())
}

/// Refuses counts that are not those of the shards: an outcome would be lost or told twice.
async fn check_accounting(write: &mut Write, job: &Job, published: &Published) -> Result<(), Error> {
    let doing = "end a job";
    let row = sqlx::query(
        "select coalesce(sum(num_done), 0) as num_done, coalesce(sum(num_failed), 0) as num_failed,
            coalesce(sum(num_cancelled), 0) as num_cancelled, coalesce(sum(num_expired), 0) as num_expired
        from shards where job_id = ?1",
    )
    .bind(key(job.id.uuid()))
    .row(write)
    .await?;
    let (done, failed_bits) = (row.u64("num_done")?, row.u64("num_failed")?);
    let (cancelled, expired) = (row.u64("num_cancelled")?, row.u64("num_expired")?);
    let undone = job.num_items.saturating_sub(done);
    let ending = job.ending.ok_or_else(|| refused(doing, "its ending was never drawn"))?;
    let wanted = OutcomeCounts {
        total: job.num_items,
        completed: done - failed_bits,
        failed: failed_bits - cancelled - expired,
        cancelled: cancelled + if ending == Ending::Cancelled { undone } else { 0 },
        expired: expired + if ending == Ending::Expired { undone } else { 0 },
    };
    if published.counts != wanted {
        return Err(refused(doing, format!("its files hold {:?}, its shards {wanted:?}", published.counts)));
    }
    Ok(())
}

/// Records the published files under the ids that were drawn for them.
async fn record_published(write: &mut Write, job: &Job, published: &Published) -> Result<(), Error> {
    for (file, drawn) in [(&published.output, job.output_file_id), (&published.error, job.error_file_id)] {
        let Some(file) = file else { continue };
        if Some(file.id) != drawn {
            return Err(refused("end a job", format!("file {} is not the one that was drawn", file.id)));
        }
        files::insert(write, file).await?;
        set_publisher(write, file.id, job.id).await?;
        if let Some(keep) = job.output_expires_after {
            let until = after(write.now, keep);
            set_file_expiry(write, file.id, until).await?;
        }
    }
    Ok(())
}

/// Tells retention whose file it is, in whatever round the job will be then.
async fn set_publisher(write: &mut Write, file: FileId, job: JobId) -> Result<(), Error> {
    sqlx::query("update files set job_id = ?2 where file_id = ?1")
        .bind(key(file.uuid()))
        .bind(key(job.uuid()))
        .change(write)
        .await?;
    Ok(())
}

async fn set_file_expiry(write: &mut Write, file: FileId, until: i64) -> Result<(), Error> {
    sqlx::query("update files set expires_at = ?2 where file_id = ?1")
        .bind(key(file.uuid()))
        .bind(until)
        .change(write)
        .await?;
    Ok(())
}

/// The terminal state, its moment, the final counts; faults go.
async fn end(write: &mut Write, job: &Job, published: &Published) -> Result<Job, Error> {
    let now = write.now;
    let state = job.ending.map_or(job.state, Ending::state);
    let Published { counts, usage, .. } = published;
    let row = sqlx::query(
        "update jobs set state = ?2,
            completed_at = iif(?2 = 'completed', ?3, null), expired_at = iif(?2 = 'expired', ?3, null),
            cancelled_at = iif(?2 = 'cancelled', ?3, null),
            final_completed = ?4, final_failed = ?5, final_cancelled = ?6, final_expired = ?7,
            final_input_tokens = ?8, final_cached_tokens = ?9, final_output_tokens = ?10,
            final_reasoning_tokens = ?11, step_due_at = null, step_owner = null, step_until = null
        where job_id = ?1 returning *",
    )
    .bind(key(job.id.uuid()))
    .bind(state.as_str())
    .bind(now)
    .bind(int(counts.completed))
    .bind(int(counts.failed))
    .bind(int(counts.cancelled))
    .bind(int(counts.expired))
    .bind(int(usage.input_tokens))
    .bind(int(usage.cached_tokens))
    .bind(int(usage.output_tokens))
    .bind(int(usage.reasoning_tokens))
    .row(write)
    .await?;
    sqlx::query("delete from item_faults where job_id = ?1").bind(key(job.id.uuid())).change(write).await?;
    write.record_event(job.id, state.as_str(), "").await?;
    tell(write, job.id, state).await?;
    jobs::read(&row)
}

/// Puts the end of a job into the outbox.
async fn tell(write: &mut Write, job: JobId, state: JobState) -> Result<(), Error> {
    let now = write.now;
    sqlx::query("insert into outbox (event_id, job_id, kind, created_at, due_at) values (?1, ?2, ?3, ?4, ?4)")
        .bind(key(EventId::new().uuid()))
        .bind(key(job.uuid()))
        .bind(format!("batch.{state}"))
        .bind(now)
        .change(write)
        .await?;
    Ok(())
}
