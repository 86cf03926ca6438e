//! The commit of a segment: one statement, one round trip, guarded by the lease.
//!
//! Invariant: an item's bit is set only together with the row of the segment that
//! holds its outcome, under the epoch of the lease that ran it, once.
//!
//! A connection that breaks leaves open whether the statement was carried out. The
//! caller may make it again: then the guard answers `Lost`, the shard is leased anew and
//! goes on from what its bits say.

use overnight_store::{Committed, Error, Guarded, NewSegment, ShardKey};
use overnight_types::{Bitmap, JobState, ShardState};
use sqlx::postgres::PgRow;

use crate::PostgresStore;
use crate::error::{refused, settling_conflicts};
use crate::row::{Bits, Read, int, short, text};
use crate::statement::Statement;
use crate::transaction::clock;

const DOING: &str = "commit a segment";

impl PostgresStore {
    pub(crate) async fn commit_segment(
        &self,
        shard: ShardKey,
        segment: &NewSegment,
    ) -> Result<Guarded<ShardState, Committed>, Error> {
        check_shape(segment, shard)?;
        let Some(row) = settling_conflicts!(self.write_segment(shard, segment))? else {
            return Ok(Guarded::Lost { now: None });
        };
        let num_bits = row.u32("num_items")?;
        if num_bits != segment.items.num_bits() {
            return Err(refused(DOING, format!("the segment's bitmaps are not {num_bits} bits long")));
        }
        let shard_state: ShardState = row.word("state")?;
        let mut job_state: JobState = row.word("job_state")?;
        let Some(now) = row.text_or_null("now_state")? else {
            // Perhaps our own earlier try was carried out, and died before its job was moved on.
            if shard_state == ShardState::Done {
                self.settle(&[shard.job]).await?;
            }
            return Ok(Guarded::Lost { now: Some(shard_state) });
        };
        let shard_done = now == ShardState::Done.as_str();
        if shard_done && let Some((_, moved)) = self.settle(&[shard.job]).await?.first() {
            job_state = *moved;
        }
        Ok(Guarded::Applied(Committed { shard_done, job_state }))
    }

    /// The shard as it was under the lock, and its new state if the guard held.
    async fn write_segment(&self, shard: ShardKey, segment: &NewSegment) -> Result<Option<PgRow>, Error> {
        sqlx::query(concat!(
            "with clock as materialized (select ",
            clock!(),
            " as now),
            held as materialized (
                select s.job_id, s.shard_index, s.state, s.num_items, s.first_item, s.next_seq, s.epoch,
                    j.state as job_state, j.round,
                    s.num_items = length($6::varbit) and j.state in ('in_progress', 'cancelling') and ($7 or (
                        s.state = 'leased' and s.epoch = $4 and s.next_seq = $5
                        and case when s.num_items = length($6) then bit_count(s.done & $6) = 0 end)) as holds
                from shards s join jobs j on j.job_id = s.job_id
                where s.job_id = $2 and s.shard_index = $3
                for no key update of s),
            done as (
                update shards s set done = s.done | $6, num_done = bit_count(s.done | $6),
                    failed = case when $8::varbit is null then s.failed else coalesce(s.failed | $8, $8) end,
                    num_failed = case when $8 is null then s.num_failed
                        else bit_count(coalesce(s.failed | $8, $8)) end,
                    input_tokens = s.input_tokens + $9, cached_tokens = s.cached_tokens + $10,
                    output_tokens = s.output_tokens + $11, reasoning_tokens = s.reasoning_tokens + $12,
                    state = case when bit_count(s.done | $6) = s.num_items then 'done' else s.state end,
                    owner = case when bit_count(s.done | $6) < s.num_items then s.owner end,
                    lease_until = case when bit_count(s.done | $6) < s.num_items then s.lease_until end,
                    next_seq = greatest(s.next_seq, $5 + 1), crashes = 0, probe_item = null, probe_epoch = null,
                    probe_deaths = 0
                from held h
                where h.holds and s.job_id = h.job_id and s.shard_index = h.shard_index
                returning s.state),
            named as (
                insert into segments (job_id, shard_index, seq, epoch, round, num_items, items, failed, code_counts,
                    input_tokens, cached_tokens, output_tokens, reasoning_tokens, byte_len, sha256, committed)
                select h.job_id, h.shard_index, $5, $4, h.round, bit_count($6), $6, $8, $13, $9, $10, $11, $12,
                    $14, $15, pg_current_xact_id()::text::bigint + (select last_value from segments_committed_base)
                from held h where h.holds
                -- Only without the guard; with it, a null breaks the statement.
                on conflict (job_id, shard_index, seq) do update set epoch = excluded.epoch, items = excluded.items,
                    failed = excluded.failed, num_items = case when $7 then excluded.num_items end,
                    sha256 = excluded.sha256, byte_len = excluded.byte_len, code_counts = excluded.code_counts,
                    committed = excluded.committed),
            settled as (
                delete from item_faults f using held h
                where h.holds and f.job_id = h.job_id and f.item_index >= h.first_item
                    and f.item_index < h.first_item + h.num_items
                    and get_bit($6, (f.item_index - h.first_item)::integer) = 1),
            ended as (
                update attempts a set ended_at = clock.now, \"end\" = 'done' from done, held h, clock
                where done.state = 'done' and a.job_id = h.job_id and a.shard_index = h.shard_index and a.epoch = $4
                    and a.ended_at is null)
            select h.state, h.num_items, h.job_state, done.state as now_state from held h left join done on true"
        ))
        .bind(self.clock_offset.micros())
        .bind(shard.job.uuid())
        .bind(short(shard.shard.0))
        .bind(int(shard.epoch.0))
        .bind(short(segment.seq))
        .bind(Bits::of(&segment.items))
        .bind(!self.epoch_guard)
        .bind(Bits::or_null(&segment.failed))
        .bind(int(segment.usage.input_tokens))
        .bind(int(segment.usage.cached_tokens))
        .bind(int(segment.usage.output_tokens))
        .bind(int(segment.usage.reasoning_tokens))
        .bind(text(&segment.code_counts))
        .bind(int(segment.byte_len))
        .bind(&segment.sha256[..])
        .row_of(self, DOING)
        .await
    }
}

/// A segment that could never be right is the caller's fault, not a lost race.
fn check_shape(segment: &NewSegment, shard: ShardKey) -> Result<(), Error> {
    if segment.shard != shard.shard || segment.epoch != shard.epoch {
        return Err(refused(DOING, "the segment is named for another lease"));
    }
    if segment.items.num_bits() != segment.failed.num_bits() {
        return Err(refused(DOING, "the segment's bitmaps have two lengths"));
    }
    if segment.items.count_ones() == 0 {
        return Err(refused(DOING, "the segment holds no outcome"));
    }
    if !is_subset(&segment.failed, &segment.items) {
        return Err(refused(DOING, "the segment marks an item failed that it does not hold"));
    }
    Ok(())
}

/// Whether every bit of `part` is set in `whole`.
pub(crate) fn is_subset(part: &Bitmap, whole: &Bitmap) -> bool {
    let mut union = whole.clone();
    union.union(part);
    union == *whole
}
