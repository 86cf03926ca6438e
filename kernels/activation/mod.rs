//! The gated activations of the feed-forward layers.

pub mod reference;
#[cfg(test)]
mod tests;

use crate::memory::DeviceSlice;
use crate::sources::Source;
use crate::vectors::{VEC, expect_vectors};
use crate::{Error, Function, Launch, Modules, Stream};

/// Device code.
pub const SOURCE: Source = Source::new("activation", "activation/activation.cu", include_str!("activation.cu"));

/// Threads of a CTA, and vectors of a thread (`VECTORS` in the kernel).
const THREADS: u32 = 256;
const VECTORS: u32 = 2;

/// The kernels.
#[derive(Debug)]
pub struct Activation {
    silu_mul: Function,
    gelu_tanh_mul: Function,
}

impl Activation {
    /// Errors with `Driver` when an entry point is missing.
    pub fn load(modules: &Modules) -> Result<Self, Error> {
        let function = |entry| modules.function(SOURCE.name, entry);
        Ok(Self { silu_mul: function("silu_mul")?, gelu_tanh_mul: function("gelu_tanh_mul")? })
    }

    /// out `[num_tokens, intermediate]` = silu(gate) * up of gate_up `[num_tokens, 2 * intermediate]`,
    /// whose rows are gate, then up. Shazeer, GLU Variants Improve Transformer, 2020, eq. 6. Errors
    /// with `Shape` when lengths, widths or alignment do not fit.
    pub fn silu_mul(
        &self,
        stream: &Stream,
        out: DeviceSlice<u16>,
        gate_up: DeviceSlice<u16>,
        num_tokens: u32,
        intermediate: u32,
    ) -> Result<(), Error> {
        run(&self.silu_mul, stream, out, gate_up, num_tokens, intermediate)
    }

    /// The same with the tanh form of gelu. Hendrycks & Gimpel, Gaussian Error Linear Units, 2016,
    /// section 2. Errors with `Shape`.
    pub fn gelu_tanh_mul(
        &self,
        stream: &Stream,
        out: DeviceSlice<u16>,
        gate_up: DeviceSlice<u16>,
        num_tokens: u32,
        intermediate: u32,
    ) -> Result<(), Error> {
        run(&self.gelu_tanh_mul, stream, out, gate_up, num_tokens, intermediate)
    }
}

fn run(
    function: &Function,
    stream: &Stream,
    out: DeviceSlice<u16>,
    gate_up: DeviceSlice<u16>,
    num_tokens: u32,
    intermediate: u32,
) -> Result<(), Error> {
    let name = function.name();
    let too_many = || Error::shape(name, format!("{num_tokens} tokens of {intermediate}: too many numbers"));
    let width = intermediate.checked_mul(2).ok_or_else(too_many)?;
    expect_vectors(out, name, "out", num_tokens, intermediate)?;
    expect_vectors(gate_up, name, "gate_up", num_tokens, width)?;
    // Indices of vectors are u32, and those of the last CTA may pass the end.
    let num_vectors = num_tokens.checked_mul(intermediate / VEC).filter(|&num| num <= u32::MAX - THREADS * VECTORS);
    let num_vectors = num_vectors.ok_or_else(too_many)?;
    // SAFETY: arguments are those of activation.cu in its order; lengths, alignment and the number
    // of vectors were checked for these dims. Without vectors there is no launch.
    unsafe {
        Launch::new(function)
            .grid(num_vectors.div_ceil(THREADS * VECTORS))
            .cta(THREADS)
            .overlaps_previous(true)
            .arg(out)
            .arg(gate_up)
            .arg(num_tokens)
            .arg(intermediate)
            .run(stream)
    }
}
