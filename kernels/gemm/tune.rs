//! Times candidate algorithms on this card, with weights that the cache has not seen.
//!
//! [`Gemm::tune`] is the start's quick choice; [`Gemm::contest`] says how good that was.

use cudarc::cublaslt::sys as lt;

use super::{Gemm, Layouts, Shape, bucket, check};
use crate::graph::Graph;
use crate::memory::DeviceSlice;
use crate::{Error, Event, Stream};

/// Algorithms that the library is asked for: more than it has for a shape (13.1 offers eight).
const NUM_OFFERED: usize = 128;
/// Timed calls of each, after one that is not timed.
const NUM_CALLS: usize = 6;
/// From this many microseconds on single calls tell algorithms apart. A shorter product takes
/// about as long as its launch: there those within `CLOSE` of the best are replayed as graphs.
const LONG_US: f32 = 60.0;
const CLOSE: f32 = 1.5;
/// Microseconds that a finalist's graph takes, about.
const FINALIST_GRAPH_US: f32 = 300.0;

/// What was found for a shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Candidates that ran.
    pub num_candidates: usize,
    /// Microseconds of the library's favourite.
    pub first_us: f32,
    /// Microseconds of the winner.
    pub best_us: f32,
}

/// Microseconds that the calls of a contestant's graph take together, about.
const GRAPH_US: f32 = 1500.0;
/// Replays of each graph: to find the best ones, and of those in turns.
const HEATS: usize = 3;
const FINALS: usize = 11;
/// Contestants this many times slower than the best one so far are out after one call.
const HOPELESS: f32 = 3.0;

/// How the algorithm in use compares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contest {
    /// Microseconds of a call of the algorithm in use, the median.
    pub ours_us: f32,
    /// Its fastest replay.
    pub ours_us_min: f32,
    /// Of the best algorithm of all, the median; at most `ours_us`.
    pub best_us: f32,
    /// Algorithms that ran.
    pub num_algorithms: usize,
}

/// y, x and weights.
type Operands<'a> = (DeviceSlice<u16>, DeviceSlice<u16>, &'a [DeviceSlice<u16>]);

impl Gemm {
    /// Finds the fastest algorithm for the bucket of `shape` and keeps it. `weights` are
    /// matrices `[N, K]`, taken in turns so that each call reads from memory (give as many as
    /// exceed the cache); x and y are scratch of `bucket(m)` rows. `None` when it is known.
    pub fn tune(
        &mut self,
        stream: &Stream,
        y: DeviceSlice<u16>,
        x: DeviceSlice<u16>,
        weights: &[DeviceSlice<u16>],
        shape: Shape,
    ) -> Result<Option<Timing>, Error> {
        let shape = Shape { m: bucket(shape.m), ..shape };
        if self.algorithms.contains_key(&shape) || weights.is_empty() {
            return Ok(None);
        }
        for &w in weights {
            check(y, x, w, shape)?;
        }
        let [w, x_layout, y_layout] = self.make_layouts(shape)?;
        let candidates = self.heuristics(shape, [&w, &x_layout, &y_layout], NUM_OFFERED)?;
        let mut layouts = Layouts { w, x: x_layout, y: y_layout, algorithm: candidates[0] };
        let operands = (y, x, weights);
        let mut turn = 0;
        let mut first_us = f32::INFINITY;
        let mut times: Vec<(f32, lt::cublasLtMatmulAlgo_t)> = Vec::with_capacity(candidates.len());
        for (rank, candidate) in candidates.into_iter().enumerate() {
            let time = self.time(stream, operands, &mut turn, shape, &layouts, &candidate)?;
            if rank == 0 {
                first_us = time.unwrap_or(f32::INFINITY);
            }
            times.extend(time.map(|us| (us, candidate)));
        }
        let num_candidates = times.len();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(&(mut best_us, mut algorithm)) = times.first() else {
            let status = "no algorithm runs".to_owned();
            return Err(Error::Launch { kernel: "gemm".to_owned(), dims: format!("{shape:?}"), status });
        };
        if best_us < LONG_US {
            times.retain(|(us, _)| *us <= best_us * CLOSE);
            let finalists = times.iter().map(|(_, candidate)| candidate);
            if let Some((us, winner)) = self.finals(stream, operands, shape, &layouts, finalists)? {
                (best_us, algorithm) = (us, winner);
            }
        }
        self.algorithms.insert(shape, algorithm.data);
        layouts.algorithm = algorithm;
        self.layouts.insert(shape, layouts);
        Ok(Some(Timing { num_candidates, first_us, best_us }))
    }

    /// The fastest of the finalists as a graph of calls, with its microseconds a call; `None`
    /// when none can be recorded. The best three are replayed in turns, so that a change of
    /// the clock between them decides nothing.
    fn finals<'a>(
        &self,
        stream: &Stream,
        operands: Operands<'_>,
        shape: Shape,
        layouts: &Layouts,
        finalists: impl Iterator<Item = &'a lt::cublasLtMatmulAlgo_t>,
    ) -> Result<Option<(f32, lt::cublasLtMatmulAlgo_t)>, Error> {
        let mut heats = Vec::new();
        for algorithm in finalists {
            let limits = (f32::INFINITY, FINALIST_GRAPH_US);
            if let Some(contestant) = self.contestant(stream, operands, shape, layouts, algorithm, limits)? {
                heats.push((contestant.median(stream, HEATS)?, contestant, *algorithm));
            }
        }
        heats.sort_by(|a, b| a.0.total_cmp(&b.0));
        heats.truncate(3);
        let mut replays = vec![Vec::with_capacity(FINALS); heats.len()];
        for _ in 0..FINALS {
            for (times, (_, contestant, _)) in replays.iter_mut().zip(&heats) {
                times.push(contestant.replay(stream)?);
            }
        }
        let medians = replays.into_iter().map(|mut times| {
            times.sort_by(f32::total_cmp);
            times[FINALS / 2]
        });
        let best = medians.zip(&heats).min_by(|a, b| a.0.total_cmp(&b.0));
        Ok(best.map(|(us, (_, _, algorithm))| (us, *algorithm)))
    }

    /// Compares the algorithm that [`Gemm::run`] takes for exactly this shape with every one that
    /// the library offers for it, each as a graph of calls, as a decode step replays them. Operands
    /// as for [`Gemm::tune`].
    pub fn contest(
        &mut self,
        stream: &Stream,
        y: DeviceSlice<u16>,
        x: DeviceSlice<u16>,
        weights: &[DeviceSlice<u16>],
        shape: Shape,
    ) -> Result<Contest, Error> {
        for &w in weights {
            check(y, x, w, shape)?;
        }
        self.prepare(shape)?;
        let layouts = &self.layouts[&shape];
        let operands = (y, x, weights);
        let limits = |us| (us, GRAPH_US);
        let offered = self.heuristics(shape, [&layouts.w, &layouts.x, &layouts.y], NUM_OFFERED)?;
        let Some(ours) =
            self.contestant(stream, operands, shape, layouts, &layouts.algorithm, limits(f32::INFINITY))?
        else {
            let status = "the algorithm in use does not run".to_owned();
            return Err(Error::Launch { kernel: "gemm".to_owned(), dims: format!("{shape:?}"), status });
        };
        let (mut num_algorithms, mut best_us) = (1, ours.median(stream, HEATS)?);
        let mut best = None;
        for algorithm in offered.iter().filter(|offered| offered.data != layouts.algorithm.data) {
            num_algorithms += 1;
            let limits = limits(best_us * HOPELESS);
            let Some(other) = self.contestant(stream, operands, shape, layouts, algorithm, limits)? else {
                continue;
            };
            let us = other.median(stream, HEATS)?;
            if us < best_us {
                (best_us, best) = (us, Some(other));
            }
        }
        let (mut of_ours, mut of_best) = (Vec::with_capacity(FINALS), Vec::with_capacity(FINALS));
        for _ in 0..FINALS {
            of_ours.push(ours.replay(stream)?);
            if let Some(best) = &best {
                of_best.push(best.replay(stream)?);
            }
        }
        of_ours.sort_by(f32::total_cmp);
        of_best.sort_by(f32::total_cmp);
        let ours_us = of_ours[FINALS / 2];
        // The winner of the heats may have been lucky there.
        let best_us = of_best.get(FINALS / 2).map_or(ours_us, |&us| us.min(ours_us));
        Ok(Contest { ours_us, ours_us_min: of_ours[0], best_us, num_algorithms })
    }

    /// The graph of a contestant, of about `graph_us`; `None` when the library refuses it after
    /// all, or one call takes longer than `limit_us`.
    fn contestant(
        &self,
        stream: &Stream,
        (y, x, weights): Operands<'_>,
        shape: Shape,
        layouts: &Layouts,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        (limit_us, graph_us): (f32, f32),
    ) -> Result<Option<Contestant>, Error> {
        let call = |turn: usize| self.launch(stream, y, x, weights[turn % weights.len()], shape, layouts, algorithm);
        // The first call loads code.
        if let Err(Error::Launch { .. }) = call(0) {
            return Ok(None);
        }
        let (start, end) = (Event::timed(stream.device())?, Event::timed(stream.device())?);
        start.record(stream)?;
        call(1)?;
        end.record(stream)?;
        end.synchronize()?;
        let us = end.ms_since(&start)? * 1000.0;
        if us > limit_us {
            return Ok(None);
        }
        // A whole number of rounds over the weights, unless they are too many for the time.
        let num_calls = ((graph_us / us.max(1.0)) as usize).clamp(2, 64);
        let rounds = num_calls / weights.len();
        let num_calls = if rounds == 0 { num_calls } else { rounds * weights.len() };
        let graph = match Graph::record(stream, || (0..num_calls).try_for_each(call)) {
            Ok(graph) => graph,
            // One that cannot be recorded is of no use to decode steps.
            Err(error) if !error.is_sticky() => return Ok(None),
            Err(error) => return Err(error),
        };
        graph.upload(stream)?;
        graph.launch(stream)?;
        Ok(Some(Contestant { graph, num_calls, start, end }))
    }

    /// Microseconds a call, `None` when the library refuses the candidate after all.
    fn time(
        &self,
        stream: &Stream,
        (y, x, weights): Operands<'_>,
        turn: &mut usize,
        shape: Shape,
        layouts: &Layouts,
        candidate: &lt::cublasLtMatmulAlgo_t,
    ) -> Result<Option<f32>, Error> {
        let mut call = || {
            *turn += 1;
            self.launch(stream, y, x, weights[*turn % weights.len()], shape, layouts, candidate)
        };
        if let Err(Error::Launch { .. }) = call() {
            return Ok(None);
        }
        let (start, end) = (Event::timed(stream.device())?, Event::timed(stream.device())?);
        start.record(stream)?;
        for _ in 0..NUM_CALLS {
            call()?;
        }
        end.record(stream)?;
        end.synchronize()?;
        Ok(Some(end.ms_since(&start)? * 1000.0 / NUM_CALLS as f32))
    }
}

/// An algorithm as a graph of calls.
struct Contestant {
    graph: Graph,
    num_calls: usize,
    start: Event,
    end: Event,
}

impl Contestant {
    /// Microseconds a call in one replay.
    fn replay(&self, stream: &Stream) -> Result<f32, Error> {
        self.start.record(stream)?;
        self.graph.launch(stream)?;
        self.end.record(stream)?;
        self.end.synchronize()?;
        Ok(self.end.ms_since(&self.start)? * 1000.0 / self.num_calls as f32)
    }

    fn median(&self, stream: &Stream, num: usize) -> Result<f32, Error> {
        let mut times = (0..num).map(|_| self.replay(stream)).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f32::total_cmp);
        Ok(times[num / 2])
    }
}
