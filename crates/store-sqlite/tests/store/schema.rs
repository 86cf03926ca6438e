//! The structure of the database: its snapshot, its words, its versions.

use overnight_store::{AttemptEnd, CancelMode, Error, FilePurpose, Files, Store};
use overnight_store_sqlite::{Options, SchemaState, SqliteStore, migrate, schema_state};
use overnight_types::{JobState, ShardState};
use sqlx::{Connection, SqliteConnection};

const SNAPSHOT: &str = include_str!("../../../../migrations/sqlite/schema.snapshot");

/// Every statement of the structure, in a fixed order.
async fn dump(connection: &mut SqliteConnection) -> String {
    let statements: Vec<String> = sqlx::query_scalar(
        "select sql from sqlite_schema where sql is not null and name not like 'sqlite_%'
            and tbl_name <> 'overnight_migrations'
        order by tbl_name, type desc, name",
    )
    .fetch_all(connection)
    .await
    .unwrap();
    statements.iter().map(|statement| format!("{statement};\n\n")).collect()
}

#[tokio::test]
async fn schema_is_the_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    migrate(&path).await.unwrap();
    let mut connection = connect(&path).await;
    let found = dump(&mut connection).await;
    #[expect(clippy::disallowed_methods, reason = "the switch that writes the snapshot anew")]
    if std::env::var("UPDATE_SNAPSHOT").is_ok() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../migrations/sqlite/schema.snapshot");
        std::fs::write(path, &found).unwrap();
        return;
    }
    assert!(found == SNAPSHOT, "the migrations give another schema than schema.snapshot:\n{found}");
}

/// A CHECK that lists words lists exactly those of the enum.
#[tokio::test]
async fn check_words_are_the_enums_words() {
    let words_after = |start: &str| -> Vec<String> {
        let list = SNAPSHOT.split(start).nth(1).unwrap_or_else(|| panic!("no {start}"));
        let list = list.split_once('(').unwrap().1.split_once(')').unwrap().0;
        list.split(',').map(|word| word.trim().trim_matches('\'').to_owned()).collect()
    };
    let table = |name: &str| format!("CREATE TABLE {name} (");
    let of_table = |name: &str, constraint: &str| {
        let text = SNAPSHOT.split(&table(name)).nth(1).unwrap();
        let start = text.split_once(constraint).unwrap_or_else(|| panic!("no {constraint} in {name}")).1;
        let list = start.split_once(" in").unwrap().1.split_once('(').unwrap().1.split_once(')').unwrap().0;
        list.split(',').map(|word| word.trim().trim_matches('\'').to_owned()).collect::<Vec<_>>()
    };
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let job: Vec<_> = JobState::ALL.iter().map(JobState::as_str).collect();
    assert_eq!(of_table("jobs", "state_is_known"), owned(&job));
    let shard: Vec<_> = ShardState::ALL.iter().map(ShardState::as_str).collect();
    assert_eq!(of_table("shards", "state_is_known"), owned(&shard));
    let purpose: Vec<_> = FilePurpose::ALL.iter().map(FilePurpose::as_str).collect();
    assert_eq!(of_table("files", "purpose_is_known"), owned(&purpose));
    let end: Vec<_> = AttemptEnd::ALL.iter().map(AttemptEnd::as_str).collect();
    assert_eq!(of_table("attempts", "end_is_known"), owned(&end));
    let modes: Vec<_> = CancelMode::ALL.iter().map(CancelMode::as_str).collect();
    assert_eq!(of_table("jobs", "cancel_mode_is_known"), owned(&modes));
    let endings: Vec<_> =
        [JobState::Completed, JobState::Expired, JobState::Cancelled].iter().map(JobState::as_str).collect();
    assert_eq!(of_table("jobs", "ending_is_known"), owned(&endings));
    // What counts as unfinished, wherever a statement says it by its states.
    let unfinished: Vec<_> = JobState::ALL.iter().filter(|state| !state.is_terminal()).map(JobState::as_str).collect();
    assert_eq!(words_after("jobs_reading_input on jobs (input_file_id) where state in"), owned(&unfinished));
}

#[tokio::test]
async fn empty_file_is_migrated_and_a_current_one_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    assert!(matches!(schema_state(&path).await, Err(Error::Missing { .. })));
    assert!(!path.exists(), "reading a version creates nothing");
    let before = migrate(&path).await.unwrap();
    assert_eq!((before.found, before.is_current()), (0, false));
    let again = migrate(&path).await.unwrap();
    assert!(again.is_current());
    assert_eq!(schema_state(&path).await.unwrap(), again);
}

#[tokio::test]
async fn older_schema_is_refused_unless_migration_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let options = Options { migrate: false, ..Options::default() };
    let refused = SqliteStore::open(&path, options.clone()).await.expect_err("nothing is migrated yet");
    assert!(matches!(refused, Error::Schema { found: 0, .. }), "{refused}");
    SqliteStore::open(&path, Options::default()).await.unwrap().close().await;
    SqliteStore::open(&path, options).await.unwrap().close().await;
}

#[tokio::test]
async fn newer_schema_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    migrate(&path).await.unwrap();
    let mut connection = connect(&path).await;
    sqlx::query(
        "insert into overnight_migrations (version, description, success, checksum, execution_time)
        values (9999, 'from the future', true, x'00', 0)",
    )
    .execute(&mut connection)
    .await
    .unwrap();
    let refused = SqliteStore::open(&path, Options::default()).await.expect_err("the schema is newer");
    assert!(matches!(refused, Error::NewerSchema { found: 9999, .. }), "{refused}");
    assert!(refused.to_string().contains("newer"), "{refused}");
    assert!(matches!(schema_state(&path).await.unwrap(), SchemaState { found: 9999, .. }));
}

/// A file whose migration was edited after it ran does not start.
#[tokio::test]
async fn edited_migration_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    migrate(&path).await.unwrap();
    let mut connection = connect(&path).await;
    sqlx::query("update overnight_migrations set checksum = x'00' where version = 1")
        .execute(&mut connection)
        .await
        .unwrap();
    let refused = SqliteStore::open(&path, Options::default()).await.expect_err("the checksum differs");
    assert!(overnight_types::chain(&refused).contains("migration 1"), "{}", overnight_types::chain(&refused));
}

/// Processes that start at once on an empty file all find it whole.
#[tokio::test]
async fn starts_at_once_do_not_meet_in_the_migration() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let starts: Vec<_> = (0..4)
        .map(|_| {
            let path = path.clone();
            tokio::spawn(async move { SqliteStore::open(&path, Options::default()).await })
        })
        .collect();
    for start in starts {
        let store = start.await.unwrap().unwrap();
        assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
        store.close().await;
    }
}

/// Another library's bookkeeping in the same file is not ours.
#[tokio::test]
async fn bookkeeping_is_in_our_own_table() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overnight.db");
    let mut connection = connect(&path).await;
    sqlx::query("create table _sqlx_migrations (version integer, note text)").execute(&mut connection).await.unwrap();
    let store = SqliteStore::open(&path, Options::default()).await.unwrap();
    let known: i64 =
        sqlx::query_scalar("select count(*) from overnight_migrations").fetch_one(&mut connection).await.unwrap();
    assert!(known >= 10);
    assert!(store.known_files(&[]).await.unwrap().is_empty());
}

async fn connect(path: &std::path::Path) -> SqliteConnection {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(path).create_if_missing(true);
    SqliteConnection::connect_with(&options).await.unwrap()
}
