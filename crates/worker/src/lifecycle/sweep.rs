//! Removes what nothing needs any more: jobs whose time is over, orphaned segments,
//! unclaimed uploads, leftovers of killed writes, deleted files and jobs, old attempts.
//!
//! Invariants: an object goes only when no row names it and no writer that could
//! still name it is left (its epoch is fenced, or its shard or job has ended), and
//! only after an age that outlasts any write under way, by this machine's clock and
//! by the database's: one that runs ahead makes nothing old. Every statement is bounded, and
//! so is what one sweep removes; listings are streamed, so memory does not grow with them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
/// For so long nothing is asked about what was seen.
const SEEN_FOR: Duration = Duration::from_secs(24 * 3600);
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

/// Ended jobs of which a sweep has seen every object since their end, by their round: the next ones
/// ask nothing about those, for a day. Grows with the jobs that are kept, some bytes each.
#[derive(Debug)]
pub struct SweptJobs(Mutex<(Instant, HashMap<JobId, u32>)>);

impl Default for SweptJobs {
    fn default() -> Self {
        Self(Mutex::new((Instant::now(), HashMap::new())))
    }
}

impl SweptJobs {
    fn round(&self, job: JobId) -> Option<u32> {
        self.lock().1.get(&job).copied()
    }

    fn extend(&self, seen: Vec<(JobId, u32)>) {
        let mut known = self.lock();
        if known.0.elapsed() > SEEN_FOR {
            // A writer that had been stopped may have left something since.
            *known = (Instant::now(), HashMap::new());
        }
        known.1.extend(seen);
    }

    fn lock(&self) -> MutexGuard<'_, (Instant, HashMap<JobId, u32>)> {
        // One operation at a time, whole across a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sweeps everything once.
pub async fn sweep(store: &dyn Store, blobs: &Blobs, ages: &SweepAges) -> Result<Swept, Error> {
    sweep_again(store, blobs, ages, &SweptJobs::default()).await
}

/// The same, knowing what earlier sweeps of this process have seen.
pub async fn sweep_again(
    store: &dyn Store,
    blobs: &Blobs,
    ages: &SweepAges,
    known: &SweptJobs,
) -> Result<Swept, Error> {
    let now = by_both_clocks(store).await?;
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
        unclaimed: sweep_unclaimed(store, blobs, now, ages.unclaimed).await?,
        ..Swept::default()
    };
    let leftovers = blobs.sweep_leftovers(now, ages.unclaimed).await.map_err(Error::blobs("sweep leftovers"))?;
    swept.leftovers = u64::from(leftovers) + sweep_probes(blobs, now, ages.unclaimed).await?;
    swept.orphans = sweep_orphans(store, blobs, Prefix::Jobs, (now, ages.orphans), known).await?;
    Ok(swept)
}

/// Sweeps one job's orphans; run after its end.
pub async fn sweep_job(store: &dyn Store, blobs: &Blobs, job: JobId, ages: &SweepAges) -> Result<u64, Error> {
    let now = by_both_clocks(store).await?;
    sweep_orphans(store, blobs, Prefix::Job(job), (now, ages.orphans), &SweptJobs::default()).await
}

/// The moment by which a whole sweep reckons ages: the earlier one of this machine's clock and the
/// database's. A clock that jumps during the sweep changes nothing.
async fn by_both_clocks(store: &dyn Store) -> Result<Timestamp, Error> {
    let here = Timestamp::now();
    let there = store.now().await.map_err(Error::store("read the database's clock"))?;
    if here.since(there) > AHEAD_WARNED {
        let ahead_s = here.since(there).as_secs();
        tracing::warn!(ahead_s, "this machine's clock is ahead of the database's: set it right");
    }
    Ok(here.min(there))
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

async fn sweep_unclaimed(store: &dyn Store, blobs: &Blobs, now: Timestamp, age: Duration) -> Result<u64, Error> {
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
async fn sweep_probes(blobs: &Blobs, now: Timestamp, age: Duration) -> Result<u64, Error> {
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

/// A job whose objects are being listed.
struct LookedAt {
    job: JobId,
    /// Its round, when it has ended.
    ended_in: Option<u32>,
    /// An earlier sweep has seen all of this round.
    is_seen: bool,
    /// No object was too young to be judged.
    is_whole: bool,
}

impl LookedAt {
    async fn begin(store: &dyn Store, job: JobId, known: &SweptJobs) -> Result<Self, Error> {
        let row = store.find_job(job).await.map_err(Error::store("find a job"))?;
        let ended_in = row.filter(|row| row.state.is_terminal()).map(|row| row.round);
        let is_seen = ended_in.is_some() && known.round(job) == ended_in;
        Ok(Self { job, ended_in, is_seen, is_whole: true })
    }

    /// All its objects were listed: what the next sweep need not look at.
    fn end(self) -> Option<(JobId, u32)> {
        self.ended_in.filter(|_| self.is_whole).map(|round| (self.job, round))
    }
}

async fn sweep_orphans(
    store: &dyn Store,
    blobs: &Blobs,
    prefix: Prefix,
    (now, age): (Timestamp, Duration),
    known: &SweptJobs,
) -> Result<u64, Error> {
    let mut listed = blobs.list(prefix);
    let mut rows: Option<ShardRows> = None;
    let (mut looked, mut orphaned_jobs) = (None::<LookedAt>, BTreeMap::<JobId, u64>::new());
    // The job of the last object that was too young, and jobs that were looked at whole.
    let (mut young_in, mut seen) = (None, Vec::new());
    let mut orphans = Vec::new();
    let mut removed = 0;
    while removed < REMOVED_MAX
        && let Some(object) = listed.try_next().await.map_err(Error::blobs("list objects"))?
    {
        let Some(job) = object.name.job() else { continue };
        if !is_old(&object, now, age) {
            young_in = Some(job);
            looked.iter_mut().filter(|looked| looked.job == job).for_each(|looked| looked.is_whole = false);
            continue;
        }
        if looked.as_ref().is_none_or(|looked| looked.job != job) {
            seen.extend(looked.take().and_then(LookedAt::end));
            if !is_known(store, job).await? {
                // All at the end: the listing is still under way.
                if orphaned_jobs.len() < ORPHANED_JOBS_MAX || orphaned_jobs.contains_key(&job) {
                    *orphaned_jobs.entry(job).or_default() += 1;
                }
                continue;
            }
            let begun = LookedAt::begin(store, job, known).await?;
            looked = Some(LookedAt { is_whole: young_in != Some(job), ..begun });
        }
        if looked.as_ref().is_some_and(|looked| looked.is_seen) {
            continue;
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
    if removed < REMOVED_MAX {
        seen.extend(looked.and_then(LookedAt::end));
    }
    removed += delete_orphans(blobs, &mut orphans).await?;
    // A purge that died after the last row: ids are never used again, so nothing under
    // this one will be wanted.
    for (job, num_objects) in orphaned_jobs {
        blobs.remove_job(job).await.map_err(Error::blobs("delete the objects of a job without a row"))?;
        removed += num_objects;
    }
    // Only now that what was found is gone.
    known.extend(seen);
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
