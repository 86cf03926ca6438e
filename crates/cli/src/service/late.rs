//! Stands in for the engine of this process while it loads, and while it is built anew
//! after a breakdown; [`keep`] does that.
//!
//! Invariant: whoever asks sees one engine: loading, ready, stalled, or broken. What it breaks
//! down under is told to its owners as failed before another one takes its place. One that
//! stalls for good is not replaced in this process, whose thread and device it holds: the
//! process ends by its named code.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use overnight_engine::{DeviceKind, EngineHandle, RequestId};
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
/// A rebuild may take so many times what the first load took, besides a stall for good.
const REBUILD_TIMES_MAX: u32 = 10;
/// The process is given up once its engine has stalled for this many times
/// `worker.engine_stall_max`.
const STALLS_MAX: u32 = 3;

/// [`Generate`] before, between and over engines.
#[derive(Debug)]
pub(crate) struct LateEngine {
    models: Vec<String>,
    started_at: Instant,
    /// `worker.engine_stall_max`.
    stall_max: Duration,
    now: RwLock<Now>,
}

#[derive(Debug)]
struct Now {
    engine: Option<Current>,
    /// What is being done while there is none.
    stage: String,
    /// Breakdowns of earlier engines.
    num_breakdowns: u32,
    stall: Stall,
    /// What the first load took, from the making of the stand-in on.
    loaded_in: Option<Duration>,
}

/// How long the engine has been seen with work and without the end of a step. Summed up over
/// looks: a process that was stopped for a while (SIGSTOP) has not stalled meanwhile.
#[derive(Debug, Default)]
struct Stall {
    /// The last progress that the engine had at the last look.
    progress_at: Option<Instant>,
    seen: Duration,
}

impl Stall {
    /// The engine is looked at, `passed` after the last look.
    fn look(&mut self, status: &EngineStatus, passed: Duration) {
        let goes_on = status.is_idle() || self.progress_at != Some(status.last_progress);
        self.seen = if goes_on { Duration::ZERO } else { self.seen + passed };
        self.progress_at = Some(status.last_progress);
    }
}

#[derive(Debug, Clone)]
struct Current {
    generate: Arc<dyn Generate>,
    handle: Option<EngineHandle>,
    /// Where the local engine computes.
    device: Option<DeviceKind>,
}

impl LateEngine {
    /// Answers to `models`, not yet. Without a step's end for `stall_max` it counts as stalled.
    pub(crate) fn new(models: Vec<String>, stall_max: Duration) -> Arc<Self> {
        let stage = "waiting to load the model".to_owned();
        let now = Now { engine: None, stage, num_breakdowns: 0, stall: Stall::default(), loaded_in: None };
        Arc::new(Self { models, started_at: Instant::now(), stall_max, now: RwLock::new(now) })
    }

    /// What is being done, for `/health` and the log.
    pub(crate) fn stage(&self, text: &str) {
        tracing::info!("{text}");
        text.clone_into(&mut self.now.write().unwrap_or_else(PoisonError::into_inner).stage);
    }

    /// From here on this engine answers.
    pub(crate) fn set(&self, started: &Started) {
        let (generate, handle) = (started.generate.clone(), started.handle.clone());
        self.take(Current { generate, handle, device: started.device });
    }

    fn take(&self, current: Current) {
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        (now.engine, now.stall) = (Some(current), Stall::default());
        now.loaded_in.get_or_insert(self.started_at.elapsed());
    }

    fn loaded_in(&self) -> Duration {
        self.now.read().unwrap_or_else(PoisonError::into_inner).loaded_in.unwrap_or_default()
    }

    /// The local engine, for its counters.
    pub(crate) fn handle(&self) -> Option<EngineHandle> {
        self.current().and_then(|current| current.handle)
    }

    fn current(&self) -> Option<Current> {
        self.now.read().unwrap_or_else(PoisonError::into_inner).engine.clone()
    }

    /// Why the local engine can answer no more; `None` while it can. Looks at its progress too,
    /// `passed` after the last look.
    fn look(&self, passed: Duration) -> Option<End> {
        let current = self.current()?;
        let status = current.generate.status();
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        now.stall.look(&status, passed);
        match status.state {
            EngineState::Poisoned(why) => Some(End::Broken(why)),
            _ if now.stall.seen >= self.stall_max * STALLS_MAX => Some(End::Stalled(now.stall.seen)),
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
            let mut status = current.generate.status();
            let seen = self.now.read().unwrap_or_else(PoisonError::into_inner).stall.seen;
            if status.state == EngineState::Ready && seen > self.stall_max {
                status.state = EngineState::Stalled(format!("no step has ended for {}", human::duration(seen)));
            }
            return status;
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

/// How an engine ends that nobody stopped.
enum End {
    /// It failed or panicked; why.
    Broken(String),
    /// It has work and has ended no step for this long.
    Stalled(Duration),
}

/// Builds the engine of this process anew when it breaks down, at most
/// `engine.rebuilds_max` times in an hour, with waits in between. Ends only when that is
/// given up, or the engine has stalled for [`STALLS_MAX`] times the time allowed. Does nothing
/// for an engine that is not in this process: a remote one heals by itself.
pub(crate) async fn keep(config: &Config, late: &Arc<LateEngine>) -> Failure {
    let Some(Current { handle: Some(first), device, .. }) = late.current() else {
        return std::future::pending().await;
    };
    let rebuilds_max = config.engine.source.rebuilds_max;
    let config = for_the_next(config, first.limits().max_model_len, device);
    drop(first);
    // Weights are in the page cache by now, and no model takes that much longer than the first time.
    let rebuild_max = config.worker.engine_stall_max * STALLS_MAX + late.loaded_in() * REBUILD_TIMES_MAX;
    let mut rebuilds: VecDeque<Instant> = VecDeque::new();
    loop {
        let mut why = match ended(late).await {
            End::Broken(why) => why,
            End::Stalled(seen) => return stalled(seen),
        };
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
            let rebuilt = match tokio::time::timeout(rebuild_max, rebuild(&config, late)).await {
                Ok(rebuilt) => rebuilt,
                // The driver hangs, as the engine does where no step ends.
                Err(_) => return hung_in_a_rebuild(rebuild_max),
            };
            match rebuilt {
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

/// The settings of an engine that takes the place of the first one.
fn for_the_next(config: &Config, max_model_len: u32, device: Option<DeviceKind>) -> Config {
    let mut config = config.clone();
    // Bodies are prepared for this length: the next engine must hold it too.
    config.engine.local.max_model_len = Some(max_model_len);
    // `auto` must not take a GPU that has failed for none, and go on a hundred times slower.
    config.engine.local.device = device.unwrap_or(config.engine.local.device);
    config
}

async fn ended(late: &LateEngine) -> End {
    loop {
        if let Some(end) = late.look(LOOK_EVERY) {
            return end;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn stalled(seen: Duration) -> Failure {
    let seen = human::duration(seen);
    let message = format!(
        "the engine hangs: it has work and has ended no step for {seen}, {STALLS_MAX} times worker.engine_stall_max"
    );
    Failure::new(Exit::EngineBroken, message)
        .hint("everything finished is kept and the rest goes on at the next start; for a GPU, `dmesg` and `nvidia-smi` tell more")
}

fn hung_in_a_rebuild(limit: Duration) -> Failure {
    let message =
        format!("the engine broke down, and building it anew has not ended within {}", human::duration(limit));
    Failure::new(Exit::EngineBroken, message)
        .hint("everything finished is kept and the rest goes on at the next start; for a GPU, `dmesg` and `nvidia-smi` tell more")
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const STALL_MAX: Duration = Duration::from_secs(2);

    /// Stands as it is told to.
    #[derive(Debug)]
    struct Standing(Mutex<EngineStatus>);

    #[async_trait]
    impl Generate for Standing {
        async fn submit(&self, _: Vec<Request>, _: OutputSender) -> Result<(), NotAccepting> {
            Ok(())
        }

        fn cancel(&self, _: &[RequestId]) {}

        fn status(&self) -> EngineStatus {
            self.0.lock().expect("no test panics inside").clone()
        }
    }

    /// An engine with one request, and what stands in for it.
    fn busy() -> (Arc<Standing>, Arc<LateEngine>) {
        let late = LateEngine::new(vec!["tiny".to_owned()], STALL_MAX);
        let status = EngineStatus { state: EngineState::Ready, num_running: 1, ..late.status() };
        let engine = Arc::new(Standing(Mutex::new(status)));
        late.take(Current { generate: engine.clone(), handle: None, device: None });
        (engine, late)
    }

    /// Looks for this long; the end that was seen.
    fn look_for(late: &LateEngine, time: Duration) -> Option<End> {
        let num_looks = time.as_millis() / LOOK_EVERY.as_millis();
        (0..num_looks).find_map(|_| late.look(LOOK_EVERY))
    }

    fn is_stalled(late: &LateEngine) -> bool {
        matches!(late.status().state, EngineState::Stalled(_))
    }

    #[test]
    fn engine_that_hangs_is_stalled_and_after_a_few_times_given_up() {
        let (_, late) = busy();
        assert!(look_for(&late, STALL_MAX).is_none() && !is_stalled(&late), "it may take that long");
        assert!(look_for(&late, LOOK_EVERY * 2).is_none());
        let EngineState::Stalled(why) = late.status().state else { panic!("{:?}", late.status()) };
        assert!(why.contains("no step has ended for 2s"), "{why}");
        let end = look_for(&late, STALL_MAX * (STALLS_MAX - 1)).expect("it is given up");
        let End::Stalled(seen) = end else { panic!("it did not break") };
        let failure = stalled(seen);
        assert_eq!(failure.exit, Exit::EngineBroken);
        assert!(failure.message().contains("no step for 6s, 3 times worker.engine_stall_max"), "{}", failure.message());
    }

    #[test]
    fn engine_that_goes_on_or_is_idle_has_not_stalled() {
        let (engine, late) = busy();
        assert!(look_for(&late, STALL_MAX * 2).is_none() && is_stalled(&late));
        engine.0.lock().expect("whole").last_progress += Duration::from_millis(1);
        assert!(late.look(LOOK_EVERY).is_none() && !is_stalled(&late), "a step has ended");
        engine.0.lock().expect("whole").num_running = 0;
        assert!(look_for(&late, STALL_MAX * 5).is_none() && !is_stalled(&late), "it has nothing to do");
        // An engine that is built anew begins anew.
        let (_, late) = busy();
        assert!(look_for(&late, STALL_MAX * 2).is_none() && is_stalled(&late));
        late.take(late.current().expect("there is one"));
        assert!(!is_stalled(&late));
    }

    #[test]
    fn next_engine_computes_where_the_first_one_did() {
        let config = Config::default();
        assert_eq!(config.engine.local.device, DeviceKind::Auto);
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            let next = for_the_next(&config, 512, Some(device)).engine.local;
            assert_eq!((next.device, next.max_model_len), (device, Some(512)));
        }
    }

    /// The looks count, not the clock: a process that was stopped finds its engine as it left it.
    #[test]
    fn engine_of_a_process_that_was_stopped_has_not_stalled() {
        let (engine, late) = busy();
        let long_ago = Instant::now().checked_sub(STALL_MAX * 100).unwrap_or_else(Instant::now);
        engine.0.lock().expect("whole").last_progress = long_ago;
        assert!(look_for(&late, STALL_MAX).is_none() && !is_stalled(&late));
    }
}
