//! The finalize step: places every line in input order and publishes the files.
//!
//! Invariants: the files are a pure function of the committed segments, the input
//! and the job's ending, so two finalizers write the same bytes and the step can
//! be run again from any point; nothing becomes visible unless the lease still stood
//! after the last row was read, so what a finalizer publishes is of its own round,
//! however late it comes; a segment that is missing or damaged fails the
//! step, which is then retried, and nothing is published; memory is bounded by a
//! few shards, whatever their number.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use futures::stream::{self, Stream, TryStreamExt};
use overnight_blobs::manifest::{FileEntry, Manifest};
use overnight_blobs::{BlobWriter, Blobs, ObjectName, Written};
use overnight_store::{FilePurpose, Job, NewFile, Published, Segment, Shard, StepLease, Store};
use overnight_types::{Ending, FileId, OutcomeCounts, OutcomeKind, ShardIndex, Usage};

use super::StepContext;
use super::intake::held;
use super::shard_lines::ShardLines;
use super::undone::{undone_lines, undone_outcome};
use crate::Error;

/// Shard rows, and about as many segment rows, per read.
const SHARDS_PER_READ: u32 = 64;
const SEGMENTS_PER_READ: u32 = 128;
/// Shards read ahead of the one that is being written.
const SHARDS_AHEAD: usize = 2;

/// Publishes a job's files and ends it.
pub async fn run(context: &StepContext, lease: &StepLease) -> Result<(), Error> {
    let fenced = context.store.fence_shards_if_leased(lease).await;
    held(fenced.map_err(Error::store("fence a job's shards"))?)?;
    fail::fail_point!("finalize::after_fence");
    let published = publish(context, lease).await?;
    let finished = context.store.finish_job_if_leased(lease, published).await;
    held(finished.map_err(Error::store("end a job"))?)?;
    fail::fail_point!("finalize::after_finish");
    Ok(())
}

/// Writes the output file, the error file and the manifest; repeatable. Errors with
/// [`Error::Stopped`], with nothing published, when the lease is not held any more.
pub async fn publish(context: &StepContext, lease: &StepLease) -> Result<Published, Error> {
    let job = &lease.job;
    let missing = |what: &str| Error::Damaged { job: job.id, what: format!("it ends without {what}") };
    let ending = job.ending.ok_or_else(|| missing("an ending"))?;
    let output_id = job.output_file_id.ok_or_else(|| missing("an output file id"))?;
    let error_id = job.error_file_id.ok_or_else(|| missing("an error file id"))?;
    let mut files = Files::new(&context.blobs, output_id, error_id);
    // Shards of an intake that did not end hold no outcome.
    if job.num_items > 0 {
        write_lines(context, job, ending, &mut files).await?;
    }
    fail::fail_point!("finalize::before_output_object");
    // Everything is read. A lease that stands now stood while it was read, so the rows
    // were those of this round's end; the names below are of this round too. If it is
    // lost from here on, whoever takes over writes the same bytes. Without this look a
    // finalizer that was stopped could read a later round and change published files.
    let held_still = context.store.extend_step_if_leased(lease, context.lease_ttl).await;
    held(held_still.map_err(Error::store("extend a step's lease"))?)?;
    let Files { output, error, tally, .. } = files;
    let output = output.finish().await?;
    fail::fail_point!("finalize::after_output_object");
    let error = error.finish().await?;
    fail::fail_point!("finalize::after_error_object");
    if tally.counts.total != job.num_items {
        let what = format!("{} lines for {} items", tally.counts.total, job.num_items);
        return Err(Error::Damaged { job: job.id, what });
    }
    let manifest = manifest(job, ending, &tally, output_id, output, error_id, error);
    let name = ObjectName::manifest(job.id, job.round);
    context.blobs.put(&name, manifest.to_bytes()).await.map_err(Error::blobs("write a manifest"))?;
    fail::fail_point!("finalize::after_manifest_object");
    let file = |id, what: &str, written: Option<(Written, u64)>| {
        written.map(|(written, _)| NewFile {
            id,
            filename: format!("{}_{what}.jsonl", job.id),
            purpose: FilePurpose::BatchOutput,
            bytes: written.bytes,
            sha256: written.sha256,
            expires_after_s: job.output_expires_after.map(|keep| keep.as_secs()),
        })
    };
    Ok(Published {
        output: file(output_id, "output", output),
        error: file(error_id, "error", error),
        counts: tally.counts,
        usage: tally.usage,
    })
}

async fn write_lines(context: &StepContext, job: &Job, ending: Ending, files: &mut Files) -> Result<(), Error> {
    let blobs = &context.blobs;
    let shards = shards_with_segments(context.store.as_ref(), job);
    let mut loaded = std::pin::pin!(
        shards
            .map_ok(|(shard, segments)| async move {
                let lines = ShardLines::load(blobs, job, &shard, &segments).await?;
                let undone = undone_of(blobs, job, &shard, ending).await?;
                Ok::<_, Error>((shard, lines, undone))
            })
            .try_buffered(SHARDS_AHEAD)
    );
    while let Some((shard, lines, undone)) = loaded.try_next().await? {
        write_shard(blobs, &shard, &lines, undone, ending, files).await?;
        fail::fail_point!("finalize::after_shard");
    }
    Ok(())
}

/// One shard's lines, in input order.
async fn write_shard(
    blobs: &Blobs,
    shard: &Shard,
    lines: &ShardLines,
    undone: Vec<Bytes>,
    ending: Ending,
    files: &mut Files,
) -> Result<(), Error> {
    files.tally.num_segments += lines.num_segments();
    files.tally.producers.extend(lines.producers().map(str::to_owned));
    let mut undone = undone.into_iter();
    for bit in 0..shard.cut.num_items {
        let (outcome, usage, line) = if shard.done.get(bit) {
            let (meta, line) = lines.outcome(blobs, bit).await?;
            (meta.outcome, meta.usage, line)
        } else {
            let (outcome, ..) = undone_outcome(ending).expect("undone items were made for this ending");
            (outcome, Usage::default(), undone.next().expect("a line per undone item"))
        };
        files.push(outcome, usage, &line).await?;
    }
    Ok(())
}

async fn undone_of(blobs: &Blobs, job: &Job, shard: &Shard, ending: Ending) -> Result<Vec<Bytes>, Error> {
    if shard.done.is_full() {
        return Ok(Vec::new());
    }
    let mut bits = overnight_types::Bitmap::new(shard.cut.num_items);
    shard.done.zeros().for_each(|bit| bits.set(bit));
    let lines = undone_lines(blobs, job, &shard.cut, &bits, ending).await?;
    Ok(lines.into_iter().map(|(_, line)| line).collect())
}

/// A job's shards by index, each with its segments by sequence.
fn shards_with_segments<'a>(
    store: &'a dyn Store,
    job: &'a Job,
) -> impl Stream<Item = Result<(Shard, Vec<Segment>), Error>> + 'a {
    struct Reading {
        next_shard: u32,
        shards: VecDeque<Shard>,
        segments: VecDeque<Segment>,
        /// Segments of shards below this one were read.
        segments_from: u32,
        segments_end: bool,
    }
    let start = Reading {
        next_shard: 0,
        shards: VecDeque::new(),
        segments: VecDeque::new(),
        segments_from: 0,
        segments_end: false,
    };
    stream::try_unfold(start, move |mut reading| async move {
        if reading.next_shard >= job.num_shards {
            return Ok(None);
        }
        if reading.shards.is_empty() {
            let page = store.list_shards(job.id, ShardIndex(reading.next_shard), SHARDS_PER_READ).await;
            reading.shards = page.map_err(Error::store("list shards"))?.into();
        }
        let shard = reading.shards.pop_front().filter(|shard| shard.cut.shard.0 == reading.next_shard);
        let Some(shard) = shard else {
            let what = format!("shard {} of {} has no row", reading.next_shard, job.num_shards);
            return Err(Error::Damaged { job: job.id, what });
        };
        // Rows come in whole shards, so a segment of a later shard ends this one.
        while !reading.segments_end && reading.segments_from <= reading.next_shard {
            let page = store.list_segments(job.id, ShardIndex(reading.segments_from), SEGMENTS_PER_READ).await;
            let page = page.map_err(Error::store("list segments"))?;
            match page.last() {
                Some(last) => reading.segments_from = last.new.shard.0 + 1,
                None => reading.segments_end = true,
            }
            reading.segments.extend(page);
        }
        let here = reading.segments.partition_point(|segment| segment.new.shard.0 <= reading.next_shard);
        let segments = reading.segments.drain(..here).collect();
        reading.next_shard += 1;
        Ok(Some(((shard, segments), reading)))
    })
}

/// Sums over all lines.
#[derive(Debug, Default)]
struct Tally {
    counts: OutcomeCounts,
    usage: Usage,
    num_segments: u64,
    producers: BTreeSet<String>,
}

/// Both files while they are written.
#[derive(Debug)]
struct Files {
    output: LazyFile,
    error: LazyFile,
    tally: Tally,
}

impl Files {
    fn new(blobs: &Blobs, output: FileId, error: FileId) -> Self {
        let (output, error) = (LazyFile::new(blobs, output), LazyFile::new(blobs, error));
        Self { output, error, tally: Tally::default() }
    }

    async fn push(&mut self, outcome: OutcomeKind, usage: Usage, line: &[u8]) -> Result<(), Error> {
        let counts = &mut self.tally.counts;
        counts.total += 1;
        *match outcome {
            OutcomeKind::Completed => &mut counts.completed,
            OutcomeKind::Failed => &mut counts.failed,
            OutcomeKind::Cancelled => &mut counts.cancelled,
            OutcomeKind::Expired => &mut counts.expired,
        } += 1;
        match outcome {
            OutcomeKind::Completed => {
                self.tally.usage.add(usage);
                self.output.push(line).await
            }
            _ => self.error.push(line).await,
        }
    }
}

/// A file that exists once it has a line.
#[derive(Debug)]
struct LazyFile {
    blobs: Blobs,
    name: ObjectName,
    writer: Option<BlobWriter>,
    /// Lines that the writer has not got yet.
    pending: Vec<u8>,
    num_lines: u64,
}

impl LazyFile {
    fn new(blobs: &Blobs, id: FileId) -> Self {
        let name = ObjectName::file(id);
        Self { blobs: blobs.clone(), name, writer: None, pending: Vec::new(), num_lines: 0 }
    }

    async fn push(&mut self, line: &[u8]) -> Result<(), Error> {
        self.num_lines += 1;
        self.pending.extend_from_slice(line);
        self.pending.push(b'\n');
        if self.pending.len() >= 256 << 10 { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<(), Error> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => {
                let writer = self.blobs.writer(&self.name).await.map_err(Error::blobs("start a published file"))?;
                none.insert(writer)
            }
        };
        writer.append(&self.pending).await.map_err(Error::blobs("write a published file"))?;
        self.pending.clear();
        Ok(())
    }

    /// What was written and how many lines; `None` without a line.
    async fn finish(mut self) -> Result<Option<(Written, u64)>, Error> {
        if self.num_lines == 0 {
            return Ok(None);
        }
        self.flush().await?;
        let writer = self.writer.take().expect("a flush makes the writer");
        let written = writer.finish().await.map_err(Error::blobs("publish a file"))?;
        Ok(Some((written, self.num_lines)))
    }
}

fn manifest(
    job: &Job,
    ending: Ending,
    tally: &Tally,
    output_id: FileId,
    output: Option<(Written, u64)>,
    error_id: FileId,
    error: Option<(Written, u64)>,
) -> Manifest {
    let entry =
        |id, written: Option<(Written, u64)>| written.map(|(written, lines)| FileEntry::new(id, &written, Some(lines)));
    let input = Written { bytes: job.input_bytes, sha256: job.input_sha256 };
    Manifest {
        version: Manifest::VERSION,
        job: job.id,
        round: job.round,
        ending,
        endpoint: job.endpoint.to_string(),
        model: job.model.clone(),
        input: FileEntry::new(job.input_file_id, &input, None),
        output: entry(output_id, output),
        error: entry(error_id, error),
        counts: tally.counts,
        usage: tally.usage,
        num_segments: tally.num_segments,
        producers: tally.producers.iter().cloned().collect(),
    }
}
