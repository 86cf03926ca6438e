//! A whole service in one process: SQLite in a temporary folder, a local object
//! folder, a scripted engine, and workers that are started and stopped by the test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use overnight_blobs::lines_hash::LinesHash;
use overnight_blobs::{Blobs, ItemRecord, ObjectName, Prefix, SegmentReader};
use overnight_engine::text::Text;
use overnight_store::{
    FilePurpose, Files, Guarded, InsertJob, IntakeEnd, IntakeProgress, Job, Jobs, NewFile, NewJob, NewShard, Segment,
    Segments, Shard, Shards, StepKind, Steps,
};
use overnight_store_sqlite::{Options, SqliteStore};
use overnight_types::{
    Endpoint, FileId, ItemIndex, JobId, JobState, Limits, OutcomeKind, ShardIndex, ShardState, WorkerId,
};
use overnight_worker::generate::Generate;
use overnight_worker::lifecycle::sweep::{self, SweepAges};
use overnight_worker::lifecycle::webhook::Webhook;
use overnight_worker::mapper::{Mapper, ModelLimits};
use overnight_worker::{WorkerConfig, WorkerHandle, WorkerParts};

use crate::faults::FaultyStore;
use crate::tiny_model::{self, TinyArch, TinyModel};
use crate::wait;

/// The model that the jobs of tests name.
pub const MODEL: &str = "m";

/// Builds workers over one database and one object folder.
#[derive(Debug)]
pub struct TestService {
    /// The database, with faults where the test asks for them.
    pub store: FaultyStore,
    /// The objects.
    pub blobs: Blobs,
    /// Of workers started from now on.
    pub config: WorkerConfig,
    /// Of intake.
    pub limits: Limits,
    /// Of workers started from now on.
    pub webhook: Option<Webhook>,
    dir: Arc<tempfile::TempDir>,
}

/// Settings with short waits: a lease of two seconds, everything else in milliseconds.
pub fn quick_config() -> WorkerConfig {
    let ms = Duration::from_millis;
    WorkerConfig {
        lease_ttl: ms(2_000),
        renew_every: ms(200),
        checkpoint_every_local: ms(20),
        backoff_min: ms(1),
        backoff_max: ms(20),
        shutdown_grace: ms(5_000),
        poll_every: ms(20),
        signals_every: ms(20),
        ..WorkerConfig::default()
    }
}

impl TestService {
    /// An empty service.
    pub async fn new() -> Self {
        Self::with_options(Options::default()).await
    }

    /// An empty service whose database is opened so.
    pub async fn with_options(options: Options) -> Self {
        let dir = Arc::new(tempfile::tempdir().expect("a temporary folder can be made"));
        let store = SqliteStore::open(dir.path().join("overnight.db"), options).await.expect("the database opens");
        let blobs = Blobs::local(&dir.path().join("objects")).expect("the object folder opens");
        let limits = Limits::default();
        Self { store: FaultyStore::new(Arc::new(store)), blobs, config: quick_config(), limits, webhook: None, dir }
    }

    /// The data folder.
    pub fn data_dir(&self) -> &Path {
        self.dir.path()
    }

    /// The object folder.
    pub fn objects_dir(&self) -> PathBuf {
        self.dir.path().join("objects")
    }

    /// Starts a worker on an engine that takes bodies.
    pub async fn start(&self, engine: &(impl Generate + Clone)) -> WorkerHandle {
        let generate: Arc<dyn Generate> = Arc::new(engine.clone());
        self.start_parts(Some((generate, Mapper::remote(None)))).await
    }

    /// A mapper for token requests, with the tokenizer of a tiny model.
    pub fn local_mapper(&self) -> Mapper {
        let folder = self.dir.path().join("tiny-model");
        TinyModel::new(TinyArch::Qwen3).write(&folder).expect("the tiny model can be written");
        let text = Text::from_dir(&folder).expect("the tiny model's tokenizer loads");
        let limits = ModelLimits { max_model_len: 512, vocab_size: tiny_model::VOCAB_ROWS as u32, max_logprobs: 20 };
        Mapper::local(Arc::new(text), vec![MODEL.to_owned()], limits)
    }

    /// Starts a worker, without an engine for `None`.
    pub async fn start_parts(&self, engine: Option<(Arc<dyn Generate>, Mapper)>) -> WorkerHandle {
        let (generate, mapper) = engine.unzip();
        let parts = WorkerParts {
            store: Arc::new(self.store.clone()),
            blobs: self.blobs.clone(),
            generate,
            mapper,
            config: self.config.clone(),
            known_models: vec![MODEL.to_owned()],
            may_load: Vec::new(),
            producer: "test engine".to_owned(),
            limits: self.limits.clone(),
            webhook: self.webhook.clone(),
            host: "test-host".to_owned(),
            data_dir: self.dir.path().to_owned(),
        };
        overnight_worker::start(parts).await.expect("the worker starts")
    }

    /// Uploads bytes as an input file.
    pub async fn upload(&self, bytes: impl Into<Bytes>) -> FileId {
        let (id, bytes) = (FileId::new(), bytes.into());
        let mut writer = self.blobs.writer(&ObjectName::file(id)).await.expect("the object can be written");
        let byte_len = bytes.len() as u64;
        writer.write(bytes).await.expect("the object can be written");
        let written = writer.finish().await.expect("the object can be finished");
        assert_eq!(written.bytes, byte_len);
        let file = NewFile {
            id,
            filename: "input.jsonl".to_owned(),
            purpose: FilePurpose::Batch,
            bytes: byte_len,
            sha256: written.sha256,
            expires_after_s: None,
        };
        self.store.insert_file(file).await.expect("the file can be recorded");
        id
    }

    /// Uploads these lines and creates a job for them, in validation.
    pub async fn submit(&self, lines: &[String]) -> JobId {
        self.submit_with(lines, |_| {}).await
    }

    /// The same, with the job changed before it is recorded.
    pub async fn submit_with(&self, lines: &[String], change: impl FnOnce(&mut NewJob)) -> JobId {
        let input_file_id = self.upload(lines.iter().map(|line| format!("{line}\n")).collect::<String>()).await;
        let mut job = NewJob {
            id: JobId::new(),
            endpoint: Endpoint::ChatCompletions,
            input_file_id,
            completion_window: "1h".to_owned(),
            window: Duration::from_secs(3600),
            metadata: None,
            name: None,
            priority: 0,
            output_expires_after: None,
        };
        change(&mut job);
        match self.store.insert_job(job, None).await.expect("the job can be recorded") {
            InsertJob::Created(job) => job.id,
            other => panic!("the job was not created: {other:?}"),
        }
    }

    /// Creates a job of `lines` that is in progress at once, cut into shards of
    /// `shard_items`. Call it before a worker starts that would take the intake.
    pub async fn submit_cut(&self, lines: &[String], shard_items: usize) -> JobId {
        let job = self.submit(lines).await;
        self.cut(job, lines, shard_items).await;
        job
    }

    /// Does the intake of a new job by hand.
    pub async fn cut(&self, job: JobId, lines: &[String], shard_items: usize) {
        let lease = self.store.claim_step(WorkerId::new(), Duration::from_secs(60)).await.expect("the claim works");
        let lease = lease.filter(|lease| lease.kind == StepKind::Intake && lease.job.id == job);
        let lease = lease.expect("the new job's intake is due and free");
        let mut shards = Vec::new();
        let (mut item, mut offset) = (0, 0);
        for (index, piece) in lines.chunks(shard_items).enumerate() {
            let byte_len = piece.iter().map(|line| line.len() as u64 + 1).sum();
            let mut lines_hash = LinesHash::default();
            piece.iter().for_each(|line| lines_hash.push(LinesHash::of_line(line.as_bytes())));
            shards.push(NewShard {
                shard: ShardIndex(index as u32),
                first_item: ItemIndex(item),
                num_items: piece.len() as u32,
                first_line: item + 1,
                byte_offset: offset,
                byte_len,
                lines_hash: Some(lines_hash.value()),
            });
            (item, offset) = (item + piece.len() as u64, offset + byte_len);
        }
        let num_shards = shards.len() as u32;
        let progress = IntakeProgress { offset, notes: "{}".to_owned() };
        let recorded = self.store.record_intake_if_leased(&lease, progress, shards).await.expect("intake records");
        assert!(recorded.is_applied(), "{recorded:?}");
        let end = IntakeEnd::Valid { model: MODEL.to_owned(), num_items: item, num_shards };
        match self.store.finish_intake_if_leased(&lease, end).await.expect("intake ends") {
            Guarded::Applied(job) => assert_eq!(job.state, JobState::InProgress),
            Guarded::Lost { now } => panic!("the intake was lost: {now:?}"),
        }
    }

    /// The job's row.
    pub async fn job(&self, id: JobId) -> Job {
        self.store.find_job(id).await.expect("the database answers").expect("the job is there")
    }

    /// All shards.
    pub async fn shards(&self, id: JobId) -> Vec<Shard> {
        self.store.list_shards(id, ShardIndex(0), 10_000).await.expect("the database answers")
    }

    /// All recorded segments.
    pub async fn segments(&self, id: JobId) -> Vec<Segment> {
        self.store.list_segments(id, ShardIndex(0), 10_000).await.expect("the database answers")
    }

    /// Waits until the job is in this state.
    pub async fn until_state(&self, id: JobId, state: JobState) -> Job {
        wait::until(&format!("{id} to be {state}"), || async {
            let job = self.job(id).await;
            if job.state == state { Ok(job) } else { Err(self.seen(id).await) }
        })
        .await
    }

    /// Waits until this many outcomes are committed.
    pub async fn until_outcomes(&self, id: JobId, at_least: u64) {
        wait::until(&format!("{at_least} outcomes of {id}"), || async {
            let progress = self.store.find_progress(id).await.expect("the database answers");
            let done = progress.counts.total - progress.counts.unfinished();
            if done >= at_least { Ok(()) } else { Err(self.seen(id).await) }
        })
        .await;
    }

    /// A job and its shards in a few words, for a wait that fails.
    pub async fn seen(&self, id: JobId) -> String {
        let (job, shards) = (self.job(id).await, self.shards(id).await);
        let shards: Vec<String> = shards
            .iter()
            .map(|shard| {
                let (done, items) = (shard.done.count_ones(), shard.done.num_bits());
                let (state, crashes, probe) = (shard.state, shard.crashes, shard.probe_item);
                format!("{state} {done}/{items} epoch {} crashes {crashes} probe {probe:?}", shard.epoch)
            })
            .collect();
        format!("{} paused {}: {shards:?}", job.state, job.paused_at.is_some())
    }

    /// The committed outcome of every item, the latest round's where there are several.
    /// Asserts that no round holds an item twice.
    pub async fn outcomes(&self, id: JobId) -> BTreeMap<u64, ItemRecord> {
        let mut outcomes: BTreeMap<u64, (u32, ItemRecord)> = BTreeMap::new();
        for shard in self.shards(id).await {
            let index = shard.cut.shard;
            for segment in self.store.list_segments_of_shard(id, index).await.expect("the database answers") {
                let new = &segment.new;
                let name = ObjectName::segment(id, index, new.epoch, new.seq, &new.sha256);
                let bytes = self.blobs.read(&name).await.expect("a recorded segment is there");
                let reader = SegmentReader::open(name, bytes, new.items.count_ones(), &new.sha256);
                for record in reader.expect("a recorded segment is whole").records() {
                    let record = record.expect("a record of a whole segment can be read");
                    let before = outcomes.insert(record.item.0, (segment.round, record));
                    assert!(
                        before.is_none_or(|(round, _)| round < segment.round),
                        "an item has two outcomes in a round"
                    );
                }
            }
        }
        outcomes.into_iter().map(|(item, (_, record))| (item, record)).collect()
    }

    /// Lines of a published file; empty when there is none.
    pub async fn lines(&self, file: Option<FileId>) -> Vec<String> {
        let Some(file) = file else { return Vec::new() };
        if self.store.find_file(file).await.expect("the database answers").is_none() {
            return Vec::new();
        }
        let bytes = self.blobs.read(&ObjectName::file(file)).await.expect("a published file is there");
        let text = String::from_utf8(bytes.to_vec()).expect("published files are UTF-8");
        text.lines().map(str::to_owned).collect()
    }

    /// Ends a test: no lease is held, no orphan is left after a sweep, and a job
    /// that has ended has output lines + error lines = items, each with one outcome.
    pub async fn drop_checks(&self, id: JobId) {
        for shard in self.shards(id).await {
            assert_ne!(shard.state, ShardState::Leased, "a lease is held: {}", self.seen(id).await);
        }
        let ages = SweepAges { orphans: Duration::ZERO, unclaimed: Duration::ZERO, jobs: None };
        sweep::sweep(&self.store, &self.blobs, &ages).await.expect("the sweep works");
        let mut listed = self.blobs.list(Prefix::Segments(id));
        let mut objects = 0;
        while let Some(object) = futures::TryStreamExt::try_next(&mut listed).await.expect("the listing works") {
            objects += usize::from(matches!(object.name, ObjectName::Segment { .. }));
        }
        let mut rows = 0;
        for shard in self.shards(id).await {
            rows += self.store.list_segments_of_shard(id, shard.cut.shard).await.expect("the database answers").len();
        }
        assert_eq!(objects, rows, "segment objects and rows");
        let job = self.job(id).await;
        if job.state.is_terminal() && job.state != JobState::Failed {
            let counts = job.final_counts.expect("an ended job has its counts");
            let (output, error) = (self.lines(job.output_file_id).await, self.lines(job.error_file_id).await);
            assert_eq!((output.len() + error.len()) as u64, job.num_items, "{counts:?}");
            assert_eq!(output.len() as u64, counts.completed);
            assert_eq!(counts.unfinished(), 0, "{counts:?}");
        }
    }
}

/// An input line whose body says its own custom id.
pub fn line(custom_id: &str) -> String {
    line_saying(custom_id, custom_id)
}

/// An input line whose body says `text`.
pub fn line_saying(custom_id: &str, text: &str) -> String {
    let (custom_id, body) = (serde_json::Value::from(custom_id), body_saying(text));
    format!(r#"{{"custom_id":{custom_id},"method":"POST","url":"/v1/chat/completions","body":{body}}}"#)
}

/// An input line whose body says `text`, with more fields: `,"temperature":0`.
pub fn line_with(custom_id: &str, text: &str, fields: &str) -> String {
    let line = line_saying(custom_id, text);
    format!("{}{fields}}}}}", line.strip_suffix("}}").expect("a line ends with its body"))
}

/// The body of [`line_saying`].
pub fn body_saying(text: &str) -> String {
    let text = serde_json::Value::from(text);
    format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":{text}}}]}}"#)
}

/// `count` lines `item-0`, `item-1`, ….
pub fn numbered_lines(count: usize) -> Vec<String> {
    (0..count).map(|index| line(&format!("item-{index}"))).collect()
}

/// Whether an outcome is a success that echoes its own line's body.
pub fn is_own_echo(record: &ItemRecord, custom_id: &str) -> bool {
    let line = String::from_utf8_lossy(&record.line);
    let echo = crate::scripted::echo_of(&body_saying(custom_id));
    let content = serde_json::Value::from(echo).to_string();
    record.outcome == OutcomeKind::Completed
        && line.contains(&format!(r#""custom_id":"{custom_id}""#))
        && line.contains(&content)
}
