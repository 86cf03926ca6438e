//! Stands in for the engine of this process while it loads, and while it is built anew
//! after a breakdown; [`keep`] does that.
//!
//! Invariant: whoever asks sees one engine: loading, ready, or broken. What it breaks
//! down under is told to its owners as failed before another one takes its place.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use overnight_engine::{EngineHandle, RequestId};
use overnight_worker::generate::{EngineState, EngineStatus, Generate, NotAccepting, OutputSender, Request};

use super::engine::{self, Started};
use crate::config::Config;
use crate::error::{Exit, Failure};
use crate::output::human;

/// How often the engine is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Rebuilds are counted over this time.
const REBUILDS_WITHIN: Duration = Duration::from_secs(3600);
/// Wait before the first rebuild; doubles with each one that is counted.
const REBUILD_WAIT_MIN: Duration = Duration::from_millis(500);
const REBUILD_WAIT_MAX: Duration = Duration::from_secs(60);

/// [`Generate`] before, between and over engines.
#[derive(Debug)]
pub(crate) struct LateEngine {
    models: Vec<String>,
    started_at: Instant,
    now: RwLock<Now>,
}

#[derive(Debug)]
struct Now {
    engine: Option<Current>,
    /// What is being done while there is none.
    stage: String,
    /// Breakdowns of earlier engines.
    num_breakdowns: u32,
}

#[derive(Debug, Clone)]
struct Current {
    generate: Arc<dyn Generate>,
    handle: Option<EngineHandle>,
}

impl LateEngine {
    /// Answers to `models`, not yet.
    pub(crate) fn new(models: Vec<String>) -> Arc<Self> {
        let now = Now { engine: None, stage: "waiting to load the model".to_owned(), num_breakdowns: 0 };
        Arc::new(Self { models, started_at: Instant::now(), now: RwLock::new(now) })
    }

    /// What is being done, for `/health` and the log.
    pub(crate) fn stage(&self, text: &str) {
        tracing::info!("{text}");
        text.clone_into(&mut self.now.write().unwrap_or_else(PoisonError::into_inner).stage);
    }

    /// From here on this engine answers.
    pub(crate) fn set(&self, started: &Started) {
        let current = Current { generate: started.generate.clone(), handle: started.handle.clone() };
        self.now.write().unwrap_or_else(PoisonError::into_inner).engine = Some(current);
    }

    /// The local engine, for its counters.
    pub(crate) fn handle(&self) -> Option<EngineHandle> {
        self.current().and_then(|current| current.handle)
    }

    fn current(&self) -> Option<Current> {
        self.now.read().unwrap_or_else(PoisonError::into_inner).engine.clone()
    }

    /// Why the local engine can answer no more; `None` while it can, and for a remote one,
    /// which heals by itself.
    fn breakdown(&self) -> Option<String> {
        let current = self.current()?;
        let state = current.generate.status().state;
        match state {
            EngineState::Poisoned(why) if current.handle.is_some() => Some(why),
            _ => None,
        }
    }

    /// Lets go of a broken engine, whose memory the next one needs.
    fn drop_broken(&self, stage: String) {
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        now.stage = stage;
        if let Some(broken) = now.engine.take() {
            now.num_breakdowns += broken.generate.num_breakdowns();
        }
    }
}

#[async_trait]
impl Generate for LateEngine {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        match self.current() {
            Some(current) => current.generate.submit(requests, outputs).await,
            None => Err(NotAccepting("the model is still loading".to_owned())),
        }
    }

    fn cancel(&self, ids: &[RequestId]) {
        if let Some(current) = self.current() {
            current.generate.cancel(ids);
        }
    }

    fn status(&self) -> EngineStatus {
        if let Some(current) = self.current() {
            return current.generate.status();
        }
        let stage = self.now.read().unwrap_or_else(PoisonError::into_inner).stage.clone();
        EngineStatus {
            state: EngineState::Starting(stage),
            models: self.models.clone(),
            num_running: 0,
            num_waiting: 0,
            max_num_seqs: 1,
            kv_cache_usage: 0.0,
            last_progress: self.started_at,
            generation_tokens: 0,
            prompt_tokens: 0,
        }
    }

    fn num_breakdowns(&self) -> u32 {
        let now = self.now.read().unwrap_or_else(PoisonError::into_inner);
        now.num_breakdowns + now.engine.as_ref().map_or(0, |current| current.generate.num_breakdowns())
    }
}

/// Builds the engine of this process anew when it breaks down, at most
/// `engine.rebuilds_max` times in an hour, with waits in between. Ends only when that is
/// given up. Does nothing for an engine that is not in this process.
pub(crate) async fn keep(config: &Config, late: &Arc<LateEngine>) -> Failure {
    let Some(first) = late.handle() else { return std::future::pending().await };
    let rebuilds_max = config.engine.source.rebuilds_max;
    let mut config = config.clone();
    // Bodies are prepared for this length: the next engine must hold it too.
    config.engine.local.max_model_len = Some(first.limits().max_model_len);
    drop(first);
    let mut rebuilds: VecDeque<Instant> = VecDeque::new();
    loop {
        let mut why = broken(late).await;
        loop {
            rebuilds.retain(|at| at.elapsed() < REBUILDS_WITHIN);
            if rebuilds.len() >= rebuilds_max as usize {
                return given_up(&why, rebuilds.len());
            }
            let wait = (REBUILD_WAIT_MIN * 2u32.pow(rebuilds.len().min(16) as u32)).min(REBUILD_WAIT_MAX);
            rebuilds.push_back(Instant::now());
            let (number, pause) = (rebuilds.len(), human::duration(wait));
            tracing::warn!(
                "the engine broke down and is built anew in {pause}, {number} of {rebuilds_max} in an hour: {why}"
            );
            late.drop_broken(format!("building the engine anew after a breakdown: {why}"));
            tokio::time::sleep(wait).await;
            match rebuild(&config, late).await {
                Ok(started) => {
                    late.set(&started);
                    tracing::info!("ready again: {}", started.producer);
                    break;
                }
                Err(failure) => failure.message().clone_into(&mut why),
            }
        }
    }
}

async fn broken(late: &LateEngine) -> String {
    loop {
        if let Some(why) = late.breakdown() {
            return why;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn rebuild(config: &Config, late: &Arc<LateEngine>) -> Result<Started, Failure> {
    let (config, late) = (config.clone(), late.clone());
    let building = tokio::task::spawn_blocking(move || engine::start(&config, |text| late.stage(text)));
    building.await.unwrap_or_else(|err| Err(Failure::from_error("load the model", &err)))
}

fn given_up(why: &str, num_rebuilds: usize) -> Failure {
    let tries = match num_rebuilds {
        0 => "and engine.rebuilds_max is 0".to_owned(),
        _ => format!("after {num_rebuilds} rebuilds within an hour (engine.rebuilds_max)"),
    };
    Failure::new(Exit::EngineBroken, format!("the engine broke down, {tries}: {why}"))
        .hint("everything finished is kept and the rest goes on at the next start; the log says what broke")
}
