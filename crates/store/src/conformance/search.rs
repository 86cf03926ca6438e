//! A small exhaustive search: two workers, two shards, a crash, a pause longer than
//! the lease, or a cancel at any point.
//!
//! First over a pure model of claim, object, commit, release, expiry and finalize:
//! every reachable state is visited and the invariant checked in each. Then against
//! the real store: every transition of the model within a few moves of the start is
//! replayed and both must give the same answer. Both searches must fail with the
//! guard taken out, or they would show nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use overnight_types::{JobId, ShardIndex, ShardState, WorkerId};

use super::builders::*;
use super::{EpochGuard, Fixture};
use crate::{AttemptEnd, CancelMode, ShardLease, StepLease, Store};

/// Items of each shard.
const ITEMS: [u8; 2] = [2, 1];

/// Leases that the search gives each shard, so that it ends.
const EPOCHS_MAX: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Running,
    Cancelling,
    Finalizing,
    /// The finalizer has fenced the shards.
    Fenced,
    /// It has read the segments: outcomes per item.
    Read([[u8; 2]; 2]),
    Ended([[u8; 2]; 2]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Row {
    /// 0 ready, 1 leased, 2 done.
    state: u8,
    owner: u8,
    epoch: u8,
    next_seq: u8,
    done: u8,
    /// Outcomes that segments name, per item.
    outcomes: [u8; 2],
}

/// What a worker believes; it outlives its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct View {
    shard: u8,
    epoch: u8,
    next_seq: u8,
    done: u8,
    /// The object that is durable and not yet named: its item.
    written: Option<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    phase: Phase,
    rows: [Row; 2],
    views: [Option<View>; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Move {
    Claim(u8),
    Write(u8),
    Commit(u8),
    Release(u8),
    /// The worker is gone, with all that it believed.
    Crash(u8),
    /// The worker's lease is taken back; it does not know.
    Expire(u8),
    Cancel,
    Fence,
    Read,
    Publish,
}

/// What the commit looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guard {
    Whole,
    /// Without epoch and lease; sequence and done bits are still compared.
    #[cfg(test)]
    NoEpoch,
    /// Without anything of the lease.
    #[cfg(test)]
    Nothing,
}

impl State {
    fn start() -> Self {
        State { phase: Phase::Running, rows: [Row::default(); 2], views: [None; 2] }
    }

    /// Moves that somebody may make here.
    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for w in 0..2u8 {
            match self.views[w as usize] {
                None => moves.push(Move::Claim(w)),
                Some(view) => {
                    moves.push(Move::Crash(w));
                    moves.push(Move::Release(w));
                    moves.push(if view.written.is_none() { Move::Write(w) } else { Move::Commit(w) });
                }
            }
            if self.rows.iter().any(|row| row.state == 1 && row.owner == w) {
                moves.push(Move::Expire(w));
            }
        }
        match self.phase {
            Phase::Running => moves.push(Move::Cancel),
            Phase::Cancelling | Phase::Finalizing => moves.push(Move::Fence),
            Phase::Fenced => moves.push(Move::Read),
            Phase::Read(_) => moves.push(Move::Publish),
            Phase::Ended(_) => moves.clear(),
        }
        moves
    }

    /// The state after a move, and whether it was applied.
    fn after(mut self, step: Move, guard: Guard) -> (State, bool) {
        let applied = match step {
            Move::Claim(w) => self.claim(w),
            Move::Write(w) => self.write(w),
            Move::Commit(w) => self.commit(w, guard),
            Move::Release(w) => self.release(w),
            Move::Crash(w) => self.views[w as usize].take().is_some(),
            Move::Expire(w) => self.take_back(|row| row.owner == w, 0),
            Move::Cancel => {
                self.phase = Phase::Cancelling;
                true
            }
            Move::Fence => {
                self.take_back(|_| true, 1);
                self.phase = Phase::Fenced;
                true
            }
            Move::Read => {
                self.phase = Phase::Read([self.rows[0].outcomes, self.rows[1].outcomes]);
                true
            }
            Move::Publish => {
                let Phase::Read(read) = self.phase else { unreachable!("publish follows read") };
                self.phase = Phase::Ended(read);
                true
            }
        };
        (self, applied)
    }

    fn claim(&mut self, w: u8) -> bool {
        let free = |row: &Row| row.state == 0 && row.epoch < EPOCHS_MAX;
        let Some(shard) = (0..2).find(|&s| self.phase == Phase::Running && free(&self.rows[s])) else { return false };
        let row = &mut self.rows[shard];
        (row.state, row.owner, row.epoch) = (1, w, row.epoch + 1);
        let view = View { shard: shard as u8, epoch: row.epoch, next_seq: row.next_seq, done: row.done, written: None };
        self.views[w as usize] = Some(view);
        true
    }

    fn write(&mut self, w: u8) -> bool {
        let view = self.views[w as usize].as_mut().expect("a worker that writes holds a shard");
        view.written = (0..ITEMS[view.shard as usize]).find(|item| view.done >> item & 1 == 0);
        if view.written.is_none() {
            self.views[w as usize] = None;
        }
        true
    }

    fn commit(&mut self, w: u8, guard: Guard) -> bool {
        let view = self.views[w as usize].as_mut().expect("a worker that commits holds a shard");
        let item = view.written.take().expect("objects first");
        let row = &mut self.rows[view.shard as usize];
        let leased = row.state == 1 && row.epoch == view.epoch;
        let fresh = row.next_seq == view.next_seq && row.done >> item & 1 == 0;
        let running = matches!(self.phase, Phase::Running | Phase::Cancelling | Phase::Fenced | Phase::Read(_));
        let held = match guard {
            Guard::Whole => leased && fresh,
            #[cfg(test)]
            Guard::NoEpoch => fresh,
            #[cfg(test)]
            Guard::Nothing => true,
        };
        if !running || !held {
            self.views[w as usize] = None;
            return false;
        }
        row.done |= 1 << item;
        row.outcomes[item as usize] += 1;
        row.next_seq += 1;
        view.next_seq += 1;
        view.done |= 1 << item;
        if row.done == (1 << ITEMS[view.shard as usize]) - 1 {
            row.state = 2;
            self.views[w as usize] = None;
            if self.phase == Phase::Running && self.rows.iter().all(|row| row.state == 2) {
                self.phase = Phase::Finalizing;
            }
        }
        true
    }

    fn release(&mut self, w: u8) -> bool {
        let view = self.views[w as usize].take().expect("a worker that releases holds a shard");
        let row = &mut self.rows[view.shard as usize];
        let held = row.state == 1 && row.epoch == view.epoch;
        if held {
            row.state = 0;
        }
        held
    }

    fn take_back(&mut self, which: impl Fn(&Row) -> bool, raise: u8) -> bool {
        let mut any = false;
        for row in self.rows.iter_mut().filter(|row| row.state == 1 && which(row)) {
            (row.state, row.epoch) = (0, row.epoch + raise);
            any = true;
        }
        any
    }

    /// What must hold everywhere; the reason, where it does not.
    fn broken(&self) -> Option<String> {
        for (shard, row) in self.rows.iter().enumerate() {
            for item in 0..2 {
                let done = row.done >> item & 1;
                if row.outcomes[item] != done {
                    return Some(format!(
                        "item {item} of shard {shard} has {} outcomes and done {done}",
                        row.outcomes[item]
                    ));
                }
            }
        }
        match self.phase {
            Phase::Ended(read) if read != [self.rows[0].outcomes, self.rows[1].outcomes] => {
                Some("an outcome was committed after the files were read".into())
            }
            _ => None,
        }
    }
}

/// Every reachable state with the moves that lead there; stops at a broken one.
fn search(guard: Guard) -> Result<HashMap<State, Vec<Move>>, (Vec<Move>, String)> {
    let mut seen = HashMap::from([(State::start(), vec![])]);
    let mut queue = VecDeque::from([State::start()]);
    while let Some(state) = queue.pop_front() {
        for step in state.moves() {
            let (next, _) = state.after(step, guard);
            if seen.contains_key(&next) {
                continue;
            }
            let mut path: Vec<Move> = seen[&state].clone();
            path.push(step);
            if let Some(why) = next.broken() {
                return Err((path, why));
            }
            seen.insert(next, path);
            queue.push_back(next);
        }
    }
    Ok(seen)
}

/// The real store, driven by the model's moves.
struct Real {
    store: Arc<dyn Store>,
    job: JobId,
    workers: [WorkerId; 2],
    leases: [Option<ShardLease>; 2],
    written: [Option<u8>; 2],
    finalize: Option<StepLease>,
}

impl Real {
    async fn start(store: &Arc<dyn Store>) -> Self {
        let job = running_job(&**store, &ITEMS.map(u32::from)).await.id;
        let workers = [WorkerId::new(), WorkerId::new()];
        Real { store: store.clone(), job, workers, leases: [None, None], written: [None; 2], finalize: None }
    }

    /// Makes the move; whether the store applied it.
    async fn make(&mut self, step: Move) -> bool {
        let store = self.store.clone();
        match step {
            Move::Claim(w) => {
                self.leases[w as usize] = try_lease(&*store, self.workers[w as usize]).await;
                self.leases[w as usize].is_some()
            }
            Move::Write(w) => {
                let lease = self.leases[w as usize].as_ref().expect("the model has a lease here");
                self.written[w as usize] = lease.shard.done.zeros().next().map(|bit| bit as u8);
                true
            }
            Move::Commit(w) => {
                let item = self.written[w as usize].take().expect("the model has written here");
                let lease = self.leases[w as usize].as_mut().expect("the model has a lease here");
                let applied = commit(&*store, lease, &[u32::from(item)], &[]).await.is_applied();
                if !applied || lease.shard.done.is_full() {
                    self.leases[w as usize] = None;
                }
                applied
            }
            Move::Release(w) => {
                self.written[w as usize] = None;
                let lease = self.leases[w as usize].take().expect("the model has a lease here");
                let why = AttemptEnd::Released;
                store.release_shard_if_leased(lease.key(), Duration::ZERO, why).await.unwrap().is_applied()
            }
            Move::Crash(w) => {
                self.written[w as usize] = None;
                self.leases[w as usize].take().is_some()
            }
            Move::Expire(w) => store.release_leases_of_dead(&[self.workers[w as usize]]).await.unwrap() > 0,
            Move::Cancel => store.cancel_job_if_active(self.job, CancelMode::Now, TTL).await.unwrap().is_applied(),
            Move::Fence => {
                let lease = claim_step_of(&*store, self.job).await;
                let fenced = store.fence_shards_if_leased(&lease).await.unwrap().is_applied();
                self.finalize = Some(lease);
                fenced
            }
            Move::Read => true,
            Move::Publish => {
                let lease = self.finalize.as_ref().expect("fence comes first");
                let published = publication(&*store, &lease.job).await;
                let ended = applied(store.finish_job_if_leased(lease, published).await.unwrap());
                assert_closed(&*store, &ended).await;
                true
            }
        }
    }

    /// Ends the job from whatever state, so that later claims do not meet it.
    async fn put_away(mut self) {
        let store = &*self.store;
        let _ = store.cancel_job_if_active(self.job, CancelMode::Now, Duration::ZERO).await.unwrap();
        if store.find_job(self.job).await.unwrap().unwrap().state.is_terminal() {
            return;
        }
        let lease = match self.finalize.take() {
            Some(lease) => lease,
            None => claim_step_of(store, self.job).await,
        };
        applied(store.fence_shards_if_leased(&lease).await.unwrap());
        let published = publication(store, &lease.job).await;
        applied(store.finish_job_if_leased(&lease, published).await.unwrap());
    }

    /// State, done bits and outcomes by segment of both shards.
    async fn rows(&self) -> Vec<(ShardState, u8, [u8; 2])> {
        let mut rows = Vec::new();
        for shard in self.store.list_shards(self.job, ShardIndex(0), 9).await.unwrap() {
            let mut outcomes = [0; 2];
            for segment in self.store.list_segments_of_shard(self.job, shard.cut.shard).await.unwrap() {
                segment.new.items.ones().for_each(|bit| outcomes[bit as usize] += 1);
            }
            rows.push((shard.state, shard.done.ones().map(|bit| 1 << bit).sum(), outcomes));
        }
        rows
    }
}

fn expected(state: &State) -> Vec<(ShardState, u8, [u8; 2])> {
    let words = [ShardState::Ready, ShardState::Leased, ShardState::Done];
    state.rows.iter().map(|row| (words[row.state as usize], row.done, row.outcomes)).collect()
}

/// Every transition of the model within `depth` moves, on a job of its own.
async fn replay(store: &Arc<dyn Store>, depth: usize) -> Result<usize, String> {
    let seen = search(Guard::Whole).unwrap_or_else(|(path, why)| panic!("{why} after {path:?}"));
    let paths: BTreeMap<usize, Vec<(&State, &Vec<Move>)>> =
        seen.iter().fold(BTreeMap::new(), |mut by_len, (state, path)| {
            by_len.entry(path.len()).or_insert_with(Vec::new).push((state, path));
            by_len
        });
    let mut replayed = 0;
    for (state, path) in paths.range(..depth).flat_map(|(_, paths)| paths) {
        // Moves in a worker's memory alone are made on the way, but prove nothing as the last one.
        let in_memory = |step: &Move| matches!(step, Move::Write(_) | Move::Crash(_) | Move::Read);
        for step in state.moves().into_iter().filter(|step| !in_memory(step)) {
            let mut real = Real::start(store).await;
            for &earlier in *path {
                real.make(earlier).await;
            }
            let (next, applied) = state.after(step, Guard::Whole);
            let (really, rows) = (real.make(step).await, real.rows().await);
            if really != applied || rows != expected(&next) {
                return Err(format!(
                    "{path:?} then {step:?}: model {applied} {:?}, store {really} {rows:?}",
                    expected(&next)
                ));
            }
            replayed += 1;
            real.put_away().await;
        }
    }
    Ok(replayed)
}

/// The database's own promise: it answers as the model does.
pub async fn store_answers_as_the_model_on_every_short_path<F, O, I>(open: F)
where
    F: Fn(EpochGuard) -> O,
    O: Future<Output = I>,
    I: Into<Option<Fixture>>,
{
    let Some(fixture) = open(EpochGuard::Held).await.into() else { return };
    let replayed = replay(&fixture.store, 5).await.unwrap_or_else(|why| panic!("{why}"));
    assert!(replayed > 100, "{replayed} transitions");
}

/// The negative control.
pub async fn store_without_its_guard_is_caught_by_the_model<F, O, I>(open: F)
where
    F: Fn(EpochGuard) -> O,
    O: Future<Output = I>,
    I: Into<Option<Fixture>>,
{
    let Some(fixture) = open(EpochGuard::TakenOut).await.into() else { return };
    let why = replay(&fixture.store, 6).await.expect_err("the negative control must fail");
    assert!(why.contains("Commit"), "{why}");
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_crash_anywhere_breaks_the_protocol() {
        let seen = search(Guard::Whole).unwrap_or_else(|(path, why)| panic!("{why} after {path:?}"));
        assert!(seen.len() > 50_000, "the search is exhaustive, not stuck: {} states", seen.len());
        let ended = seen.keys().filter(|state| matches!(state.phase, Phase::Ended(_))).count();
        assert!(ended > 10, "{ended} ends");
    }

    /// Nobody is stuck: from every state that has leases to give, some way leads to an end.
    #[test]
    fn every_state_can_still_come_to_an_end() {
        let seen = search(Guard::Whole).unwrap_or_else(|(path, why)| panic!("{why} after {path:?}"));
        let mut before: HashMap<State, Vec<State>> = HashMap::new();
        for state in seen.keys() {
            for step in state.moves() {
                before.entry(state.after(step, Guard::Whole).0).or_default().push(*state);
            }
        }
        let mut good: HashSet<State> =
            seen.keys().filter(|state| matches!(state.phase, Phase::Ended(_))).copied().collect();
        let mut queue: VecDeque<State> = good.iter().copied().collect();
        while let Some(state) = queue.pop_front() {
            for earlier in before.get(&state).into_iter().flatten() {
                if good.insert(*earlier) {
                    queue.push_back(*earlier);
                }
            }
        }
        let stuck = seen.iter().find(|(state, _)| !good.contains(state));
        assert!(stuck.is_none(), "no end from {stuck:?}");
    }

    #[test]
    fn without_the_epoch_the_search_finds_a_broken_promise() {
        let (path, why) = search(Guard::NoEpoch).expect_err("the negative control must fail");
        assert!(why.contains("after the files were read"), "{why} after {path:?}");
    }

    #[test]
    fn without_the_lease_the_search_finds_an_item_with_two_outcomes() {
        let (path, why) = search(Guard::Nothing).expect_err("the negative control must fail");
        assert!(why.contains("2 outcomes") || why.contains("after the files"), "{why} after {path:?}");
    }
}
