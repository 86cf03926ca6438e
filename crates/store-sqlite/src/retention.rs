//! Ended jobs whose time is over: hidden with their files, whose bytes and rows then go
//! as those of deleted ones do.

use std::time::Duration;

use overnight_store::Error;
use uuid::Uuid;

use crate::SqliteStore;
use crate::row::{Read, hex_list, micros};
use crate::statement::Statement;
use crate::transaction::Write;

impl SqliteStore {
    pub(crate) async fn hide_ended(&self, kept: Duration, limit: u32) -> Result<u32, Error> {
        let mut write = self.write("hide ended jobs").await?;
        let rows = sqlx::query(
            "update jobs set deleted_at = ?1 where job_id in (
                select j.job_id from jobs j
                where coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) is not null
                    and coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) <= ?2
                    and j.deleted_at is null
                    -- Where nobody is told of ends, events stay open and untried for good.
                    and not exists (select 1 from outbox o
                        where o.job_id = j.job_id and o.due_at is not null and o.attempts > 0)
                order by coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) limit ?3)
            returning job_id, input_file_id, output_file_id, error_file_id",
        )
        .bind(write.now)
        .bind(write.now.saturating_sub(micros(kept)))
        .bind(limit)
        .rows(&mut write)
        .await?;
        let (mut jobs, mut inputs, mut published) = (Vec::new(), Vec::new(), Vec::new());
        for row in &rows {
            jobs.push(row.job_id()?.uuid());
            inputs.push(row.uuid("input_file_id")?);
            published.extend(row.uuid_or_null("output_file_id")?);
            published.extend(row.uuid_or_null("error_file_id")?);
        }
        hide_published(&mut write, &jobs, &published).await?;
        hide_inputs(&mut write, &inputs).await?;
        self.commit(write).await?;
        Ok(u32::try_from(rows.len()).expect("no more than the limit"))
    }
}

/// Files by their publisher; by their ids too, since earlier releases noted none.
async fn hide_published(write: &mut Write, jobs: &[Uuid], files: &[Uuid]) -> Result<(), Error> {
    let now = write.now;
    sqlx::query(
        "update files set deleted_at = ?1
        where deleted_at is null and expires_at is null
            and (job_id in (select unhex(value) from json_each(?2))
                or file_id in (select unhex(value) from json_each(?3)))",
    )
    .bind(now)
    .bind(hex_list(jobs.iter().copied()))
    .bind(hex_list(files.iter().copied()))
    .change(write)
    .await?;
    Ok(())
}

/// After the jobs themselves, so that jobs on one input that go together count as nobody.
async fn hide_inputs(write: &mut Write, inputs: &[Uuid]) -> Result<(), Error> {
    let now = write.now;
    sqlx::query(
        "update files set deleted_at = ?1
        where file_id in (select unhex(value) from json_each(?2)) and deleted_at is null and expires_at is null
            and not exists (select 1 from jobs j where j.input_file_id = files.file_id and j.deleted_at is null)",
    )
    .bind(now)
    .bind(hex_list(inputs.iter().copied()))
    .change(write)
    .await?;
    Ok(())
}
