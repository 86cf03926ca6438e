//! The disk is full for a while: the job waits, nothing is lost, and it ends as if
//! nothing had been.
//!
//! The data folder lies on a small disk of its own, which only the server's process
//! sees (a mount namespace); the test reaches it through `/proc/<pid>/root`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_delays_a_job_and_loses_nothing() {
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
    service.wait_up(PATIENCE).await;
    let seen_from_here = PathBuf::from(format!("/proc/{}/root", service.pid()));
    let inside = |name: &str| seen_from_here.join(disk.strip_prefix("/").expect("absolute")).join(name);
    let file = service.upload("input.jsonl", input(2_000, 5)).await;
    let id = service.create(&file, "/v1/completions").await;
    let done = |batch: &Value| batch["request_counts"]["completed"].as_u64().unwrap_or(0);
    service.wait_batch(&id, PATIENCE, |batch| done(batch) > 0).await;

    fill(&inside("filler"));
    service.wait_log("No space left on device", PATIENCE).await;
    let batch = service.batch(&id).await.expect("the door answers on a full disk");
    assert_eq!(batch["status"], "in_progress", "a full disk ends no job: {batch}");
    assert_eq!(batch["request_counts"]["failed"].as_u64().map(|failed| failed > 20), Some(false), "{batch}");
    let at_most = done(&batch);
    assert!(at_most < 1_980, "the disk was full too late to show anything: {batch}");

    std::fs::remove_file(inside("filler")).expect("the filler can go");
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    assert!(published(&service, &batch).await == whole, "files differ from those of an undisturbed run");
    let mut beside = Command::new("nsenter");
    beside.args(["--preserve-credentials", "--user", "--mount", "--target", &service.pid().to_string()]);
    beside.arg(batch_binary());
    assert_eq!(service.unsound_below(beside), None);
}
