//! The disk is full for a while: the job waits, nothing is lost, and it ends as if
//! nothing had been.
//!
//! Two ways to the same end. With ENOSPC: the data folder lies on a small disk of its
//! own, which only the server's process sees (a mount namespace); the test reaches it
//! through `/proc/<pid>/root`. And without any privilege, on every machine: the system
//! refuses each write of the server's process with EFBIG (RLIMIT_FSIZE), which the
//! database tells as an I/O error.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;

use crate::backend::{self, Backend};
use crate::harness::{Service, batch_binary, is_terminal, missing};
use crate::kill::{FAST, input, published, tiny_model, undisturbed};

const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the words after it with a disk of `bytes` at `folder`.
fn on_a_small_disk(folder: &Path, bytes: u64) -> Command {
    let script = format!("mount -t tmpfs -o size={bytes} tmpfs \"$0\" && exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &script]).arg(folder);
    command
}

/// Whether this system lets a test have a disk of its own.
fn can_mount(folder: &Path) -> bool {
    let tried = on_a_small_disk(folder, 1 << 20).arg("true").output();
    tried.is_ok_and(|output| output.status.success())
}

/// Takes every byte that is left.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).expect("the filler can be made");
    for piece in [64 << 10, 4 << 10, 1] {
        while file.write_all(&vec![0; piece]).is_ok() {}
    }
}

/// Runs the words after it so that a write beyond the limit is an error and no signal, and
/// with a log that the limit does not meet, since another process writes it.
fn with_writes_that_can_be_refused() -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", "trap '' XFSZ; exec \"$@\" 2> >(exec cat >&2)", "bash"]);
    command
}

/// Lets files of a process grow to so many bytes; `None`: without a limit.
fn limit_files(service: &Service, bytes: Option<u64>) {
    let pid = i32::try_from(service.pid()).ok().and_then(Pid::from_raw).expect("a process has a pid");
    let limit = |current, maximum| prlimit(Some(pid), Resource::Fsize, Rlimit { current, maximum });
    let before = limit(bytes, None).expect("a limit can be set on a child while its upper one stays open");
    assert_eq!(before.maximum, None, "this test needs files without a hard limit (ulimit -Hf)");
}

/// A job that is under way when the disk fills up; `free` ends that.
async fn a_full_disk_delays_and_loses_nothing(
    service: &mut Service,
    whole: &(Vec<Value>, Vec<Value>),
    fill: impl AsyncFnOnce(&Service),
    says: &str,
    free: impl AsyncFnOnce(&Service),
) {
    service.wait_up(PATIENCE).await;
    let file = service.upload("input.jsonl", input(2_000, 5)).await;
    let id = service.create(&file, "/v1/completions").await;
    let done = |batch: &Value| batch["request_counts"]["completed"].as_u64().unwrap_or(0);
    service.wait_batch(&id, PATIENCE, |batch| done(batch) > 0).await;

    fill(service).await;
    service.wait_log(says, PATIENCE).await;
    let batch = service.batch(&id).await.expect("the door answers on a full disk");
    assert_eq!(batch["status"], "in_progress", "a full disk ends no job: {batch}");
    assert_eq!(batch["request_counts"]["failed"].as_u64().map(|failed| failed > 20), Some(false), "{batch}");
    assert!(done(&batch) < 1_980, "the disk was full too late to show anything: {batch}");

    free(service).await;
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert!(published(service, &batch).await == *whole, "files differ from those of an undisturbed run");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_delays_a_job_and_loses_nothing() {
    if backend::is_without("a disk that holds objects", |backend| backend != Backend::PostgresS3) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).expect("a folder can be made");
    if !can_mount(&disk) {
        return missing("mount", "`unshare --map-root-user --mount` and a tmpfs, for a disk that can be filled");
    }
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(2_000, 5), "/v1/completions").await;

    let mut program = on_a_small_disk(&disk, 24 << 20);
    program.arg(batch_binary());
    // The guard at the door is for disks of another size.
    let env = [FAST, &[("OVERNIGHT_API__FREE_DISK_BYTES_MIN", "0")]].concat();
    let mut service = Service::start_below(program, &disk.join("data"), &args, &env);
    let filler = |service: &Service| {
        let seen_from_here = PathBuf::from(format!("/proc/{}/root", service.pid()));
        seen_from_here.join(disk.strip_prefix("/").expect("absolute")).join("filler")
    };
    let full = async |service: &Service| fill(&filler(service));
    let free = async |service: &Service| std::fs::remove_file(filler(service)).expect("the filler can go");
    a_full_disk_delays_and_loses_nothing(&mut service, &whole, full, "No space left on device", free).await;
    let mut beside = Command::new("nsenter");
    beside.args(["--preserve-credentials", "--user", "--mount", "--target", &service.pid().to_string()]);
    beside.arg(batch_binary());
    assert_eq!(service.unsound_below(beside), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_writes_delay_a_job_and_lose_nothing() {
    if backend::is_without("a database that the server's own process writes", |backend| backend == Backend::Sqlite) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let whole = undisturbed(folder.path(), &args, input(2_000, 5), "/v1/completions").await;

    let mut program = with_writes_that_can_be_refused();
    program.arg(batch_binary());
    let mut service = Service::start_below(program, &folder.path().join("data"), &args, FAST);
    let full = async |service: &Service| limit_files(service, Some(0));
    let free = async |service: &Service| limit_files(service, None);
    a_full_disk_delays_and_loses_nothing(&mut service, &whole, full, "disk I/O error", free).await;
    assert_eq!(service.unsound(), None);
}
