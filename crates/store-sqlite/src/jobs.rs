//! Rows of jobs, and the moves that doors make.

use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{
    CancelMode, Error, Guarded, IdempotencyKey, InsertJob, Job, JobQuery, Jobs, JobsAhead, NewJob, Page, Progress,
    Purged, Reopen, Reopened,
};
use overnight_types::{Ending, FileId, JobId, JobState, Timestamp};
use sqlx::sqlite::SqliteRow;

use crate::error::failed;
use crate::files::{PAGE_MAX, page};
pub(crate) use crate::job_row::read;
use crate::job_row::read_progress;
use crate::row::{Read, after, hex_list, key};
use crate::statement::Statement;
use crate::take_back;
use crate::transaction::Write;
use crate::{SqliteStore, job_insert, workers};

#[async_trait]
impl Jobs for SqliteStore {
    async fn insert_job(&self, job: NewJob, key: Option<IdempotencyKey>) -> Result<InsertJob, Error> {
        let mut write = self.write("record a job").await?;
        if let Some(key) = &key
            && let Some(answer) = job_insert::find_by_key(&mut write, key).await?
        {
            return Ok(answer);
        }
        let Some(job) = job_insert::insert(&mut write, &job).await? else { return Ok(InsertJob::NoInput) };
        if let Some(key) = &key {
            job_insert::insert_key(&mut write, key, job.id).await?;
        }
        write.record_event(job.id, "created", "").await?;
        write.wakes();
        self.commit(write).await?;
        Ok(InsertJob::Created(job))
    }

    async fn find_job(&self, id: JobId) -> Result<Option<Job>, Error> {
        sqlx::query("select * from jobs where job_id = ?1 and deleted_at is null")
            .bind(key(id.uuid()))
            .find(&self.readers, "find a job", read)
            .await
    }

    async fn list_jobs(&self, query: JobQuery) -> Result<Page<Job>, Error> {
        let doing = "list jobs";
        let after: Option<i64> = match query.after {
            None => None,
            Some(id) => sqlx::query_scalar("select created_at from jobs where job_id = ?1 and deleted_at is null")
                .bind(key(id.uuid()))
                .fetch_optional(&self.readers)
                .await
                .map_err(failed(doing))?
                .map(Some)
                .ok_or_else(|| missing(id))?,
        };
        let limit = query.limit.clamp(1, PAGE_MAX);
        let states: Vec<_> = query.states.iter().map(JobState::as_str).collect();
        let rows = sqlx::query(
            "select * from jobs
            where deleted_at is null
                and (?1 is null or (created_at, job_id) < (?1, ?2))
                and (?3 is null or state in (select value from json_each(?3)))
                and (?4 is null or model = ?4)
                and (?5 is null or created_at >= ?5)
            order by created_at desc, job_id desc limit ?6",
        )
        .bind(after)
        .bind(query.after.map(|id| key(id.uuid())))
        .bind((!states.is_empty()).then(|| serde_json::json!(states).to_string()))
        .bind(query.model)
        .bind(query.since.map(|since| since.micros()))
        .bind(i64::from(limit) + 1)
        .rows_of(&self.readers, doing)
        .await?;
        page(rows, limit, read)
    }

    async fn find_progress(&self, id: JobId) -> Result<Progress, Error> {
        let found = self.find_progress_of(&[id], JobsAhead::Count).await?;
        found.into_iter().next().map(|(_, progress)| progress).ok_or_else(|| missing(id))
    }

    async fn pause_job_if_active(&self, id: JobId) -> Result<Guarded<JobState, Job>, Error> {
        let mut write = self.write("pause a job").await?;
        let Some(job) = find(&mut write, id).await? else { return Ok(Guarded::Lost { now: None }) };
        if !matches!(job.state, JobState::Validating | JobState::InProgress) {
            return Ok(Guarded::Lost { now: Some(job.state) });
        }
        if job.paused_at.is_some() {
            return Ok(Guarded::Applied(job));
        }
        let job = set_paused(&mut write, id, true).await?;
        write.record_event(id, "paused", "").await?;
        self.commit(write).await?;
        Ok(Guarded::Applied(job))
    }

    async fn unpause_job_if_active(&self, id: JobId) -> Result<Guarded<JobState, Job>, Error> {
        let mut write = self.write("go on with a job").await?;
        let Some(job) = find(&mut write, id).await? else { return Ok(Guarded::Lost { now: None }) };
        if job.state.is_terminal() {
            return Ok(Guarded::Lost { now: Some(job.state) });
        }
        if job.paused_at.is_none() {
            return Ok(Guarded::Applied(job));
        }
        let job = set_paused(&mut write, id, false).await?;
        write.record_event(id, "unpaused", "").await?;
        write.wakes();
        self.commit(write).await?;
        Ok(Guarded::Applied(job))
    }

    async fn cancel_job_if_active(
        &self,
        id: JobId,
        mode: CancelMode,
        drain: Duration,
    ) -> Result<Guarded<JobState, Job>, Error> {
        let mut write = self.write("cancel a job").await?;
        let Some(job) = find(&mut write, id).await? else { return Ok(Guarded::Lost { now: None }) };
        let cancelled = match job.state {
            JobState::Validating | JobState::InProgress => enter_cancelling(&mut write, &job, mode, drain).await?,
            JobState::Cancelling if mode == CancelMode::Now && job.cancel_mode == CancelMode::Drain => {
                sharpen_cancel(&mut write, id).await?
            }
            JobState::Cancelling | JobState::Cancelled => return Ok(Guarded::Applied(job)),
            _ => return Ok(Guarded::Lost { now: Some(job.state) }),
        };
        write.wakes();
        self.commit(write).await?;
        Ok(Guarded::Applied(cancelled))
    }

    async fn reopen_job_if_ended(&self, id: JobId, reopen: Reopen) -> Result<Guarded<JobState, Reopened>, Error> {
        self.reopen(id, reopen).await
    }

    async fn release_lost_leases(&self, id: JobId) -> Result<u32, Error> {
        let mut write = self.write("release lost leases").await?;
        let rows = sqlx::query(
            "select s.job_id, s.shard_index from shards s indexed by shards_leased
            where s.job_id = ?1 and s.state = 'leased'
                and not exists (select 1 from workers w where w.worker_id = s.owner and w.seen_at >= ?2)",
        )
        .bind(key(id.uuid()))
        .bind(write.now - workers::LIVE_US)
        .rows(&mut write)
        .await?;
        self.commit_lost(write, &rows).await
    }

    async fn expire_due_jobs(&self, limit: u32) -> Result<Vec<JobId>, Error> {
        let mut write = self.write("expire jobs").await?;
        let rows = sqlx::query(
            "select job_id from jobs where state = 'in_progress' and expires_at <= ?1 order by expires_at limit ?2",
        )
        .bind(write.now)
        .bind(limit)
        .rows(&mut write)
        .await?;
        let expired: Vec<JobId> = rows.iter().map(SqliteRow::job_id).collect::<Result<_, _>>()?;
        if expired.is_empty() {
            return Ok(expired);
        }
        for &job in &expired {
            take_back::fence(&mut write, job).await?;
            // The last shard may have ended between its commit and this moment only
            // through a commit that moved the job on, so something is undone here.
            enter_finalizing(&mut write, job, Ending::Expired).await?;
        }
        self.commit(write).await?;
        Ok(expired)
    }

    async fn known_jobs(&self, ids: &[JobId]) -> Result<Vec<JobId>, Error> {
        sqlx::query("select job_id from jobs where job_id in (select unhex(value) from json_each(?1))")
            .bind(hex_list(ids.iter().map(JobId::uuid)))
            .list(&self.readers, "tell known jobs", SqliteRow::job_id)
            .await
    }

    async fn delete_job_if_terminal(&self, id: JobId) -> Result<Guarded<JobState, ()>, Error> {
        let mut write = self.write("delete a job").await?;
        let Some(job) = find(&mut write, id).await? else { return Ok(Guarded::Lost { now: None }) };
        if !job.state.is_terminal() {
            return Ok(Guarded::Lost { now: Some(job.state) });
        }
        sqlx::query("update jobs set deleted_at = ?2 where job_id = ?1")
            .bind(key(id.uuid()))
            .bind(write.now)
            .change(&mut write)
            .await?;
        write.record_event(id, "deleted", "").await?;
        self.commit(write).await?;
        Ok(Guarded::Applied(()))
    }

    async fn delete_jobs_ended_for(&self, kept: Duration, limit: u32) -> Result<u32, Error> {
        self.hide_ended(kept, limit).await
    }

    async fn purge_deleted_jobs(&self, limit: u32) -> Result<Purged, Error> {
        self.purge(limit).await
    }

    async fn find_progress_of(&self, ids: &[JobId], ahead: JobsAhead) -> Result<Vec<(JobId, Progress)>, Error> {
        let doing = "sum up progress";
        let now = self.read_now(doing).await?;
        sqlx::query(
            "with places as materialized (
                -- As claim_shard goes: the same order, and past jobs with nothing to lease. Once for
                -- all of the ids: a count for each would be quadratic in the runnable jobs.
                select r.job_id, coalesce(sum(exists (
                        select 1 from shards s indexed by shards_ready
                        where s.job_id = r.job_id and s.state = 'ready' and s.not_before <= ?2
                    )) over (
                        partition by r.model
                        order by r.priority, r.expires_at, r.created_at, r.job_id
                        rows between unbounded preceding and 1 preceding
                    ), 0) as jobs_ahead
                from jobs r indexed by jobs_runnable
                where ?3 and r.state = 'in_progress' and r.paused_at is null and r.expires_at > ?2
                    and r.model in (select m.model from jobs m
                        where m.job_id in (select unhex(value) from json_each(?1)))
            )
            select j.job_id, j.num_items, j.retries_used, j.final_completed, j.final_failed, j.final_cancelled,
                j.final_expired, j.final_input_tokens, j.final_cached_tokens, j.final_output_tokens,
                j.final_reasoning_tokens,
                (select count(*) from item_faults f where f.job_id = j.job_id and f.not_before > ?2) as num_waiting,
                p.jobs_ahead,
                coalesce(sum(s.num_done), 0) as num_done, coalesce(sum(s.num_failed), 0) as num_failed,
                coalesce(sum(s.num_cancelled), 0) as num_cancelled, coalesce(sum(s.num_expired), 0) as num_expired,
                coalesce(sum(s.input_tokens), 0) as input_tokens, coalesce(sum(s.cached_tokens), 0) as cached_tokens,
                coalesce(sum(s.output_tokens), 0) as output_tokens,
                coalesce(sum(s.reasoning_tokens), 0) as reasoning_tokens,
                coalesce(sum(s.state = 'ready'), 0) as shards_ready,
                coalesce(sum(s.state = 'leased'), 0) as shards_leased,
                coalesce(sum(s.state = 'done'), 0) as shards_done
            from jobs j left join places p on p.job_id = j.job_id
                left join shards s on s.job_id = j.job_id and j.in_progress_at is not null
            where j.job_id in (select unhex(value) from json_each(?1)) and j.deleted_at is null
            group by j.job_id",
        )
        .bind(hex_list(ids.iter().map(JobId::uuid)))
        .bind(now)
        .bind(ahead == JobsAhead::Count)
        .list(&self.readers, doing, |row| Ok((row.job_id()?, read_progress(row)?)))
        .await
    }
}

fn missing(id: JobId) -> Error {
    Error::Missing { what: "job", id: id.to_string() }
}

async fn set_paused(write: &mut Write, id: JobId, paused: bool) -> Result<Job, Error> {
    let now = write.now;
    let row = sqlx::query("update jobs set paused_at = ?2 where job_id = ?1 returning *")
        .bind(key(id.uuid()))
        .bind(paused.then_some(now))
        .row(write)
        .await?;
    read(&row)
}

async fn enter_cancelling(write: &mut Write, job: &Job, mode: CancelMode, drain: Duration) -> Result<Job, Error> {
    let now = write.now;
    // The step lease goes too, so that a running intake can record nothing more.
    let row = sqlx::query(
        "update jobs set state = 'cancelling', ending = 'cancelled', cancel_mode = ?2, cancelling_at = ?3,
            paused_at = null, output_file_id = ?4, error_file_id = ?5, step_owner = null, step_until = null,
            step_due_at = iif(?2 = 'drain' and exists (
                select 1 from shards s indexed by shards_leased
                where s.job_id = jobs.job_id and s.state = 'leased'), ?6, ?3)
        where job_id = ?1 returning *",
    )
    .bind(key(job.id.uuid()))
    .bind(mode.as_str())
    .bind(now)
    .bind(key(FileId::new().uuid()))
    .bind(key(FileId::new().uuid()))
    .bind(after(now, drain))
    .row(write)
    .await?;
    write.record_event(job.id, "cancelling", "").await?;
    read(&row)
}

async fn sharpen_cancel(write: &mut Write, id: JobId) -> Result<Job, Error> {
    let now = write.now;
    let row = sqlx::query(
        "update jobs set cancel_mode = 'now', step_due_at = min(step_due_at, ?2) where job_id = ?1 returning *",
    )
    .bind(key(id.uuid()))
    .bind(now)
    .row(write)
    .await?;
    write.record_event(id, "cancelling", "now").await?;
    read(&row)
}

/// Takes an `in_progress` job to `finalizing`: draws the ending and the file ids,
/// makes finalize due. The caller holds the guard.
pub(crate) async fn enter_finalizing(write: &mut Write, id: JobId, ending: Ending) -> Result<(), Error> {
    let now = write.now;
    sqlx::query(
        "update jobs set state = 'finalizing', ending = ?2, finalizing_at = ?3, paused_at = null,
            output_file_id = ?4, error_file_id = ?5, step_due_at = ?3, step_owner = null, step_until = null
        where job_id = ?1",
    )
    .bind(key(id.uuid()))
    .bind(ending.state().as_str())
    .bind(now)
    .bind(key(FileId::new().uuid()))
    .bind(key(FileId::new().uuid()))
    .change(write)
    .await?;
    write.record_event(id, "finalizing", ending.state().as_str()).await?;
    write.wakes();
    Ok(())
}

/// Whether no shard of the job is ready or leased.
pub(crate) async fn is_all_done(write: &mut Write, id: JobId) -> Result<bool, Error> {
    let doing = write.doing();
    sqlx::query_scalar(
        // Named indexes: by its key, every done shard of the job would be walked.
        "select not exists (select 1 from shards indexed by shards_ready where job_id = ?1 and state = 'ready')
            and not exists (select 1 from shards indexed by shards_leased where job_id = ?1 and state = 'leased')",
    )
    .bind(key(id.uuid()))
    .fetch_one(&mut **write)
    .await
    .map_err(failed(doing))
}

/// The row of a job that is not deleted.
pub(crate) async fn find_row(write: &mut Write, id: JobId) -> Result<Option<SqliteRow>, Error> {
    sqlx::query("select * from jobs where job_id = ?1 and deleted_at is null")
        .bind(key(id.uuid()))
        .row_if_any(write)
        .await
}

pub(crate) async fn find(write: &mut Write, id: JobId) -> Result<Option<Job>, Error> {
    find_row(write, id).await?.as_ref().map(read).transpose()
}

/// The end of a window that starts now.
pub(crate) fn window_end(write: &Write, window: Duration) -> Timestamp {
    write.moment().plus(window)
}
