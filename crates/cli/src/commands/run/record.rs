//! The run's own record: what it is known by, and the job that it found or made.

use std::path::{Path, PathBuf};
use std::time::Duration;

use overnight_blobs::ObjectName;
use overnight_store::{FilePurpose, IdempotencyKey, InsertJob, Job, NewFile, NewJob, Reopen, ReopenItems};
use overnight_types::{Endpoint, FileId, JobId, JobState};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{RunArgs, counts_of, store_error};
use crate::client::download::hex;
use crate::config::Config;
use crate::error::{Exit, Failure, Result};
use crate::output::{Ui, human};
use crate::service::{Place, engine};
use crate::validation::Input;

/// A run may take this long before its unfinished requests expire.
const WINDOW: Duration = Duration::from_secs(30 * 86_400);
/// Bytes handed to the object store at once.
const PIECE: usize = 1 << 20;

/// What is kept of a run in the data folder, so that the same command finds it.
#[derive(Debug, Serialize, Deserialize)]
struct RunRecord {
    job: JobId,
    output: PathBuf,
}

/// What the same command has again: a hash over input, endpoint, model, overrides and output.
pub(super) async fn identity(input: &Input, endpoint: Endpoint, args: &RunArgs, config: &Config) -> Result<String> {
    let path = input.path.clone();
    let hashing = tokio::task::spawn_blocking(move || -> std::io::Result<Sha256> {
        let mut hash = Sha256::new();
        std::io::copy(&mut std::fs::File::open(&path)?, &mut hash)?;
        Ok(hash)
    });
    let hash = hashing.await.map_err(|err| Failure::from_error("hash the input", &err))??;
    let output = std::path::absolute(&args.output_file)?;
    let mut whole = json!({
        "input": hex(&hash.finalize()), "endpoint": endpoint.as_str(), "model": config.engine.source.model,
        "overrides": {"seed": config.engine.local.seed, "served": config.engine.source.served_model_name,
            "load_format": format!("{:?}", config.engine.source.load_format)},
        "output": output.to_string_lossy(),
    });
    // Only when there is one, so that runs without keep their identity.
    if let Some(template) = engine::chat_template(config)? {
        whole["overrides"]["chat_template"] = hex(&Sha256::digest(template.as_bytes())).into();
    }
    Ok(hex(&Sha256::digest(whole.to_string().as_bytes())))
}

/// The job of this run: the one that its record names, or a new one.
pub(super) async fn find_or_create(
    place: &Place,
    input: &Input,
    endpoint: Endpoint,
    identity: &str,
    output: &Path,
    ui: &Ui,
) -> Result<Job> {
    let folder = place.data_dir.join("runs");
    std::fs::create_dir_all(&folder)?;
    let card = folder.join(identity);
    let known: Option<RunRecord> = std::fs::read(&card).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(record) = known
        && let Some(job) = place.store.find_job(record.job).await.map_err(store_error("look the run up"))?
        && job.state != JobState::Failed
    {
        say_where_it_stands(place, &job, ui).await?;
        return Ok(job);
    }
    let file = upload(place, input).await?;
    let key = IdempotencyKey { key: format!("run-{identity}-{file}"), params_sha256: Sha256::digest(identity).into() };
    let new = NewJob {
        id: JobId::new(),
        endpoint,
        input_file_id: file,
        completion_window: "30d".to_owned(),
        window: WINDOW,
        metadata: None,
        name: Some(format!("batch run {}", input.label)),
        priority: 0,
        output_expires_after: None,
    };
    let made = place.store.insert_job(new, Some(key)).await.map_err(store_error("record the run"))?;
    let job = match made {
        InsertJob::Created(job) | InsertJob::Existing(job) => job,
        InsertJob::KeyReused | InsertJob::NoInput => {
            return Err(Failure::new(Exit::Failure, "the run could not be recorded: its input vanished"));
        }
    };
    let record = RunRecord { job: job.id, output: std::path::absolute(output)? };
    let fresh = folder.join(format!("{identity}.new"));
    std::fs::write(&fresh, serde_json::to_vec(&record).map_err(|err| Failure::from_error("note the run", &err))?)?;
    std::fs::rename(&fresh, &card)?;
    Ok(job)
}

async fn say_where_it_stands(place: &Place, job: &Job, ui: &Ui) -> Result {
    let counts = counts_of(place, job).await?;
    if job.state.is_terminal() || counts.total == 0 {
        return Ok(());
    }
    let done = counts.total - counts.unfinished();
    ui.summary(format!("resumed: {} done, {} to go", human::count(done), human::count(counts.unfinished())));
    Ok(())
}

async fn upload(place: &Place, input: &Input) -> Result<FileId> {
    let id = FileId::new();
    let name = ObjectName::file(id);
    let fail = |err: overnight_blobs::Error| Failure::from_error("store the input", &err);
    let mut writer = place.blobs.writer(&name).await.map_err(fail)?;
    let mut file = tokio::fs::File::open(&input.path).await?;
    loop {
        let mut piece = bytes::BytesMut::with_capacity(PIECE);
        if tokio::io::AsyncReadExt::read_buf(&mut file, &mut piece).await? == 0 {
            break;
        }
        writer.write(piece.freeze()).await.map_err(fail)?;
    }
    let written = writer.finish().await.map_err(fail)?;
    let file = NewFile {
        id,
        filename: input.upload_name(),
        purpose: FilePurpose::Batch,
        bytes: written.bytes,
        sha256: written.sha256,
        expires_after_s: None,
    };
    place.store.insert_file(file).await.map_err(store_error("record the input"))?;
    Ok(id)
}

/// Opens a new round of an ended run, when something of it is left.
pub(super) async fn reopen(place: &Place, job: Job, ui: &Ui) -> Result<Job> {
    if !job.state.is_terminal() || job.state == JobState::Failed {
        return Ok(job);
    }
    let window = Some(("30d".to_owned(), WINDOW));
    let reopen = Reopen { items: ReopenItems::NotCompleted, window, leftover_segments: Vec::new() };
    let reopened = place.store.reopen_job_if_ended(job.id, reopen).await.map_err(store_error("re-open the run"))?;
    match reopened.applied() {
        Some(reopened) => {
            ui.summary(format!(
                "{} kept; {} failed and {} unfinished will run",
                human::count(reopened.num_kept),
                human::count(reopened.num_failed_again),
                human::count(reopened.num_unfinished)
            ));
            Ok(reopened.job)
        }
        None => Ok(job),
    }
}
