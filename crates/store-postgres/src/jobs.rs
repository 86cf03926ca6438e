//! Rows of jobs, and the moves that doors make.

use std::time::Duration;

use async_trait::async_trait;
use overnight_store::{
    CancelMode, Error, Guarded, IdempotencyKey, InsertJob, Job, JobQuery, Jobs, JobsAhead, NewJob, Page, Progress,
    Purged, Reopen, Reopened,
};
use overnight_types::{Ending, FileId, JobId, JobState, Timestamp};
use sqlx::postgres::PgRow;

use crate::error::settling_conflicts;
use crate::files::{PAGE_MAX, page};
use crate::job_row::job_columns;
pub(crate) use crate::job_row::read;
use crate::row::{Read, after, text, uuids};
use crate::statement::Statement;
use crate::take_back::{self, lost};
use crate::transaction::Write;
use crate::{PostgresStore, job_insert, workers};

#[async_trait]
impl Jobs for PostgresStore {
    async fn insert_job(&self, job: NewJob, key: Option<IdempotencyKey>) -> Result<InsertJob, Error> {
        settling_conflicts!(async {
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
        })
    }

    async fn find_job(&self, id: JobId) -> Result<Option<Job>, Error> {
        sqlx::query(concat!("select ", job_columns!(""), " from jobs where job_id = $1 and deleted_at is null"))
            .bind(id.uuid())
            .find(self, "find a job", read)
            .await
    }

    async fn list_jobs(&self, query: JobQuery) -> Result<Page<Job>, Error> {
        let doing = "list jobs";
        let after: Option<i64> = match query.after {
            None => None,
            Some(id) => sqlx::query("select created_at from jobs where job_id = $1 and deleted_at is null")
                .bind(id.uuid())
                .find(self, doing, |row| row.int("created_at"))
                .await?
                .map(Some)
                .ok_or_else(|| missing(id))?,
        };
        let limit = query.limit.clamp(1, PAGE_MAX);
        let states: Vec<_> = query.states.iter().map(JobState::as_str).collect();
        let rows = sqlx::query(concat!(
            "select ",
            job_columns!(""),
            " from jobs
            where deleted_at is null
                and ($1::bigint is null or (created_at, job_id) < ($1, $2::uuid))
                and ($3::text[] is null or state = any($3))
                and ($4::text is null or model = $4)
                and ($5::bigint is null or created_at >= $5)
            order by created_at desc, job_id desc limit $6"
        ))
        .bind(after)
        .bind(query.after.map(|id| id.uuid()))
        .bind((!states.is_empty()).then_some(states))
        .bind(query.model.as_deref().map(text))
        .bind(query.since.map(|since| since.micros()))
        .bind(i64::from(limit) + 1)
        .rows_of(self, doing)
        .await?;
        page(rows, limit, read)
    }

    async fn find_progress(&self, id: JobId) -> Result<Progress, Error> {
        let found = self.find_progress_of(&[id], JobsAhead::Count).await?;
        found.into_iter().next().map(|(_, progress)| progress).ok_or_else(|| missing(id))
    }

    async fn pause_job_if_active(&self, id: JobId) -> Result<Guarded<JobState, Job>, Error> {
        let mut write = self.write("pause a job").await?;
        let Some(job) = lock(&mut write, id).await? else { return write.lose(None).await };
        if !matches!(job.state, JobState::Validating | JobState::InProgress) {
            return write.lose(Some(job.state)).await;
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
        let Some(job) = lock(&mut write, id).await? else { return write.lose(None).await };
        if job.state.is_terminal() {
            return write.lose(Some(job.state)).await;
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
        let Some(job) = lock(&mut write, id).await? else { return write.lose(None).await };
        let cancelled = match job.state {
            JobState::Validating | JobState::InProgress => enter_cancelling(&mut write, &job, mode, drain).await?,
            JobState::Cancelling if mode == CancelMode::Now && job.cancel_mode == CancelMode::Drain => {
                sharpen_cancel(&mut write, id).await?
            }
            JobState::Cancelling | JobState::Cancelled => return Ok(Guarded::Applied(job)),
            _ => return write.lose(Some(job.state)).await,
        };
        write.wakes();
        self.commit(write).await?;
        Ok(Guarded::Applied(cancelled))
    }

    async fn reopen_job_if_ended(&self, id: JobId, reopen: Reopen) -> Result<Guarded<JobState, Reopened>, Error> {
        self.reopen(id, reopen).await
    }

    async fn release_lost_leases(&self, id: JobId) -> Result<u32, Error> {
        let rows = settling_conflicts!(
            sqlx::query(lost!(
                "select s.job_id, s.shard_index, s.epoch from shards s
                where s.job_id = $2 and s.state = 'leased'
                    and not exists (select 1 from workers w, clock
                        where w.worker_id = s.owner and w.seen_at >= clock.now - $3)
                order by s.shard_index for no key update of s"
            ))
            .bind(self.clock_offset.micros())
            .bind(id.uuid())
            .bind(workers::LIVE_US)
            .rows_of(self, "release lost leases")
        )?;
        self.after_loss(&rows).await
    }

    async fn expire_due_jobs(&self, limit: u32) -> Result<Vec<JobId>, Error> {
        self.settle_forgotten().await?;
        settling_conflicts!(self.expire(limit))
    }

    async fn known_jobs(&self, ids: &[JobId]) -> Result<Vec<JobId>, Error> {
        sqlx::query("select job_id from jobs where job_id = any($1)")
            .bind(uuids(ids.iter().map(JobId::uuid)))
            .list(self, "tell known jobs", Read::job_id)
            .await
    }

    async fn delete_job_if_terminal(&self, id: JobId) -> Result<Guarded<JobState, ()>, Error> {
        let mut write = self.write("delete a job").await?;
        let Some(job) = lock(&mut write, id).await? else { return write.lose(None).await };
        if !job.state.is_terminal() {
            return write.lose(Some(job.state)).await;
        }
        sqlx::query("update jobs set deleted_at = $2 where job_id = $1")
            .bind(id.uuid())
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
        self.progress_of(ids, ahead).await
    }
}

impl PostgresStore {
    /// Jobs past their window; one that another one moves on this moment waits for the next look.
    async fn expire(&self, limit: u32) -> Result<Vec<JobId>, Error> {
        let mut write = self.write("expire jobs").await?;
        let rows = sqlx::query(
            "select job_id from jobs where state = 'in_progress' and expires_at <= $1
            order by expires_at limit $2 for no key update skip locked",
        )
        .bind(write.now)
        .bind(i64::from(limit))
        .rows(&mut write)
        .await?;
        let expired: Vec<JobId> = rows.iter().map(Read::job_id).collect::<Result<_, _>>()?;
        for &job in &expired {
            take_back::fence(&mut write, job).await?;
            enter_finalizing(&mut write, job, Ending::Expired).await?;
        }
        self.commit(write).await?;
        Ok(expired)
    }
}

fn missing(id: JobId) -> Error {
    Error::Missing { what: "job", id: id.to_string() }
}

async fn set_paused(write: &mut Write, id: JobId, paused: bool) -> Result<Job, Error> {
    let now = write.now;
    let row = sqlx::query(concat!("update jobs set paused_at = $2 where job_id = $1 returning ", job_columns!("")))
        .bind(id.uuid())
        .bind(paused.then_some(now))
        .row(write)
        .await?;
    read(&row)
}

async fn enter_cancelling(write: &mut Write, job: &Job, mode: CancelMode, drain: Duration) -> Result<Job, Error> {
    let now = write.now;
    // The step lease goes too, so that a running intake can record nothing more.
    let row = sqlx::query(concat!(
        "update jobs set state = 'cancelling', ending = 'cancelled', cancel_mode = $2, cancelling_at = $3,
            paused_at = null, output_file_id = $4, error_file_id = $5, step_owner = null, step_until = null,
            step_due_at = case when $2 = 'drain' and exists (
                select 1 from shards s where s.job_id = jobs.job_id and s.state = 'leased') then $6 else $3 end
        where job_id = $1 returning ",
        job_columns!("")
    ))
    .bind(job.id.uuid())
    .bind(mode.as_str())
    .bind(now)
    .bind(FileId::new().uuid())
    .bind(FileId::new().uuid())
    .bind(after(now, drain))
    .row(write)
    .await?;
    write.record_event(job.id, "cancelling", "").await?;
    read(&row)
}

async fn sharpen_cancel(write: &mut Write, id: JobId) -> Result<Job, Error> {
    let now = write.now;
    let row = sqlx::query(concat!(
        "update jobs set cancel_mode = 'now', step_due_at = least(step_due_at, $2) where job_id = $1 returning ",
        job_columns!("")
    ))
    .bind(id.uuid())
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
        "update jobs set state = 'finalizing', ending = $2, finalizing_at = $3, paused_at = null,
            output_file_id = $4, error_file_id = $5, step_due_at = $3, step_owner = null, step_until = null
        where job_id = $1",
    )
    .bind(id.uuid())
    .bind(ending.state().as_str())
    .bind(now)
    .bind(FileId::new().uuid())
    .bind(FileId::new().uuid())
    .change(write)
    .await?;
    write.record_event(id, "finalizing", ending.state().as_str()).await?;
    write.wakes();
    Ok(())
}

/// The row of a job that is not deleted, locked: whoever moves it comes after, and claims
/// pass it over. Read by its caller, if another one moved it meanwhile, as it is then.
pub(crate) async fn lock_row(write: &mut Write, id: JobId) -> Result<Option<PgRow>, Error> {
    sqlx::query(concat!(
        "select ",
        job_columns!(""),
        " from jobs where job_id = $1 and deleted_at is null for no key update"
    ))
    .bind(id.uuid())
    .row_if_any(write)
    .await
}

pub(crate) async fn lock(write: &mut Write, id: JobId) -> Result<Option<Job>, Error> {
    lock_row(write, id).await?.as_ref().map(read).transpose()
}

/// The end of a window that starts now.
pub(crate) fn window_end(write: &Write, window: Duration) -> Timestamp {
    write.moment().plus(window)
}
