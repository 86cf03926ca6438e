//! The objects that a data folder belongs to, opened and known again at every start.
//!
//! Invariant: a start never takes an empty mount point, or a mistyped bucket, for an
//! empty service. The objects' id is kept in the data folder; objects with another one,
//! and a store without a mark of which the database names objects, are refused before
//! anything is read from them. The database keeps the id too: a machine that has not been
//! here before brings no objects of its own. Nor does it take another installation's objects for
//! orphans: an empty database is refused where jobs have written.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use futures::TryStreamExt;
use overnight_blobs::{Blobs, ObjectName, Options, Prefix, Unmarked};
use overnight_store::{File, FileQuery, JobQuery, Store};

use crate::config::Config;
use crate::environment;
use crate::error::{Exit, Failure, Result};

/// In the data folder: the id of the objects that its database names.
pub(crate) const ID_FILE: &str = "objects.id";
/// Newest files of the database of which a remote store must hold one.
const PROVING_FILES: u32 = 20;
/// A call is not tried again for longer, however long leases are.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Opens the objects, making their folder or marking their store at the first start,
/// and finds out what a remote store can do.
pub(super) async fn open(config: &Config, data_dir: &Path, store: &dyn Store) -> Result<Blobs> {
    let url = config.objects_url()?;
    let files = store.list_files(FileQuery { limit: PROVING_FILES, ..FileQuery::default() }).await;
    let files = files.map_err(|err| Failure::from_error("look for files in the database", &err))?.rows;
    // A store that was never used is new only to a database that names no object of it.
    let unmarked = if files.is_empty() { Unmarked::IsNew } else { Unmarked::IsWrong };
    let blobs = Blobs::open(&url, &options(config, unmarked)).await.map_err(|err| failure(&url, &err))?;
    let shown = match config.objects.url {
        Some(_) => url.clone(),
        None => format!("{url} (objects.url is not set)"),
    };
    let remembers = know_again(&blobs, &shown, data_dir).await?;
    require_one_of(&blobs, &shown, &files).await?;
    if files.is_empty() {
        refuse_others(&blobs, &shown, store).await?;
    }
    // Only now: a start that is refused is remembered neither in the database nor here.
    require_the_databases(&blobs, &shown, store).await?;
    if !remembers {
        remember(&blobs, data_dir)?;
    }
    if !blobs.is_local() {
        let found = blobs.probe().await.map_err(|err| failure(&url, &err))?;
        tracing::info!(
            objects.url = url,
            objects.conditional_create = found.conditional_create,
            objects.listed_at_once = found.listed_at_once,
            "objects can be written, read by ranges, listed, deleted, and uploaded in parts"
        );
    }
    Ok(blobs)
}

/// Refuses a store that holds none of the files that the database names: a machine that
/// has not been here before knows no id to compare.
async fn require_one_of(blobs: &Blobs, url: &str, files: &[File]) -> Result {
    for file in files {
        if blobs.size(&ObjectName::file(file.id)).await.map_err(|err| failure(url, &err))?.is_some() {
            return Ok(());
        }
    }
    match files {
        [] => Ok(()),
        [newest, ..] => {
            let num_files = files.len();
            let what =
                format!("{url} holds none of the {num_files} newest files of this database, not even {}", newest.id);
            let hint = "correct objects.url or database.url: they belong to different installations";
            Err(Failure::new(Exit::Failure, what).code("objects_not_ours").hint(hint))
        }
    }
}

/// Refuses objects that are not those which the database was first used with: a worker whose
/// machine has a folder of its own instead of theirs would call every input missing, and end
/// its items for good.
async fn require_the_databases(blobs: &Blobs, url: &str, store: &dyn Store) -> Result {
    let Some(id) = blobs.id() else { return Ok(()) };
    let kept = store.keep_objects_id(id).await.map_err(|err| Failure::from_error("keep the objects' id", &err))?;
    if blobs.is_known_as(kept).await.map_err(|err| failure(url, &err))? {
        return Ok(());
    }
    let what = format!("the objects at {url} are not those that this database was first used with");
    let hint = match blobs.is_local() {
        true => {
            "processes on several machines need one object store: give all of them the same objects.url, or the same \
             folder; if the objects were replaced or moved without their mark on purpose, run `batch db forget-objects`"
        }
        false => {
            "correct objects.url or database.url; if the objects were moved there without their mark on purpose, run \
             `batch db forget-objects`"
        }
    };
    Err(Failure::new(Exit::Failure, what).code("objects_not_ours").hint(hint))
}

/// Refuses an empty database where jobs have written objects: the sweep of a process with
/// the wrong `database.url`, or with a new file in the place of a lost one, would take
/// everything there for orphans.
async fn refuse_others(blobs: &Blobs, url: &str, store: &dyn Store) -> Result {
    let failed = |err| Failure::from_error("look for jobs in the database", &err);
    let jobs = store.list_jobs(JobQuery { limit: 1, ..JobQuery::default() }).await.map_err(failed)?;
    if !jobs.rows.is_empty() {
        return Ok(());
    }
    let first = blobs.list(Prefix::Jobs).try_next().await.map_err(|err| failure(url, &err))?;
    let Some(job) = first.and_then(|object| object.name.job()) else { return Ok(()) };
    // A deleted one's objects may outlive all that is shown.
    if !store.known_jobs(&[job]).await.map_err(failed)?.is_empty() {
        return Ok(());
    }
    let what = format!("{url} holds objects of {job}, and this database is empty");
    let hint = "correct database.url or objects.url, or restore the lost database; to begin anew take another folder \
                or prefix: the sweep would remove what is there";
    Err(Failure::new(Exit::Failure, what).code("objects_of_another_database").hint(hint))
}

/// How the objects of this configuration are opened.
pub(crate) fn options(config: &Config, unmarked: Unmarked) -> Options {
    let prefixes = ["AWS_", "AZURE_", "GOOGLE_"];
    let named = prefixes.into_iter().flat_map(environment::with_prefix);
    let text =
        |(name, value): (String, OsString)| Some((name, value.into_string().ok().filter(|text| !text.is_empty())?));
    let identity = environment::text("IDENTITY_ENDPOINT").map(|value| ("IDENTITY_ENDPOINT".to_owned(), value));
    Options {
        environment: named.filter_map(text).chain(identity).collect(),
        // A call ends before the lease that it is made under.
        retry_for: (config.worker.lease_ttl / 2).min(RETRY_MAX),
        unmarked,
    }
}

fn failure(url: &str, err: &overnight_blobs::Error) -> Failure {
    let failure = Failure::from_error(&format!("open the objects at {url}"), err).code("objects");
    match err {
        overnight_blobs::Error::NotOurs { .. } => failure.code("objects_not_ours").hint(
            "correct objects.url; if the objects were moved there without their mark, copy it too (.overnight-marks/)",
        ),
        overnight_blobs::Error::Unsupported { .. } => failure,
        _ => failure.hint("`batch doctor` looks at the object store alone"),
    }
}

/// Compares the objects' id with the one kept in the data folder. False when none is kept there.
async fn know_again(blobs: &Blobs, url: &str, data_dir: &Path) -> Result<bool> {
    if blobs.id().is_none() {
        return Ok(true);
    }
    let path = data_dir.join(ID_FILE);
    let known = match std::fs::read_to_string(&path) {
        Ok(known) => uuid::Uuid::try_parse(known.trim()).ok(),
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(err) => return Err(Failure::from_error(&format!("read {}", path.display()), &err)),
    };
    let is_known = match known {
        Some(known) => blobs.is_known_as(known).await.map_err(|err| failure(url, &err))?,
        None => false,
    };
    if is_known {
        return Ok(true);
    }
    let what = format!("the objects at {url} are not those that this data folder was used with");
    let hint = match blobs.is_local() {
        true => "mount their disk; if they were replaced on purpose, run `batch db forget-objects`",
        false => "correct objects.url; if they were moved on purpose, run `batch db forget-objects`",
    };
    Err(Failure::new(Exit::Failure, what).code("objects_changed").hint(hint))
}

/// Keeps the objects' id in the data folder.
fn remember(blobs: &Blobs, data_dir: &Path) -> Result {
    let Some(id) = blobs.id() else { return Ok(()) };
    let path = data_dir.join(ID_FILE);
    // Whole or not at all: half an id would refuse every later start.
    let new = path.with_extension("id.new");
    let whole = || {
        let mut file = std::fs::File::create(&new)?;
        file.write_all(format!("{id}\n").as_bytes())?;
        // Renamed before it is on the disk, a power cut could leave an empty file.
        file.sync_all()?;
        std::fs::rename(&new, &path)
    };
    whole().map_err(|err| Failure::from_error(&format!("write {}", path.display()), &err))
}

#[cfg(test)]
mod tests {
    use super::*;

    // A reboot that did not mount the disk: the folder is there, empty.
    #[tokio::test]
    async fn start_on_a_bare_mount_point_is_refused_and_nothing_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let [data, objects, disk] = ["data", "objects", "disk"].map(|name| dir.path().join(name));
        std::fs::create_dir(&data).unwrap();
        let start = async || {
            let blobs = Blobs::local(&objects).unwrap();
            if !know_again(&blobs, "file:///objects", &data).await? {
                remember(&blobs, &data)?;
            }
            Ok::<_, Failure>(())
        };
        start().await.unwrap();
        start().await.unwrap();
        std::fs::rename(&objects, &disk).unwrap();
        std::fs::create_dir(&objects).unwrap();
        let failure = start().await.unwrap_err();
        assert!(failure.message().contains("not those"), "{}", failure.message());
        assert!(start().await.is_err(), "the refused start changed nothing");
        std::fs::remove_dir_all(&objects).unwrap();
        std::fs::rename(&disk, &objects).unwrap();
        start().await.unwrap();
        std::fs::remove_file(data.join(ID_FILE)).unwrap();
        std::fs::remove_dir_all(&objects).unwrap();
        start().await.unwrap();
    }

    // Two machines that share a database and have a folder each.
    #[tokio::test]
    async fn second_folder_for_one_database_is_refused_until_it_forgets_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let store =
            overnight_store_sqlite::SqliteStore::open(dir.path().join("o.db"), Default::default()).await.unwrap();
        let [one, two] = ["one", "two"].map(|name| Blobs::local(&dir.path().join(name)).unwrap());
        for _ in 0..2 {
            require_the_databases(&one, "file:///one", &store).await.unwrap();
            let failure = require_the_databases(&two, "file:///two", &store).await.unwrap_err();
            assert!(failure.message().contains("first used with"), "{}", failure.message());
        }
        assert!(store.forget_objects_id().await.unwrap());
        require_the_databases(&two, "file:///two", &store).await.unwrap();
        require_the_databases(&one, "file:///one", &store).await.unwrap_err();
        store.close().await;
    }

    // A worker on a new machine with the bucket of another installation would call every
    // input missing, and end its items for good.
    #[tokio::test]
    async fn store_that_holds_no_file_of_the_database_is_refused() {
        let file = |id| File {
            id,
            filename: "in.jsonl".to_owned(),
            purpose: overnight_store::FilePurpose::Batch,
            bytes: 1,
            sha256: [0; 32],
            created_at: overnight_types::Timestamp::now(),
            expires_at: None,
        };
        let files = [overnight_types::FileId::new(), overnight_types::FileId::new()].map(file);
        let blobs = Blobs::memory();
        require_one_of(&blobs, "s3://b/p", &[]).await.unwrap();
        let failure = require_one_of(&blobs, "s3://b/p", &files).await.unwrap_err();
        assert!(failure.message().contains("none of the 2 newest files"), "{}", failure.message());
        blobs.put(&ObjectName::file(files[1].id), "x".into()).await.unwrap();
        require_one_of(&blobs, "s3://b/p", &files).await.unwrap();
    }
}
