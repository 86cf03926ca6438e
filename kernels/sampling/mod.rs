//! Choice of the next token of each row of logits, and log probabilities.
//!
//! Order: penalties, bias, mask; temperature; top-k, top-p, min-p; then the id at which the
//! running sum of weights, in order of ids, passes a random part of the whole. The random number
//! depends on seed and position alone, and a row's result on nothing but the row.
//! `sampling.cu` scans all rows and chooses where there is no filter, `filter.cu` chooses where
//! there is one, without sorting the vocabulary.

pub mod reference;
#[cfg(test)]
mod tests;

use crate::memory::{DeviceSlice, Element};
use crate::sources::Source;
use crate::vectors::expect_vectors;
use crate::{Error, Function, Launch, Modules, Stream};

/// Device code of scan, choice without filters, and log probabilities.
pub const SOURCE: Source = Source::new("sampling", "sampling/sampling.cu", include_str!("sampling.cu"));

/// Device code of the choice with filters.
pub const FILTER_SOURCE: Source = Source::new("sampling_filter", "sampling/filter.cu", include_str!("filter.cu"));

/// Largest vocabulary.
pub const VOCAB_MAX: u32 = 1 << 19;
/// Likeliest tokens that can be reported of a row.
pub const TOP_MAX: u32 = 20;
/// The row has its token.
pub const STATUS_OK: u32 = 0;
/// The row has a NaN or no finite largest logit; its token is 0 and means nothing.
pub const STATUS_NOT_FINITE: u32 = 1;

/// Report log probabilities.
pub const FLAG_LOGPROBS: u32 = 1;
/// Do not choose: the token is `score_token`.
pub const FLAG_SCORE: u32 = 2;
/// The id may not be chosen.
pub const USE_MASKED: u32 = 1 << 31;
/// The id is in the prompt or the output: penalties apply. The bits below count its uses in the output.
pub const USE_PENALIZED: u32 = 1 << 30;

/// Ids that a warp holds (`CHUNK` in the kernels).
const CHUNK: u32 = 1024;
/// Bytes that the scan leaves of a chunk.
const STATS_BYTES: u64 = 16;
/// Up to so many rows, a row gets a whole SM.
const WIDE_ROWS: u32 = 132;

/// What to do with a row.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SampleParams {
    /// Of the generator.
    pub seed: u64,
    /// Output position, from 0.
    pub position: u32,
    /// [`FLAG_LOGPROBS`], [`FLAG_SCORE`].
    pub flags: u32,
    /// Below 1e-5 the likeliest id is taken, the lowest of equal ones.
    pub temperature: f32,
    /// (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// 0, and the vocabulary or more, keep all.
    pub top_k: u32,
    /// Subtracted once from logits of ids used in the output.
    pub presence_penalty: f32,
    /// Subtracted per use.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of penalized ids; 1 is none.
    pub repetition_penalty: f32,
    /// Likeliest ids to report, at most [`TOP_MAX`].
    pub num_logprobs: u32,
    /// With [`FLAG_SCORE`]; below the vocabulary.
    pub score_token: u32,
    /// First of the row's adjustments.
    pub adjustments_start: u32,
    /// How many it has.
    pub num_adjustments: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<SampleParams>() == 64, "as in sampling_row.cuh");

// SAFETY: 64 bytes of numbers without padding (asserted), every bit pattern of which is a value.
unsafe impl Element for SampleParams {
    fn zeroed() -> Self {
        Self::default()
    }
}

/// What changes the logit of an id before the choice: penalties, then bias, then mask. A row's are
/// sorted by id; several of one id apply in their order.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Adjustment {
    /// Below the vocabulary; others have no effect.
    pub id: u32,
    /// [`USE_MASKED`], [`USE_PENALIZED`] with the number of uses in the output.
    pub use_: u32,
    /// Added.
    pub bias: f32,
}
const _: () = assert!(size_of::<Adjustment>() == 12, "as in sampling_row.cuh");

// SAFETY: 12 bytes of numbers without padding (asserted), every bit pattern of which is a value.
unsafe impl Element for Adjustment {
    fn zeroed() -> Self {
        Self::default()
    }
}

/// Where results go; each holds at least the rows of a call.
#[derive(Debug, Clone, Copy)]
pub struct Outputs {
    /// `[num_rows]`.
    pub tokens: DeviceSlice<u32>,
    /// `[num_rows]`: [`STATUS_OK`] or [`STATUS_NOT_FINITE`].
    pub status: DeviceSlice<u32>,
    /// `[num_rows]`; this and the next are written for rows with [`FLAG_LOGPROBS`] and finite logits.
    /// By the raw logits at temperature 1.
    pub chosen_logprobs: DeviceSlice<f32>,
    /// `[num_rows]`, from 1.
    pub chosen_ranks: DeviceSlice<u32>,
    /// `[num_rows, TOP_MAX]`, likeliest first; as many as the row asks for.
    pub top_ids: DeviceSlice<u32>,
    /// `[num_rows, TOP_MAX]`.
    pub top_logprobs: DeviceSlice<f32>,
}

/// Dims of a call, and which kernels it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Rows.
    pub num_rows: u32,
    /// Elements from row to row.
    pub row_stride: u32,
    /// Ids that count; what lies between them and the next row is not looked at.
    pub vocab_size: u32,
    /// Some row has a top-k, top-p or min-p that keeps less than all. Rows of both kinds mix.
    pub is_filtered: bool,
    /// Some row has [`FLAG_LOGPROBS`].
    pub has_logprobs: bool,
}

/// Bytes of workspace for a call, to be aligned to 16.
pub fn workspace_bytes(num_rows: u32, vocab_size: u32) -> u64 {
    u64::from(num_rows) * u64::from(vocab_size.div_ceil(CHUNK)) * STATS_BYTES
}

/// The kernels.
#[derive(Debug)]
pub struct Sampling {
    scan: Function,
    pick: Function,
    filter: Function,
    logprobs: Function,
}

impl Sampling {
    /// Errors with `Driver` when an entry point is missing.
    pub fn load(modules: &Modules) -> Result<Self, Error> {
        let function = |entry| modules.function(SOURCE.name, entry);
        Ok(Self {
            scan: function("sampling_scan")?,
            pick: function("sampling_pick")?,
            filter: modules.function(FILTER_SOURCE.name, "sampling_filter")?,
            logprobs: function("sampling_logprobs")?,
        })
    }

    /// Chooses a token for each row of logits `[num_rows, row_stride]` by its params `[num_rows]` and
    /// their part of `adjustments`. Errors with `Shape` when dims, lengths or alignment do not fit.
    /// Params are on the device and not checked: the ranges of their fields are the caller's promise,
    /// and a row without its kernel (see [`Rows`]) gets no result.
    #[expect(clippy::too_many_arguments, reason = "tensors and dims of the kernels, in their order")]
    pub fn run(
        &self,
        stream: &Stream,
        outputs: &Outputs,
        logits: DeviceSlice<u16>,
        params: DeviceSlice<SampleParams>,
        adjustments: DeviceSlice<Adjustment>,
        workspace: DeviceSlice<u8>,
        rows: Rows,
    ) -> Result<(), Error> {
        check(outputs, logits, params, workspace, rows)?;
        let Rows { num_rows, row_stride, vocab_size, is_filtered, has_logprobs } = rows;
        if num_rows == 0 {
            return Ok(());
        }
        let scan = Launch::new(&self.scan).grid3(vocab_size.div_ceil(CHUNK).div_ceil(8), num_rows, 1).cta(256);
        let scan = scan.overlaps_previous(true).arg(workspace).arg(logits).arg(adjustments).arg(params);
        // SAFETY: arguments are those of sampling.cu in its order; `check` compared lengths and
        // alignment with these dims, params are the caller's promise.
        unsafe { scan.arg(num_rows).arg(row_stride).arg(vocab_size).run(stream)? };
        let choose = |launch: Launch<'_>| {
            let launch = launch.overlaps_previous(true).arg(outputs.tokens).arg(outputs.status).arg(workspace);
            let launch = launch.arg(logits).arg(adjustments).arg(params);
            // SAFETY: as above; `sampling_pick` and `sampling_filter` take the same arguments.
            unsafe { launch.arg(num_rows).arg(row_stride).arg(vocab_size).run(stream) }
        };
        choose(Launch::new(&self.pick).grid(num_rows.div_ceil(4)).cta(128))?;
        if is_filtered {
            let threads = if num_rows <= WIDE_ROWS { 1024 } else { 512 };
            choose(Launch::new(&self.filter).grid(num_rows).cta(threads))?;
        }
        if has_logprobs {
            let launch = Launch::new(&self.logprobs).grid(num_rows).cta(256).overlaps_previous(true);
            let launch = launch.arg(outputs.chosen_logprobs).arg(outputs.chosen_ranks);
            let launch = launch.arg(outputs.top_ids).arg(outputs.top_logprobs).arg(outputs.tokens).arg(outputs.status);
            let launch = launch.arg(workspace).arg(logits).arg(params);
            // SAFETY: as above.
            unsafe { launch.arg(num_rows).arg(row_stride).arg(vocab_size).run(stream)? };
        }
        Ok(())
    }
}

fn check(
    outputs: &Outputs,
    logits: DeviceSlice<u16>,
    params: DeviceSlice<SampleParams>,
    workspace: DeviceSlice<u8>,
    rows: Rows,
) -> Result<(), Error> {
    let name = "sampling";
    let Rows { num_rows, row_stride, vocab_size, has_logprobs, .. } = rows;
    if vocab_size == 0 || vocab_size > VOCAB_MAX.min(row_stride) || num_rows > u32::from(u16::MAX) {
        let what = format!(
            "{num_rows} rows of {vocab_size} ids, {row_stride} apart; {VOCAB_MAX} ids and 65535 rows are possible"
        );
        return Err(Error::shape(name, what));
    }
    expect_vectors(logits, name, "logits", num_rows, row_stride)?;
    let num = num_rows as usize;
    params.expect_len(name, "params", num)?;
    outputs.tokens.expect_len(name, "tokens", num)?;
    outputs.status.expect_len(name, "status", num)?;
    if has_logprobs {
        outputs.chosen_logprobs.expect_len(name, "chosen_logprobs", num)?;
        outputs.chosen_ranks.expect_len(name, "chosen_ranks", num)?;
        outputs.top_ids.expect_len(name, "top_ids", num * TOP_MAX as usize)?;
        outputs.top_logprobs.expect_len(name, "top_logprobs", num * TOP_MAX as usize)?;
    }
    workspace.expect_len(name, "workspace", workspace_bytes(num_rows, vocab_size) as usize)?;
    if !workspace.address().is_multiple_of(STATS_BYTES) {
        return Err(Error::shape(
            name,
            format!("workspace at address {:#x}; a multiple of 16 is needed", workspace.address()),
        ));
    }
    Ok(())
}
