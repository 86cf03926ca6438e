//! Breadth first over all reachable states, which are kept by their hash alone; the way
//! to a state is told by the moves that led there.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::model::{JobState, Setup, State, Without};
use crate::step::Move;

/// What was seen when nothing was broken.
#[derive(Debug)]
pub(crate) struct Explored {
    pub(crate) states: usize,
    pub(crate) ended: usize,
}

/// A broken promise, and the shortest way to it.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) why: String,
    trace: Vec<String>,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, after:", self.why)?;
        self.trace.iter().enumerate().try_for_each(|(at, step)| write!(f, "\n  {}. {step}", at + 1))
    }
}

/// Two independent sums over a state's fields: 128 bits, so that no two states meet.
#[derive(Debug)]
struct Mix(u64, u64);

impl Mix {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.1 = (self.1.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.add(u64::from(value));
    }

    fn write_isize(&mut self, value: isize) {
        self.add(value as u64);
    }

    fn write_usize(&mut self, value: usize) {
        self.add(value as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn hash(state: &State) -> u128 {
    let mut mix = Mix(0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344);
    state.hash(&mut mix);
    u128::from(mix.0) << 64 | u128::from(mix.1)
}

/// States by number, in the order in which they were found.
struct Seen {
    numbers: HashMap<u128, u32>,
    /// The state and the move that led there first.
    from: Vec<(u32, Move)>,
}

impl Seen {
    fn trace(&self, setup: &Setup, without: Without, last: u32) -> Vec<String> {
        let mut moves = Vec::new();
        let mut number = last;
        while number > 0 {
            let (before, step) = self.from[number as usize];
            moves.push(step);
            number = before;
        }
        let mut state = State::start(setup);
        let told = moves.into_iter().rev().map(|step| {
            let text = step.in_words(&state);
            state = state.after(step, setup, without).expect("the move was made here before");
            text
        });
        told.collect()
    }
}

/// Visits every state; stops at the first that is broken, which is one of the nearest.
pub(crate) fn search(setup: &Setup, without: Without) -> Result<Explored, Broken> {
    let start = State::start(setup);
    let mut seen = Seen { numbers: HashMap::from([(hash(&start), 0)]), from: vec![(0, Move::TimePasses)] };
    let (mut level, mut ends) = (vec![(0, start)], Vec::new());
    // Moves that nobody has to force: they go on being made when faults and users stop.
    let mut onward: Vec<(u32, u32)> = Vec::new();
    let moves = Move::all(setup);
    while !level.is_empty() {
        let mut next_level = Vec::new();
        for (number, state) in level {
            if state.job.state == JobState::Ended {
                ends.push(number);
            }
            for &step in &moves {
                let Some(next) = state.after(step, setup, without) else { continue };
                let found = seen.from.len() as u32;
                let to = *seen.numbers.entry(hash(&next)).or_insert(found);
                if to == found {
                    seen.from.push((number, step));
                    if let Some(why) = next.broken(setup) {
                        return Err(Broken { why, trace: seen.trace(setup, without, found) });
                    }
                    next_level.push((found, next));
                }
                if next.faults_left == state.faults_left && !step.is_asked_for() {
                    onward.push((number, to));
                }
            }
        }
        level = next_level;
    }
    let states = seen.from.len();
    if let Some(stuck) = stuck(states, &ends, &onward) {
        let why = "nothing leads from here to an end".to_owned();
        return Err(Broken { why, trace: seen.trace(setup, without, stuck) });
    }
    Ok(Explored { states, ended: ends.len() })
}

/// The first state from which no end can be reached any more.
fn stuck(states: usize, ends: &[u32], onward: &[(u32, u32)]) -> Option<u32> {
    let mut before: Vec<Vec<u32>> = vec![Vec::new(); states];
    for &(from, to) in onward {
        before[to as usize].push(from);
    }
    let mut good = vec![false; states];
    let mut queue = ends.to_vec();
    ends.iter().for_each(|&end| good[end as usize] = true);
    while let Some(state) = queue.pop() {
        for &earlier in &before[state as usize] {
            if !std::mem::replace(&mut good[earlier as usize], true) {
                queue.push(earlier);
            }
        }
    }
    good.iter().position(|good| !good).map(|number| number as u32)
}
