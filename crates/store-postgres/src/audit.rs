//! Audit: what the CHECK constraints cannot hold, because it spans rows or bits.
//!
//! Above all the promise itself: an item that is done has its outcome in a segment,
//! and no round gives it two. Each finding is one sentence that names the row.

use std::collections::BTreeMap;

use overnight_store::Error;
use overnight_types::Bitmap;
use sqlx::PgConnection;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use crate::commit::is_subset;
use crate::error::failed;
use crate::row::Read;

const DOING: &str = "audit the database";

/// Findings told at most.
pub(crate) const FINDINGS_MAX: usize = 20;

/// Shards read at a time.
const PIECE: i64 = 500;

/// Job and shard.
type Key = (Uuid, i64);

fn key(row: &PgRow) -> Result<Key, Error> {
    Ok((row.uuid("job_id")?, row.int("shard_index")?))
}

/// Jobs whose shards do not add up or whose final counts are not theirs, shards whose
/// counts are not those of their bits or whose segments are not all there; in words.
pub(crate) async fn find_open_accounting(connection: &mut PgConnection) -> Result<Vec<String>, Error> {
    let mut findings = jobs_that_do_not_add_up(connection).await?;
    findings.extend(jobs_with_other_final_counts(connection).await?);
    findings.extend(shards_that_do_not_add_up(connection).await?);
    findings.truncate(FINDINGS_MAX);
    Ok(findings)
}

async fn jobs_that_do_not_add_up(connection: &mut PgConnection) -> Result<Vec<String>, Error> {
    let rows = sqlx::query(
        "select j.job_id, j.num_items, j.num_shards, count(s.shard_index) as shards_there,
            coalesce(sum(s.num_items), 0)::bigint as items_there
        from jobs j left join shards s on s.job_id = j.job_id
        where j.in_progress_at is not null and j.deleted_at is null
        group by j.job_id
        having count(s.shard_index) <> j.num_shards or coalesce(sum(s.num_items), 0) <> j.num_items limit 20",
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(failed(DOING))?;
    let finding = |row: &PgRow| {
        Ok(format!(
            "{} has {} items in {} shards, but its shards hold {} in {}",
            row.job_id()?,
            row.u64("num_items")?,
            row.u64("num_shards")?,
            row.u64("items_there")?,
            row.u64("shards_there")?
        ))
    };
    rows.iter().map(finding).collect()
}

/// The counts that an ended job shows are those of its shards; what its end left
/// undone counts as the kind of that end.
async fn jobs_with_other_final_counts(connection: &mut PgConnection) -> Result<Vec<String>, Error> {
    let rows = sqlx::query(
        "with sums as (
            select j.job_id, j.final_completed, j.final_failed, j.final_cancelled, j.final_expired,
                coalesce(sum(s.num_done - s.num_failed), 0)::bigint as completed,
                coalesce(sum(s.num_failed - s.num_cancelled - s.num_expired), 0)::bigint as failed,
                coalesce(sum(s.num_cancelled), 0)::bigint + case when j.state = 'cancelled'
                    then j.num_items - coalesce(sum(s.num_done), 0)::bigint else 0 end as cancelled,
                coalesce(sum(s.num_expired), 0)::bigint + case when j.state = 'expired'
                    then j.num_items - coalesce(sum(s.num_done), 0)::bigint else 0 end as expired
            from jobs j left join shards s on s.job_id = j.job_id
            where j.final_completed is not null and j.deleted_at is null
            group by j.job_id)
        select job_id, final_completed, final_failed, final_cancelled, final_expired, completed, failed, cancelled,
            expired
        from sums
        where (final_completed, final_failed, final_cancelled, final_expired)
            is distinct from (completed, failed, cancelled, expired) limit 20",
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(failed(DOING))?;
    let finding = |row: &PgRow| {
        let told = four(row, ["final_completed", "final_failed", "final_cancelled", "final_expired"])?;
        let there = four(row, ["completed", "failed", "cancelled", "expired"])?;
        Ok(format!("{} ended with {told}, but its shards hold {there}", row.job_id()?))
    };
    rows.iter().map(finding).collect()
}

/// Outcomes by kind, in words, as they stand: a damaged row may hold anything.
fn four(row: &PgRow, columns: [&'static str; 4]) -> Result<String, Error> {
    let kinds = ["completed", "failed", "cancelled", "expired"];
    let told = columns.iter().zip(kinds).map(|(column, kind)| {
        let count = row.int_or_null(column)?.map_or_else(|| "no".to_owned(), |count| count.to_string());
        Ok(format!("{count} {kind}"))
    });
    Ok(told.collect::<Result<Vec<_>, Error>>()?.join(", "))
}

async fn shards_that_do_not_add_up(connection: &mut PgConnection) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    let mut after: Key = (Uuid::nil(), -1);
    loop {
        let rows = sqlx::query(
            "select s.job_id, s.shard_index, s.num_items, s.num_done, s.num_failed, s.num_cancelled, s.num_expired,
                s.next_seq, s.done, s.failed, s.cancelled, s.expired,
                (select count(*) from segments g
                    where g.job_id = s.job_id and g.shard_index = s.shard_index) as num_segments
            from shards s join jobs j on j.job_id = s.job_id
            where (s.job_id, s.shard_index) > ($1, $2) and j.deleted_at is null
            order by s.job_id, s.shard_index limit $3",
        )
        .bind(after.0)
        .bind(after.1)
        .bind(PIECE)
        .fetch_all(&mut *connection)
        .await
        .map_err(failed(DOING))?;
        let Some(last) = rows.last() else { break };
        let upto = key(last)?;
        let outcomes = outcomes_between(connection, &after, &upto).await?;
        after = upto;
        for row in &rows {
            let why = match finding_of_shard(row)? {
                Some(why) => Some(why),
                None => {
                    let shard = key(row)?;
                    finding_of_outcomes(row, outcomes.get(&shard).map_or(&[], Vec::as_slice))?
                }
            };
            findings.extend(why.map(|why| format!("shard {} of {}: {why}", row_index(row), row_job(row))));
        }
        if findings.len() >= FINDINGS_MAX {
            break;
        }
    }
    Ok(findings)
}

/// What a segment's row says of items; bits as they are stored.
struct Outcomes {
    round: i64,
    num_items: i64,
    items: Option<Bitmap>,
    failed: Option<Bitmap>,
}

/// Segments of the shards after one and up to another, by shard.
async fn outcomes_between(
    connection: &mut PgConnection,
    after: &Key,
    upto: &Key,
) -> Result<BTreeMap<Key, Vec<Outcomes>>, Error> {
    let rows = sqlx::query(
        "select job_id, shard_index, round, num_items, items, failed from segments
        where (job_id, shard_index) > ($1, $2) and (job_id, shard_index) <= ($3, $4)",
    )
    .bind(after.0)
    .bind(after.1)
    .bind(upto.0)
    .bind(upto.1)
    .fetch_all(&mut *connection)
    .await
    .map_err(failed(DOING))?;
    let mut outcomes: BTreeMap<_, Vec<Outcomes>> = BTreeMap::new();
    for row in &rows {
        let shard = key(row)?;
        outcomes.entry(shard).or_default().push(Outcomes {
            round: row.int("round")?,
            num_items: row.int("num_items")?,
            items: row.bits_or_null("items")?,
            failed: row.bits_or_null("failed")?,
        });
    }
    Ok(outcomes)
}

fn finding_of_outcomes(row: &PgRow, segments: &[Outcomes]) -> Result<Option<String>, Error> {
    let num_items = row.u32("num_items")?;
    let mut held = Bitmap::new(num_items);
    let mut by_round: BTreeMap<i64, Bitmap> = BTreeMap::new();
    for Outcomes { round, num_items: told, items, failed } in segments {
        let fits = |bits: &&Bitmap| bits.num_bits() == num_items;
        let failed_bits = failed.clone().unwrap_or_else(|| Bitmap::new(num_items));
        let (Some(items), true) = (items.as_ref().filter(fits), fits(&&failed_bits)) else {
            return Ok(Some("a segment has not one bit for each of the shard's items".to_owned()));
        };
        if i64::from(items.count_ones()) != *told {
            return Ok(Some(format!("a segment has {told} outcomes by its count, {} by its bits", items.count_ones())));
        }
        if !is_subset(&failed_bits, items) {
            return Ok(Some("a segment marks an item failed that it does not hold".to_owned()));
        }
        let of_round = by_round.entry(*round).or_insert_with(|| Bitmap::new(num_items));
        if of_round.intersects(items) {
            return Ok(Some(format!("an item has two outcomes in round {round}")));
        }
        of_round.union(items);
        held.union(items);
    }
    let mut lost = row.bitmap("done", num_items)?;
    lost.subtract(&held);
    let num_lost = lost.count_ones();
    Ok((num_lost > 0).then(|| format!("{num_lost} items are done and no segment holds their outcome")))
}

fn row_index(row: &PgRow) -> i64 {
    row.int("shard_index").unwrap_or(-1)
}

fn row_job(row: &PgRow) -> String {
    row.job_id().map_or_else(|_| "an unreadable job".to_owned(), |job| job.to_string())
}

fn finding_of_shard(row: &PgRow) -> Result<Option<String>, Error> {
    let num_items = row.u32("num_items")?;
    let bits = |column| row.bitmap(column, num_items);
    let (Ok(done), Ok(failed_bits), Ok(cancelled), Ok(expired)) =
        (bits("done"), bits("failed"), bits("cancelled"), bits("expired"))
    else {
        return Ok(Some("a bitmap has not one bit for each of its items".to_owned()));
    };
    let (num_done, num_failed) = (row.u32("num_done")?, row.u32("num_failed")?);
    let (num_cancelled, num_expired) = (row.u32("num_cancelled")?, row.u32("num_expired")?);
    let (num_segments, next_seq) = (row.u32("num_segments")?, row.u32("next_seq")?);
    Ok(if (done.count_ones(), failed_bits.count_ones()) != (num_done, num_failed) {
        let (bits_done, bits_failed) = (done.count_ones(), failed_bits.count_ones());
        Some(format!(
            "{num_done} done and {num_failed} failed by its counts, {bits_done} and {bits_failed} by its bits"
        ))
    } else if (cancelled.count_ones(), expired.count_ones()) != (num_cancelled, num_expired) {
        let (bits_cancelled, bits_expired) = (cancelled.count_ones(), expired.count_ones());
        Some(format!(
            "{num_cancelled} cancelled and {num_expired} expired by its counts, \
             {bits_cancelled} and {bits_expired} by its bits"
        ))
    } else if !is_subset(&failed_bits, &done) {
        Some("an item is failed and not done".to_owned())
    } else if !is_subset(&cancelled, &failed_bits) || !is_subset(&expired, &failed_bits) {
        Some("an item is cancelled or expired and not failed".to_owned())
    } else if cancelled.intersects(&expired) {
        Some("an item is cancelled and expired".to_owned())
    } else if num_segments != next_seq {
        Some(format!("{next_seq} segments were committed, {num_segments} are there"))
    } else {
        None
    })
}
