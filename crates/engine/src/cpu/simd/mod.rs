//! The inner loops, by instruction set.
//!
//! Invariant: every path gives the same bits. Integer sums are exact, and each f32 result is a
//! fixed sequence of fused multiply-adds over its own inputs, so that neither the path, nor the
//! rows beside it, nor the split among threads can change it.

pub(crate) mod dense;
pub(crate) mod quant;
pub(crate) mod vector;

/// An instruction set of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    /// Any machine; slow where there is no fused multiply-add.
    Plain,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 and the 16-bit dot product of AVX-512 VNNI on 256-bit registers.
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Isa {
    /// The fastest that this processor has.
    pub(crate) fn detect() -> Self {
        *Self::available().last().expect("Plain is always there")
    }

    /// All that this processor has, the fastest last.
    pub(crate) fn available() -> Vec<Self> {
        let mut all = vec![Self::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                all.push(Self::Avx2);
                if has!("avx512vnni") && has!("avx512vl") {
                    all.push(Self::Vnni);
                }
            }
        }
        all
    }
}
