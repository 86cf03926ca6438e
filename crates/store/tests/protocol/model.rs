//! What there is: rows, objects, files, and what each process believes.
//!
//! Bounds: two shards of two items, two rounds, eight epochs, four segments a shard.

/// Shards, and items of the largest.
pub(crate) const SHARDS: usize = 2;
pub(crate) const ITEMS: usize = 2;
const ROUNDS: usize = 2;
const EPOCHS: u8 = 8;
const SEQS: u8 = 4;

/// This item fails in the first round and is run again by a second.
pub(crate) const FAILING: (usize, u8) = (0, 0);

/// Who takes part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) workers: usize,
    /// Items of each shard.
    pub(crate) items: [u8; SHARDS],
    pub(crate) finalizers: usize,
    pub(crate) sweep: bool,
    /// The job may be cancelled, once.
    pub(crate) cancel: bool,
    /// The job may be opened again, once.
    pub(crate) reopen: bool,
    /// Crashes, lost answers and leases that run out under a living process, in all.
    pub(crate) faults: u8,
    /// A commit under a lease that is over is a broken promise in itself, whether it does harm or not.
    pub(crate) judges_leases: bool,
}

impl Setup {
    pub(crate) const NOBODY: Self = Self {
        workers: 0,
        items: [0; SHARDS],
        finalizers: 0,
        sweep: false,
        cancel: false,
        reopen: false,
        faults: 0,
        judges_leases: true,
    };
}

/// The guard that is taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Without {
    Nothing,
    /// A commit does not compare the epoch.
    Epoch,
    /// A commit does not compare the sequence number.
    Sequence,
    /// A claim keeps the shard's epoch.
    NewEpochPerClaim,
    /// A lease never runs out.
    Expiry,
    /// A commit does not wait for its object.
    ObjectFirst,
    /// The sweep takes any object that no row names.
    EpochInSweep,
    /// The sweep takes young objects too.
    AgeInSweep,
    /// Every try of a re-opening writes the same objects.
    OwnNames,
    /// The sweep reads the names before the shard's row.
    RowBeforeNames,
    /// The finalizer reads without having fenced the shards.
    Fence,
    /// The finalizer does not look at its lease between the last read and the files.
    LastLook,
    /// The end of a job does not compare the step's epoch.
    EpochOfStep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum JobState {
    Running,
    Cancelling,
    Finalizing,
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum RowState {
    Ready,
    Leased,
    Done,
}

/// The job's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Job {
    pub(crate) state: JobState,
    pub(crate) round: u8,
    pub(crate) was_cancelled: bool,
    pub(crate) step_epoch: u8,
    pub(crate) step_leased: bool,
}

/// A shard's row, and its segments' rows as far as they matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    pub(crate) state: RowState,
    pub(crate) epoch: u8,
    /// Claims so far. No process looks at it: it tells whose lease a commit was made under.
    pub(crate) claims: u8,
    pub(crate) next_seq: u8,
    pub(crate) done: u8,
    pub(crate) failed: u8,
    /// Outcomes of each item that the rows of segments name and no later round supersedes.
    pub(crate) outcomes: [u8; ITEMS],
    /// The newest of them: which segment's. 0 for none.
    pub(crate) answers: [u8; ITEMS],
    /// Objects that rows name.
    pub(crate) named: Names,
}

/// A set of segment objects of one shard; their names hold epoch, sequence number and content.
pub(crate) type Names = u128;

/// The name of one.
pub(crate) fn name(epoch: u8, seq: u8, items: u8) -> Names {
    assert!(epoch < EPOCHS && seq < SEQS && items < 1 << ITEMS, "out of the model's bounds: {epoch} {seq} {items}");
    1 << ((u32::from(epoch) * u32::from(SEQS) + u32::from(seq)) * (1 << ITEMS) + u32::from(items))
}

/// The name of a re-opening's object. Its content holds the moment of planning, so that no
/// other try writes the same name: the model has room for two tries.
pub(crate) fn leftover_name(epoch: u8, seq: u8, tries: u8) -> Names {
    assert!(tries < 2 && seq < SEQS - 1, "out of the model's bounds: {tries} {seq}");
    name(epoch, if tries == 0 { seq } else { SEQS - 1 }, 0)
}

/// All names of lower epochs.
pub(crate) fn names_below(epoch: u8) -> Names {
    assert!(epoch < EPOCHS, "out of the model's bounds: {epoch}");
    (1 << (u32::from(epoch) * u32::from(SEQS) * (1 << ITEMS))) - 1
}

/// Published lines: for each item the segment that its line is from, 0 for the line of an undone one.
pub(crate) type Lines = [[u8; ITEMS]; SHARDS];

/// What a worker believes; it outlives its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct View {
    pub(crate) shard: usize,
    pub(crate) epoch: u8,
    pub(crate) claim: u8,
    pub(crate) next_seq: u8,
    pub(crate) done: u8,
    /// Items of the object that is written and, as far as it knows, not yet named.
    pub(crate) written: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Stage {
    Claimed,
    /// So many shards are read.
    Reading(usize),
    Looked,
    Published,
}

/// What a finalizer believes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Step {
    pub(crate) stage: Stage,
    pub(crate) epoch: u8,
    pub(crate) round: u8,
    pub(crate) lines: Lines,
}

/// What the sweep has seen of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Sweep {
    pub(crate) shard: usize,
    pub(crate) has_names: bool,
    pub(crate) candidates: Names,
}

/// What a re-opening has seen: per shard the epoch and sequence number of its segment of
/// lines that the selection leaves out, and its items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Reopening {
    pub(crate) selected: bool,
    pub(crate) has_put: bool,
    /// Which try it is.
    pub(crate) tries: u8,
    pub(crate) leftovers: [(u8, u8, u8); SHARDS],
}

/// Everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) job: Job,
    pub(crate) rows: [Row; SHARDS],
    pub(crate) objects: [Names; SHARDS],
    /// Objects that are older than the sweep asks for.
    pub(crate) old: [Names; SHARDS],
    /// Files under the names that each round draws.
    pub(crate) files: [Option<Lines>; ROUNDS],
    /// What the rows said when a round ended.
    pub(crate) ends: [Option<Lines>; ROUNDS],
    pub(crate) workers: [Option<View>; 3],
    pub(crate) finalizers: [Option<Step>; 2],
    pub(crate) sweep: Option<Sweep>,
    pub(crate) reopening: Option<Reopening>,
    /// Re-openings that wrote objects before.
    pub(crate) tries: u8,
    pub(crate) faults_left: u8,
    /// A commit was applied under a lease that was over.
    pub(crate) was_late: bool,
}

impl State {
    /// A job in progress that nobody has touched.
    pub(crate) fn start(setup: &Setup) -> Self {
        let row = |items: u8| Row {
            state: if items == 0 { RowState::Done } else { RowState::Ready },
            epoch: 0,
            claims: 0,
            next_seq: 0,
            done: 0,
            failed: 0,
            outcomes: [0; ITEMS],
            answers: [0; ITEMS],
            named: 0,
        };
        let state = JobState::Running;
        Self {
            job: Job { state, round: 0, was_cancelled: false, step_epoch: 0, step_leased: false },
            rows: setup.items.map(row),
            objects: [0; SHARDS],
            old: [0; SHARDS],
            files: [None; ROUNDS],
            ends: [None; ROUNDS],
            workers: [None; 3],
            finalizers: [None; 2],
            sweep: None,
            reopening: None,
            tries: 0,
            faults_left: setup.faults,
            was_late: false,
        }
    }

    /// The lines that the rows stand for.
    pub(crate) fn lines(&self) -> Lines {
        self.rows.map(|row| row.answers)
    }

    /// Whether somebody who lives believes in this lease.
    pub(crate) fn is_held(&self, shard: usize) -> bool {
        let believes = |view: &View| view.shard == shard && view.claim == self.rows[shard].claims;
        self.workers.iter().flatten().any(believes)
    }

    /// Whether the database takes this finalizer for the one that holds the step.
    pub(crate) fn holds_step(&self, step: &Step) -> bool {
        self.is_ending() && self.job.step_leased && step.epoch == self.job.step_epoch
    }

    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.job.state, JobState::Cancelling | JobState::Finalizing)
    }

    /// Which promise is broken here, if one is.
    pub(crate) fn broken(&self, setup: &Setup) -> Option<String> {
        for (shard, row) in self.rows.iter().enumerate() {
            if row.named & !self.objects[shard] != 0 {
                return Some(format!("a row of shard {shard} names a segment whose object is gone"));
            }
            for item in 0..ITEMS {
                let (done, outcomes) = (row.done >> item & 1, row.outcomes[item]);
                if outcomes != done {
                    return Some(format!("item {item} of shard {shard} has {outcomes} outcomes and done {done}"));
                }
            }
        }
        if setup.judges_leases && self.was_late {
            return Some("a commit was applied under a lease that was over".to_owned());
        }
        for round in 0..ROUNDS {
            let Some(end) = self.ends[round] else { continue };
            if self.files[round] != Some(end) {
                let file = self.files[round];
                return Some(format!("round {round} ended with {end:?}, its file has other lines: {file:?}"));
            }
        }
        if self.job.state == JobState::Ended {
            let undone = (0..SHARDS).any(|shard| self.rows[shard].done.count_ones() != u32::from(setup.items[shard]));
            if undone && !self.job.was_cancelled {
                return Some("a job is completed with undone items".to_owned());
            }
            if self.ends[usize::from(self.job.round)] != Some(self.lines()) {
                return Some("an outcome was committed after the end".to_owned());
            }
        }
        None
    }
}
