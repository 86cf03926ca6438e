//! What must hold after a round: in the database, in the published files, among the
//! objects and in the engines. Each check answers with what is wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use overnight_blobs::ObjectName;
use overnight_testing::postgres::Database;
use overnight_types::{Epoch, FileId, JobId, ShardIndex};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::users::Ended;
use super::world::World;
use crate::kill::essence;

/// Each statement's rows are findings.
const INVARIANTS: &str = include_str!("invariants.sql");
/// Most findings that a failure shows.
const FINDINGS_MAX: usize = 20;

/// What a job says when nobody disturbs it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Whole {
    pub(crate) output: Vec<Value>,
    pub(crate) errors: Vec<Value>,
}

impl Whole {
    pub(crate) fn of(ended: &Ended) -> Self {
        let essences = |lines: &[Value]| lines.iter().map(essence).collect();
        Self { output: essences(&ended.output), errors: essences(&ended.errors) }
    }
}

/// What is wrong in the database, were nobody at work any more.
pub(crate) fn findings(database: &Database) -> Result<Vec<String>, String> {
    let found = tokio::task::block_in_place(|| database.try_sql(INVARIANTS))?;
    Ok(found.lines().take(FINDINGS_MAX).map(str::to_owned).collect())
}

/// The database once nobody works any more; waits for that up to `limit`.
pub(crate) async fn database(world: &mut World, limit: Duration) -> Result<(), String> {
    let until = Instant::now() + limit;
    loop {
        let found = findings(&world.database)?;
        if found.is_empty() {
            return Ok(());
        }
        // Leases run out and steps end after the last job's end; all else stays wrong.
        if Instant::now() > until {
            return Err(format!("in the database:\n  {}", found.join("\n  ")));
        }
        world.supervise()?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A job that nobody cancelled has the files of an undisturbed run; of one that was, each
/// item has one line, which is that of the undisturbed run or says that it was cancelled.
pub(crate) fn files(ended: &Ended, whole: &Whole) -> Result<(), String> {
    let Ended { id, batch, output, errors } = ended;
    let count = |kind: &str| batch["outcome_counts"][kind].as_u64().unwrap_or(0);
    let total = batch["request_counts"]["total"].as_u64().unwrap_or(0);
    let told = [total, count("succeeded"), count("errored") + count("canceled") + count("expired")];
    let there = [output.len() + errors.len(), output.len(), errors.len()].map(|count| count as u64);
    if told != there {
        return Err(format!("{id} has total, completed, other outcomes {told:?}, its files {there:?} lines"));
    }
    let got = Whole::of(ended);
    match batch["status"].as_str() {
        Some("completed") if got == *whole => Ok(()),
        Some("completed") => Err(format!("{id} differs from an undisturbed run: {}", first_difference(&got, whole))),
        // Before intake had counted its items.
        Some("cancelled") if total == 0 => Ok(()),
        Some("cancelled") => cancelled(&got, whole).map_err(|why| format!("{id}: {why}")),
        _ => Err(format!("{id} ended as nobody asked: {batch}")),
    }
}

fn cancelled(got: &Whole, whole: &Whole) -> Result<(), String> {
    let expected: BTreeMap<&str, &Value> =
        whole.output.iter().chain(&whole.errors).filter_map(|line| Some((line[0].as_str()?, line))).collect();
    let mut seen = BTreeSet::new();
    for (lines, are_errors) in [(&got.output, false), (&got.errors, true)] {
        let ids: Vec<&str> = lines.iter().filter_map(|line| line[0].as_str()).collect();
        if ids.len() != lines.len() || !ids.is_sorted() {
            return Err("lines are not in input order".to_owned());
        }
        for (id, line) in ids.iter().zip(lines) {
            let is_cancelled = are_errors && line[1]["code"] == "batch_cancelled";
            if !seen.insert(id.to_string()) || !(is_cancelled || expected.get(id) == Some(&line)) {
                return Err(format!("{id} has a second line or another than undisturbed: {line}"));
            }
        }
    }
    if seen.len() == expected.len() { Ok(()) } else { Err(format!("{} of {} items", seen.len(), expected.len())) }
}

fn first_difference(got: &Whole, whole: &Whole) -> String {
    for (name, got, whole) in [("output", &got.output, &whole.output), ("errors", &got.errors, &whole.errors)] {
        let at = got.iter().zip(whole).position(|(got, whole)| got != whole);
        if let Some(at) = at {
            return format!("line {at} of the {name} is {}, should be {}", got[at], whole[at]);
        }
        if got.len() != whole.len() {
            return format!("{} {name} lines, should be {}", got.len(), whole.len());
        }
    }
    "in nothing".to_owned()
}

/// Files, manifests and their hashes, read from the object server's disk; and, after a
/// sweep, that every object is one that a row names.
pub(crate) fn objects(world: &World, ended: &[Ended]) -> Result<(), String> {
    let bucket = world.objects.bucket();
    for Ended { id, batch, .. } in ended {
        let job: JobId = id.parse().map_err(|err| format!("{id}: {err}"))?;
        let round = one(world, &format!("select round from jobs where job_id = '{}'", job.uuid()))?;
        let round = round.parse().map_err(|err| format!("{id}: {err}"))?;
        let manifest = bucket.join(ObjectName::Manifest { job, round }.to_string());
        let manifest = std::fs::read(&manifest).map_err(|err| format!("{}: {err}", manifest.display()))?;
        let manifest: Value = serde_json::from_slice(&manifest).map_err(|err| format!("manifest of {id}: {err}"))?;
        for (kind, field) in [("output", "output_file_id"), ("error", "error_file_id"), ("input", "input_file_id")] {
            let Some(file) = batch[field].as_str() else { continue };
            let file: FileId = file.parse().map_err(|err| format!("{file}: {err}"))?;
            let bytes = std::fs::read(bucket.join(ObjectName::File(file).to_string()));
            let bytes = bytes.map_err(|err| format!("{kind} of {id}: {err}"))?;
            let sha = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            let row =
                format!("select encode(sha256, 'hex') || ' ' || bytes from files where file_id = '{}'", file.uuid());
            if one(world, &row)? != format!("{sha} {}", bytes.len()) || manifest[kind]["sha256"] != sha {
                return Err(format!("{kind} of {id} is not what its row or its manifest says: {}", manifest[kind]));
            }
        }
    }
    let rows = |statement: &str| tokio::task::block_in_place(|| world.database.try_sql(statement));
    let segments = rows(
        "select 'batch_' || replace(job_id::text, '-', ''), shard_index, epoch, seq, encode(sha256, 'hex') from segments",
    )?;
    let mut named: BTreeSet<String> = segments.lines().map(segment_name).collect::<Result<_, _>>()?;
    let files = rows("select 'files/file-' || replace(file_id::text, '-', '') from files")?;
    named.extend(files.lines().map(str::to_owned));
    let mut there = BTreeSet::new();
    list(&bucket, &bucket, &mut there);
    let checked: BTreeSet<String> = there
        .into_iter()
        .filter(|name| match name.parse::<ObjectName>() {
            Ok(ObjectName::Index(_) | ObjectName::Manifest { .. }) => false,
            Ok(_) => true,
            // The mark by which a service knows its objects again.
            Err(_) => false,
        })
        .collect();
    let orphans: Vec<&String> = checked.difference(&named).take(FINDINGS_MAX).collect();
    let gone: Vec<&String> = named.difference(&checked).take(FINDINGS_MAX).collect();
    if orphans.is_empty() && gone.is_empty() {
        return Ok(());
    }
    Err(format!("objects that no row names after the sweep: {orphans:?}; rows whose object is gone: {gone:?}"))
}

fn segment_name(row: &str) -> Result<String, String> {
    let columns: Vec<&str> = row.split('|').collect();
    let [job, shard, epoch, seq, sha] = columns[..] else { return Err(format!("five columns, not {row}")) };
    let number = |text: &str| text.parse::<u64>().map_err(|err| format!("{text}: {err}"));
    let mut sha256 = [0; 32];
    for (byte, at) in sha256.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&sha[at..at + 2], 16).map_err(|err| format!("{sha}: {err}"))?;
    }
    let job: JobId = job.parse().map_err(|err| format!("{job}: {err}"))?;
    let (shard, seq) = (ShardIndex(number(shard)? as u32), number(seq)? as u32);
    Ok(ObjectName::segment(job, shard, Epoch(number(epoch)?), seq, &sha256).to_string())
}

fn one(world: &World, statement: &str) -> Result<String, String> {
    let row = tokio::task::block_in_place(|| world.database.try_sql(statement))?;
    if row.is_empty() { Err(format!("no row: {statement}")) } else { Ok(row) }
}

fn list(root: &Path, folder: &Path, into: &mut BTreeSet<String>) {
    let entries: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path()).collect();
    for path in entries {
        if path.is_dir() {
            list(root, &path, into);
        } else if let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str) {
            into.insert(name.to_owned());
        }
    }
}

/// No request runs or waits, and no block of the KV cache is held.
pub(crate) async fn engine(url: &str) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let answer = reqwest::get(format!("{url}/metrics")).await.map_err(|err| err.to_string())?;
        let text = answer.text().await.map_err(|err| err.to_string())?;
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name) && !line.starts_with('#'))?;
            line.rsplit(' ').next()?.parse::<f64>().ok()
        };
        let names = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"];
        let held: Vec<(&str, Option<f64>)> = names.into_iter().map(|name| (name, value(name))).collect();
        if held.iter().all(|(_, value)| *value == Some(0.0)) {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!("the engine holds something: {held:?}"));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Objects that are there although every job and file is deleted.
pub(crate) fn left(world: &World) -> Vec<String> {
    let mut there = BTreeSet::new();
    list(&world.objects.bucket(), &world.objects.bucket(), &mut there);
    there.into_iter().filter(|name| name.parse::<ObjectName>().is_ok()).take(FINDINGS_MAX).collect()
}
