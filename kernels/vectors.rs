//! Checks of tensors that kernels read and write in vectors of 16 bytes.

use crate::Error;
use crate::memory::{DeviceSlice, Element};

/// Elements of a vector of 16-bit numbers.
pub(crate) const VEC: u32 = 8;

/// Errors with `Shape` unless `slice` holds `rows * width` elements from an address of whole
/// vectors, and rows consist of whole ones.
pub(crate) fn expect_vectors<T: Element>(
    slice: DeviceSlice<T>,
    kernel: &'static str,
    name: &str,
    rows: u32,
    width: u32,
) -> Result<(), Error> {
    if !width.is_multiple_of(VEC) {
        return Err(Error::shape(
            kernel,
            format!("{name} has rows of {width} elements; a multiple of {VEC} is needed"),
        ));
    }
    if !slice.address().is_multiple_of(16) {
        return Err(Error::shape(
            kernel,
            format!("{name} is at address {:#x}; a multiple of 16 is needed", slice.address()),
        ));
    }
    slice.expect_len(kernel, name, rows as usize * width as usize)
}
