//! Rows of segments.

use async_trait::async_trait;
use overnight_store::{Error, NewSegment, Segment, SegmentSelection, Segments};
use overnight_types::{Bitmap, Epoch, JobId, ShardIndex};
use sqlx::sqlite::SqliteRow;

use crate::SqliteStore;
use crate::row::{Read, bits_or_null, int, key};
use crate::statement::Statement;
use crate::transaction::Write;

#[async_trait]
impl Segments for SqliteStore {
    async fn list_segments(&self, job: JobId, from: ShardIndex, limit: u32) -> Result<Vec<Segment>, Error> {
        let limit = limit.max(1) as usize;
        let rows = sqlx::query(
            "select g.*, s.num_items as num_bits from segments g
            join shards s on s.job_id = g.job_id and s.shard_index = g.shard_index
            where g.job_id = ?1 and g.shard_index >= ?2
            order by g.shard_index, g.seq limit ?3",
        )
        .bind(key(job.uuid()))
        .bind(from.0)
        .bind(int(limit as u64) + 1)
        .rows_of(&self.readers, "list segments")
        .await?;
        let mut segments: Vec<Segment> = rows.iter().map(read).collect::<Result<_, _>>()?;
        // One row past the limit: its shard may have more, so it waits for the next call.
        if let Some(cut) = segments.get(limit).map(|segment| segment.new.shard) {
            segments.retain(|segment| segment.new.shard != cut);
            if segments.is_empty() {
                return self.list_segments_of_shard(job, cut).await;
            }
        }
        Ok(segments)
    }

    async fn list_segments_of_shard(&self, job: JobId, shard: ShardIndex) -> Result<Vec<Segment>, Error> {
        sqlx::query(
            "select g.*, s.num_items as num_bits from segments g
            join shards s on s.job_id = g.job_id and s.shard_index = g.shard_index
            where g.job_id = ?1 and g.shard_index = ?2 order by g.seq",
        )
        .bind(key(job.uuid()))
        .bind(shard.0)
        .list(&self.readers, "list segments of a shard", read)
        .await
    }

    async fn list_segments_committed(&self, selection: SegmentSelection) -> Result<Vec<Segment>, Error> {
        // Writers come one after another, so a higher number never commits first.
        sqlx::query(
            "select g.*, s.num_items as num_bits from segments g
            join shards s on s.job_id = g.job_id and s.shard_index = g.shard_index
            where g.job_id = ?1 and g.committed >= ?2 and (g.committed > ?2 or g.shard_index > ?3)
                and (?4 is null or g.round = ?4)
            order by g.committed limit ?5",
        )
        .bind(key(selection.job.uuid()))
        .bind(int(selection.after.committed))
        .bind(selection.after.shard)
        .bind(selection.round)
        .bind(selection.limit)
        .list(&self.readers, "list segments in commit order", read)
        .await
    }
}

/// Inserts a segment's row. `replace` is for the negative control without leases.
pub(crate) async fn insert(
    write: &mut Write,
    job: JobId,
    round: u32,
    segment: &NewSegment,
    replace: bool,
) -> Result<(), Error> {
    let statement = if replace {
        "insert or replace into segments (job_id, shard_index, seq, epoch, round, num_items, items, failed,
            code_counts, input_tokens, cached_tokens, output_tokens, reasoning_tokens, byte_len, sha256)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)"
    } else {
        "insert into segments (job_id, shard_index, seq, epoch, round, num_items, items, failed,
            code_counts, input_tokens, cached_tokens, output_tokens, reasoning_tokens, byte_len, sha256)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)"
    };
    sqlx::query(statement)
        .bind(key(job.uuid()))
        .bind(segment.shard.0)
        .bind(segment.seq)
        .bind(int(segment.epoch.0))
        .bind(round)
        .bind(segment.items.count_ones())
        .bind(segment.items.as_bytes())
        .bind(bits_or_null(&segment.failed))
        .bind(&segment.code_counts)
        .bind(int(segment.usage.input_tokens))
        .bind(int(segment.usage.cached_tokens))
        .bind(int(segment.usage.output_tokens))
        .bind(int(segment.usage.reasoning_tokens))
        .bind(int(segment.byte_len))
        .bind(&segment.sha256[..])
        .change(write)
        .await?;
    Ok(())
}

/// `num_bits` is the shard's number of items, from the join.
fn read(row: &SqliteRow) -> Result<Segment, Error> {
    let num_bits = row.u32("num_bits")?;
    let failed: Bitmap = row.bitmap("failed", num_bits)?;
    Ok(Segment {
        job: row.job_id()?,
        round: row.u32("round")?,
        committed: row.u64("committed")?,
        new: NewSegment {
            shard: ShardIndex(row.u32("shard_index")?),
            seq: row.u32("seq")?,
            epoch: Epoch(row.u64("epoch")?),
            items: row.bitmap("items", num_bits)?,
            failed,
            code_counts: row.text("code_counts")?,
            usage: row.usage()?,
            byte_len: row.u64("byte_len")?,
            sha256: row.hash("sha256")?,
        },
    })
}
