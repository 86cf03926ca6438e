//! Random weights for models that are run for speed alone.

pub mod reference;
#[cfg(test)]
mod tests;

use crate::memory::DeviceSlice;
use crate::sources::Source;
use crate::vectors::{VEC, expect_vectors};
use crate::{Error, Function, Launch, Modules, Stream};

/// Device code.
pub const SOURCE: Source = Source::new("fill", "fill/fill.cu", include_str!("fill.cu"));

const THREADS: u32 = 256;
/// Enough CTAs for any GPU; each goes on with further vectors.
const CTAS_MAX: u64 = 4096;
/// The counter of the generator has 32 bits for four numbers each.
const COUNT_MAX: u64 = 1 << 34;

/// The kernel.
#[derive(Debug)]
pub struct Fill {
    fill_normal: Function,
}

impl Fill {
    /// Errors with `Driver` when the entry point is missing.
    pub fn load(modules: &Modules) -> Result<Self, Error> {
        Ok(Self { fill_normal: modules.function(SOURCE.name, "fill_normal")? })
    }

    /// Fills `out[..count]` with normal numbers of mean 0 and standard deviation `std`, the same for
    /// every launch with this seed. Box & Muller, A Note on the Generation of Random Normal
    /// Deviates, 1958. Errors with `Shape` when `out` is too short, not aligned, or too long.
    pub fn fill_normal(
        &self,
        stream: &Stream,
        out: DeviceSlice<u16>,
        count: u64,
        seed: u64,
        std: f32,
    ) -> Result<(), Error> {
        let name = self.fill_normal.name();
        if count > COUNT_MAX || count > out.len() as u64 {
            let what = format!("{count} numbers into a buffer of {}; {COUNT_MAX} are possible", out.len());
            return Err(Error::shape(name, what));
        }
        expect_vectors(out, name, "out", 0, VEC)?;
        let num_ctas = count.div_ceil(u64::from(THREADS * VEC)).min(CTAS_MAX) as u32;
        let launch = Launch::new(&self.fill_normal).grid(num_ctas).cta(THREADS);
        // SAFETY: arguments are those of fill.cu in its order; length and alignment were checked.
        // Without numbers there is no launch.
        unsafe { launch.arg(out).arg(count).arg(seed).arg(std).run(stream) }
    }
}
