//! The moves that there are, and each in words.

use crate::model::{Setup, State};

/// Numbers name places in the state, which are kept in order: worker 0 now may be
/// worker 1 in the next state. [`Move::in_words`] says who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Move {
    Claim(usize),
    /// Writes the object of the next undone item, or of all of them.
    Put(usize, bool),
    Commit(usize),
    /// Its commit happens and the answer is lost, so it will try again.
    CommitUnanswered(usize),
    Crash(usize),
    /// The lease of a shard runs out.
    Expire(usize),
    Cancel,
    ClaimStep(usize),
    Fence(usize),
    Read(usize),
    Look(usize),
    Publish(usize),
    Finish(usize),
    CrashStep(usize),
    ExpireStep,
    /// Everything written by now is older than the sweep asks for, except what a
    /// re-opening writes: it ends within that time or not at all.
    TimePasses,
    SweepShard(usize),
    SweepNames,
    SweepDelete,
    /// Somebody asks for the failed items alone, or for all that have no success.
    AskReopen(bool),
    PutLeftovers,
    Reopen,
    CrashReopening,
}

impl Move {
    /// All that there are with these processes.
    pub(crate) fn all(setup: &Setup) -> Vec<Move> {
        use Move::*;
        let of_workers = (0..setup.workers)
            .flat_map(|w| [Claim(w), Put(w, false), Put(w, true), Commit(w), CommitUnanswered(w), Crash(w)]);
        let of_finalizers = (0..setup.finalizers)
            .flat_map(|f| [ClaimStep(f), Fence(f), Read(f), Look(f), Publish(f), Finish(f), CrashStep(f)]);
        let mut moves: Vec<Move> = of_workers.chain(of_finalizers).collect();
        moves.extend([Expire(0), Expire(1), ExpireStep]);
        if setup.cancel {
            moves.push(Cancel);
        }
        if setup.sweep {
            moves.extend([TimePasses, SweepShard(0), SweepShard(1), SweepNames, SweepDelete]);
        }
        if setup.reopen {
            moves.extend([AskReopen(false), AskReopen(true), PutLeftovers, Reopen, CrashReopening]);
        }
        moves
    }

    /// A user's wish, which nobody may count on.
    pub(crate) fn is_asked_for(self) -> bool {
        matches!(self, Move::Cancel | Move::AskReopen(_))
    }

    pub(crate) fn in_words(self, state: &State) -> String {
        let worker = |w: usize| match state.workers[w] {
            Some(view) => format!("the worker of shard {} under epoch {}", view.shard, view.epoch),
            None => "a worker".to_owned(),
        };
        let finalizer = |f: usize| match state.finalizers[f] {
            Some(step) => format!("the finalizer of round {} under epoch {}", step.round, step.epoch),
            None => "a finalizer".to_owned(),
        };
        match self {
            Move::Claim(_) => "a worker claims the first ready shard".to_owned(),
            Move::Put(w, false) => format!("{} writes an object of one item", worker(w)),
            Move::Put(w, true) => format!("{} writes an object of all undone items", worker(w)),
            Move::Commit(w) => format!("{} commits", worker(w)),
            Move::CommitUnanswered(w) => format!("{} commits and hears no answer", worker(w)),
            Move::Crash(w) => format!("{} dies", worker(w)),
            Move::Expire(shard) => format!("the lease of shard {shard} runs out"),
            Move::Cancel => "the job is cancelled".to_owned(),
            Move::ClaimStep(_) => "a finalizer claims the job".to_owned(),
            Move::Fence(f) => format!("{} fences the shards", finalizer(f)),
            Move::Read(f) => format!("{} reads a shard", finalizer(f)),
            Move::Look(f) => format!("{} looks whether it still holds the job", finalizer(f)),
            Move::Publish(f) => format!("{} publishes the file", finalizer(f)),
            Move::Finish(f) => format!("{} ends the job", finalizer(f)),
            Move::CrashStep(f) => format!("{} dies", finalizer(f)),
            Move::ExpireStep => "the finalizer's lease runs out".to_owned(),
            Move::TimePasses => "what is written grows old".to_owned(),
            Move::SweepShard(shard) => format!("the sweep looks at shard {shard}"),
            Move::SweepNames => "the sweep reads the names of its segments".to_owned(),
            Move::SweepDelete => "the sweep deletes".to_owned(),
            Move::AskReopen(true) => "somebody asks for a second round of the failed items".to_owned(),
            Move::AskReopen(false) => "somebody asks for a second round".to_owned(),
            Move::PutLeftovers => "the re-opening writes the lines that it leaves out".to_owned(),
            Move::Reopen => "the job is opened again".to_owned(),
            Move::CrashReopening => "the re-opening dies".to_owned(),
        }
    }
}
