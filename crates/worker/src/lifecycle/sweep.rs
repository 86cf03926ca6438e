//! Removes what nothing needs any more: jobs whose time is over, orphaned segments,
//! unclaimed uploads, leftovers of killed writes, deleted files and jobs, old attempts.
//!
//! Invariants: an object goes only when no row names it and no writer that could
//! still name it is left (its epoch is fenced, or its shard or job has ended), and
//! only after an age that outlasts any write under way, by this machine's clock and
//! by the database's: one that runs ahead makes nothing old. Every statement is bounded, and
//! so is what one sweep removes; listings are streamed, so memory does not grow with them.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use futures::TryStreamExt;
use overnight_blobs::{Blobs, Listed, ObjectName, Prefix};
use overnight_store::Store;
use overnight_types::{FileId, JobId, JobState, ShardIndex, ShardState, Timestamp};

use crate::Error;

/// Rows or names per statement.
const PIECE: u32 = 200;
/// Pieces of one kind in one sweep; the rest waits for the next.
const PIECES_MAX: u32 = 500;
/// Objects of one kind that one sweep removes; the rest waits for the next.
const REMOVED_MAX: u64 = (PIECE * PIECES_MAX) as u64;
/// A clock that is so far ahead is told.
const AHEAD_WARNED: Duration = Duration::from_secs(60);
/// Jobs without a row whose objects one sweep removes.
const ORPHANED_JOBS_MAX: usize = PIECE as usize;

/// How old a thing must be before it may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepAges {
    /// Segments and intake runs that no row names.
    pub orphans: Duration,
    /// Objects under `files/` without a row, and leftovers of killed writes and probes.
    pub unclaimed: Duration,
    /// Ended jobs, from their end on; `None` keeps them.
    pub jobs: Option<Duration>,
}

impl Default for SweepAges {
    fn default() -> Self {
        Self { orphans: Duration::from_secs(3600), unclaimed: Duration::from_secs(24 * 3600), jobs: None }
    }
}

/// How many things a sweep removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Swept {
    /// Ended jobs whose time was over, hidden with their files.
    pub ended: u64,
    /// Segments and intake runs that no row names, and all objects of jobs without a row.
    pub orphans: u64,
    /// Objects under `files/` that nobody claimed.
    pub unclaimed: u64,
    /// Leftovers of killed writes and probes.
    pub leftovers: u64,
    /// Deleted or expired files.
    pub files: u64,
    /// Deleted jobs whose last row went.
    pub jobs: u64,
    /// Rows of old attempts.
    pub attempts: u64,
}

/// Sweeps everything once.
pub async fn sweep(store: &dyn Store, blobs: &Blobs, ages: &SweepAges) -> Result<Swept, Error> {
    let ages = &by_both_clocks(store, ages).await?;
    let ended = match ages.jobs {
        // First, so that what it hides goes in this sweep.
        Some(kept) => hide_ended_jobs(store, kept).await?,
        None => 0,
    };
    let mut swept = Swept {
        ended,
        files: sweep_files(store, blobs).await?,
        jobs: sweep_deleted_jobs(store, blobs).await?,
        attempts: prune_attempts(store).await?,
        unclaimed: sweep_unclaimed(store, blobs, ages.unclaimed).await?,
        ..Swept::default()
    };
    let leftovers = blobs.sweep_leftovers(ages.unclaimed).await.map_err(Error::blobs("sweep leftovers"))?;
    swept.leftovers = u64::from(leftovers) + sweep_probes(blobs, ages.unclaimed).await?;
    swept.orphans = sweep_orphans(store, blobs, Prefix::Jobs, ages.orphans).await?;
    Ok(swept)
}

/// Sweeps one job's orphans; run after its end.
pub async fn sweep_job(store: &dyn Store, blobs: &Blobs, job: JobId, ages: &SweepAges) -> Result<u64, Error> {
    let ages = by_both_clocks(store, ages).await?;
    sweep_orphans(store, blobs, Prefix::Job(job), ages.orphans).await
}

/// The ages that objects must have by this machine's clock, so that they have the ones asked for
/// by the database's too. Ended jobs are dated by the database alone.
async fn by_both_clocks(store: &dyn Store, ages: &SweepAges) -> Result<SweepAges, Error> {
    // Before the question, so that the time that it takes puts nobody ahead.
    let here = Timestamp::now();
    let ahead = here.since(store.now().await.map_err(Error::store("read the database's clock"))?);
    if ahead > AHEAD_WARNED {
        tracing::warn!(ahead_s = ahead.as_secs(), "this machine's clock is ahead of the database's: set it right");
    }
    Ok(SweepAges {
        orphans: ages.orphans.saturating_add(ahead),
        unclaimed: ages.unclaimed.saturating_add(ahead),
        jobs: ages.jobs,
    })
}

async fn hide_ended_jobs(store: &dyn Store, kept: Duration) -> Result<u64, Error> {
    let mut hidden = 0;
    for _ in 0..PIECES_MAX {
        let jobs = store.delete_jobs_ended_for(kept, PIECE).await.map_err(Error::store("hide ended jobs"))?;
        fail::fail_point!("sweep::after_hidden_jobs");
        hidden += u64::from(jobs);
        if jobs < PIECE {
            break;
        }
    }
    Ok(hidden)
}

async fn sweep_files(store: &dyn Store, blobs: &Blobs) -> Result<u64, Error> {
    let mut removed = 0;
    for _ in 0..PIECES_MAX {
        let files = store.list_removable_files(PIECE).await.map_err(Error::store("list removable files"))?;
        for id in &files {
            // The object first: a row without an object would be swept again, an object without a row not at once.
            blobs.delete(&ObjectName::file(*id)).await.map_err(Error::blobs("delete a file"))?;
            fail::fail_point!("sweep::after_file_object");
            store.forget_file(*id).await.map_err(Error::store("forget a file"))?;
        }
        removed += files.len() as u64;
        if files.len() < PIECE as usize {
            break;
        }
    }
    Ok(removed)
}

async fn sweep_deleted_jobs(store: &dyn Store, blobs: &Blobs) -> Result<u64, Error> {
    let mut removed = 0;
    for _ in 0..PIECES_MAX {
        let purged = store.purge_deleted_jobs(PIECE).await.map_err(Error::store("purge deleted jobs"))?;
        for job in purged.jobs {
            fail::fail_point!("sweep::after_job_rows");
            blobs.remove_job(job).await.map_err(Error::blobs("delete the objects of a deleted job"))?;
            removed += 1;
        }
        if !purged.has_more {
            break;
        }
    }
    Ok(removed)
}

async fn prune_attempts(store: &dyn Store) -> Result<u64, Error> {
    let mut pruned = 0;
    for _ in 0..PIECES_MAX {
        let rows = store.prune_attempts(PIECE).await.map_err(Error::store("prune attempts"))?;
        pruned += u64::from(rows);
        if rows < PIECE {
            break;
        }
    }
    Ok(pruned)
}

async fn sweep_unclaimed(store: &dyn Store, blobs: &Blobs, age: Duration) -> Result<u64, Error> {
    let now = Timestamp::now();
    let listed = blobs.list(Prefix::Files).map_err(Error::blobs("list files"));
    let old = listed.try_filter_map(|object| async move {
        let id = match object.name {
            ObjectName::File(id) if is_old(&object, now, age) => Some(id),
            _ => None,
        };
        Ok(id)
    });
    let mut pieces = std::pin::pin!(old.try_chunks(PIECE as usize));
    let mut removed = 0;
    while let Some(ids) = pieces.try_next().await.map_err(|err| err.1)? {
        let known: HashSet<FileId> =
            store.known_files(&ids).await.map_err(Error::store("find files"))?.into_iter().collect();
        let unclaimed: Vec<ObjectName> =
            ids.into_iter().filter(|id| !known.contains(id)).map(ObjectName::file).collect();
        delete_all(blobs, &unclaimed, || fail::fail_point!("sweep::after_unclaimed_object"))
            .await
            .map_err(Error::blobs("delete unclaimed files"))?;
        removed += unclaimed.len() as u64;
        if removed >= REMOVED_MAX {
            break;
        }
    }
    Ok(removed)
}

/// What starts left that died in the middle of their probe of the store.
async fn sweep_probes(blobs: &Blobs, age: Duration) -> Result<u64, Error> {
    let now = Timestamp::now();
    let old = blobs.list(Prefix::Probes).try_filter(|object| std::future::ready(is_old(object, now, age)));
    let mut pieces = std::pin::pin!(old.map_ok(|object| object.name).try_chunks(PIECE as usize));
    let mut removed = 0;
    while let Some(names) = pieces.try_next().await.map_err(|err| Error::blobs("list probes")(err.1))? {
        delete_all(blobs, &names, || ()).await.map_err(Error::blobs("delete what a probe left"))?;
        removed += names.len() as u64;
        if removed >= REMOVED_MAX {
            break;
        }
    }
    Ok(removed)
}

/// Deletes by one call for many where the store has one; on a folder one after another.
async fn delete_all(blobs: &Blobs, names: &[ObjectName], after: impl Fn()) -> Result<(), overnight_blobs::Error> {
    let at_once = if blobs.is_local() { 1 } else { names.len().max(1) };
    for names in names.chunks(at_once) {
        blobs.delete_all(names).await?;
        after();
    }
    Ok(())
}

fn is_old(object: &Listed, now: Timestamp, age: Duration) -> bool {
    now.since(object.modified) >= age
}

/// Rows of the shard whose objects are being listed.
struct ShardRows {
    job: JobId,
    shard: ShardIndex,
    /// Objects of lower epochs have no writer left; all of them when shard or job has
    /// ended. `None` when the shard's row is gone.
    fenced_below: Option<(u64, bool)>,
    named: HashSet<ObjectName>,
}

async fn sweep_orphans(store: &dyn Store, blobs: &Blobs, prefix: Prefix, age: Duration) -> Result<u64, Error> {
    let now = Timestamp::now();
    let mut listed = blobs.list(prefix);
    let mut rows: Option<ShardRows> = None;
    let (mut known_job, mut orphaned_jobs) = (None, BTreeMap::<JobId, u64>::new());
    let mut orphans = Vec::new();
    let mut removed = 0;
    while removed < REMOVED_MAX
        && let Some(object) = listed.try_next().await.map_err(Error::blobs("list objects"))?
    {
        let Some(job) = object.name.job().filter(|_| is_old(&object, now, age)) else { continue };
        if known_job != Some(job) {
            if !is_known(store, job).await? {
                // All at the end: the listing is still under way.
                if orphaned_jobs.len() < ORPHANED_JOBS_MAX || orphaned_jobs.contains_key(&job) {
                    *orphaned_jobs.entry(job).or_default() += 1;
                }
                continue;
            }
            known_job = Some(job);
        }
        let is_orphan = match object.name {
            ObjectName::Segment { job, shard, epoch, .. } => {
                let known = match rows.take().filter(|rows| (rows.job, rows.shard) == (job, shard)) {
                    Some(known) => known,
                    None => shard_rows(store, job, shard).await?,
                };
                let fenced = known.fenced_below.is_none_or(|(below, ended)| ended || epoch.0 < below);
                let is_orphan = fenced && !known.named.contains(&object.name);
                rows = Some(known);
                is_orphan
            }
            // Only a job in validation still needs them.
            ObjectName::IntakeRun { job, .. } => {
                let job = store.find_job(job).await.map_err(Error::store("find a job"))?;
                job.is_none_or(|job| {
                    job.state != JobState::Validating && job.in_progress_at.is_some() || job.state.is_terminal()
                })
            }
            _ => false,
        };
        if is_orphan {
            orphans.push(object.name);
        }
        if orphans.len() >= PIECE as usize {
            removed += delete_orphans(blobs, &mut orphans).await?;
        }
    }
    removed += delete_orphans(blobs, &mut orphans).await?;
    // A purge that died after the last row: ids are never used again, so nothing under
    // this one will be wanted.
    for (job, num_objects) in orphaned_jobs {
        blobs.remove_job(job).await.map_err(Error::blobs("delete the objects of a job without a row"))?;
        removed += num_objects;
    }
    Ok(removed)
}

/// What is an orphan once stays one: its epoch is fenced.
async fn delete_orphans(blobs: &Blobs, orphans: &mut Vec<ObjectName>) -> Result<u64, Error> {
    delete_all(blobs, orphans, || fail::fail_point!("sweep::after_orphan_object"))
        .await
        .map_err(Error::blobs("delete orphans"))?;
    Ok(std::mem::take(orphans).len() as u64)
}

async fn is_known(store: &dyn Store, job: JobId) -> Result<bool, Error> {
    Ok(!store.known_jobs(&[job]).await.map_err(Error::store("find a job"))?.is_empty())
}

async fn shard_rows(store: &dyn Store, job: JobId, shard: ShardIndex) -> Result<ShardRows, Error> {
    // The shard and its job first: a segment committed after this look has an epoch that
    // is not below it, or was written by a re-opening that began after it.
    let row = store.find_shard(job, shard).await.map_err(Error::store("find a shard"))?;
    let state = store.find_job(job).await.map_err(Error::store("find a job"))?.map(|job| job.state);
    let has_ended = state.is_none_or(JobState::is_terminal);
    let fenced_below = row.map(|row| (row.epoch.0, has_ended || row.state == ShardState::Done));
    let segments = store.list_segments_of_shard(job, shard).await.map_err(Error::store("list segments"))?;
    let name = |segment: &overnight_store::Segment| {
        let new = &segment.new;
        ObjectName::segment(job, shard, new.epoch, new.seq, &new.sha256)
    };
    Ok(ShardRows { job, shard, fenced_below, named: segments.iter().map(name).collect() })
}
