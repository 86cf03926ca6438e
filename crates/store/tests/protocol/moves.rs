//! Who may do what. A move that is not possible here gives `None`.
//!
//! Commits, ends and re-openings are transactions, so each is one move; everything
//! between two of them is a move of its own, and others come in between.

use crate::model::{
    FAILING, ITEMS, JobState, Names, Reopening, Row, RowState, SHARDS, Setup, Stage, State, Step, Sweep, View, Without,
    leftover_name, name, names_below,
};
use crate::step::Move;

impl State {
    /// The state after a move.
    pub(crate) fn after(mut self, step: Move, setup: &Setup, without: Without) -> Option<State> {
        match step {
            Move::Claim(w) => self.claim(w, without),
            Move::Put(w, all) => self.put(w, all, setup, without),
            Move::Commit(w) => self.commit(w, setup, without, true),
            Move::CommitUnanswered(w) => self.fault().and_then(|()| self.commit(w, setup, without, false)),
            Move::Crash(w) => self.fault().and(self.workers[w].take()).map(drop),
            Move::Expire(_) if without == Without::Expiry => None,
            Move::Expire(shard) => self.expire(shard),
            Move::Cancel => self.cancel(),
            Move::ClaimStep(f) => self.claim_step(f),
            Move::Fence(f) => self.fence(f, without),
            Move::Read(f) => self.read(f),
            Move::Look(f) => self.look(f, without),
            Move::Publish(f) => self.publish(f),
            Move::Finish(f) => self.finish(f, without),
            Move::CrashStep(f) => self.fault().and(self.finalizers[f].take()).map(drop),
            Move::ExpireStep => self.expire_step(),
            Move::TimePasses => self.time_passes(),
            Move::SweepShard(shard) => self.sweep_shard(shard, without),
            Move::SweepNames => self.sweep_names(without),
            Move::SweepDelete => self.sweep_delete(),
            Move::AskReopen(selected) => self.ask_reopen(selected, setup, without),
            Move::PutLeftovers => self.put_leftovers(),
            Move::Reopen => self.reopen(setup),
            Move::CrashReopening => self.fault().and(self.reopening.take()).map(drop),
        }?;
        // Processes of a kind are alike, so their order tells nothing.
        self.workers[..setup.workers].sort_unstable();
        self.finalizers[..setup.finalizers].sort_unstable();
        Some(self)
    }

    fn fault(&mut self) -> Option<()> {
        self.faults_left = self.faults_left.checked_sub(1)?;
        Some(())
    }

    fn claim(&mut self, w: usize, without: Without) -> Option<()> {
        if self.workers[w].is_some() || self.job.state != JobState::Running {
            return None;
        }
        let shard = self.rows.iter().position(|row| row.state == RowState::Ready)?;
        let row = &mut self.rows[shard];
        row.state = RowState::Leased;
        row.claims += 1;
        if without != Without::NewEpochPerClaim || row.epoch == 0 {
            row.epoch += 1;
        }
        let Row { epoch, claims: claim, next_seq, done, .. } = *row;
        self.workers[w] = Some(View { shard, epoch, claim, next_seq, done, written: 0 });
        Some(())
    }

    fn put(&mut self, w: usize, all: bool, setup: &Setup, without: Without) -> Option<()> {
        let view = self.workers[w].as_mut().filter(|view| view.written == 0)?;
        let undone = ((1 << setup.items[view.shard]) - 1) & !view.done;
        let first = undone & undone.wrapping_neg();
        if all && undone == first {
            return None;
        }
        view.written = if all { undone } else { first };
        if without != Without::ObjectFirst {
            self.objects[view.shard] |= name(view.epoch, view.next_seq, view.written);
        }
        Some(())
    }

    fn commit(&mut self, w: usize, setup: &Setup, without: Without, is_answered: bool) -> Option<()> {
        let view = self.workers[w].filter(|view| view.written != 0)?;
        let row = &mut self.rows[view.shard];
        let running = matches!(self.job.state, JobState::Running | JobState::Cancelling);
        let is_leased = row.state == RowState::Leased;
        let same_epoch = row.epoch == view.epoch || without == Without::Epoch;
        let same_seq = row.next_seq == view.next_seq || without == Without::Sequence;
        if !(running && is_leased && same_epoch && same_seq) {
            // An answer that says so and one that is lost come to the same: the next try says it.
            self.workers[w] = None;
            return is_answered.then_some(());
        }
        self.was_late |= row.claims != view.claim;
        let answer = 1 + view.epoch * 4 + view.next_seq;
        for item in (0..ITEMS as u8).filter(|item| view.written >> item & 1 == 1) {
            row.outcomes[usize::from(item)] += 1;
            row.answers[usize::from(item)] = answer;
            if (view.shard, item) == FAILING && self.job.round == 0 {
                row.failed |= 1 << item;
            }
        }
        row.done |= view.written;
        row.named |= name(view.epoch, view.next_seq, view.written);
        row.next_seq = row.next_seq.max(view.next_seq + 1);
        let is_done = row.done == (1 << setup.items[view.shard]) - 1;
        if is_done {
            row.state = RowState::Done;
        }
        if is_answered {
            let known = View { next_seq: view.next_seq + 1, done: view.done | view.written, written: 0, ..view };
            self.workers[w] = (!is_done).then_some(known);
        }
        if self.job.state == JobState::Running && self.rows.iter().all(|row| row.state == RowState::Done) {
            self.job.state = JobState::Finalizing;
        }
        Some(())
    }

    fn expire(&mut self, shard: usize) -> Option<()> {
        if self.rows[shard].state != RowState::Leased {
            return None;
        }
        if self.is_held(shard) {
            self.fault()?;
        }
        self.rows[shard].state = RowState::Ready;
        Some(())
    }

    fn cancel(&mut self) -> Option<()> {
        if self.job.state != JobState::Running || self.job.was_cancelled {
            return None;
        }
        (self.job.state, self.job.was_cancelled) = (JobState::Cancelling, true);
        Some(())
    }

    fn claim_step(&mut self, f: usize) -> Option<()> {
        if self.finalizers[f].is_some() || !self.is_ending() || self.job.step_leased {
            return None;
        }
        self.job.step_epoch += 1;
        self.job.step_leased = true;
        let (epoch, round) = (self.job.step_epoch, self.job.round);
        self.finalizers[f] = Some(Step { stage: Stage::Claimed, epoch, round, lines: [[0; ITEMS]; SHARDS] });
        Some(())
    }

    /// The finalizer, if it is at this stage.
    fn at(&self, f: usize, stage: Stage) -> Option<Step> {
        self.finalizers[f].filter(|step| step.stage == stage)
    }

    fn fence(&mut self, f: usize, without: Without) -> Option<()> {
        let step = self.at(f, Stage::Claimed)?;
        if !self.holds_step(&step) {
            self.finalizers[f] = None;
            return Some(());
        }
        if without != Without::Fence {
            for row in self.rows.iter_mut().filter(|row| row.state == RowState::Leased) {
                (row.state, row.epoch) = (RowState::Ready, row.epoch + 1);
            }
        }
        self.finalizers[f] = Some(Step { stage: Stage::Reading(0), ..step });
        Some(())
    }

    fn read(&mut self, f: usize) -> Option<()> {
        let step = self.finalizers[f].as_mut()?;
        let Stage::Reading(shard) = step.stage else { return None };
        let row = self.rows.get(shard)?;
        // A segment that is gone is never published over: the step fails, again and again.
        if row.named & !self.objects[shard] != 0 {
            return None;
        }
        step.lines[shard] = row.answers;
        step.stage = Stage::Reading(shard + 1);
        Some(())
    }

    fn look(&mut self, f: usize, without: Without) -> Option<()> {
        let step = self.at(f, Stage::Reading(SHARDS))?;
        let goes_on = self.holds_step(&step) || without == Without::LastLook;
        self.finalizers[f] = goes_on.then_some(Step { stage: Stage::Looked, ..step });
        Some(())
    }

    fn publish(&mut self, f: usize) -> Option<()> {
        let step = self.at(f, Stage::Looked)?;
        self.files[usize::from(step.round)] = Some(step.lines);
        self.finalizers[f] = Some(Step { stage: Stage::Published, ..step });
        Some(())
    }

    fn finish(&mut self, f: usize, without: Without) -> Option<()> {
        let step = self.at(f, Stage::Published)?;
        self.finalizers[f] = None;
        if self.holds_step(&step) || without == Without::EpochOfStep && self.is_ending() {
            self.job.state = JobState::Ended;
            self.job.step_leased = false;
            self.ends[usize::from(self.job.round)] = Some(self.lines());
        }
        Some(())
    }

    fn expire_step(&mut self) -> Option<()> {
        if !self.job.step_leased {
            return None;
        }
        let epoch = self.job.step_epoch;
        if self.finalizers.iter().flatten().any(|step| step.epoch == epoch) {
            self.fault()?;
        }
        self.job.step_leased = false;
        Some(())
    }

    fn time_passes(&mut self) -> Option<()> {
        let mut grown = self.objects;
        if let Some(reopening) = self.reopening.filter(|reopening| reopening.has_put) {
            for (names, (epoch, seq, _)) in grown.iter_mut().zip(reopening.leftovers) {
                *names &= !leftover_name(epoch, seq, reopening.tries);
            }
        }
        let before = self.old;
        self.old = grown;
        (self.old != before).then_some(())
    }

    fn sweep_shard(&mut self, shard: usize, without: Without) -> Option<()> {
        if self.sweep.is_some() {
            return None;
        }
        let mut candidates = self.objects[shard];
        if without != Without::AgeInSweep {
            candidates &= self.old[shard];
        }
        candidates &= match without {
            Without::RowBeforeNames => !self.rows[shard].named,
            _ => self.fenced(shard, without),
        };
        self.sweep = Some(Sweep { shard, has_names: false, candidates });
        (candidates != 0).then_some(())
    }

    /// Objects that no writer could name any more.
    fn fenced(&self, shard: usize, without: Without) -> Names {
        let row = &self.rows[shard];
        let has_ended = self.job.state == JobState::Ended || row.state == RowState::Done;
        if has_ended || without == Without::EpochInSweep { Names::MAX } else { names_below(row.epoch) }
    }

    fn sweep_names(&mut self, without: Without) -> Option<()> {
        let sweep = self.sweep.take().filter(|sweep| !sweep.has_names)?;
        let candidates = sweep.candidates
            & match without {
                Without::RowBeforeNames => self.fenced(sweep.shard, without),
                _ => !self.rows[sweep.shard].named,
            };
        self.sweep = (candidates != 0).then_some(Sweep { has_names: true, candidates, ..sweep });
        Some(())
    }

    fn sweep_delete(&mut self) -> Option<()> {
        let sweep = self.sweep.take().filter(|sweep| sweep.has_names)?;
        self.objects[sweep.shard] &= !sweep.candidates;
        self.old[sweep.shard] &= !sweep.candidates;
        Some(())
    }

    fn ask_reopen(&mut self, selected: bool, setup: &Setup, without: Without) -> Option<()> {
        // The names of two tries have room in the model.
        if self.reopening.is_some() || self.tries == 2 || self.job.state != JobState::Ended || self.job.round != 0 {
            return None;
        }
        let mut leftovers = [(0, 0, 0); SHARDS];
        let (mut runs, mut left_out) = (0, 0);
        for (shard, row) in self.rows.iter().enumerate() {
            let undone = ((1 << setup.items[shard]) - 1) & !row.done;
            runs |= if selected { row.failed } else { row.failed | undone };
            let items = if selected { undone } else { 0 };
            left_out |= items;
            leftovers[shard] = (row.epoch, row.next_seq, items);
        }
        // Without anything to leave out a selection is the same as all.
        if runs == 0 || selected && left_out == 0 {
            return None;
        }
        let tries = if without == Without::OwnNames { 0 } else { self.tries };
        self.reopening = Some(Reopening { selected, has_put: !selected, tries, leftovers });
        Some(())
    }

    fn put_leftovers(&mut self) -> Option<()> {
        let reopening = self.reopening.as_mut().filter(|reopening| !reopening.has_put)?;
        reopening.has_put = true;
        self.tries += 1;
        let mut written = [0; SHARDS];
        for (shard, (epoch, seq, items)) in reopening.leftovers.into_iter().enumerate() {
            if items != 0 {
                written[shard] = leftover_name(epoch, seq, reopening.tries);
            }
        }
        for (shard, names) in written.into_iter().enumerate() {
            self.objects[shard] |= names;
            // Written anew, it is young again.
            self.old[shard] &= !names;
        }
        Some(())
    }

    fn reopen(&mut self, setup: &Setup) -> Option<()> {
        let reopening = self.reopening.filter(|reopening| reopening.has_put)?;
        self.reopening = None;
        let is_as_seen = (0..SHARDS).all(|shard| {
            let (epoch, seq, _) = reopening.leftovers[shard];
            (self.rows[shard].epoch, self.rows[shard].next_seq) == (epoch, seq)
        });
        if self.job.state != JobState::Ended || self.job.round != 0 || !is_as_seen {
            return Some(());
        }
        for (shard, row) in self.rows.iter_mut().enumerate() {
            let all = (1 << setup.items[shard]) - 1;
            let (epoch, seq, left_out) = reopening.leftovers[shard];
            if row.done == all && row.failed == 0 {
                continue;
            }
            for item in (0..ITEMS as u8).filter(|item| row.failed >> item & 1 == 1) {
                (row.outcomes[usize::from(item)], row.answers[usize::from(item)]) = (0, 0);
            }
            row.done &= !row.failed;
            row.failed = left_out;
            if left_out != 0 {
                row.done |= left_out;
                row.named |= leftover_name(epoch, seq, reopening.tries);
                row.next_seq += 1;
                for item in (0..ITEMS as u8).filter(|item| left_out >> item & 1 == 1) {
                    row.outcomes[usize::from(item)] = 1;
                    row.answers[usize::from(item)] = 1 + epoch * 4 + seq;
                }
            }
            row.state = if row.done == all { RowState::Done } else { RowState::Ready };
            row.epoch += 1;
        }
        self.job.round = 1;
        self.job.state = JobState::Running;
        Some(())
    }
}
