//! The commit of a segment: one short transaction guarded by the lease.
//!
//! Invariant: an item's bit is set only together with the row of the segment that
//! holds its outcome, under the epoch of the lease that ran it, once.

use overnight_store::{AttemptEnd, Committed, Error, Guarded, NewSegment, ShardKey};
use overnight_types::{Bitmap, Ending, JobState, ShardState};
use sqlx::sqlite::SqliteRow;

use crate::error::refused;
use crate::row::{Read, bits_or_null, int, key};
use crate::statement::Statement;
use crate::transaction::Write;
use crate::{SqliteStore, attempts, jobs, segments, take_back};

/// What the guard looks at, read under the write lock.
struct Held {
    state: ShardState,
    epoch: u64,
    next_seq: u32,
    first_item: u64,
    done: Bitmap,
    failed: Bitmap,
    job_state: JobState,
    round: u32,
    has_faults: bool,
}

impl SqliteStore {
    pub(crate) async fn commit_segment(
        &self,
        shard: ShardKey,
        segment: &NewSegment,
    ) -> Result<Guarded<ShardState, Committed>, Error> {
        let mut write = self.write("commit a segment").await?;
        let Some(held) = look(&mut write, shard).await? else { return Ok(Guarded::Lost { now: None }) };
        check_shape(segment, shard, &held)?;
        let leased = held.state == ShardState::Leased
            && held.epoch == shard.epoch.0
            && held.next_seq == segment.seq
            && !held.done.intersects(&segment.items);
        let running = matches!(held.job_state, JobState::InProgress | JobState::Cancelling);
        if !running || (self.epoch_guard && !leased) {
            return Ok(Guarded::Lost { now: Some(held.state) });
        }
        let shard_done = set_bits(&mut write, shard, segment, &held, self.epoch_guard).await?;
        segments::insert(&mut write, shard.job, held.round, segment, !self.epoch_guard).await?;
        if held.has_faults {
            drop_faults(&mut write, shard, segment, held.first_item).await?;
        }
        let mut job_state = held.job_state;
        if shard_done {
            attempts::end(&mut write, shard.job, shard.shard, shard.epoch, AttemptEnd::Done).await?;
            if job_state == JobState::InProgress && jobs::is_all_done(&mut write, shard.job).await? {
                jobs::enter_finalizing(&mut write, shard.job, Ending::Completed).await?;
                job_state = JobState::Finalizing;
            }
            take_back::finalize_if_drained(&mut write, shard.job, shard.shard).await?;
        }
        self.commit(write).await?;
        Ok(Guarded::Applied(Committed { shard_done, job_state }))
    }
}

async fn look(write: &mut Write, shard: ShardKey) -> Result<Option<Held>, Error> {
    let row = sqlx::query(
        "select s.state, s.epoch, s.next_seq, s.first_item, s.num_items, s.done, s.failed,
            j.state as job_state, j.round,
            exists (select 1 from item_faults f where f.job_id = s.job_id
                and f.item_index >= s.first_item and f.item_index < s.first_item + s.num_items) as has_faults
        from shards s join jobs j on j.job_id = s.job_id
        where s.job_id = ?1 and s.shard_index = ?2",
    )
    .bind(key(shard.job.uuid()))
    .bind(shard.shard.0)
    .row_if_any(write)
    .await?;
    let read = |row: SqliteRow| {
        let num_items = row.u32("num_items")?;
        Ok(Held {
            state: row.word("state")?,
            epoch: row.u64("epoch")?,
            next_seq: row.u32("next_seq")?,
            first_item: row.u64("first_item")?,
            done: row.bitmap("done", num_items)?,
            failed: row.bitmap("failed", num_items)?,
            job_state: row.word("job_state")?,
            round: row.u32("round")?,
            has_faults: row.int("has_faults")? != 0,
        })
    };
    row.map(read).transpose()
}

/// A segment that could never be right is the caller's fault, not a lost race.
fn check_shape(segment: &NewSegment, shard: ShardKey, held: &Held) -> Result<(), Error> {
    let doing = "commit a segment";
    let num_bits = held.done.num_bits();
    if segment.shard != shard.shard || segment.epoch != shard.epoch {
        return Err(refused(doing, "the segment is named for another lease"));
    }
    if segment.items.num_bits() != num_bits || segment.failed.num_bits() != num_bits {
        return Err(refused(doing, format!("the segment's bitmaps are not {num_bits} bits long")));
    }
    if segment.items.count_ones() == 0 {
        return Err(refused(doing, "the segment holds no outcome"));
    }
    if !is_subset(&segment.failed, &segment.items) {
        return Err(refused(doing, "the segment marks an item failed that it does not hold"));
    }
    Ok(())
}

/// Whether every bit of `part` is set in `whole`.
pub(crate) fn is_subset(part: &Bitmap, whole: &Bitmap) -> bool {
    let mut union = whole.clone();
    union.union(part);
    union == *whole
}

/// Sets the bits and moves the counts; the guard stands in the statement as well,
/// so that no change elsewhere can part it from the write.
async fn set_bits(
    write: &mut Write,
    shard: ShardKey,
    segment: &NewSegment,
    held: &Held,
    epoch_guard: bool,
) -> Result<bool, Error> {
    let (mut done, mut failed_bits) = (held.done.clone(), held.failed.clone());
    done.union(&segment.items);
    failed_bits.union(&segment.failed);
    let shard_done = done.is_full();
    let changed = sqlx::query(
        "update shards set done = ?5, num_done = ?6, failed = ?7, num_failed = ?8,
            input_tokens = input_tokens + ?9, cached_tokens = cached_tokens + ?10,
            output_tokens = output_tokens + ?11, reasoning_tokens = reasoning_tokens + ?12,
            state = iif(?13, 'done', state), owner = iif(?13, null, owner), lease_until = iif(?13, null, lease_until),
            next_seq = max(next_seq, ?4 + 1), crashes = 0, probe_item = null, probe_epoch = null, probe_deaths = 0
        where job_id = ?1 and shard_index = ?2
            and (?14 or (epoch = ?3 and state = 'leased' and next_seq = ?4))",
    )
    .bind(key(shard.job.uuid()))
    .bind(shard.shard.0)
    .bind(int(shard.epoch.0))
    .bind(segment.seq)
    .bind(done.as_bytes())
    .bind(done.count_ones())
    .bind(bits_or_null(&failed_bits))
    .bind(failed_bits.count_ones())
    .bind(int(segment.usage.input_tokens))
    .bind(int(segment.usage.cached_tokens))
    .bind(int(segment.usage.output_tokens))
    .bind(int(segment.usage.reasoning_tokens))
    .bind(shard_done)
    .bind(!epoch_guard)
    .change(write)
    .await?;
    assert_eq!(changed, 1, "the guard was read under the write lock, so it holds in the statement");
    Ok(shard_done)
}

async fn drop_faults(write: &mut Write, shard: ShardKey, segment: &NewSegment, first_item: u64) -> Result<(), Error> {
    let items: Vec<u64> = segment.items.ones().map(|bit| first_item + u64::from(bit)).collect();
    sqlx::query("delete from item_faults where job_id = ?1 and item_index in (select value from json_each(?2))")
        .bind(key(shard.job.uuid()))
        .bind(serde_json::json!(items).to_string())
        .change(write)
        .await?;
    Ok(())
}
