//! Re-opening an ended job for a new round.
//!
//! Invariant: when it has committed, an item runs if and only if its `done` bit is
//! clear, and no commit of an earlier round can come any more.

use std::collections::{BTreeMap, BTreeSet};

use overnight_store::{Error, Guarded, Job, NewSegment, Reopen, ReopenItems, Reopened};
use overnight_types::{Bitmap, ItemIndex, JobId, JobState};
use sqlx::postgres::PgRow;

use crate::commit::is_subset;
use crate::error::refused;
use crate::job_row::job_columns;
use crate::row::{Bits, Read, micros, short, text as as_text};
use crate::statement::Statement;
use crate::transaction::Write;
use crate::{PostgresStore, jobs, segments};

const DOING: &str = "re-open a job";

/// Shards read and written at a time.
const PIECE: i64 = 500;

/// What a re-opening keeps and runs.
#[derive(Default)]
struct Tally {
    kept: u64,
    failed_again: u64,
    unfinished: u64,
}

impl PostgresStore {
    pub(crate) async fn reopen(&self, id: JobId, reopen: Reopen) -> Result<Guarded<JobState, Reopened>, Error> {
        let mut write = self.write(DOING).await?;
        let Some(job) = jobs::lock(&mut write, id).await? else { return write.lose(None).await };
        let ended = matches!(job.state, JobState::Completed | JobState::Expired | JobState::Cancelled);
        if !ended || !is_input_present(&mut write, &job).await? {
            return write.lose(Some(job.state)).await;
        }
        let mut tally = Tally::default();
        if job.in_progress_at.is_some() {
            match reopen_shards(&mut write, &job, &reopen).await? {
                Some(sums) if sums.failed_again + sums.unfinished > 0 => tally = sums,
                _ => return write.lose(Some(job.state)).await,
            }
        } else if matches!(reopen.items, ReopenItems::Selected(_)) {
            return write.lose(Some(job.state)).await;
        }
        let job = start_round(&mut write, &job, &reopen).await?;
        write.record_event(id, "reopened", &format!("round {}", job.round)).await?;
        write.wakes();
        self.commit(write).await?;
        let Tally { kept, failed_again, unfinished } = tally;
        Ok(Guarded::Applied(Reopened {
            job,
            num_kept: kept,
            num_failed_again: failed_again,
            num_unfinished: unfinished,
        }))
    }
}

async fn is_input_present(write: &mut Write, job: &Job) -> Result<bool, Error> {
    let now = write.now;
    // Locked, so that a delete at the same time comes before or after.
    let row = sqlx::query(
        "select file_id from files where file_id = $1 and deleted_at is null
            and (expires_at is null or expires_at > $2)
        for share",
    )
    .bind(job.input_file_id.uuid())
    .bind(now)
    .row_if_any(write)
    .await?;
    Ok(row.is_some())
}

/// The job's row in its new round. What it ended as and published goes back to
/// null; a job that was cancelled before intake ended goes on with intake.
async fn start_round(write: &mut Write, job: &Job, reopen: &Reopen) -> Result<Job, Error> {
    let now = write.now;
    let (text, window) = reopen.window.clone().unwrap_or_else(|| (job.completion_window.clone(), job.window));
    let row = sqlx::query(concat!(
        "update jobs set state = case when in_progress_at is null then 'validating' else 'in_progress' end,
            ending = null,
            cancel_mode = 'drain', round = round + 1, retries_used = 0, completion_window = $2, window_us = $3,
            expires_at = $4, finalizing_at = null, completed_at = null, expired_at = null, cancelling_at = null,
            cancelled_at = null, output_file_id = null, error_file_id = null, final_completed = null,
            final_failed = null, final_cancelled = null, final_expired = null, final_input_tokens = null,
            final_cached_tokens = null, final_output_tokens = null, final_reasoning_tokens = null,
            step_due_at = case when in_progress_at is null then $5::bigint end
        where job_id = $1 returning ",
        job_columns!("")
    ))
    .bind(job.id.uuid())
    .bind(as_text(&text))
    .bind(micros(window))
    .bind(jobs::window_end(write, window).micros())
    .bind(now)
    .row(write)
    .await?;
    jobs::read(&row)
}

/// Moves the bits of every shard, piece by piece; `None` when a leftover segment
/// was written for a shard that has moved on.
async fn reopen_shards(write: &mut Write, job: &Job, reopen: &Reopen) -> Result<Option<Tally>, Error> {
    let selected = match &reopen.items {
        ReopenItems::NotCompleted => None,
        ReopenItems::Selected(items) => Some(items.iter().copied().collect::<BTreeSet<ItemIndex>>()),
    };
    let mut leftovers: BTreeMap<u32, &NewSegment> = BTreeMap::new();
    for segment in &reopen.leftover_segments {
        if leftovers.insert(segment.shard.0, segment).is_some() {
            return Err(refused(DOING, format!("two leftover segments for shard {}", segment.shard)));
        }
    }
    let (mut tally, mut from) = (Tally::default(), 0);
    loop {
        let rows = sqlx::query(
            "select shard_index, first_item, num_items, epoch, next_seq, done, failed, cancelled, expired from shards
            where job_id = $1 and shard_index >= $2 order by shard_index limit $3 for no key update",
        )
        .bind(job.id.uuid())
        .bind(short(from))
        .bind(PIECE)
        .rows(write)
        .await?;
        let Some(last) = rows.last() else { break };
        from = last.u32("shard_index")? + 1;
        let mut changed = Vec::new();
        for row in &rows {
            let leftover = leftovers.remove(&row.u32("shard_index")?);
            let mut shard = Reopening::read(row, job)?;
            if !shard.apply(selected.as_ref(), leftover, &mut tally)? {
                return Ok(None);
            }
            if let Some(segment) = leftover {
                segments::insert(write, job.id, job.round + 1, segment).await?;
            }
            if shard.is_touched(leftover) {
                changed.push((shard, leftover.is_some()));
            }
        }
        update_shards(write, job.id, changed).await?;
    }
    match leftovers.keys().next() {
        Some(shard) => Err(refused(DOING, format!("a leftover segment for shard {shard}, which is not there"))),
        None => Ok(Some(tally)),
    }
}

async fn update_shards(write: &mut Write, job: JobId, changed: Vec<(Reopening, bool)>) -> Result<(), Error> {
    let now = write.now;
    let counts = |of: fn(&Reopening) -> &Bitmap| -> Vec<i32> {
        changed.iter().map(|(shard, _)| short(of(shard).count_ones())).collect()
    };
    let bits = |of: fn(&Reopening) -> &Bitmap| -> Vec<Option<Bits>> {
        changed.iter().map(|(shard, _)| Bits::or_null(of(shard))).collect()
    };
    sqlx::query(
        "update shards s set state = case when k.num_done = s.num_items then 'done' else 'ready' end,
            epoch = s.epoch + 1, next_seq = s.next_seq + k.num_segments, not_before = $2, crashes = 0,
            probe_item = null, probe_epoch = null, probe_deaths = 0,
            done = k.done, num_done = k.num_done, failed = k.failed, num_failed = k.num_failed,
            cancelled = k.cancelled, num_cancelled = k.num_cancelled,
            expired = k.expired, num_expired = k.num_expired
        from unnest($3::integer[], $4::integer[], $5::varbit[], $6::integer[], $7::varbit[], $8::integer[],
            $9::varbit[], $10::integer[], $11::varbit[], $12::integer[])
            k (shard_index, num_segments, done, num_done, failed, num_failed, cancelled, num_cancelled,
                expired, num_expired)
        where s.job_id = $1 and s.shard_index = k.shard_index",
    )
    .bind(job.uuid())
    .bind(now)
    .bind(changed.iter().map(|(shard, _)| short(shard.shard)).collect::<Vec<_>>())
    .bind(changed.iter().map(|(_, has_leftover)| i32::from(*has_leftover)).collect::<Vec<_>>())
    .bind(changed.iter().map(|(shard, _)| Bits::of(&shard.done)).collect::<Vec<_>>())
    .bind(counts(|shard| &shard.done))
    .bind(bits(|shard| &shard.failed))
    .bind(counts(|shard| &shard.failed))
    .bind(bits(|shard| &shard.cancelled))
    .bind(counts(|shard| &shard.cancelled))
    .bind(bits(|shard| &shard.expired))
    .bind(counts(|shard| &shard.expired))
    .change(write)
    .await?;
    Ok(())
}

/// One shard's bits on their way into the new round.
struct Reopening {
    shard: u32,
    first_item: u64,
    epoch: u64,
    next_seq: u32,
    ended_cancelled: bool,
    before: [Bitmap; 2],
    done: Bitmap,
    failed: Bitmap,
    cancelled: Bitmap,
    expired: Bitmap,
}

impl Reopening {
    fn read(row: &PgRow, job: &Job) -> Result<Self, Error> {
        let num_items = row.u32("num_items")?;
        let (done, failed) = (row.bitmap("done", num_items)?, row.bitmap("failed", num_items)?);
        Ok(Self {
            shard: row.u32("shard_index")?,
            first_item: row.u64("first_item")?,
            epoch: row.u64("epoch")?,
            next_seq: row.u32("next_seq")?,
            ended_cancelled: job.state == JobState::Cancelled,
            before: [done.clone(), failed.clone()],
            done,
            failed,
            cancelled: row.bitmap("cancelled", num_items)?,
            expired: row.bitmap("expired", num_items)?,
        })
    }

    /// Clears what runs again and sets what a leftover segment settles. False when
    /// the leftover was written for another epoch or sequence.
    fn apply(
        &mut self,
        selected: Option<&BTreeSet<ItemIndex>>,
        leftover: Option<&NewSegment>,
        tally: &mut Tally,
    ) -> Result<bool, Error> {
        if leftover.is_some_and(|segment| segment.epoch.0 != self.epoch || segment.seq != self.next_seq) {
            return Ok(false);
        }
        let num_items = self.done.num_bits();
        let mut runs = Bitmap::new(num_items);
        let mut left_out = Bitmap::new(num_items);
        for bit in 0..num_items {
            let (done, failed) = (self.done.get(bit), self.failed.get(bit));
            let wanted = selected.is_none_or(|items| items.contains(&ItemIndex(self.first_item + u64::from(bit))));
            let settled_late = self.cancelled.get(bit) || self.expired.get(bit);
            match (done && !failed, wanted) {
                (true, _) => tally.kept += 1,
                (false, true) => {
                    runs.set(bit);
                    *(if done && !settled_late { &mut tally.failed_again } else { &mut tally.unfinished }) += 1;
                }
                (false, false) => {
                    tally.kept += 1;
                    if !done {
                        left_out.set(bit);
                    }
                }
            }
        }
        let settled = leftover.map_or_else(|| Bitmap::new(num_items), |segment| segment.items.clone());
        if settled != left_out || leftover.is_some_and(|segment| !is_subset(&segment.items, &segment.failed)) {
            let why =
                format!("leftover segments must hold, as failed, the undone items left out of shard {}", self.shard);
            return Err(refused(DOING, why));
        }
        for bits in [&mut self.done, &mut self.failed, &mut self.cancelled, &mut self.expired] {
            bits.subtract(&runs);
        }
        self.done.union(&left_out);
        self.failed.union(&left_out);
        (if self.ended_cancelled { &mut self.cancelled } else { &mut self.expired }).union(&left_out);
        Ok(true)
    }

    /// Whether the shard's row changes: its bits do, or items of it are undone.
    fn is_touched(&self, leftover: Option<&NewSegment>) -> bool {
        leftover.is_some() || !self.done.is_full() || self.before[0] != self.done || self.before[1] != self.failed
    }
}
