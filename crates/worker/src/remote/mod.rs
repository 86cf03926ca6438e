//! A remote engine: one or more servers that speak the OpenAI API.
//!
//! Invariants: a request's body goes out byte for byte as it came in; every
//! request gets exactly one output; retries are the caller's, except that a server
//! that cannot be reached at all is left out and its request sent to another.
//! Knows nothing about jobs: what an HTTP status means for an item is judged in
//! `outcome`. Concurrency per server is in `limit`.

mod limit;
mod send;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use overnight_engine::request::{Class, RequestId};
use overnight_types::Endpoint;
use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::generate::{
    EngineState, EngineStatus, Failure, Generate, Input, NotAccepting, Output, OutputSender, Request,
};
use limit::{Limit, Verdict};
use send::Answer;

/// Where the servers are and how they are asked.
#[derive(Clone, PartialEq)]
pub struct RemoteConfig {
    /// Base URLs, with or without `/v1` at the end; at least one.
    pub urls: Vec<String>,
    /// Sent as `Authorization: Bearer …`.
    pub api_key: Option<String>,
    /// Names that the servers answer to; empty when they take any.
    pub models: Vec<String>,
    /// Requests at once per server at the start.
    pub concurrency_start: u32,
    /// Most requests at once per server.
    pub concurrency_max: u32,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest wait for an answer, from sending.
    pub request_timeout: Duration,
    /// How long a server that cannot be reached is left alone at first; doubles up to a minute.
    pub retry_server_after: Duration,
    /// Largest answer that is read.
    pub response_bytes_max: u64,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            api_key: None,
            models: Vec::new(),
            concurrency_start: 16,
            concurrency_max: 256,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(600),
            retry_server_after: Duration::from_secs(1),
            response_bytes_max: 64 << 20,
        }
    }
}

impl std::fmt::Debug for RemoteConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let api_key = self.api_key.as_ref().map(|_| "***");
        f.debug_struct("RemoteConfig")
            .field("urls", &self.urls)
            .field("api_key", &api_key)
            .field("concurrency_max", &self.concurrency_max)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Queued {
    id: RequestId,
    class: Class,
    endpoint: Endpoint,
    json: Bytes,
    outputs: OutputSender,
}

#[derive(Debug)]
struct Running {
    sent_at: Instant,
    cancel: CancellationToken,
}

#[derive(Debug)]
struct State {
    online: VecDeque<Queued>,
    jobs: VecDeque<Queued>,
    running: HashMap<RequestId, Running>,
    servers: Vec<Limit>,
}

#[derive(Debug)]
struct Inner {
    client: reqwest::Client,
    config: RemoteConfig,
    bases: Vec<String>,
    state: Mutex<State>,
}

/// [`Generate`] over HTTP. Cheap to clone.
#[derive(Debug, Clone)]
pub struct RemoteGenerate {
    inner: Arc<Inner>,
}

impl RemoteGenerate {
    /// Checks the settings; sends nothing yet.
    ///
    /// Errors with [`Error::Remote`] on a URL that is not http(s), on no URL, on a
    /// key that cannot stand in a header, and on limits of zero.
    pub fn new(config: RemoteConfig) -> Result<Self, Error> {
        if config.urls.is_empty() {
            return Err(Error::Remote("no base URL; set [engine] urls".to_owned()));
        }
        if config.concurrency_start == 0 || config.concurrency_max < config.concurrency_start {
            let (start, max) = (config.concurrency_start, config.concurrency_max);
            return Err(Error::Remote(format!("concurrency from {start} to {max}; it must rise from 1 or more")));
        }
        let bases = config.urls.iter().map(|url| base_of(url)).collect::<Result<Vec<_>, _>>()?;
        let mut headers = reqwest::header::HeaderMap::new();
        if let Some(key) = &config.api_key {
            let mut value = reqwest::header::HeaderValue::try_from(format!("Bearer {key}"))
                .map_err(|_| Error::Remote("the API key holds a character that no header may have".to_owned()))?;
            value.set_sensitive(true);
            headers.insert(reqwest::header::AUTHORIZATION, value);
        }
        let client = reqwest::Client::builder()
            .default_headers(headers)
            .connect_timeout(config.connect_timeout)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|err| Error::Remote(format!("could not build the HTTP client: {err}")))?;
        let servers = bases.iter().map(|_| Limit::new(config.concurrency_start, config.concurrency_max)).collect();
        let state = State { online: VecDeque::new(), jobs: VecDeque::new(), running: HashMap::new(), servers };
        Ok(Self { inner: Arc::new(Inner { client, config, bases, state: Mutex::new(state) }) })
    }
}

fn base_of(url: &str) -> Result<String, Error> {
    let parsed = reqwest::Url::parse(url).map_err(|err| Error::Remote(format!("{url:?} is not a URL: {err}")))?;
    if !matches!(parsed.scheme(), "http" | "https") || parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(Error::Remote(format!("{url:?} must be an http or https URL without query and fragment")));
    }
    let base = url.trim_end_matches('/');
    Ok(base.strip_suffix("/v1").unwrap_or(base).to_owned())
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Queue, map and limits change together in short sections that do not panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what is queued as far as the servers' limits let it.
    fn pump(self: &Arc<Self>) {
        loop {
            let now = Instant::now();
            let mut state = self.lock();
            let Some(server) = state.freest_server(now) else {
                if state.servers.iter().all(|server| server.is_down(now)) {
                    let queued = state.take_queued();
                    drop(state);
                    let message = "none of the configured servers can be reached".to_owned();
                    fail_all(queued, &Failure::EngineTrouble { message });
                }
                return;
            };
            let Some(queued) = state.online.pop_front().or_else(|| state.jobs.pop_front()) else { return };
            let cancel = CancellationToken::new();
            state.running.insert(queued.id, Running { sent_at: now, cancel: cancel.clone() });
            state.servers[server].started();
            drop(state);
            if queued.class == Class::Job {
                // Nobody listens any more when the shard was dropped.
                let _ = queued.outputs.send(vec![Output::Begun { id: queued.id }]);
            }
            let inner = self.clone();
            tokio::spawn(async move { inner.run(queued, server, now, cancel).await });
        }
    }

    async fn run(self: Arc<Self>, queued: Queued, server: usize, sent_at: Instant, cancel: CancellationToken) {
        let outputs = queued.outputs.clone();
        let id = queued.id;
        let sending = send::send(&self.client, &self.config, &self.bases[server], &queued);
        let answer = cancel.run_until_cancelled(sending).await;
        let answer = answer.unwrap_or(Answer::Failed(Failure::Cancelled, Verdict::Neutral));
        let mut state = self.lock();
        state.running.remove(&id);
        let now = Instant::now();
        let output = match answer {
            Answer::Response { status, body, retry_after, verdict } => {
                state.servers[server].ended(verdict, sent_at, now);
                Some(Output::Response { id, status, body, retry_after })
            }
            Answer::Failed(failure, verdict) => {
                state.servers[server].ended(verdict, sent_at, now);
                Some(Output::Failed { id, failure })
            }
            Answer::Unreachable(message) => {
                let pause = state.servers[server].unreachable(now, self.config.retry_server_after);
                let server = &self.bases[server];
                tracing::warn!(server, pause_s = pause.as_secs_f32(), "remote engine cannot be reached: {message}");
                // This server never saw the request, so another may take it.
                if state.servers.iter().all(|server| server.is_down(now)) {
                    Some(Output::Failed { id, failure: Failure::EngineTrouble { message } })
                } else {
                    state.queue(queued.class).push_front(queued);
                    None
                }
            }
        };
        drop(state);
        if let Some(output) = output {
            // Nobody listens any more when the shard was dropped.
            let _ = outputs.send(vec![output]);
        }
        self.pump();
    }
}

impl State {
    fn queue(&mut self, class: Class) -> &mut VecDeque<Queued> {
        match class {
            Class::Online => &mut self.online,
            Class::Job => &mut self.jobs,
        }
    }

    /// The reachable server with the largest free share of its limit.
    fn freest_server(&self, now: Instant) -> Option<usize> {
        let free = self.servers.iter().enumerate().filter(|(_, server)| !server.is_down(now) && server.room() > 0);
        free.max_by(|(_, a), (_, b)| a.free_share().total_cmp(&b.free_share())).map(|(index, _)| index)
    }

    fn take_queued(&mut self) -> Vec<Queued> {
        self.online.drain(..).chain(self.jobs.drain(..)).collect()
    }
}

fn fail_all(queued: Vec<Queued>, failure: &Failure) {
    for queued in queued {
        let _ = queued.outputs.send(vec![Output::Failed { id: queued.id, failure: failure.clone() }]);
    }
}

#[async_trait]
impl Generate for RemoteGenerate {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        let mut refused = Vec::new();
        let mut state = self.inner.lock();
        for request in requests {
            let (id, class) = (request.id, request.class);
            match request.input {
                Input::Body { endpoint, json } => {
                    state.queue(class).push_back(Queued { id, class, endpoint, json, outputs: outputs.clone() });
                }
                Input::Tokens(_) => {
                    let message = "a remote engine takes bodies, not tokens".to_owned();
                    refused.push(Output::Failed { id, failure: Failure::EngineTrouble { message } });
                }
            }
        }
        drop(state);
        if !refused.is_empty() {
            let _ = outputs.send(refused);
        }
        self.inner.pump();
        Ok(())
    }

    fn cancel(&self, ids: &[RequestId]) {
        let mut state = self.inner.lock();
        for id in ids {
            if let Some(running) = state.running.get(id) {
                running.cancel.cancel();
            }
        }
        let mut cancelled = Vec::new();
        for class in [Class::Online, Class::Job] {
            let queue = state.queue(class);
            if queue.iter().any(|queued| ids.contains(&queued.id)) {
                let (gone, kept) = std::mem::take(queue).into_iter().partition(|queued| ids.contains(&queued.id));
                *queue = kept;
                cancelled.extend::<VecDeque<Queued>>(gone);
            }
        }
        drop(state);
        fail_all(cancelled, &Failure::Cancelled);
    }

    fn status(&self) -> EngineStatus {
        let now = Instant::now();
        let state = self.inner.lock();
        let down_until = state.servers.iter().map(|server| server.down_until(now)).min().flatten();
        let engine_state = match down_until {
            Some(_) => EngineState::Poisoned("none of the configured servers can be reached".to_owned()),
            None => EngineState::Ready,
        };
        // A request within its time limit is progress; one beyond it is a stall.
        let limit = self.inner.config.request_timeout + self.inner.config.connect_timeout;
        let overdue = state.running.values().map(|running| running.sent_at + limit).filter(|end| *end < now).min();
        let models = &self.inner.config.models;
        EngineStatus {
            state: engine_state,
            models: if models.is_empty() { vec!["*".to_owned()] } else { models.clone() },
            num_running: u32::try_from(state.running.len()).unwrap_or(u32::MAX),
            num_waiting: u32::try_from(state.online.len() + state.jobs.len()).unwrap_or(u32::MAX),
            max_num_seqs: state.servers.iter().map(Limit::allowed).sum::<u32>().max(1),
            kv_cache_usage: 0.0,
            last_progress: overdue.unwrap_or(now),
            generation_tokens: 0,
            prompt_tokens: 0,
        }
    }
}
