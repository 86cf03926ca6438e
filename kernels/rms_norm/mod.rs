//! Root mean square norm, alone and around an addition to the residual.
//!
//! The pattern of a family: `rms_norm.cu` computes, `reference.rs` defines, this file checks
//! shapes and launches, `tests.rs` compares.

pub mod reference;
#[cfg(test)]
mod tests;

use crate::memory::DeviceSlice;
use crate::sources::Source;
use crate::vectors::{VEC, expect_vectors};
use crate::{Error, Function, Launch, Modules, Stream};

/// Device code.
pub const SOURCE: Source = Source::new("rms_norm", "rms_norm/rms_norm.cu", include_str!("rms_norm.cu"));

/// Widest row.
pub const HIDDEN_MAX: u32 = 16_384;

/// Vectors that a thread keeps of a row (`VECTORS` in the kernel).
const VECTORS: u32 = 2;
/// Threads of a CTA that has several rows, at most.
const THREADS: u32 = 256;
/// Rows to every SM from which a CTA takes several; fewer rows spread over more SMs.
const SPREAD_ROWS: u32 = 264;

/// The kernels.
#[derive(Debug)]
pub struct RmsNorm {
    rms_norm: Function,
    post_add_rms_norm: Function,
}

/// Threads of a row, and rows of a CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Geometry {
    threads: u32,
    rows: u32,
}

/// As few warps a row as hold it; several narrow rows a CTA when there are many.
fn choose(num_rows: u32, hidden: u32) -> Geometry {
    let threads = hidden.div_ceil(VEC * VECTORS).next_multiple_of(32);
    let rows_max = (THREADS / threads).max(1);
    Geometry { threads, rows: (num_rows / SPREAD_ROWS).clamp(1, rows_max) }
}

impl RmsNorm {
    /// Errors with `Driver` when an entry point is missing.
    pub fn load(modules: &Modules) -> Result<Self, Error> {
        let function = |entry| modules.function(SOURCE.name, entry);
        Ok(Self { rms_norm: function("rms_norm")?, post_add_rms_norm: function("post_add_rms_norm")? })
    }

    /// out `[num_rows, hidden]` = the norm of x `[num_rows, hidden]`, or of its rows
    /// `row_index [num_rows]`, times weight `[hidden]` plus `weight_offset`. Zhang & Sennrich, Root
    /// Mean Square Layer Normalization, 2019, eq. 4. Errors with `Shape` when lengths, widths or
    /// alignment do not fit. Indices are on the device and not checked.
    #[expect(clippy::too_many_arguments, reason = "tensors, dims and scalars of the kernel, in its order")]
    pub fn rms_norm(
        &self,
        stream: &Stream,
        out: DeviceSlice<u16>,
        x: DeviceSlice<u16>,
        weight: DeviceSlice<u16>,
        row_index: Option<DeviceSlice<u32>>,
        num_rows: u32,
        hidden: u32,
        eps: f32,
        weight_offset: f32,
    ) -> Result<(), Error> {
        let name = self.rms_norm.name();
        expect_vectors(out, name, "out", num_rows, hidden)?;
        expect_vectors(x, name, "x", if row_index.is_some() { num_rows.min(1) } else { num_rows }, hidden)?;
        if let Some(row_index) = row_index {
            row_index.expect_len(name, "row_index", num_rows as usize)?;
        }
        let Some(launch) = launch(&self.rms_norm, &[weight], num_rows, hidden)? else { return Ok(()) };
        let launch = launch.arg(out).arg(x).arg(weight).arg(row_index);
        // SAFETY: arguments are those of rms_norm.cu in its order; lengths, alignment and limits
        // were checked for these dims, indices are the caller's promise.
        unsafe { launch.arg(num_rows).arg(hidden).arg(eps).arg(weight_offset).run(stream) }
    }

    /// residual `[num_rows, hidden]` += the norm of x with `post_weight [hidden]`; out = the norm of
    /// the sum with `weight`. Out may be neither residual nor x. Errors with `Shape`.
    #[expect(clippy::too_many_arguments, reason = "tensors, dims and scalars of the kernel, in its order")]
    pub fn post_add_rms_norm(
        &self,
        stream: &Stream,
        out: DeviceSlice<u16>,
        residual: DeviceSlice<u16>,
        x: DeviceSlice<u16>,
        post_weight: DeviceSlice<u16>,
        weight: DeviceSlice<u16>,
        num_rows: u32,
        hidden: u32,
        eps: f32,
        weight_offset: f32,
    ) -> Result<(), Error> {
        expect_rows(self.post_add_rms_norm.name(), [out, residual, x], num_rows, hidden)?;
        let weights = [post_weight, weight];
        let Some(launch) = launch(&self.post_add_rms_norm, &weights, num_rows, hidden)? else { return Ok(()) };
        let launch = launch.arg(out).arg(residual).arg(x).arg(post_weight).arg(weight);
        // SAFETY: arguments are those of rms_norm.cu in its order; lengths, alignment and limits
        // were checked for these dims.
        unsafe { launch.arg(num_rows).arg(hidden).arg(eps).arg(weight_offset).run(stream) }
    }
}

fn expect_rows(name: &'static str, tensors: [DeviceSlice<u16>; 3], num_rows: u32, hidden: u32) -> Result<(), Error> {
    let named = ["out", "residual", "x"].into_iter().zip(tensors);
    named.into_iter().try_for_each(|(what, tensor)| expect_vectors(tensor, name, what, num_rows, hidden))
}

/// The launch but for its arguments, or `None` when there are no rows.
fn launch<'a>(
    function: &'a Function,
    weights: &[DeviceSlice<u16>],
    num_rows: u32,
    hidden: u32,
) -> Result<Option<Launch<'a>>, Error> {
    let name = function.name();
    for &weight in weights {
        expect_vectors(weight, name, "weight", 1, hidden)?;
    }
    if hidden == 0 || hidden > HIDDEN_MAX {
        return Err(Error::shape(name, format!("hidden {hidden}; 8 to {HIDDEN_MAX} are possible")));
    }
    if num_rows == 0 {
        return Ok(None);
    }
    let Geometry { threads, rows } = choose(num_rows, hidden);
    Ok(Some(Launch::new(function).grid(num_rows.div_ceil(rows)).cta3(threads, rows, 1).overlaps_previous(true)))
}
