//! Times candidate algorithms on this card, with weights that the cache has not seen.

use cudarc::cublaslt::sys as lt;

use super::{Gemm, Layouts, Shape, bucket, check};
use crate::memory::DeviceSlice;
use crate::{Error, Event, Stream};

/// Candidates that the library is asked for.
const NUM_CANDIDATES: usize = 16;
/// Timed calls of each, after one that is not timed.
const NUM_CALLS: usize = 6;

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
        let candidates = self.heuristics(shape, [&w, &x_layout, &y_layout], NUM_CANDIDATES)?;
        let mut layouts = Layouts { w, x: x_layout, y: y_layout, algorithm: candidates[0] };
        let mut turn = 0;
        let mut times = Vec::with_capacity(candidates.len());
        for candidate in &candidates {
            times.push(self.time(stream, (y, x), weights, &mut turn, shape, &layouts, candidate)?);
        }
        let first_us = times[0].unwrap_or(f32::INFINITY);
        let best = times
            .iter()
            .zip(&candidates)
            .filter_map(|(time, candidate)| time.map(|time| (time, candidate)))
            .min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((best_us, &algorithm)) = best else {
            let status = "no algorithm runs".to_owned();
            return Err(Error::Launch { kernel: "gemm".to_owned(), dims: format!("{shape:?}"), status });
        };
        self.algorithms.insert(shape, algorithm.data);
        layouts.algorithm = algorithm;
        self.layouts.insert(shape, layouts);
        Ok(Some(Timing { num_candidates: times.iter().flatten().count(), first_us, best_us }))
    }

    /// Microseconds a call, `None` when the library refuses the candidate after all.
    #[expect(clippy::too_many_arguments, reason = "the operands of one product")]
    fn time(
        &self,
        stream: &Stream,
        (y, x): (DeviceSlice<u16>, DeviceSlice<u16>),
        weights: &[DeviceSlice<u16>],
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
