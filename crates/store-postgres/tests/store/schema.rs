//! The structure of the database: its snapshot, its words, its versions; and that it is
//! the other database's.

use std::collections::{BTreeMap, BTreeSet};

use overnight_store::{AttemptEnd, CancelMode, Error, FilePurpose, Jobs, Shards, Store, Workers};
use overnight_store_postgres::{Options, PostgresStore, SchemaState, migrate, schema_state};
use overnight_testing::postgres::Database;
use overnight_types::{ItemIndex, JobId, JobState, ShardIndex, ShardState, Timestamp};
use sqlx::{Connection, PgConnection};

const SNAPSHOT: &str = include_str!("../../../../migrations/postgres/schema.snapshot");
const OF_SQLITE: &str = include_str!("../../../../migrations/sqlite/schema.snapshot");

/// Tables, columns, constraints, indexes and sequences in a fixed order, in the words that
/// all versions of the server have in common.
const DUMP: &str = "
    select format('table %s', c.relname), 0 as kind, c.relname::text as of, 0 as place, '' as name
    from pg_class c where c.relkind = 'r' and c.relnamespace = 'public'::regnamespace
    union all
    select format('    %s %s%s%s', a.attname, format_type(a.atttypid, a.atttypmod),
        case when a.attnotnull then ' not null' else '' end,
        coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), case when a.attidentity <> '' then ' identity' else '' end)),
        1, c.relname, a.attnum, ''
    from pg_attribute a join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where c.relkind = 'r' and c.relnamespace = 'public'::regnamespace and a.attnum > 0 and not a.attisdropped
    union all
    select format('    constraint %s %s', k.conname, pg_get_constraintdef(k.oid)), 2, c.relname, 0, k.conname
    from pg_constraint k join pg_class c on c.oid = k.conrelid
    where c.relnamespace = 'public'::regnamespace and k.contype in ('c', 'p', 'u', 'f')
    union all
    select format('    %s', pg_get_indexdef(i.indexrelid)), 3, c.relname, 0, x.relname
    from pg_index i join pg_class c on c.oid = i.indrelid join pg_class x on x.oid = i.indexrelid
    where c.relnamespace = 'public'::regnamespace and not i.indisprimary
    union all
    select format('sequence %s', c.relname), 0, c.relname, 0, ''
    from pg_class c where c.relkind = 'S' and c.relnamespace = 'public'::regnamespace
    order by 3, 2, 4, 5";

fn dump(database: &Database) -> String {
    let rows = database.sql(DUMP);
    let line = |row: &str| row.rsplitn(5, '|').last().unwrap_or(row).to_owned() + "\n";
    let of = |row: &str| row.rsplit('|').nth(2).unwrap_or_default().to_owned();
    rows.lines().filter(|row| of(row) != "overnight_migrations").map(line).collect()
}

#[tokio::test]
async fn schema_is_the_snapshot() {
    let Some(database) = Database::create() else { return };
    migrate(&database.store_url()).await.unwrap();
    let found = dump(&database);
    #[expect(clippy::disallowed_methods, reason = "the switch that writes the snapshot anew")]
    if std::env::var("UPDATE_SNAPSHOT").is_ok() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../migrations/postgres/schema.snapshot");
        std::fs::write(path, &found).unwrap();
        return;
    }
    assert!(found == SNAPSHOT, "the migrations give another schema than schema.snapshot:\n{found}");
}

/// Columns of each table in our snapshot.
fn columns_here() -> BTreeMap<String, BTreeSet<String>> {
    let mut tables: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut table = String::new();
    for line in SNAPSHOT.lines() {
        let word = |at: usize| line.split_whitespace().nth(at).unwrap_or_default().to_owned();
        match line {
            _ if line.starts_with("table ") => table = word(1),
            _ if line.starts_with("sequence ") => table.clear(),
            _ if word(0) == "constraint" || word(0) == "CREATE" => {}
            _ => drop(tables.entry(table.clone()).or_default().insert(word(0))),
        }
    }
    tables
}

/// Columns of each table in the snapshot of SQLite.
fn columns_of_sqlite() -> BTreeMap<String, BTreeSet<String>> {
    let mut tables = BTreeMap::new();
    for statement in OF_SQLITE.split(";\n\n").filter(|statement| statement.starts_with("CREATE TABLE ")) {
        let (name, body) = statement["CREATE TABLE ".len()..].split_once(" (").unwrap();
        let body: String = body.lines().map(|line| line.split(" -- ").next().unwrap().to_owned() + "\n").collect();
        let mut columns = BTreeSet::new();
        let mut depth = 0;
        let mut part = String::new();
        for char in body.chars() {
            depth += i32::from(char == '(') - i32::from(char == ')');
            // A comma between columns, or the bracket that closes the table.
            if depth < 0 || (char == ',' && depth == 0) {
                let first = part.split_whitespace().next().unwrap_or_default().to_owned();
                if !["constraint", "primary", "unique", ""].contains(&first.as_str()) {
                    columns.insert(first);
                }
                part.clear();
                if depth < 0 {
                    break;
                }
            } else {
                part.push(char);
            }
        }
        tables.insert(name.to_owned(), columns);
    }
    tables
}

#[test]
fn tables_and_columns_are_those_of_sqlite() {
    assert_eq!(columns_here(), columns_of_sqlite());
    assert!(columns_here()["shards"].len() > 20, "the snapshots were read");
}

#[test]
fn migrations_have_the_numbers_and_names_of_sqlites() {
    let names = |folder: &str| -> BTreeSet<String> {
        let path = format!("{}/../../migrations/{folder}", env!("CARGO_MANIFEST_DIR"));
        let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        entries.map(|name| name.into_string().unwrap()).filter(|name| name.ends_with(".sql")).collect()
    };
    assert_eq!(names("postgres"), names("sqlite"));
}

/// A CHECK that lists words lists exactly those of the enum.
#[test]
fn check_words_are_the_enums_words() {
    let of = |table: &str, constraint: &str| -> BTreeSet<&str> {
        let text = SNAPSHOT.split_once(&format!("table {table}\n")).unwrap().1;
        let line = text.lines().find(|line| line.contains(&format!(" {constraint} "))).unwrap();
        line.split('\'').skip(1).step_by(2).collect()
    };
    let words = |words: Vec<&'static str>| words.into_iter().collect::<BTreeSet<_>>();
    assert_eq!(of("jobs", "state_is_known"), words(JobState::ALL.iter().map(JobState::as_str).collect()));
    assert_eq!(of("shards", "state_is_known"), words(ShardState::ALL.iter().map(ShardState::as_str).collect()));
    assert_eq!(of("files", "purpose_is_known"), words(FilePurpose::ALL.iter().map(FilePurpose::as_str).collect()));
    assert_eq!(of("attempts", "end_is_known"), words(AttemptEnd::ALL.iter().map(AttemptEnd::as_str).collect()));
    assert_eq!(of("jobs", "cancel_mode_is_known"), words(CancelMode::ALL.iter().map(CancelMode::as_str).collect()));
    // What counts as unfinished, wherever a statement says it by its states.
    let unfinished = JobState::ALL.iter().filter(|state| !state.is_terminal()).map(JobState::as_str).collect();
    assert_eq!(of("jobs", "INDEX jobs_reading_input"), words(unfinished));
}

#[tokio::test]
async fn empty_database_is_migrated_and_a_current_one_left_alone() {
    let Some(database) = Database::create() else { return };
    let url = database.store_url();
    assert_eq!(schema_state(&url).await.unwrap().found, 0);
    assert_eq!(database.sql("select count(*) from pg_class where relname = 'overnight_migrations'"), "0");
    let before = migrate(&url).await.unwrap();
    assert_eq!((before.found, before.is_current()), (0, false));
    let again = migrate(&url).await.unwrap();
    assert!(again.is_current());
    assert_eq!(schema_state(&url).await.unwrap(), again);
}

#[tokio::test]
async fn older_schema_is_refused_unless_migration_is_asked_for() {
    let Some(database) = Database::create() else { return };
    let options = Options { migrate: false, ..Options::default() };
    let refused = PostgresStore::open(&database.store_url(), options.clone()).await.expect_err("nothing is there yet");
    assert!(matches!(refused, Error::Schema { found: 0, .. }), "{refused}");
    database.open(Options::default()).await.close().await;
    database.open(options).await.close().await;
}

#[tokio::test]
async fn newer_schema_is_refused_by_name() {
    let Some(database) = Database::create() else { return };
    migrate(&database.store_url()).await.unwrap();
    database.sql(
        "insert into overnight_migrations (version, description, success, checksum, execution_time)
        values (9999, 'from the future', true, '', 0)",
    );
    let refused = PostgresStore::open(&database.store_url(), Options::default()).await.expect_err("it is newer");
    assert!(matches!(refused, Error::NewerSchema { found: 9999, .. }), "{refused}");
    assert!(matches!(schema_state(&database.store_url()).await.unwrap(), SchemaState { found: 9999, .. }));
}

/// A database to which a file was applied that has been edited since is not opened.
#[tokio::test]
async fn edited_migration_is_refused() {
    let Some(database) = Database::create() else { return };
    migrate(&database.store_url()).await.unwrap();
    database.sql("update overnight_migrations set checksum = '' where version = 1");
    let refused =
        PostgresStore::open(&database.store_url(), Options::default()).await.expect_err("the checksum differs");
    assert!(overnight_types::chain(&refused).contains("migration 1"), "{}", overnight_types::chain(&refused));
}

/// Processes that start at once on an empty database all find it whole.
#[tokio::test]
async fn starts_at_once_do_not_meet_in_the_migration() {
    let Some(database) = Database::create() else { return };
    let starts: Vec<_> = (0..4)
        .map(|_| {
            let url = database.store_url();
            tokio::spawn(
                async move { PostgresStore::open(&url, Options { connections: 2, ..Options::default() }).await },
            )
        })
        .collect();
    for start in starts {
        let store = start.await.unwrap().unwrap();
        assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
        store.close().await;
    }
}

/// A role that may only read and write rows can run a worker on a database that is current.
#[tokio::test]
async fn current_database_opens_for_a_role_that_may_change_no_structure() {
    let Some(database) = Database::create() else { return };
    migrate(&database.store_url()).await.unwrap();
    database.sql(
        "do $$ begin if not exists (select 1 from pg_roles where rolname = 'plain') then
            create role plain login password 'plain'; end if; exception when others then null; end $$;
        grant select, insert, update, delete on all tables in schema public to plain;
        grant select on all sequences in schema public to plain",
    );
    let (_, server) = database.url().split_once('@').unwrap();
    let url = overnight_store_postgres::Url::parse(&format!("postgres://plain:plain@{server}")).unwrap();
    let store = PostgresStore::open(&url, Options { connections: 2, ..Options::default() }).await.unwrap();
    overnight_store::conformance::builders::completed_job(&store, &[2, 1], &[1]).await;
    store.close().await;
    database.sql("drop owned by plain");
}

/// Rows of a release that had the first ten files only are right in this one.
#[tokio::test]
async fn upgrade_keeps_every_row() {
    let Some(database) = Database::create() else { return };
    let newest = schema_state(&database.store_url()).await.unwrap().needed;
    for before in 10..newest {
        let Some(database) = Database::create() else { return };
        let mut connection = PgConnection::connect(database.url()).await.unwrap();
        sqlx::migrate!().run_direct(Some(before), &mut connection, false).await.unwrap();
        assert_eq!(schema_state(&database.store_url()).await.unwrap().found, before);
        database.sql(OLD_ROWS);
        let store = database.open(Options::default()).await;
        let job = JobId::from_uuid("018f0000-0000-7000-8000-000000000002".parse().unwrap());
        let found = store.find_job(job).await.unwrap().unwrap();
        assert_eq!((found.state, found.num_items, found.model.as_deref()), (JobState::InProgress, 9, Some("tiny")));
        let shard = store.find_shard(job, ShardIndex(0)).await.unwrap().unwrap();
        assert_eq!((shard.done.ones().collect::<Vec<_>>(), shard.cut.lines_hash), (vec![0, 8], None));
        let faults = store.list_faults(job, ItemIndex(0), ItemIndex(9), 9).await.unwrap();
        assert_eq!((faults.len(), faults[0].attempts, faults[0].earlier.len()), (1, 2, 0));
        assert_eq!(store.list_workers_on_host("old").await.unwrap()[0].may_load, Vec::<String>::new());
        assert_eq!(store.check().await.unwrap(), Vec::<String>::new(), "from version {before}");
        assert!(store.now().await.unwrap() > Timestamp::from_micros(0));
        store.close().await;
    }
}

const OLD_ROWS: &str = "
    insert into files (file_id, filename, purpose, bytes, sha256, created_at)
    values ('018f0000-0000-7000-8000-000000000001', 'in.jsonl', 'batch', 90, repeat('x', 32)::bytea, 1);
    insert into jobs (job_id, endpoint, model, input_file_id, input_bytes, input_sha256, completion_window, window_us,
        priority, state, created_at, in_progress_at, expires_at, num_items, num_shards)
    values ('018f0000-0000-7000-8000-000000000002', '/v1/completions', 'tiny', '018f0000-0000-7000-8000-000000000001',
        90, repeat('x', 32)::bytea, '24h', 86400000000, 0, 'in_progress', 1, 2, 4000000000000000, 9, 1);
    insert into shards (job_id, shard_index, first_item, num_items, first_line, byte_offset, byte_len, not_before,
        done, num_done, next_seq)
    values ('018f0000-0000-7000-8000-000000000002', 0, 0, 9, 1, 0, 90, 0, b'100000001', 2, 1);
    insert into segments (job_id, committed, epoch, input_tokens, cached_tokens, output_tokens, reasoning_tokens,
        byte_len, shard_index, seq, round, num_items, items, code_counts, sha256)
    values ('018f0000-0000-7000-8000-000000000002', 3, 1, 0, 0, 0, 0, 10, 0, 0, 1, 2, b'100000001', '{}',
        repeat('x', 32)::bytea);
    insert into item_faults (job_id, item_index, attempts, not_before, code, message)
    values ('018f0000-0000-7000-8000-000000000002', 3, 2, 0, 'engine_timeout', 'no answer');
    insert into workers (worker_id, host, pid, models, started_at, seen_at)
    values ('018f0000-0000-7000-8000-000000000003', 'old', 1, '[]', 1, 4000000000000000);
    insert into outbox (event_id, job_id, kind, created_at, due_at)
    values ('018f0000-0000-7000-8000-000000000004', '018f0000-0000-7000-8000-000000000002', 'batch.failed', 1, 1);
    insert into events (job_id, at, what, note) values ('018f0000-0000-7000-8000-000000000002', 1, 'created', '');
    insert into idempotency_keys (key, params_sha256, job_id, created_at)
    values ('k', repeat('x', 32)::bytea, '018f0000-0000-7000-8000-000000000002', 1);
    insert into attempts (job_id, worker_id, epoch, started_at, shard_index)
    values ('018f0000-0000-7000-8000-000000000002', '018f0000-0000-7000-8000-000000000003', 1, 1, 0);";
