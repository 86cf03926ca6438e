//! What users do meanwhile: they upload, create, cancel, pause and resume through the API,
//! and try again when it does not answer.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::plan::Wish;
use crate::harness::is_terminal;

/// Between tries, and between looks.
const AGAIN: Duration = Duration::from_millis(60);
/// Longest wait for one answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Asks the API for as long as it takes, up to a moment.
#[derive(Debug, Clone)]
pub(crate) struct Users {
    client: reqwest::Client,
    url: String,
    /// When all of it must be over.
    pub(crate) until: Instant,
}

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) id: String,
    pub(crate) batch: Value,
    pub(crate) output: Vec<Value>,
    pub(crate) errors: Vec<Value>,
}

impl Users {
    pub(crate) fn new(url: String, limit: Duration) -> Self {
        let client = reqwest::Client::builder().timeout(ANSWER_MAX).build().expect("a client can be built");
        Self { client, url, until: Instant::now() + limit }
    }

    /// Uploads `input`, creates one job on it, or two when there are wishes for the second,
    /// makes the wishes, and waits for the ends.
    pub(crate) async fn run(
        self,
        input: Vec<u8>,
        key: String,
        wishes: Vec<(Duration, Wish)>,
    ) -> Result<Vec<Ended>, String> {
        let begun = Instant::now();
        let file = self.upload(&input).await?;
        let mut jobs = vec![self.create(&file, &format!("{key}-first")).await?];
        if !wishes.is_empty() {
            jobs.push(self.create(&file, &format!("{key}-second")).await?);
        }
        for (at, wish) in &wishes {
            tokio::time::sleep(at.saturating_sub(begun.elapsed())).await;
            self.wish(&jobs[1], *wish).await?;
        }
        let mut ended = Vec::new();
        for id in jobs {
            let batch = self.wait_end(&id).await?;
            let output = self.lines(&batch["output_file_id"]).await?;
            let errors = self.lines(&batch["error_file_id"]).await?;
            ended.push(Ended { id, batch, output, errors });
        }
        Ok(ended)
    }

    /// Deletes every job and every file, which are then for the sweep: those of uploads
    /// whose answer was lost as well.
    pub(crate) async fn clear(&self) -> Result<(), String> {
        for what in ["batches", "files"] {
            let list = format!("{}/v1/{what}?limit=100", self.url);
            loop {
                let (_, page) = self.ask("list", || self.client.get(&list)).await?;
                let ids: Vec<&str> =
                    page["data"].as_array().into_iter().flatten().filter_map(|it| it["id"].as_str()).collect();
                if ids.is_empty() {
                    break;
                }
                for id in ids {
                    let url = format!("{}/v1/{what}/{id}", self.url);
                    let (status, answer) = self.ask("delete", || self.client.delete(&url)).await?;
                    // A delete whose answer was lost is found done.
                    if !matches!(status, 200 | 404) {
                        return Err(format!("DELETE {what} {id}: {status} {answer}"));
                    }
                }
            }
        }
        Ok(())
    }

    async fn upload(&self, input: &[u8]) -> Result<String, String> {
        let (status, file) = self
            .ask("upload", || {
                let part = reqwest::multipart::Part::bytes(input.to_vec()).file_name("input.jsonl");
                let form = reqwest::multipart::Form::new().text("purpose", "batch").part("file", part);
                self.client.post(format!("{}/v1/files", self.url)).multipart(form)
            })
            .await?;
        file["id"].as_str().map(str::to_owned).ok_or_else(|| format!("upload: {status} {file}"))
    }

    /// The same key at every try makes one job, however often the answer is lost.
    async fn create(&self, file: &str, key: &str) -> Result<String, String> {
        let body = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
        let url = format!("{}/v1/batches", self.url);
        let (status, batch) =
            self.ask("create", || self.client.post(&url).header("Idempotency-Key", key).json(&body)).await?;
        batch["id"].as_str().map(str::to_owned).ok_or_else(|| format!("create: {status} {batch}"))
    }

    async fn wish(&self, id: &str, wish: Wish) -> Result<(), String> {
        let verb = match wish {
            Wish::Cancel => "cancel",
            Wish::Pause => "pause",
            Wish::Resume => "resume",
        };
        let url = format!("{}/v1/batches/{id}/{verb}", self.url);
        let (status, answer) = self.ask(verb, || self.client.post(&url)).await?;
        // It may have come too late or too early, or be done already by a try whose answer was lost.
        if matches!(status, 200 | 400 | 409) { Ok(()) } else { Err(format!("{verb} {id}: {status} {answer}")) }
    }

    async fn wait_end(&self, id: &str) -> Result<Value, String> {
        let url = format!("{}/v1/batches/{id}", self.url);
        loop {
            let (status, batch) = self.ask("status", || self.client.get(&url)).await?;
            if status != 200 {
                return Err(format!("status of {id}: {status} {batch}"));
            }
            if is_terminal(&batch) {
                return Ok(batch);
            }
            // A pause that was asked for last would last for ever.
            if batch["paused_at"].is_u64() {
                self.wish(id, Wish::Resume).await?;
            }
            if Instant::now() > self.until {
                return Err(format!("{id} does not end: {batch}"));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn lines(&self, id: &Value) -> Result<Vec<Value>, String> {
        let Some(id) = id.as_str() else { return Ok(Vec::new()) };
        let url = format!("{}/v1/files/{id}/content", self.url);
        loop {
            let text = async {
                let response = self.client.get(&url).send().await.ok()?;
                let response = response.error_for_status().ok()?;
                response.text().await.ok()
            };
            if let Some(text) = text.await {
                let parse = |line: &str| serde_json::from_str(line).map_err(|err| format!("{id}: {err} in {line}"));
                return text.lines().map(parse).collect();
            }
            if Instant::now() > self.until {
                return Err(format!("{id} cannot be read"));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Asks until there is an answer that is not about the server's own trouble.
    async fn ask(&self, what: &str, request: impl Fn() -> reqwest::RequestBuilder) -> Result<(u16, Value), String> {
        loop {
            let seen = match request().send().await {
                Ok(response) => {
                    let status = response.status().as_u16();
                    match response.text().await {
                        Ok(text) if status < 500 && status != 429 => {
                            return Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))));
                        }
                        Ok(text) => format!("{status} {text}"),
                        Err(err) => err.to_string(),
                    }
                }
                Err(err) => err.to_string(),
            };
            if Instant::now() > self.until {
                return Err(format!("{what} is not answered, last seen: {seen}"));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}
