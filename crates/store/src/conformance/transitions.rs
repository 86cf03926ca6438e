//! Random moves of workers, doors and lifecycle against a model in memory: every
//! answer is the model's, and the accounting is closed at every end.
//!
//! Times are far apart (hundreds of seconds) so that the real time that a case
//! takes never decides.

use std::sync::Arc;
use std::time::Duration;

use overnight_types::{JobId, JobState, ShardIndex, ShardState, WorkerId};
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};

use super::builders::*;
use super::{EpochGuard, Fixture, TestClock};
use crate::{AttemptEnd, CancelMode, ClaimShard, NewJob, Reopen, ReopenItems, ShardLease, Store};

const SIZES: [u32; 3] = [3, 1, 2];
const LEASE: Duration = Duration::from_secs(1_000);
const WINDOW: Duration = Duration::from_secs(10_050);

#[derive(Debug, Clone)]
enum Op {
    Claim {
        worker: usize,
    },
    /// The worker commits undone items of its view that are in `items`; of them, `failed` failed.
    Commit {
        worker: usize,
        items: u8,
        failed: u8,
    },
    /// The worker commits an item that its view says is done.
    CommitAgain {
        worker: usize,
    },
    Release {
        worker: usize,
        wait: bool,
    },
    Fault {
        worker: usize,
    },
    Extend {
        worker: usize,
    },
    /// The worker dies and forgets; its lease goes on.
    Crash {
        worker: usize,
    },
    Pass {
        long: bool,
    },
    Reap,
    Expire,
    Pause,
    Unpause,
    Cancel {
        now: bool,
    },
    Finalize,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    let worker = 0..2usize;
    prop_oneof![
        4 => worker.clone().prop_map(|worker| Op::Claim { worker }),
        6 => (worker.clone(), 1..8u8, 0..8u8).prop_map(|(worker, items, failed)| Op::Commit { worker, items, failed }),
        1 => worker.clone().prop_map(|worker| Op::CommitAgain { worker }),
        1 => (worker.clone(), any::<bool>()).prop_map(|(worker, wait)| Op::Release { worker, wait }),
        1 => worker.clone().prop_map(|worker| Op::Fault { worker }),
        1 => worker.clone().prop_map(|worker| Op::Extend { worker }),
        1 => worker.prop_map(|worker| Op::Crash { worker }),
        3 => any::<bool>().prop_map(|long| Op::Pass { long }),
        1 => Just(Op::Reap),
        1 => Just(Op::Expire),
        1 => Just(Op::Pause),
        1 => Just(Op::Unpause),
        1 => any::<bool>().prop_map(|now| Op::Cancel { now }),
        3 => Just(Op::Finalize),
        2 => Just(Op::Reopen),
    ]
}

/// A shard as the model has it.
#[derive(Debug, Clone, Default)]
struct Row {
    leased_until: Option<u64>,
    not_before: u64,
    epoch: u64,
    next_seq: u32,
    crashes: u32,
    committed_in_lease: bool,
    done: Vec<bool>,
    failed: Vec<bool>,
}

impl Row {
    fn is_done(&self) -> bool {
        self.done.iter().all(|done| *done)
    }

    fn state(&self) -> ShardState {
        match (self.is_done(), self.leased_until) {
            (true, _) => ShardState::Done,
            (false, Some(_)) => ShardState::Leased,
            (false, None) => ShardState::Ready,
        }
    }

    fn lose(&mut self, now: u64) {
        self.crashes += u32::from(!self.committed_in_lease);
        (self.leased_until, self.not_before) = (None, now);
    }
}

/// The job as the model has it; time in seconds.
#[derive(Debug, Clone)]
struct Model {
    now: u64,
    state: JobState,
    paused: bool,
    window_end: u64,
    finalize_at: Option<u64>,
    ended_as: Option<JobState>,
    retries: u64,
    rows: Vec<Row>,
}

impl Model {
    fn new() -> Self {
        let row = |&size: &u32| Row {
            done: vec![false; size as usize],
            failed: vec![false; size as usize],
            ..Row::default()
        };
        Model {
            now: 0,
            state: JobState::InProgress,
            paused: false,
            window_end: WINDOW.as_secs(),
            finalize_at: None,
            ended_as: None,
            retries: 0,
            rows: SIZES.iter().map(row).collect(),
        }
    }

    fn claim(&mut self) -> Option<usize> {
        let now = self.now;
        if self.state != JobState::InProgress || self.paused || self.window_end <= now {
            return None;
        }
        let free = |row: &Row| match row.state() {
            ShardState::Ready => row.not_before <= now,
            ShardState::Leased => row.leased_until <= Some(now),
            ShardState::Done => false,
        };
        let shard = self.rows.iter().position(free)?;
        let row = &mut self.rows[shard];
        if row.leased_until.is_some() {
            row.lose(now);
        }
        row.epoch += 1;
        row.committed_in_lease = false;
        row.leased_until = Some(now + LEASE.as_secs());
        Some(shard)
    }

    fn holds(&self, lease: &ShardLease) -> bool {
        let row = &self.rows[lease.shard.cut.shard.0 as usize];
        row.state() == ShardState::Leased && row.epoch == lease.shard.epoch.0
    }

    fn commit(&mut self, lease: &ShardLease, items: &[u32], failed: &[u32]) -> bool {
        let running = matches!(self.state, JobState::InProgress | JobState::Cancelling);
        let shard = lease.shard.cut.shard.0 as usize;
        let fresh = items.iter().all(|&item| !self.rows[shard].done[item as usize]);
        if !running || !self.holds(lease) || self.rows[shard].next_seq != lease.shard.next_seq || !fresh {
            return false;
        }
        let row = &mut self.rows[shard];
        items.iter().for_each(|&item| row.done[item as usize] = true);
        failed.iter().for_each(|&item| row.failed[item as usize] = true);
        (row.crashes, row.committed_in_lease, row.next_seq) = (0, true, row.next_seq + 1);
        if row.is_done() {
            row.leased_until = None;
            if self.state == JobState::InProgress && self.rows.iter().all(Row::is_done) {
                self.end_running(JobState::Finalizing, JobState::Completed, self.now);
            }
        }
        self.drain();
        true
    }

    fn end_running(&mut self, state: JobState, ended_as: JobState, finalize_at: u64) {
        (self.state, self.ended_as, self.paused) = (state, Some(ended_as), false);
        self.finalize_at = Some(finalize_at);
    }

    /// A cancelling job with nothing leased is finalized at once.
    fn drain(&mut self) {
        if self.state == JobState::Cancelling && self.rows.iter().all(|row| row.leased_until.is_none()) {
            self.finalize_at = self.finalize_at.map(|at| at.min(self.now));
        }
    }

    fn fence(&mut self) {
        for row in self.rows.iter_mut().filter(|row| row.leased_until.is_some()) {
            (row.leased_until, row.not_before, row.epoch) = (None, self.now, row.epoch + 1);
        }
    }

    fn reopen(&mut self) -> bool {
        let ended = matches!(self.state, JobState::Completed | JobState::Expired | JobState::Cancelled);
        let runs = self.rows.iter().any(|row| !row.is_done() || row.failed.contains(&true));
        if !ended || !runs {
            return false;
        }
        for row in self.rows.iter_mut().filter(|row| !row.is_done() || row.failed.contains(&true)) {
            for item in 0..row.done.len() {
                row.done[item] &= !row.failed[item];
                row.failed[item] = false;
            }
            (row.epoch, row.crashes, row.not_before) = (row.epoch + 1, 0, self.now);
        }
        self.state = JobState::InProgress;
        self.window_end = self.now + WINDOW.as_secs();
        (self.ended_as, self.finalize_at, self.retries) = (None, None, 0);
        true
    }

    fn counts(&self) -> (u64, u64) {
        let sum = |of: fn(&Row) -> &Vec<bool>| self.rows.iter().flat_map(of).filter(|bit| **bit).count() as u64;
        (sum(|row| &row.done), sum(|row| &row.failed))
    }
}

/// Both at once.
struct Both {
    store: Arc<dyn Store>,
    clock: Arc<dyn TestClock>,
    job: JobId,
    model: Model,
    workers: [WorkerId; 2],
    leases: [Option<ShardLease>; 2],
    num_ends: u32,
    /// States after the last move, to hold each step against `can_become`.
    last: Option<(JobState, Vec<ShardState>)>,
}

macro_rules! same {
    ($what:expr, $store:expr, $model:expr) => {
        if $store != $model {
            return Err(format!("{:?}: store {:?}, model {:?}", $what, $store, $model));
        }
    };
}

impl Both {
    async fn apply(&mut self, op: &Op) -> Result<(), String> {
        let store = self.store.clone();
        match *op {
            Op::Claim { worker } => {
                let claim = ClaimShard { ttl: LEASE, ..claim(self.workers[worker]) };
                let lease = store.claim_shard(&claim).await.unwrap();
                same!(op, lease.as_ref().map(|lease| lease.shard.cut.shard.0 as usize), self.model.claim());
                if let Some(lease) = &lease {
                    same!(op, lease.shard.crashes, self.model.rows[lease.shard.cut.shard.0 as usize].crashes);
                    same!(op, lease.retries_used, self.model.retries);
                }
                self.leases[worker] = lease.or(self.leases[worker].take());
            }
            Op::Commit { worker, items, failed } => {
                let Some(mut lease) = self.leases[worker].take() else { return Ok(()) };
                let pick =
                    |mask: u8, of: &[u32]| of.iter().copied().filter(|bit| mask >> bit & 1 == 1).collect::<Vec<_>>();
                let items = pick(items, &lease.shard.done.zeros().collect::<Vec<_>>());
                let failed = pick(failed, &items);
                if !items.is_empty() {
                    let wanted = self.model.commit(&lease, &items, &failed);
                    same!(op, commit(&*store, &mut lease, &items, &failed).await.is_applied(), wanted);
                }
                self.leases[worker] = Some(lease);
            }
            Op::CommitAgain { worker } => {
                let Some(mut lease) = self.leases[worker].take() else { return Ok(()) };
                let done = lease.shard.done.ones().next();
                if let Some(item) = done {
                    let wanted = self.model.commit(&lease, &[item], &[]);
                    same!(op, commit(&*store, &mut lease, &[item], &[]).await.is_applied(), wanted);
                }
                self.leases[worker] = Some(lease);
            }
            Op::Release { worker, wait } => {
                let Some(lease) = self.leases[worker].take() else { return Ok(()) };
                let delay = Duration::from_secs(if wait { 450 } else { 0 });
                let answer = store.release_shard_if_leased(lease.key(), delay, AttemptEnd::Waiting).await.unwrap();
                let held = self.model.holds(&lease);
                same!(op, answer.is_applied(), held);
                if held {
                    let row = &mut self.model.rows[lease.shard.cut.shard.0 as usize];
                    (row.leased_until, row.not_before) = (None, self.model.now + delay.as_secs());
                    self.model.drain();
                }
            }
            Op::Fault { worker } => {
                let Some(lease) = &self.leases[worker] else { return Ok(()) };
                let Some(bit) = lease.shard.done.zeros().next() else { return Ok(()) };
                let item = lease.shard.cut.first_item.0 + u64::from(bit);
                let fault = new_fault(item, 1, Duration::from_secs(450));
                let answer = store.record_faults_if_leased(lease.key(), &[fault]).await.unwrap();
                let shard = &self.model.rows[lease.shard.cut.shard.0 as usize];
                let wanted = self.model.holds(lease) && !shard.done[bit as usize];
                same!(op, answer.is_applied(), wanted);
                self.model.retries += u64::from(wanted);
            }
            Op::Extend { worker } => {
                let Some(lease) = &self.leases[worker] else { return Ok(()) };
                let lost = store.extend_shards(self.workers[worker], &[lease.key()], LEASE).await.unwrap();
                let held = self.model.holds(lease);
                same!(op, lost.is_empty(), held);
                if held {
                    let until = self.model.now + LEASE.as_secs();
                    self.model.rows[lease.shard.cut.shard.0 as usize].leased_until = Some(until);
                }
            }
            Op::Crash { worker } => self.leases[worker] = None,
            Op::Pass { long } => {
                let seconds = if long { 2_100 } else { 300 };
                self.clock.advance(Duration::from_secs(seconds)).await;
                self.model.now += seconds;
            }
            Op::Reap => {
                let reaped = store.release_expired_leases(99).await.unwrap();
                let now = self.model.now;
                let over = |row: &&mut Row| row.leased_until.is_some_and(|until| until <= now);
                let wanted = self.model.rows.iter_mut().filter(over).map(|row| row.lose(now)).count();
                same!(op, reaped as usize, wanted);
                if wanted > 0 {
                    self.model.drain();
                }
            }
            Op::Expire => {
                let expired = store.expire_due_jobs(9).await.unwrap();
                let due = self.model.state == JobState::InProgress && self.model.window_end <= self.model.now;
                same!(op, expired.len(), usize::from(due));
                if due {
                    self.model.fence();
                    self.model.end_running(JobState::Finalizing, JobState::Expired, self.model.now);
                }
            }
            Op::Pause => {
                let answer = store.pause_job_if_active(self.job).await.unwrap();
                same!(op, answer.is_applied(), self.model.state == JobState::InProgress);
                self.model.paused |= answer.is_applied();
            }
            Op::Unpause => {
                let answer = store.unpause_job_if_active(self.job).await.unwrap();
                same!(op, answer.is_applied(), !self.model.state.is_terminal());
                self.model.paused = false;
            }
            Op::Cancel { now } => self.cancel(op, now).await?,
            Op::Finalize => self.finalize(op).await?,
            Op::Reopen => {
                let reopen = Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: vec![] };
                let answer = store.reopen_job_if_ended(self.job, reopen).await.unwrap();
                same!(op, answer.is_applied(), self.model.reopen());
            }
        }
        self.compare(op).await
    }

    async fn cancel(&mut self, op: &Op, now: bool) -> Result<(), String> {
        let mode = if now { CancelMode::Now } else { CancelMode::Drain };
        let drain = Duration::from_secs(4_350);
        let answer = self.store.cancel_job_if_active(self.job, mode, drain).await.unwrap();
        let model = &mut self.model;
        let active = matches!(model.state, JobState::InProgress | JobState::Cancelling | JobState::Cancelled);
        same!(op, answer.is_applied(), active);
        if model.state == JobState::InProgress {
            let drains = !now && model.rows.iter().any(|row| row.leased_until.is_some());
            let at = model.now + if drains { drain.as_secs() } else { 0 };
            model.end_running(JobState::Cancelling, JobState::Cancelled, at);
        } else if model.state == JobState::Cancelling && now {
            model.finalize_at = model.finalize_at.map(|at| at.min(model.now));
        }
        Ok(())
    }

    async fn finalize(&mut self, op: &Op) -> Result<(), String> {
        let step = self.store.claim_step(WorkerId::new(), LEASE).await.unwrap();
        let due = self.model.finalize_at.is_some_and(|at| at <= self.model.now);
        same!(op, step.is_some(), due);
        let Some(step) = step else { return Ok(()) };
        applied(self.store.fence_shards_if_leased(&step).await.unwrap());
        let published = publication(&*self.store, &step.job).await;
        let ended = applied(self.store.finish_job_if_leased(&step, published).await.unwrap());
        assert_closed(&*self.store, &ended).await;
        self.model.fence();
        self.model.state = self.model.ended_as.take().expect("an ending was drawn");
        (self.model.finalize_at, self.num_ends) = (None, self.num_ends + 1);
        let counts = ended.final_counts.unwrap();
        let (done, failed) = self.model.counts();
        same!(op, (counts.completed, counts.failed), (done - failed, failed));
        Ok(())
    }

    async fn compare(&mut self, op: &Op) -> Result<(), String> {
        let job = self.store.find_job(self.job).await.unwrap().unwrap();
        same!(op, (job.state, job.paused_at.is_some()), (self.model.state, self.model.paused));
        let shards = self.store.list_shards(self.job, ShardIndex(0), 9).await.unwrap();
        for (shard, row) in shards.iter().zip(&self.model.rows) {
            let bits = |bitmap: &overnight_types::Bitmap| {
                (0..bitmap.num_bits()).map(|bit| bitmap.get(bit)).collect::<Vec<_>>()
            };
            same!(op, (shard.state, shard.epoch.0, shard.next_seq), (row.state(), row.epoch, row.next_seq));
            same!(op, (bits(&shard.done), bits(&shard.failed)), (row.done.clone(), row.failed.clone()));
            same!(op, shard.crashes, row.crashes);
        }
        let now = (job.state, shards.iter().map(|shard| shard.state).collect::<Vec<_>>());
        if let Some((job, shards)) = &self.last {
            let legal = (*job == now.0 || job.can_become(now.0))
                && shards.iter().zip(&now.1).all(|(from, to)| from == to || from.can_become(*to));
            same!(op, (legal, job, now.0), (true, job, now.0));
        }
        self.last = Some(now);
        Ok(())
    }
}

/// Runs a case; the number of ends that the job came to.
async fn run_case(ops: &[Op], fixture: Fixture) -> Result<u32, String> {
    let Fixture { store, clock, keep } = fixture;
    let input = input(&*store).await;
    let job = run_new_job(&*store, NewJob { window: WINDOW, ..new_job(input) }, &SIZES).await.id;
    let workers = [WorkerId::new(), WorkerId::new()];
    let mut both =
        Both { store, clock, job, model: Model::new(), workers, leases: [None, None], num_ends: 0, last: None };
    for op in ops {
        both.apply(op).await?;
    }
    let findings = both.store.check().await.unwrap();
    drop((both.store, keep));
    if findings.is_empty() { Ok(both.num_ends) } else { Err(findings.join("; ")) }
}

/// As many cases as `PROPTEST_CASES` says, 64 otherwise. Failing inputs are printed
/// whole, so no file of seeds is kept.
fn runner() -> TestRunner {
    TestRunner::new(ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 400,
        ..ProptestConfig::with_cases(64)
    })
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Each case on a database of its own, which `open` gives; none without its service.
pub fn every_answer_is_the_models_and_every_end_is_closed<F, O, I>(open: F)
where
    F: Fn(EpochGuard) -> O,
    O: Future<Output = I>,
    I: Into<Option<Fixture>>,
{
    let ends = std::cell::Cell::new(Some(0));
    let cases = prop::collection::vec(op(), 10..60);
    let result = runner().run(&cases, |ops| {
        block_on(async {
            let (Some(fixture), Some(before)) = (open(EpochGuard::Held).await.into(), ends.get()) else {
                ends.set(None);
                return Ok(());
            };
            ends.set(Some(before + run_case(&ops, fixture).await.map_err(TestCaseError::fail)?));
            Ok(())
        })
    });
    result.unwrap_or_else(|err| panic!("{err}"));
    assert!(ends.get().is_none_or(|ends| ends > 20), "the cases reach ends: {ends:?}");
}

/// The negative control.
pub fn model_catches_a_store_without_its_guard<F, O, I>(open: F)
where
    F: Fn(EpochGuard) -> O,
    O: Future<Output = I>,
    I: Into<Option<Fixture>>,
{
    let cases = prop::collection::vec(op(), 10..60);
    let is_lacking = std::cell::Cell::new(false);
    let result = runner().run(&cases, |ops| {
        block_on(async {
            let Some(fixture) = open(EpochGuard::TakenOut).await.into() else {
                is_lacking.set(true);
                return Ok(());
            };
            run_case(&ops, fixture).await.map(drop).map_err(TestCaseError::fail)
        })
    });
    if is_lacking.get() {
        return;
    }
    let Err(TestError::Fail(why, _)) = result else { panic!("the negative control must fail: {result:?}") };
    assert!(why.message().contains("Commit"), "{why}");
}
