//! `batch results --join INPUT`: each answer beside its input line.
//!
//! The published files are in input order, so one pass over input, output and error
//! file side by side is enough, whatever their size.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::pin::Pin;

use futures::{Stream, StreamExt};
use serde_json::{Value, json};

use super::{Lines, ResultsArgs};
use crate::App;
use crate::client::Client;
use crate::client::download::Sink;
use crate::error::{Exit, Failure, Result};

pub(super) async fn run(args: &ResultsArgs, input: &Path, batch: &Value, client: &Client, app: &App) -> Result {
    if args.format != super::ResultFormat::Jsonl || args.field.is_some() {
        return Err(Failure::usage("--join writes JSONL of whole lines; leave --format and --field out"));
    }
    if args.resume {
        return Err(Failure::usage("--join starts over each time; leave --resume out"));
    }
    let file = std::fs::File::open(input)
        .map_err(|err| Failure::new(Exit::NotFound, format!("could not read {}: {err}", input.display())))?;
    let mut answers = Reader::open(client, batch["output_file_id"].as_str()).await?;
    let mut failures = Reader::open(client, batch["error_file_id"].as_str()).await?;
    let target = super::target(args, app)?;
    let (mut sink, _) = Sink::open(&target, |_| false)?;
    let mut without = 0u64;
    for (number, line) in BufReader::new(file).split(b'\n').enumerate() {
        let line = line?;
        let body = if number == 0 { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line) } else { &line };
        if body.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')) {
            continue;
        }
        let row: Value = serde_json::from_slice(body).map_err(|err| {
            Failure::new(Exit::InvalidInput, format!("line {} is not JSON: {err}", number + 1)).note(format!(
                "--> {}:{}",
                input.display(),
                number + 1
            ))
        })?;
        let id = row["custom_id"].as_str();
        let result = match (answers.take_if(id).await?, id) {
            (Some(result), _) => Some(result),
            (None, _) => failures.take_if(id).await?,
        };
        if result.is_none() {
            without += 1;
        }
        let result = result.unwrap_or(Value::Null);
        let joined = json!({"custom_id": row["custom_id"], "input": row["body"],
            "response": result["response"], "error": result["error"]});
        sink.write(format!("{joined}\n").as_bytes())?;
    }
    let (more_answers, more_failures) = (answers.peek().await?.is_some(), failures.peek().await?.is_some());
    if more_answers || more_failures {
        sink.discard();
        return Err(Failure::new(Exit::InvalidInput, format!("{} is not the input of this batch", input.display()))
            .hint("give the file that was submitted, with its lines in the same order"));
    }
    if without > 0 {
        app.ui.warn(format!("{without} input lines have no line in the results"));
    }
    sink.finish()
}

/// Lines of one published file, one ahead.
struct Reader {
    body: Option<Pin<Box<dyn Stream<Item = reqwest::Result<bytes::Bytes>> + Send>>>,
    lines: Lines,
    ready: std::collections::VecDeque<Vec<u8>>,
    ahead: Option<Value>,
}

impl Reader {
    async fn open(client: &Client, id: Option<&str>) -> Result<Self> {
        let body = match id {
            Some(id) => {
                let response = client.stream(&format!("/v1/files/{id}/content"), &[], 0).await?;
                Some(response.bytes_stream().boxed())
            }
            None => None,
        };
        Ok(Self { body, lines: Lines::default(), ready: Default::default(), ahead: None })
    }

    async fn peek(&mut self) -> Result<Option<&Value>> {
        while self.ahead.is_none() {
            if let Some(line) = self.ready.pop_front() {
                let value =
                    serde_json::from_slice(&line).map_err(|err| Failure::from_error("read a result line", &err))?;
                self.ahead = Some(value);
                break;
            }
            let Some(body) = &mut self.body else { break };
            match body.next().await {
                Some(piece) => {
                    let piece = piece.map_err(|err| Failure::from_error("download the results", &err))?;
                    self.ready.extend(self.lines.push(&piece));
                }
                None => self.body = None,
            }
        }
        Ok(self.ahead.as_ref())
    }

    async fn take_if(&mut self, custom_id: Option<&str>) -> Result<Option<Value>> {
        let matches = self.peek().await?.is_some_and(|line| line["custom_id"].as_str() == custom_id);
        Ok(if matches { self.ahead.take() } else { None })
    }
}
