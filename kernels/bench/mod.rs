//! Times the kernels of this crate on the GPU at hand, against what the card can do.
//!
//! A case is measured by replays of a graph of back-to-back launches over operands taken in
//! turns, so that none finds its data in the second-level cache; the figure is the median of
//! the replays by device events. Operands are random: zeros would draw less power and run
//! faster. Invariant: bytes and operations are those that the operation needs, each operand
//! counted once, not what a kernel happens to do.
//! Allocates per case; belongs to no engine's path.

mod attention;
mod gemm;
mod lists;
mod rows;

use serde::Serialize;

use crate::compile::Dtype;
use crate::fill::Fill;
use crate::graph::Graph;
use crate::memory::{Buffer, DeviceSlice, Element};
use crate::module::BuildOptions;
use crate::{Device, Error, Event, Modules, Stream};

/// Operands of all turns together are at least this many times the second-level cache.
const CACHES: u64 = 3;
/// Turns, at most; small operands stay small.
const TURNS_MAX: u64 = 64;
/// Launches in a graph, at least.
const LAUNCHES_MIN: usize = 8;
/// Replays that are timed, and those before them.
const REPLAYS: usize = 20;
const WARM_UPS: usize = 3;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "kernel", rename_all = "snake_case")]
pub enum Case {
    /// A copy between two buffers: the card's own bandwidth.
    Copy {
        /// Bytes copied.
        bytes: u64,
    },
    /// One query a row over a paged cache; the plan is made before.
    AttentionDecode {
        /// Rows.
        rows: u32,
        /// Tokens in the cache of each.
        context_len: u32,
        /// Query heads.
        num_heads: u32,
        /// Heads of keys and values.
        num_kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Whole prompts, causal.
    AttentionPrefill {
        /// Prompts.
        rows: u32,
        /// Tokens of each.
        query_len: u32,
        /// Query heads.
        num_heads: u32,
        /// Heads of keys and values.
        num_kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Norm of q and k, rotation, write of K and V.
    QkNormRopeKvWrite {
        /// Tokens.
        rows: u32,
        /// Query heads.
        num_heads: u32,
        /// Heads of keys and values.
        num_kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Root mean square norm.
    RmsNorm {
        /// Tokens.
        rows: u32,
        /// Width.
        hidden: u32,
    },
    /// Norm, addition to the residual, norm of the sum.
    PostAddRmsNorm {
        /// Tokens.
        rows: u32,
        /// Width.
        hidden: u32,
    },
    /// SiLU of the gate times the other half.
    SiluMul {
        /// Tokens.
        rows: u32,
        /// Width of the result.
        intermediate: u32,
    },
    /// GeLU of the gate times the other half.
    GeluTanhMul {
        /// Tokens.
        rows: u32,
        /// Width of the result.
        intermediate: u32,
    },
    /// Rows of the embedding by token id.
    EmbeddingGather {
        /// Tokens.
        rows: u32,
        /// Width.
        hidden: u32,
        /// Rows of the table.
        vocab_size: u32,
    },
    /// The work list of decode attention.
    DecodePlan {
        /// Rows.
        rows: u32,
        /// Tokens in the cache of each.
        context_len: u32,
        /// Elements of a head, which decide the length of a chunk.
        head_dim: u32,
    },
    /// Block tables from their packed form.
    BlockTables {
        /// Rows.
        rows: u32,
        /// Blocks of each.
        blocks: u32,
    },
    /// Chosen tokens as inputs of the next step.
    TokenFeedback {
        /// Rows.
        rows: u32,
    },
    /// Choice of a token from each row of logits.
    Sampling {
        /// Rows.
        rows: u32,
        /// Ids.
        vocab_size: u32,
        /// Below 1e-5: greedy.
        temperature: f32,
        /// Below 1: a nucleus.
        top_p: f32,
    },
    /// A product y[m, n] = x[m, k] w[n, k]^T by the algorithm that the engine takes, beside the
    /// best of all that the library offers.
    Gemm {
        /// Rows of x.
        m: u32,
        /// Rows of w.
        n: u32,
        /// Columns of both.
        k: u32,
        /// Added to what is there.
        accumulates: bool,
    },
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// Microseconds a launch: the median of the replays.
    pub us: f32,
    /// The fastest replay.
    pub us_min: f32,
    /// Bytes that the operation must move.
    pub bytes: u64,
    /// Floating-point operations that it must do in matrix products; 0 without any.
    pub flops: u64,
    /// Of the best algorithm of the library, measured in turns with ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_us: Option<f32>,
    /// Algorithms that were tried for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_algorithms: Option<usize>,
}

/// The kernels on a GPU, with what measuring needs.
pub struct Bench {
    device: Device,
    stream: Stream,
    modules: Modules,
    fill: Fill,
    dtype: Dtype,
    gemm: gemm::Products,
}

impl std::fmt::Debug for Bench {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("device", self.device.properties()).finish_non_exhaustive()
    }
}

impl Bench {
    /// Opens the GPU and builds the kernels, in bf16 where the card has it. Errors with `Library`
    /// when there is no usable GPU, and says what is missing.
    pub fn open(ordinal: u32, options: &BuildOptions) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        let dtype = if device.arch().has_bf16() { Dtype::Bf16 } else { Dtype::F16 };
        let stream = Stream::new(&device)?;
        let modules = Modules::build(&device, dtype, options)?;
        let fill = Fill::load(&modules)?;
        let gemm = gemm::Products::open(&device, dtype, options)?;
        Ok(Self { device, stream, modules, fill, dtype, gemm })
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Of the operands.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Version of the library of matrix products, for example `130100`.
    pub fn cublaslt_version(&self) -> u64 {
        self.gemm.version()
    }

    /// Measures a case. Errors with `OutOfMemory` when its operands do not fit, with `Shape` when
    /// a kernel does not take it.
    pub fn measure(&mut self, case: Case) -> Result<Measured, Error> {
        match case {
            Case::Copy { bytes } => self.copy(bytes),
            Case::AttentionDecode { .. } | Case::AttentionPrefill { .. } | Case::QkNormRopeKvWrite { .. } => {
                self.attention(case)
            }
            Case::DecodePlan { .. } | Case::BlockTables { .. } | Case::TokenFeedback { .. } => self.lists(case),
            Case::Gemm { m, n, k, accumulates } => self.product(crate::gemm::Shape { m, n, k, accumulates }),
            _ => self.rows(case),
        }
    }

    fn copy(&self, bytes: u64) -> Result<Measured, Error> {
        let operands = bytes.saturating_mul(2);
        let turns: Vec<_> = (0..self.num_turns(operands))
            .map(|_| Ok((self.bytes(bytes)?, self.bytes(bytes)?)))
            .collect::<Result<_, Error>>()?;
        self.time(operands, 0, turns.len(), |turn| self.stream.copy(turns[turn].1.slice(), turns[turn].0.slice()))
    }

    /// Times `launch`, which gets the number of the turn whose operands it takes.
    fn time(
        &self,
        bytes: u64,
        flops: u64,
        num_turns: usize,
        launch: impl Fn(usize) -> Result<(), Error>,
    ) -> Result<Measured, Error> {
        // A whole number of rounds, so that every turn counts the same.
        let num_launches = num_turns * LAUNCHES_MIN.div_ceil(num_turns);
        // The first launch loads code; it must not be recorded.
        launch(0)?;
        self.stream.synchronize()?;
        let graph = Graph::record(&self.stream, || (0..num_launches).try_for_each(|at| launch(at % num_turns)))?;
        graph.upload(&self.stream)?;
        for _ in 0..WARM_UPS {
            graph.launch(&self.stream)?;
        }
        let (start, end) = (Event::timed(&self.device)?, Event::timed(&self.device)?);
        let mut times = Vec::with_capacity(REPLAYS);
        for _ in 0..REPLAYS {
            start.record(&self.stream)?;
            graph.launch(&self.stream)?;
            end.record(&self.stream)?;
            end.synchronize()?;
            times.push(end.ms_since(&start)? * 1000.0 / num_launches as f32);
        }
        times.sort_by(f32::total_cmp);
        let (us, us_min) = (times[REPLAYS / 2], times[0]);
        Ok(Measured { us, us_min, bytes, flops, best_us: None, num_algorithms: None })
    }

    /// Turns whose operands of `bytes` each exceed the cache together.
    fn num_turns(&self, bytes: u64) -> usize {
        num_turns(bytes, self.device.properties().l2_bytes)
    }

    fn bytes(&self, len: u64) -> Result<Buffer<u8>, Error> {
        Buffer::new(&self.device, "a copy", usize::try_from(len).unwrap_or(usize::MAX))
    }

    /// An output.
    fn empty<T: Element>(&self, len: usize) -> Result<Buffer<T>, Error> {
        Buffer::new(&self.device, "a benchmark", len)
    }

    /// Random numbers.
    fn normal(&self, len: usize, seed: u64, std: f32) -> Result<Buffer<u16>, Error> {
        let buffer = self.empty(len)?;
        self.fill(buffer.slice(), seed, std)?;
        Ok(buffer)
    }

    /// The generator's counter bounds a launch: large operands are filled piece by piece.
    fn fill(&self, out: DeviceSlice<u16>, seed: u64, std: f32) -> Result<(), Error> {
        const PIECE: usize = 1 << 30;
        for (piece, start) in (0..out.len()).step_by(PIECE).enumerate() {
            let part = out.slice(start, PIECE.min(out.len() - start));
            self.fill.fill_normal(&self.stream, part, part.len() as u64, seed + ((piece as u64) << 32), std)?;
        }
        Ok(())
    }

    fn upload<T: Element>(&self, elements: &[T]) -> Result<Buffer<T>, Error> {
        let buffer = self.empty(elements.len())?;
        self.stream.upload_now(buffer.slice(), elements)?;
        Ok(buffer)
    }
}

fn num_turns(bytes: u64, l2_bytes: u64) -> usize {
    (CACHES * l2_bytes).div_ceil(bytes.max(1)).clamp(2, TURNS_MAX) as usize
}

/// Ids below `end` that look random, the same every time.
fn scattered(len: u32, end: u32) -> Vec<u32> {
    (0..u64::from(len)).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u32 % end.max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::testing::{is_required, search_paths, setting};

    #[test]
    fn operands_of_all_turns_exceed_the_cache() {
        let l2 = 50 << 20;
        assert_eq!(num_turns(1 << 30, l2), 2, "large operands push each other out");
        assert_eq!(num_turns(10 << 20, l2), 15);
        assert_eq!(num_turns(1, l2), 64);
        assert_eq!(num_turns(0, 0), 2);
    }

    #[test]
    fn scattered_ids_are_spread_and_in_range() {
        let ids = scattered(1000, 7);
        assert!(ids.iter().all(|&id| id < 7));
        assert!((0..7).all(|id| ids.contains(&id)));
    }

    /// On a GPU every case runs, and its time is positive.
    #[test]
    fn every_case_can_be_measured() {
        let cache = Cache(setting("OVERNIGHT_TEST_KERNEL_CACHE").map(Into::into));
        let options = BuildOptions { paths: search_paths(), cache, ..BuildOptions::default() };
        let mut bench = match Bench::open(0, &options) {
            Ok(bench) => bench,
            Err(Error::Library { library, what }) if !is_required("gpu") => {
                eprintln!("every_case_can_be_measured needs a GPU and is skipped: {library}: {what}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let (num_heads, num_kv_heads, head_dim) = (16, 8, 128);
        for case in [
            Case::Copy { bytes: 1 << 20 },
            Case::AttentionDecode { rows: 3, context_len: 1500, num_heads, num_kv_heads, head_dim },
            Case::AttentionPrefill { rows: 2, query_len: 300, num_heads, num_kv_heads, head_dim },
            Case::QkNormRopeKvWrite { rows: 65, num_heads, num_kv_heads, head_dim },
            Case::RmsNorm { rows: 5, hidden: 1024 },
            Case::PostAddRmsNorm { rows: 5, hidden: 1024 },
            Case::SiluMul { rows: 5, intermediate: 3072 },
            Case::GeluTanhMul { rows: 5, intermediate: 3072 },
            Case::EmbeddingGather { rows: 5, hidden: 1024, vocab_size: 1000 },
            Case::DecodePlan { rows: 5, context_len: 5000, head_dim },
            Case::BlockTables { rows: 9, blocks: 33 },
            Case::TokenFeedback { rows: 300 },
            Case::Sampling { rows: 4, vocab_size: 5000, temperature: 0.0, top_p: 1.0 },
            Case::Sampling { rows: 4, vocab_size: 5000, temperature: 0.8, top_p: 0.95 },
            Case::Gemm { m: 33, n: 512, k: 256, accumulates: true },
        ] {
            let measured = bench.measure(case).unwrap_or_else(|error| panic!("{case:?}: {error}"));
            assert!(
                measured.us > 0.0 && measured.us_min <= measured.us && measured.bytes > 0,
                "{case:?}: {measured:?}"
            );
            let is_product = matches!(case, Case::Gemm { .. });
            assert_eq!(measured.best_us.is_some(), is_product, "{case:?}");
            assert!(!is_product || measured.num_algorithms > Some(0), "{measured:?}");
        }
    }
}
