//! The row of a new job, and the idempotency key under which it was asked for.

use overnight_store::{Error, IdempotencyKey, InsertJob, Job, NewJob};
use overnight_types::JobId;

use crate::job_row::{job_columns, read};
use crate::row::{Read, after, micros, text};
use crate::statement::Statement;
use crate::transaction::Write;

/// An idempotency key goes this long after its use.
const KEY_KEPT_US: i64 = 7 * 24 * 3_600_000_000;

/// The answer of an earlier create with this key, if one counts still. Creates with
/// one key come one after another from here on.
pub(crate) async fn find_by_key(write: &mut Write, wanted: &IdempotencyKey) -> Result<Option<InsertJob>, Error> {
    let now = write.now;
    sqlx::query("select pg_advisory_xact_lock(hashtextextended($1, 0))").bind(&wanted.key).change(write).await?;
    sqlx::query(
        "delete from idempotency_keys where key in (
            select k.key from idempotency_keys k where k.created_at < $1 order by k.created_at limit 10
            for update skip locked)",
    )
    .bind(now - KEY_KEPT_US)
    .change(write)
    .await?;
    // A statement of its own: an `or` of both would read every key.
    sqlx::query(
        "delete from idempotency_keys where key = $2 and (created_at < $1
            or exists (select 1 from jobs j where j.job_id = idempotency_keys.job_id and j.deleted_at is not null))",
    )
    .bind(now - KEY_KEPT_US)
    .bind(&wanted.key)
    .change(write)
    .await?;
    let row = sqlx::query(concat!(
        "select k.params_sha256, ",
        job_columns!("j."),
        " from idempotency_keys k join jobs j on j.job_id = k.job_id where k.key = $1"
    ))
    .bind(&wanted.key)
    .row_if_any(write)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let same = row.hash("params_sha256")? == wanted.params_sha256;
    Ok(Some(if same { InsertJob::Existing(read(&row)?) } else { InsertJob::KeyReused }))
}

/// Records the key with its job.
pub(crate) async fn insert_key(write: &mut Write, new: &IdempotencyKey, job: JobId) -> Result<(), Error> {
    let now = write.now;
    sqlx::query("insert into idempotency_keys (key, params_sha256, job_id, created_at) values ($1, $2, $3, $4)")
        .bind(&new.key)
        .bind(&new.params_sha256[..])
        .bind(job.uuid())
        .bind(now)
        .change(write)
        .await?;
    Ok(())
}

/// Inserts the job with its input's size and hash; `None` without a present input. The
/// input's row is locked, so that a delete at the same time comes before or after.
pub(crate) async fn insert(write: &mut Write, job: &NewJob) -> Result<Option<Job>, Error> {
    let now = write.now;
    let row = sqlx::query(concat!(
        "with input as materialized (
            select f.file_id, f.bytes, f.sha256 from files f
            where f.file_id = $3 and f.purpose = 'batch' and f.deleted_at is null
                and (f.expires_at is null or f.expires_at > $10)
            for share)
        insert into jobs (job_id, endpoint, input_file_id, input_bytes, input_sha256, completion_window, window_us,
            metadata, name, priority, output_expires_after_us, state, created_at, expires_at, step_due_at)
        select $1, $2, f.file_id, f.bytes, f.sha256, $4, $5, $6, $7, $8, $9, 'validating', $10, $11, $10
        from input f
        returning ",
        job_columns!("")
    ))
    .bind(job.id.uuid())
    .bind(job.endpoint.as_str())
    .bind(job.input_file_id.uuid())
    .bind(text(&job.completion_window))
    .bind(micros(job.window))
    .bind(job.metadata.as_deref().map(text))
    .bind(job.name.as_deref().map(text))
    .bind(job.priority)
    .bind(job.output_expires_after.map(micros))
    .bind(now)
    .bind(after(now, job.window))
    .row_if_any(write)
    .await?;
    row.as_ref().map(read).transpose()
}
