//! Audit: what the CHECK constraints cannot hold, because it spans rows or bits.

use overnight_store::Error;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use crate::commit::is_subset;
use crate::error::failed;
use crate::row::Read;

const DOING: &str = "audit the database";

/// Findings told at most.
pub(crate) const FINDINGS_MAX: usize = 20;

/// Shards read at a time.
const PIECE: u32 = 500;

/// Jobs whose shards do not add up, shards whose counts are not those of their bits
/// or whose segments are not all there; in words.
pub(crate) async fn find_open_accounting(connection: &mut SqliteConnection) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    let rows = sqlx::query(
        "select j.job_id, j.num_items, j.num_shards, count(s.shard_index) as shards_there,
            coalesce(sum(s.num_items), 0) as items_there
        from jobs j left join shards s on s.job_id = j.job_id
        where j.in_progress_at is not null and j.deleted_at is null
        group by j.job_id having shards_there <> j.num_shards or items_there <> j.num_items limit 20",
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(failed(DOING))?;
    for row in &rows {
        findings.push(format!(
            "{} has {} items in {} shards, but its shards hold {} in {}",
            row.job_id()?,
            row.u64("num_items")?,
            row.u64("num_shards")?,
            row.u64("items_there")?,
            row.u64("shards_there")?
        ));
    }
    let mut after: (Vec<u8>, i64) = (Vec::new(), -1);
    loop {
        let rows = sqlx::query(
            "select s.*, (select count(*) from segments g
                where g.job_id = s.job_id and g.shard_index = s.shard_index) as num_segments
            from shards s join jobs j on j.job_id = s.job_id
            where (s.job_id, s.shard_index) > (?1, ?2) and j.deleted_at is null
            order by s.job_id, s.shard_index limit ?3",
        )
        .bind(&after.0)
        .bind(after.1)
        .bind(PIECE)
        .fetch_all(&mut *connection)
        .await
        .map_err(failed(DOING))?;
        let Some(last) = rows.last() else { break };
        after = (last.bytes("job_id")?, last.int("shard_index")?);
        for row in &rows {
            findings.extend(
                finding_of_shard(row)?.map(|why| format!("shard {} of {}: {why}", row_index(row), row_job(row))),
            );
        }
        if findings.len() >= FINDINGS_MAX {
            break;
        }
    }
    findings.truncate(FINDINGS_MAX);
    Ok(findings)
}

fn row_index(row: &SqliteRow) -> i64 {
    row.int("shard_index").unwrap_or(-1)
}

fn row_job(row: &SqliteRow) -> String {
    row.job_id().map_or_else(|_| "an unreadable job".to_owned(), |job| job.to_string())
}

fn finding_of_shard(row: &SqliteRow) -> Result<Option<String>, Error> {
    let num_items = row.u32("num_items")?;
    let (Ok(done), Ok(failed_bits)) = (row.bitmap("done", num_items), row.bitmap("failed", num_items)) else {
        return Ok(Some("a bit past its last item is set".to_owned()));
    };
    let (num_done, num_failed) = (row.u32("num_done")?, row.u32("num_failed")?);
    let (num_segments, next_seq) = (row.u32("num_segments")?, row.u32("next_seq")?);
    Ok(if (done.count_ones(), failed_bits.count_ones()) != (num_done, num_failed) {
        let (bits_done, bits_failed) = (done.count_ones(), failed_bits.count_ones());
        Some(format!(
            "{num_done} done and {num_failed} failed by its counts, {bits_done} and {bits_failed} by its bits"
        ))
    } else if !is_subset(&failed_bits, &done) {
        Some("an item is failed and not done".to_owned())
    } else if num_segments != next_seq {
        Some(format!("{next_seq} segments were committed, {num_segments} are there"))
    } else {
        None
    })
}
