//! Ended jobs whose time is over: hidden with their files, whose bytes and rows then go
//! as those of deleted ones do.

use std::time::Duration;

use overnight_store::Error;
use uuid::Uuid;

use crate::PostgresStore;
use crate::error::settling_conflicts;
use crate::row::{Read, micros};
use crate::statement::Statement;
use crate::transaction::Write;

impl PostgresStore {
    pub(crate) async fn hide_ended(&self, kept: Duration, limit: u32) -> Result<u32, Error> {
        settling_conflicts!(self.hide_ended_once(kept, limit))
    }

    async fn hide_ended_once(&self, kept: Duration, limit: u32) -> Result<u32, Error> {
        let mut write = self.write("hide ended jobs").await?;
        // Locked, and looked at again under the lock: a job that is being re-opened is passed over.
        let rows = sqlx::query(
            "with ended as (
                select j.job_id from jobs j
                where coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) is not null
                    and coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) <= $2
                    and j.deleted_at is null
                    -- Where nobody is told of ends, events stay open and untried for good.
                    and not exists (select 1 from outbox o
                        where o.job_id = j.job_id and o.due_at is not null and o.attempts > 0)
                order by coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at)
                limit $3
                for update of j skip locked)
            update jobs set deleted_at = $1 from ended where jobs.job_id = ended.job_id
            returning jobs.job_id, jobs.input_file_id, jobs.output_file_id, jobs.error_file_id",
        )
        .bind(write.now)
        .bind(write.now.saturating_sub(micros(kept)))
        .bind(i64::from(limit))
        .rows(&mut write)
        .await?;
        let (mut jobs, mut inputs, mut published) = (Vec::new(), Vec::new(), Vec::new());
        for row in &rows {
            jobs.push(row.job_id()?.uuid());
            inputs.push(row.uuid("input_file_id")?);
            published.extend(row.uuid_or_null("output_file_id")?);
            published.extend(row.uuid_or_null("error_file_id")?);
        }
        hide_published(&mut write, jobs, published).await?;
        hide_inputs(&mut write, inputs).await?;
        self.commit(write).await?;
        Ok(u32::try_from(rows.len()).expect("no more than the limit"))
    }
}

/// Files by their publisher; by their ids too, since earlier releases noted none.
async fn hide_published(write: &mut Write, jobs: Vec<Uuid>, files: Vec<Uuid>) -> Result<(), Error> {
    let now = write.now;
    sqlx::query(
        "update files set deleted_at = $1
        where deleted_at is null and expires_at is null and (job_id = any($2) or file_id = any($3))",
    )
    .bind(now)
    .bind(jobs)
    .bind(files)
    .change(write)
    .await?;
    Ok(())
}

/// After the jobs themselves, so that jobs on one input that go together count as nobody.
async fn hide_inputs(write: &mut Write, inputs: Vec<Uuid>) -> Result<(), Error> {
    let now = write.now;
    // Locked by a statement before it: a create that holds the file meanwhile has committed by
    // then, and the next statement sees its job.
    sqlx::query("select 1 from files where file_id = any($1) order by file_id for update")
        .bind(inputs.clone())
        .rows(write)
        .await?;
    sqlx::query(
        "update files set deleted_at = $1
        where file_id = any($2) and deleted_at is null and expires_at is null
            and not exists (select 1 from jobs j where j.input_file_id = files.file_id and j.deleted_at is null)",
    )
    .bind(now)
    .bind(inputs)
    .change(write)
    .await?;
    Ok(())
}
