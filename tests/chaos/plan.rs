//! What happens in a round: drawn from its seed, so that a seed tells all of it.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Seat of the API; workers sit at 1 to [`NUM_WORKERS`].
pub(crate) const API: usize = 0;
pub(crate) const NUM_WORKERS: usize = 3;
/// The worker whose wall clock jumps.
pub(crate) const JUMPING: usize = NUM_WORKERS;
/// How long faults begin; those under way then last as long as they would.
pub(crate) const STORM: Duration = Duration::from_millis(2_600);

/// A fault; `at` names one seat's connections, without it all are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Kill {
        seat: usize,
    },
    Stop {
        seat: usize,
        ms: u64,
    },
    Terminate {
        seat: usize,
    },
    /// The next run of the worker dies at the n-th pass of a place.
    CrashAt {
        seat: usize,
        place: &'static str,
        nth: u32,
    },
    /// The next run of the worker stops itself there, for so long.
    StopAt {
        seat: usize,
        place: &'static str,
        nth: u32,
        ms: u64,
    },
    CrashDatabase,
    EndSessions,
    CutDatabase {
        at: Option<usize>,
    },
    RefuseDatabase {
        at: Option<usize>,
        ms: u64,
    },
    StallDatabase {
        at: Option<usize>,
        ms: u64,
    },
    SlowDatabase {
        at: Option<usize>,
        each_ms: u64,
        ms: u64,
    },
    LoseDatabaseAnswers {
        at: Option<usize>,
        count: u32,
    },
    RefuseObjects {
        at: Option<usize>,
        status: u16,
        percent: u32,
        ms: u64,
    },
    SlowObjects {
        at: Option<usize>,
        each_ms: u64,
        ms: u64,
    },
    TearUploads {
        at: Option<usize>,
        percent: u32,
        ms: u64,
    },
    TearDownloads {
        at: Option<usize>,
        percent: u32,
        ms: u64,
    },
    LoseObjectAnswers {
        at: Option<usize>,
        percent: u32,
        ms: u64,
    },
    KillObjects {
        ms: u64,
    },
    FillObjects {
        ms: u64,
    },
    FillDisk {
        seat: usize,
        ms: u64,
    },
    JumpClock {
        seconds: i64,
    },
}

impl Fault {
    /// One word for each kind, for the summary.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Kill { seat: API } => "api killed",
            Self::Kill { .. } => "worker killed",
            Self::Stop { seat: API, .. } => "api stopped past the lease",
            Self::Stop { .. } => "worker stopped past the lease",
            Self::Terminate { seat: API } => "api terminated",
            Self::Terminate { .. } => "worker drained",
            Self::CrashAt { .. } => "worker crashed between two writes",
            Self::StopAt { .. } => "worker stopped between two writes",
            Self::CrashDatabase => "database crashed",
            Self::EndSessions => "sessions ended",
            Self::CutDatabase { .. } => "database connections cut",
            Self::RefuseDatabase { .. } => "database connections refused",
            Self::StallDatabase { .. } => "database connections stalled",
            Self::SlowDatabase { .. } => "database connections slow",
            Self::LoseDatabaseAnswers { .. } => "database answers lost",
            Self::RefuseObjects { status: 403, .. } => "objects forbidden",
            Self::RefuseObjects { .. } => "objects refused",
            Self::SlowObjects { .. } => "objects slow",
            Self::TearUploads { .. } => "uploads torn",
            Self::TearDownloads { .. } => "downloads torn",
            Self::LoseObjectAnswers { .. } => "object answers lost",
            Self::KillObjects { .. } => "object server killed",
            Self::FillObjects { .. } => "object server's disk full",
            Self::FillDisk { .. } => "worker's disk full",
            Self::JumpClock { .. } => "wall clock jumped",
        }
    }

    fn draw(random: &mut StdRng) -> Self {
        let worker = random.random_range(1..=NUM_WORKERS);
        let seat = if random.random_range(0..5) == 0 { API } else { worker };
        let at = random.random_bool(0.5).then_some(worker);
        let past_the_lease = random.random_range(1_700..2_400);
        let short = random.random_range(200..900);
        let percent = random.random_range(20..80);
        match random.random_range(0..23) {
            0..=2 => Self::Kill { seat },
            3 => Self::Stop { seat, ms: past_the_lease },
            4 => Self::Terminate { seat },
            5 => Self::CrashAt { seat: worker, place: place(random), nth: random.random_range(1..4) },
            6 => {
                Self::StopAt { seat: worker, place: place(random), nth: random.random_range(1..4), ms: past_the_lease }
            }
            7 => Self::CrashDatabase,
            8 => Self::EndSessions,
            9 => Self::CutDatabase { at },
            10 => Self::RefuseDatabase { at, ms: short },
            11 => Self::StallDatabase { at: Some(worker), ms: past_the_lease },
            12 => Self::SlowDatabase { at, each_ms: random.random_range(5..60), ms: short },
            13 => Self::LoseDatabaseAnswers { at, count: random.random_range(1..5) },
            14 => {
                Self::RefuseObjects { at, status: *[500, 503, 503].choose(random).expect("some"), percent, ms: short }
            }
            15 => Self::RefuseObjects { at, status: 403, percent, ms: short },
            16 => Self::SlowObjects { at, each_ms: random.random_range(50..400), ms: short },
            17 => Self::TearUploads { at, percent, ms: short },
            18 => Self::TearDownloads { at, percent, ms: short },
            19 => Self::LoseObjectAnswers { at, percent, ms: short },
            20 => Self::KillObjects { ms: short },
            21 if random.random_bool(0.5) => Self::FillObjects { ms: short },
            21 => Self::FillDisk { seat: worker, ms: short },
            _ => Self::JumpClock { seconds: if random.random_bool(0.5) { 300 } else { -300 } },
        }
    }
}

/// Around the two writes of a checkpoint and around its ends.
fn place(random: &mut StdRng) -> &'static str {
    const PLACES: &[&str] = &[
        "worker::segment_before_put",
        "worker::segment_after_put",
        "worker::segment_before_commit",
        "worker::segment_after_commit",
        "worker::shard_claimed",
        "worker::input_read",
        "finalize::after_fence",
        "finalize::after_output_object",
        "finalize::after_manifest_object",
        "intake::before_finish",
    ];
    // The first three matter most.
    let known = if random.random_bool(0.5) { &PLACES[..3] } else { PLACES };
    known.choose(random).expect("there are some")
}

/// What a user asks of the second job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    Cancel,
    Pause,
    Resume,
}

/// A round.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// By time from its begin.
    pub(crate) faults: Vec<(Duration, Fault)>,
    /// The same; without any there is no second job.
    pub(crate) wishes: Vec<(Duration, Wish)>,
}

impl Plan {
    /// Four to eight faults of any kind.
    pub(crate) fn draw(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let time = |random: &mut StdRng| Duration::from_millis(random.random_range(100..2_300));
        let num_faults = random.random_range(4..=8);
        let faults = (0..num_faults).map(|_| (time(&mut random), Fault::draw(&mut random))).collect();
        let words: &[Wish] = match random.random_range(0..6) {
            0 => &[Wish::Cancel],
            1 => &[Wish::Cancel, Wish::Resume],
            2 => &[Wish::Pause, Wish::Resume],
            3 => &[Wish::Pause, Wish::Cancel, Wish::Resume],
            _ => &[],
        };
        let wishes = words.iter().map(|wish| (time(&mut random), *wish)).collect();
        Self { seed, faults, wishes }.in_order()
    }

    /// Workers that stop between object and commit past their lease, one after another:
    /// what only the epoch in the commit makes harmless.
    pub(crate) fn late_commits(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let stop = |random: &mut StdRng, seat| {
            let place = *["worker::segment_after_put", "worker::segment_before_commit"].choose(random).expect("two");
            let (nth, ms) = (random.random_range(1..3), random.random_range(2_600..3_200));
            (Duration::from_millis(random.random_range(100..500)), Fault::StopAt { seat, place, nth, ms })
        };
        let faults = (1..NUM_WORKERS).map(|seat| stop(&mut random, seat)).collect();
        Self { seed, faults, wishes: Vec::new() }.in_order()
    }

    fn in_order(mut self) -> Self {
        self.faults.sort_by_key(|(at, _)| *at);
        let mut times: Vec<Duration> = self.wishes.iter().map(|(at, _)| *at).collect();
        times.sort_unstable();
        self.wishes.iter_mut().zip(times).for_each(|(wish, at)| wish.0 = at);
        self
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}", self.seed)?;
        for (at, fault) in &self.faults {
            write!(f, "\n  {:>5} ms  {fault:?}", at.as_millis())?;
        }
        for (at, wish) in &self.wishes {
            write!(f, "\n  {:>5} ms  the second job: {wish:?}", at.as_millis())?;
        }
        Ok(())
    }
}

#[test]
fn chaos_plan_is_told_by_its_seed_and_every_kind_is_drawn() {
    let mut kinds = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let plan = Plan::draw(seed);
        assert_eq!(plan.to_string(), Plan::draw(seed).to_string());
        assert!(plan.faults.is_sorted_by_key(|(at, _)| *at) && plan.faults.iter().all(|(at, _)| *at < STORM));
        kinds.extend(plan.faults.iter().map(|(_, fault)| fault.kind()));
    }
    assert_eq!(kinds.len(), 25, "{kinds:?}");
}
