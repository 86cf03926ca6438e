//! `batch logs`: what the services of this data folder logged, also after their end.
//!
//! Reads the files that `serve` and `worker` write; needs no server.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use overnight_types::Timestamp;
use serde_json::Value;

use crate::App;
use crate::client::ids;
use crate::config::Loaded;
use crate::error::{Exit, Failure, Result};
use crate::logging;
use crate::output::{Format, escape, human, plain};

/// Pause between looks for new lines under `--follow`.
const FOLLOW_EVERY: Duration = Duration::from_millis(300);
/// Bytes read of a file at once.
const PIECE: u64 = 1 << 20;

/// How bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Arguments of `batch logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Only lines about this batch
    id: Option<String>,
    /// Go on with new lines until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// Only lines not older than this, for example 2h
    #[arg(long, value_name = "DURATION", value_parser = human::parse_duration)]
    since: Option<Duration>,
    /// Only lines at least this old
    #[arg(long, value_name = "DURATION", value_parser = human::parse_duration, conflicts_with = "follow")]
    until: Option<Duration>,
    /// Most lines, the newest ones
    #[arg(short = 'n', long, default_value = "100", value_parser = human::parse_count)]
    lines: u64,
    /// Only lines as bad as this, or worse
    #[arg(long, value_name = "LEVEL")]
    level: Option<Level>,
    /// Only lines with this text
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
}

pub(crate) async fn run(args: LogsArgs, app: &App) -> Result {
    if args.follow && matches!(app.ui.format, Some(Format::Json)) {
        return Err(Failure::usage("--json is one array, which --follow never ends").hint("say --output jsonl"));
    }
    let config = Loaded::read(&app.globals, Vec::new())?.config;
    let folder = logging::folder(&config);
    let wanted = Wanted::new(&args)?;
    let most = usize::try_from(args.lines).unwrap_or(usize::MAX);
    let mut tails = Tails::default();
    let found = tails.read(&folder, &wanted, most).map_err(|err| match err.kind() {
        std::io::ErrorKind::NotFound => Failure::new(Exit::NotFound, format!("no log files in {}", folder.display()))
            .hint("`batch serve` and `batch worker` write them where they run; --data-dir says where that is"),
        _ => Failure::new(Exit::Failure, format!("could not read {}: {err}", folder.display())),
    })?;
    show(&found, app)?;
    if !args.follow {
        return Ok(());
    }
    app.interrupts.listen()?;
    loop {
        tokio::select! {
            () = tokio::time::sleep(FOLLOW_EVERY) => {}
            () = app.interrupts.wait() => return Err(Failure::shown(Exit::Interrupted, "stopped following the log")),
        }
        show(&tails.read(&folder, &wanted, usize::MAX)?, app)?;
    }
}

fn show(records: &[Value], app: &App) -> Result {
    match app.ui.format {
        Some(Format::Json) => app.ui.data(&format!("{}\n", Value::Array(records.to_vec()))),
        Some(Format::Jsonl) => records.iter().try_for_each(|record| app.ui.data(&format!("{record}\n"))),
        _ => app.ui.data(&records.iter().map(text).collect::<String>()),
    }
}

/// A record as one line: time, level, message, then its fields.
fn text(record: &Value) -> String {
    let mut line =
        format!("{} {:>5} {}", plain(&record["timestamp"]), plain(&record["level"]), plain(&record["message"]));
    for (key, value) in record.as_object().into_iter().flatten() {
        if !matches!(key.as_str(), "timestamp" | "level" | "message" | "target" | "span" | "spans") {
            line.push_str(&format!(" {key}={}", plain(value)));
        }
    }
    format!("{}\n", escape(&line))
}

/// Which lines are asked for.
struct Wanted {
    batch: Option<String>,
    since: Option<String>,
    until: Option<String>,
    level: Level,
    search: Option<String>,
}

impl Wanted {
    fn new(args: &LogsArgs) -> Result<Self> {
        let batch = args.id.as_deref().map(ids::without_server).transpose()?;
        // As the records write it, so that texts compare as moments do.
        let moment = |ago: Duration| {
            let at = Timestamp::now().micros() - i64::try_from(ago.as_micros()).unwrap_or(i64::MAX);
            Timestamp::from_micros(at).datetime().to_rfc3339_opts(chrono::SecondsFormat::Micros, true)
        };
        Ok(Self {
            batch,
            since: args.since.map(moment),
            until: args.until.map(moment),
            level: args.level.unwrap_or(Level::Trace),
            search: args.search.clone(),
        })
    }

    fn fits(&self, line: &str, record: &Value) -> bool {
        let at = record["timestamp"].as_str().unwrap_or_default();
        let level = Level::from_str(record["level"].as_str().unwrap_or_default(), true).unwrap_or(Level::Error);
        self.since.as_deref().is_none_or(|since| at >= since)
            && self.until.as_deref().is_none_or(|until| at <= until)
            && level <= self.level
            && self.search.as_deref().is_none_or(|text| line.contains(text))
            && self.batch.as_deref().is_none_or(|batch| is_about(record, batch))
    }
}

/// Whether a record, or a span that it stands in, names a batch whose id starts so.
fn is_about(record: &Value, batch: &str) -> bool {
    let names = |fields: &Value| fields["job.id"].as_str().is_some_and(|id| id.starts_with(batch));
    names(record) || record["spans"].as_array().into_iter().flatten().any(names)
}

/// How far each file was read.
#[derive(Default)]
struct Tails(BTreeMap<PathBuf, u64>);

impl Tails {
    /// What was added since the last look, at most the newest `most` records, by time.
    fn read(&mut self, folder: &Path, wanted: &Wanted, most: usize) -> std::io::Result<Vec<Value>> {
        let mut found = Vec::new();
        for (path, size) in logging::list(folder)? {
            let from = self.0.entry(path.clone()).or_default();
            if *from < size {
                found.extend(read_on(&path, from, wanted, most)?);
            }
        }
        found.sort_by(|a: &Value, b| a["timestamp"].as_str().cmp(&b["timestamp"].as_str()));
        Ok(found.split_off(found.len().saturating_sub(most)))
    }
}

/// Whole lines of a file from an offset on, which goes behind the last of them.
fn read_on(path: &Path, from: &mut u64, wanted: &Wanted, most: usize) -> std::io::Result<VecDeque<Value>> {
    let mut found = VecDeque::new();
    let mut file = match File::open(path) {
        Ok(file) => file,
        // Its service has just thrown it away.
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(err) => return Err(err),
    };
    file.seek(SeekFrom::Start(*from))?;
    let mut bytes = Vec::new();
    loop {
        let read = (&mut file).take(PIECE).read_to_end(&mut bytes)?;
        let Some(end) = bytes.iter().rposition(|&byte| byte == b'\n') else {
            if read == 0 {
                return Ok(found);
            }
            continue;
        };
        for line in bytes[..end].split(|&byte| byte == b'\n') {
            let line = String::from_utf8_lossy(line);
            // A line that a full disk cut in two is no record.
            let Ok(record) = serde_json::from_str::<Value>(&line) else { continue };
            if wanted.fits(&line, &record) {
                if found.len() >= most.max(1) {
                    found.pop_front();
                }
                found.push_back(record);
            }
        }
        *from += end as u64 + 1;
        bytes.drain(..=end);
        if read == 0 {
            return Ok(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Wanted {
        Wanted { batch: None, since: None, until: None, level: Level::Trace, search: None }
    }

    fn messages(records: &[Value]) -> Vec<&str> {
        records.iter().map(|record| record["message"].as_str().unwrap()).collect()
    }

    const LINES: &str = concat!(
        r#"{"timestamp":"2026-01-01T00:00:01Z","level":"INFO","message":"a","job.id":"batch_01"}"#,
        "\n",
        r#"{"timestamp":"2026-01-01T00:00:03Z","level":"WARN","message":"c","spans":[{"job.id":"batch_01"}]}"#,
        "\nbroken\n",
        r#"{"timestamp":"2026-01-01T00:00:05Z","level":"DEBUG","message":"e"}"#,
        "\n",
    );

    #[test]
    fn files_are_merged_by_time_and_read_on_at_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("serve-1.jsonl"), LINES).unwrap();
        let other = folder.path().join("worker-2.jsonl");
        let line = |second: u32, message: &str| {
            format!(r#"{{"timestamp":"2026-01-01T00:00:0{second}Z","level":"ERROR","message":"{message}"}}"#)
        };
        std::fs::write(&other, line(2, "b") + "\n" + &line(4, "d")[..20]).unwrap();
        let mut tails = Tails::default();
        assert_eq!(messages(&tails.read(folder.path(), &all(), 3).unwrap()), ["b", "c", "e"]);
        std::fs::write(&other, line(2, "b") + "\n" + &line(4, "d") + "\n").unwrap();
        assert_eq!(messages(&tails.read(folder.path(), &all(), 9).unwrap()), ["d"]);
        assert!(tails.read(folder.path(), &all(), 9).unwrap().is_empty());
    }

    #[test]
    fn every_condition_narrows() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("serve-1.jsonl"), LINES).unwrap();
        for (wanted, left) in [
            (Wanted { batch: Some("batch_0".to_owned()), ..all() }, &["a", "c"][..]),
            (Wanted { batch: Some("batch_02".to_owned()), ..all() }, &[]),
            (Wanted { since: Some("2026-01-01T00:00:02Z".to_owned()), ..all() }, &["c", "e"]),
            (Wanted { until: Some("2026-01-01T00:00:02Z".to_owned()), ..all() }, &["a"]),
            (Wanted { level: Level::Warn, ..all() }, &["c"]),
            (Wanted { search: Some("DEBUG".to_owned()), ..all() }, &["e"]),
        ] {
            let found = Tails::default().read(folder.path(), &wanted, 9).unwrap();
            assert_eq!(messages(&found), left);
        }
    }

    #[test]
    fn record_is_one_line_without_control_characters() {
        let record = serde_json::json!({"timestamp": "t", "level": "WARN", "message": "a\nb\u{1b}[31m", "job.id": "x",
            "target": "overnight_worker"});
        let line = text(&record);
        assert!(line.starts_with("t  WARN a") && line.ends_with(" job.id=x\n"), "{line:?}");
        assert_eq!(line.chars().filter(|c| c.is_control()).count(), 1, "{line:?}");
    }
}
