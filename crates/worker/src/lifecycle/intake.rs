//! The intake step: the pass of [`crate::intake`] with its progress recorded.
//!
//! Invariant: an object of a piece (a sorted run of custom ids, the index) is
//! durable before the transaction that counts on it, so the step can be killed at
//! any point and goes on from its last record with the same result.

use overnight_blobs::ObjectName;
use overnight_blobs::index::{self, Runs};
use overnight_store::{Guarded, IntakeEnd, IntakeProgress, Job, NewShard, StepLease, Store};
use overnight_types::{JobState, ShardIndex, chain};

use super::StepContext;
use crate::Error;
use crate::intake::{Expected, Findings, IntakeOptions, KnownModels, Pass, Piece, Source, SourceError};
use crate::intake::{duplicates, known_models, unreadable};

/// Shard rows per read.
const SHARDS_PER_READ: u32 = 5_000;

/// Reads, checks and cuts a job's input; ends with the job in progress or failed.
pub async fn run(context: &StepContext, lease: &StepLease) -> Result<(), Error> {
    let sizes = IntakeOptions::new(lease.job.endpoint, KnownModels::Any);
    run_with(context, lease, sizes).await
}

/// As [`run`], with the sizes of pieces and runs given; the rest of the options is
/// the job's.
pub async fn run_with(context: &StepContext, lease: &StepLease, mut options: IntakeOptions) -> Result<(), Error> {
    let job = &lease.job;
    options.limits = context.limits.clone();
    options.expected = Some(Expected { bytes: job.input_bytes, sha256: job.input_sha256 });
    let mut pass = match Pass::resume(job.id, options.clone(), job.intake_offset, job.intake_notes.as_deref()) {
        Some(pass) => pass,
        None => {
            tracing::warn!(job.id = %job.id, "the notes of intake are another version's: it starts over");
            let restarted = context.store.restart_intake_if_leased(lease).await;
            held(restarted.map_err(Error::store("start intake over"))?)?;
            Pass::new(job.id, options)
        }
    };
    let findings = match read_all(context, lease, &mut pass).await {
        Ok(findings) => findings,
        Err(Trouble::Input(err)) => unreadable(err).map_err(|source| source_error(job, source))?,
        Err(Trouble::Ours(err)) => return Err(err),
    };
    fail::fail_point!("intake::before_finish");
    finish(context, lease, &pass, findings).await?;
    fail::fail_point!("intake::after_finish");
    delete_runs(context, job, pass.runs().len()).await;
    Ok(())
}

/// What can go wrong: the input itself, or everything else.
enum Trouble {
    Input(SourceError),
    Ours(Error),
}

impl From<SourceError> for Trouble {
    fn from(err: SourceError) -> Self {
        Trouble::Input(err)
    }
}

impl From<Error> for Trouble {
    fn from(err: Error) -> Self {
        Trouble::Ours(err)
    }
}

async fn read_all(context: &StepContext, lease: &StepLease, pass: &mut Pass) -> Result<Findings, Trouble> {
    let job = &lease.job;
    let source = Source::Object(context.blobs.clone(), ObjectName::file(job.input_file_id));
    if !pass.is_finished() {
        restore_runs(context, job, pass, &source).await?;
    }
    while !pass.is_finished() {
        let piece = pass.read_piece(&source, None).await?;
        let at_end = piece.at_end;
        let shards = if at_end {
            end(context, job, pass, &source, piece).await?
        } else {
            write_run(context, job, pass, piece).await?
        };
        record(context, lease, pass, shards).await?;
        fail::fail_point!("intake::after_record");
    }
    Ok(pass.findings().clone())
}

/// Writes the runs again when one is gone: a job that was cancelled while it was
/// validated has none left once the sweep has passed, and may be resumed.
async fn restore_runs(context: &StepContext, job: &Job, pass: &mut Pass, source: &Source) -> Result<(), Trouble> {
    let mut all_there = true;
    for (run, bytes) in (0..).zip(pass.runs()) {
        let size = context.blobs.size(&ObjectName::intake_run(job.id, run)).await;
        all_there &= size.map_err(Error::blobs("look at a run of custom ids"))? == Some(*bytes);
    }
    if all_there {
        return Ok(());
    }
    tracing::warn!(job.id = %job.id, "runs of custom ids are gone, reading the input again up to the last record");
    let options = IntakeOptions { expected: None, ..pass.options().clone() };
    let mut again = Pass::new(job.id, options).up_to(pass.offset());
    loop {
        let piece = again.read_piece(source, None).await?;
        let at_end = piece.at_end;
        write_run(context, job, &mut again, piece).await?;
        if at_end {
            pass.set_runs(again.runs().to_vec());
            return Ok(());
        }
    }
}

/// Writes a piece's custom ids as a sorted run.
async fn write_run(
    context: &StepContext,
    job: &Job,
    pass: &mut Pass,
    mut piece: Piece,
) -> Result<Vec<NewShard>, Error> {
    let run = u32::try_from(pass.runs().len()).expect("an index has fewer runs than items");
    let bytes = index::encode_run(&mut piece.entries);
    pass.add_run(bytes.len() as u64);
    let name = ObjectName::intake_run(job.id, run);
    context.blobs.put(&name, bytes).await.map_err(Error::blobs("write a run of custom ids"))?;
    fail::fail_point!("intake::after_run_object");
    Ok(piece.shards)
}

/// Ends the pass: merges the runs into the index and proves duplicates.
async fn end(
    context: &StepContext,
    job: &Job,
    pass: &mut Pass,
    source: &Source,
    mut piece: Piece,
) -> Result<Vec<NewShard>, Trouble> {
    index::encode_run(&mut piece.entries);
    let written = (0..).zip(pass.runs()).map(|(run, bytes)| (ObjectName::intake_run(job.id, run), *bytes)).collect();
    let runs = Runs { blobs: &context.blobs, written, last: &piece.entries };
    // A job that fails needs no index.
    let out = pass.findings().is_empty().then(|| (&context.blobs, ObjectName::index(job.id)));
    let twins = index::merge(runs, out, pass.options().limits.errors_kept_max)
        .await
        .map_err(Error::blobs("merge the custom ids"))?;
    fail::fail_point!("intake::after_index_object");
    let cuts = match twins.total {
        0 => Vec::new(),
        _ => [recorded_cuts(context.store.as_ref(), job).await?, piece.shards.clone()].concat(),
    };
    let duplicates = duplicates::verify(source, &cuts, twins, &pass.options().limits).await?;
    let models = known_models(context.store.as_ref(), &context.known_models).await?;
    pass.finish(&models, duplicates);
    Ok(piece.shards)
}

async fn recorded_cuts(store: &dyn Store, job: &Job) -> Result<Vec<NewShard>, Error> {
    let mut cuts: Vec<NewShard> = Vec::new();
    loop {
        let from = ShardIndex(u32::try_from(cuts.len()).expect("shards are counted in 32 bits"));
        let page = store.list_shards(job.id, from, SHARDS_PER_READ).await.map_err(Error::store("list shards"))?;
        if page.is_empty() {
            return Ok(cuts);
        }
        cuts.extend(page.into_iter().map(|shard| shard.cut));
    }
}

async fn record(context: &StepContext, lease: &StepLease, pass: &Pass, shards: Vec<NewShard>) -> Result<(), Error> {
    let progress = IntakeProgress { offset: pass.offset(), notes: pass.save() };
    let recorded = context.store.record_intake_if_leased(lease, progress, shards).await;
    held(recorded.map_err(Error::store("record intake"))?)
}

async fn finish(context: &StepContext, lease: &StepLease, pass: &Pass, findings: Findings) -> Result<(), Error> {
    let end = if findings.is_empty() {
        let model = pass.model().ok_or_else(|| damaged(&lease.job, "its intake found items but no model"))?;
        let (num_items, num_shards) = (pass.num_items(), pass.num_shards());
        IntakeEnd::Valid { model: model.to_owned(), num_items, num_shards }
    } else {
        // The index of a job that fails is of no use; it may have been written before the fault was found.
        let index = ObjectName::index(lease.job.id);
        context.blobs.delete(&index).await.map_err(Error::blobs("delete an index"))?;
        IntakeEnd::Invalid { errors: findings.to_json().to_string() }
    };
    let finished = context.store.finish_intake_if_leased(lease, end).await;
    held(finished.map_err(Error::store("end intake"))?)
}

/// Best effort: the sweep takes what stays.
async fn delete_runs(context: &StepContext, job: &Job, num_runs: usize) {
    for run in 0..u32::try_from(num_runs).unwrap_or(u32::MAX) {
        if let Err(err) = context.blobs.delete(&ObjectName::intake_run(job.id, run)).await {
            tracing::debug!(job.id = %job.id, error = %chain(&err), "could not delete a run of intake, left to the sweep");
        }
    }
}

pub(super) fn held<T>(guarded: Guarded<JobState, T>) -> Result<(), Error> {
    match guarded {
        Guarded::Applied(_) => Ok(()),
        Guarded::Lost { .. } => Err(Error::Stopped("the step's lease was lost, or the job moved on")),
    }
}

fn source_error(job: &Job, err: SourceError) -> Error {
    match err {
        SourceError::Blobs(source) => Error::Blobs { doing: "read the input", source },
        other => damaged(job, &chain(&other)),
    }
}

fn damaged(job: &Job, what: &str) -> Error {
    Error::Damaged { job: job.id, what: what.to_owned() }
}
