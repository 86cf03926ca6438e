//! Rows of segments.

use async_trait::async_trait;
use overnight_store::{Error, NewSegment, Segment, SegmentSelection, Segments};
use overnight_types::{Epoch, JobId, ShardIndex};
use sqlx::postgres::PgRow;

use crate::PostgresStore;
use crate::row::{Bits, Read, int, short, text};
use crate::statement::Statement;
use crate::transaction::Write;

/// The columns that `read` reads, with the shard's number of items from the join.
macro_rules! columns {
    () => {
        "select g.job_id, g.committed, g.epoch, g.input_tokens, g.cached_tokens, g.output_tokens,
            g.reasoning_tokens, g.byte_len, g.shard_index, g.seq, g.round, g.items, g.failed, g.code_counts, g.sha256,
            s.num_items as num_bits
        from segments g join shards s on s.job_id = g.job_id and s.shard_index = g.shard_index "
    };
}

#[async_trait]
impl Segments for PostgresStore {
    async fn list_segments(&self, job: JobId, from: ShardIndex, limit: u32) -> Result<Vec<Segment>, Error> {
        let limit = limit.max(1) as usize;
        let mut segments = sqlx::query(concat!(
            columns!(),
            "where g.job_id = $1 and g.shard_index >= $2 order by g.shard_index, g.seq limit $3"
        ))
        .bind(job.uuid())
        .bind(short(from.0))
        .bind(int(limit as u64) + 1)
        .list(self, "list segments", read)
        .await?;
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
        sqlx::query(concat!(columns!(), "where g.job_id = $1 and g.shard_index = $2 order by g.seq"))
            .bind(job.uuid())
            .bind(short(shard.0))
            .list(self, "list segments of a shard", read)
            .await
    }

    async fn list_segments_committed(&self, selection: SegmentSelection) -> Result<Vec<Segment>, Error> {
        let below = self.settled_below().await?;
        sqlx::query(concat!(
            columns!(),
            "where g.job_id = $1 and (g.committed, g.shard_index) > ($2, $3) and g.committed < $4
                and ($5::integer is null or g.round = $5)
            order by g.committed, g.shard_index limit $6"
        ))
        .bind(selection.job.uuid())
        .bind(int(selection.after.committed))
        .bind(short(selection.after.shard))
        .bind(below)
        .bind(selection.round.map(short))
        .bind(i64::from(selection.limit))
        .list(self, "list segments in commit order", read)
        .await
    }
}

impl PostgresStore {
    /// Transactions commit in another order than they are numbered in: a reader that comes
    /// after this stops below the lowest number that may still commit a segment, and so never
    /// passes one that commits later.
    ///
    /// The lowest of those that hold the table's lock of writers, or the next number to be
    /// given out as of before the locks were looked at. A number of the whole server
    /// (`pg_snapshot_xmin`) would do as well, but then any long transaction in it, of
    /// whatever database, would hold readers up.
    async fn settled_below(&self) -> Result<i64, Error> {
        let row = sqlx::query(
            // The snapshot is taken before the function of pg_locks runs. Locks show the lower
            // half of a transaction's number; one past the snapshot's counts for nothing.
            "with next as materialized (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as number),
            behind as (
                select (next.number - holder.transactionid::text::bigint) & 4294967295 as by
                from next, pg_locks writes join pg_locks holder
                    on holder.locktype = 'transactionid' and holder.mode = 'ExclusiveLock' and holder.granted
                        and holder.virtualtransaction = writes.virtualtransaction
                where writes.locktype = 'relation' and writes.relation = 'segments'::regclass
                    and writes.database = (select d.oid from pg_database d where d.datname = current_database())
                    and writes.mode = 'RowExclusiveLock' and writes.granted)
            select next.number - coalesce((select max(by) from behind where by < 2147483648), 0)
                + (select last_value from segments_committed_base) as below
            from next",
        )
        .row_of(self, "read the order of commits")
        .await?;
        row.map_or(Ok(0), |row| row.int("below"))
    }
}

/// Inserts a segment's row that settles what a re-opening leaves out.
pub(crate) async fn insert(write: &mut Write, job: JobId, round: u32, segment: &NewSegment) -> Result<(), Error> {
    sqlx::query(
        "insert into segments (job_id, shard_index, seq, epoch, round, num_items, items, failed, code_counts,
            input_tokens, cached_tokens, output_tokens, reasoning_tokens, byte_len, sha256, committed)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15,
            pg_current_xact_id()::text::bigint + (select last_value from segments_committed_base))",
    )
    .bind(job.uuid())
    .bind(short(segment.shard.0))
    .bind(short(segment.seq))
    .bind(int(segment.epoch.0))
    .bind(short(round))
    .bind(short(segment.items.count_ones()))
    .bind(Bits::of(&segment.items))
    .bind(Bits::or_null(&segment.failed))
    .bind(text(&segment.code_counts))
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

fn read(row: &PgRow) -> Result<Segment, Error> {
    let num_bits = row.u32("num_bits")?;
    Ok(Segment {
        job: row.job_id()?,
        round: row.u32("round")?,
        committed: row.u64("committed")?,
        new: NewSegment {
            shard: ShardIndex(row.u32("shard_index")?),
            seq: row.u32("seq")?,
            epoch: Epoch(row.u64("epoch")?),
            items: row.bitmap("items", num_bits)?,
            failed: row.bitmap("failed", num_bits)?,
            code_counts: row.text("code_counts")?,
            usage: row.usage()?,
            byte_len: row.u64("byte_len")?,
            sha256: row.hash("sha256")?,
        },
    })
}
