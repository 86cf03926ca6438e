//! A backup restored elsewhere goes on where it was, and a machine with objects of its own
//! does not join.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use overnight_store_postgres::Url;
use serde_json::Value;

use crate::backend::{self, Backend, backend};
use crate::harness::{Service, batch_binary, is_terminal, setting};
use crate::kill::{FAST, input, published, tiny_model};

const PATIENCE: Duration = Duration::from_secs(120);

/// `batch` on a data folder and the database that it has on this back end.
fn batch(data_dir: &Path, words: &[&str]) -> Output {
    let output = Command::new(batch_binary())
        .args(words)
        .arg("--data-dir")
        .arg(data_dir)
        .envs(backend::environment(data_dir))
        .output();
    output.expect("batch starts")
}

fn succeed(data_dir: &Path, words: &[&str]) -> String {
    let output = batch(data_dir, words);
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "batch {words:?}: {out}{err}");
    out + &err
}

async fn terminate(mut service: Service) {
    service.signal("TERM");
    let status = service.wait_exit(Duration::from_secs(60)).await;
    assert_eq!(status.code(), Some(0), "{}", service.log_tail());
}

fn copy_folder(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("cp starts");
    assert!(copied.success(), "the objects are copied");
}

/// The database's copy into the empty database of a new data folder, as docs/operations.md says.
fn restore(copy: &Path, restored: &Path) {
    if backend() == Backend::Sqlite {
        std::fs::copy(copy, restored.join("overnight.db")).expect("the copy is a database");
        return;
    }
    let environment = backend::environment(restored);
    let (_, url) = environment.iter().find(|(name, _)| name == "OVERNIGHT_DATABASE__URL").expect("a database");
    let (url, password) = Url::parse(url).expect("a URL").without_password();
    let bin = setting("OVERNIGHT_TEST_POSTGRES_BIN").expect("tests/with_services.sh says where the programs are");
    let output = Command::new(Path::new(&bin).join("pg_restore"))
        .args(["--no-owner", "--exit-on-error", "--dbname", &url])
        .arg(copy)
        .env("PGPASSWORD", password.unwrap_or_default())
        .output()
        .expect("pg_restore starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_backup_has_every_answer_and_goes_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let [data, restored] = ["data", "restored"].map(|name| folder.path().join(name));
    std::fs::create_dir(&restored).expect("a folder can be made");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let mut service = Service::start(&data, &args, FAST);
    service.wait_up(PATIENCE).await;
    let file = service.upload("input.jsonl", input(300, 5)).await;
    let id = service.create(&file, "/v1/completions").await;
    let batch_before = service.wait_batch(&id, PATIENCE, is_terminal).await;
    let whole = published(&service, &batch_before).await;

    // While the server runs; the objects after it.
    let copy = folder.path().join("backup");
    let told = succeed(&data, &["db", "backup", copy.to_str().expect("UTF-8")]);
    assert!(told.contains("objects are not in it"), "{told}");
    let again = batch(&data, &["db", "backup", copy.to_str().expect("UTF-8")]);
    assert!(!again.status.success(), "an older copy is not written over");
    terminate(service).await;
    if backend() != Backend::PostgresS3 {
        copy_folder(&data.join("objects"), &restored.join("objects"));
    }
    restore(&copy, &restored);

    assert!(succeed(&restored, &["db", "check"]).contains("is sound"));
    // A bucket is shared by both; a folder was copied.
    let objects = backend::environment(&data).into_iter().find(|(name, _)| name == "OVERNIGHT_OBJECTS__URL");
    let mut env = FAST.to_vec();
    env.extend(objects.iter().map(|(name, url)| (name.as_str(), url.as_str())));
    let mut service = Service::start(&restored, &args, &env);
    service.wait_up(PATIENCE).await;
    let batch_after = service.batch(&id).await.expect("the batch is there");
    assert_eq!(batch_after, batch_before);
    assert!(published(&service, &batch_after).await == whole, "the restored files are the same");
    let next = service.create(&file, "/v1/completions").await;
    let next = service.wait_batch(&next, PATIENCE, is_terminal).await;
    assert_eq!(next["status"], "completed", "{next}");
    assert!(published(&service, &next).await == whole, "and a new batch of the restored input ends alike");
    terminate(service).await;
    assert!(succeed(&restored, &["db", "vacuum"]).contains("before"), "the sizes are told");
    assert!(succeed(&restored, &["db", "check"]).contains("is sound"));
}

/// A worker with the database's URL and no `objects.url` has a folder of its own, where no
/// input is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_with_objects_of_its_own_is_refused_and_ends_no_item() {
    if backend::is_without("a database that other machines reach", |backend| backend == Backend::Postgres) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let [here, there] = ["here", "there"].map(|name| folder.path().join(name));
    std::fs::create_dir(&there).expect("a folder can be made");
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny"];
    let mut api = Service::start(&here, &["--no-worker"], FAST);
    api.wait_up(PATIENCE).await;
    let database = backend::environment(&here);
    let other = || {
        let mut command = Command::new(batch_binary());
        command.args(["worker", "--data-dir"]).arg(&there).args(args).envs(database.iter().cloned());
        command.output().expect("batch starts")
    };
    let refused = |output: Output| {
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && told.contains("not those that this database was first used with"),
            "{told}"
        );
        assert!(told.contains("objects.url"), "it says what to do: {told}");
        assert!(!there.join("objects.id").exists(), "a start that is refused remembers nothing");
    };
    // Also while the database names no file yet.
    refused(other());
    let file = api.upload("input.jsonl", input(100, 2)).await;
    let id = api.create(&file, "/v1/completions").await;
    let is_running = |batch: &Value| batch["status"] == "in_progress";
    api.wait_batch(&id, PATIENCE, is_running).await;
    let told = String::from_utf8_lossy(&other().stderr).into_owned();
    assert!(told.contains("objects.url"), "{told}");
    let batch = api.batch(&id).await.expect("the door answers");
    assert_eq!(batch["request_counts"]["failed"], 0, "{batch}");
    let worker = Service::start_worker(&here, &args, FAST);
    let batch = api.wait_batch(&id, PATIENCE, is_terminal).await;
    // One of a hundred is wrong on purpose; none has ended for want of its input.
    assert_eq!((&batch["status"], &batch["request_counts"]["failed"]), (&"completed".into(), &1.into()), "{batch}");
    terminate(worker).await;
    terminate(api).await;
}
