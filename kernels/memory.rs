//! Memory: the one device allocation that is cut into named regions, pinned host buffers.
//!
//! Invariant: a [`DeviceSlice`] is a plain address range, never dereferenced on the host; its
//! owner ([`Arena`] or [`Buffer`]) outlives the work that uses it because both wait for the
//! device before they free.

use std::marker::PhantomData;

use cudarc::driver::sys::{self, CUresult};

use crate::driver::check;
use crate::{Device, Error};

/// Every region starts at a multiple of this; enough for vector loads, cp.async and TMA.
pub const ALIGNMENT: u64 = 256;

/// Plain numbers: every bit pattern is a value, and there is no padding.
///
/// # Safety
/// The implementing type must be so.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// All bits zero.
    fn zeroed() -> Self;
}

macro_rules! element {
    ($($type:ty => $zero:expr),+ $(,)?) => {$(
        // SAFETY: a number without padding, every bit pattern of which is a value.
        unsafe impl Element for $type {
            fn zeroed() -> Self {
                $zero
            }
        }
    )+};
}
element!(u8 => 0, u16 => 0, u32 => 0, u64 => 0, i32 => 0, f32 => 0.0, half::bf16 => half::bf16::ZERO, half::f16 => half::f16::ZERO);

/// A range of device memory: `len` elements from an address. No ownership, no arithmetic on it
/// but cutting. 16-bit tensors of either type are `DeviceSlice<u16>`.
#[derive(Debug)]
pub struct DeviceSlice<T> {
    address: u64,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<T> {}

impl<T: Element> DeviceSlice<T> {
    /// Device address of the first element.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// No elements.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Elements `start..start + len`; a range beyond the end is a fault of the caller.
    #[track_caller]
    pub fn slice(self, start: usize, len: usize) -> Self {
        let end = start.checked_add(len).expect("a range within a buffer");
        assert!(end <= self.len, "elements {start}..{end} of a buffer of {}", self.len);
        Self { address: self.address + (start * size_of::<T>()) as u64, len, element: PhantomData }
    }

    /// Errors with `Shape` when it holds fewer elements than `len`.
    pub fn expect_len(self, kernel: &'static str, name: &str, len: usize) -> Result<(), Error> {
        if self.len < len {
            return Err(Error::shape(kernel, format!("{name} has {} elements; {len} are needed", self.len)));
        }
        Ok(())
    }

    /// The same bytes as elements of another type of the same or a smaller alignment.
    #[track_caller]
    pub fn cast<U: Element>(self) -> DeviceSlice<U> {
        let bytes = self.len * size_of::<T>();
        assert_eq!(self.address % align_of::<U>() as u64, 0, "alignment of a cast buffer");
        DeviceSlice { address: self.address, len: bytes / size_of::<U>(), element: PhantomData }
    }
}

/// A region of the arena, for the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// What it is for.
    pub name: String,
    /// Rounded up to [`ALIGNMENT`].
    pub bytes: u64,
}

/// The bookkeeping of an arena, apart from the device.
#[derive(Debug, Default)]
pub struct Ledger {
    capacity_bytes: u64,
    used_bytes: u64,
    regions: Vec<Region>,
}

impl Ledger {
    /// Of an arena of that size.
    pub fn new(capacity_bytes: u64) -> Self {
        Self { capacity_bytes, used_bytes: 0, regions: Vec::new() }
    }

    /// Takes `bytes` and gives the offset. Regions of one name add up in the report. Errors with
    /// `OutOfMemory`.
    pub fn take(&mut self, name: &str, bytes: u64) -> Result<u64, Error> {
        let full = |asked| Error::OutOfMemory {
            what: name.to_owned(),
            asked_bytes: asked,
            free_bytes: self.capacity_bytes - self.used_bytes,
            total_bytes: self.capacity_bytes,
        };
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or_else(|| full(bytes))?;
        if rounded > self.capacity_bytes - self.used_bytes {
            return Err(full(rounded));
        }
        let offset = self.used_bytes;
        self.used_bytes += rounded;
        match self.regions.iter_mut().find(|region| region.name == name) {
            Some(region) => region.bytes += rounded,
            None => self.regions.push(Region { name: name.to_owned(), bytes: rounded }),
        }
        Ok(offset)
    }

    /// Bytes that are left.
    pub fn free_bytes(&self) -> u64 {
        self.capacity_bytes - self.used_bytes
    }

    /// Where the memory went, in the order of the first taking.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }
}

/// One big allocation; addresses stay what they are until it is dropped.
#[derive(Debug)]
pub struct Arena {
    base: Buffer<u8>,
    ledger: Ledger,
}

impl Arena {
    /// Allocates it. Errors with `OutOfMemory`.
    pub fn new(device: &Device, bytes: u64) -> Result<Self, Error> {
        let len = usize::try_from(bytes).expect("an address space of 64 bits");
        Ok(Self { base: Buffer::new(device, "the arena", len)?, ledger: Ledger::new(bytes) })
    }

    /// Cuts off `len` elements for `name`. The content is undefined.
    pub fn take<T: Element>(&mut self, name: &str, len: usize) -> Result<DeviceSlice<T>, Error> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let offset = self.ledger.take(name, bytes)?;
        Ok(DeviceSlice { address: self.base.slice().address + offset, len, element: PhantomData })
    }

    /// Where the memory went.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

/// An allocation of its own: for the arena, and for tests.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    slice: DeviceSlice<T>,
    device: Device,
}

impl<T: Element> Buffer<T> {
    /// Allocates `len` elements; `what` names them in an error. Errors with `OutOfMemory`.
    pub fn new(device: &Device, what: &str, len: usize) -> Result<Self, Error> {
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(1);
        let mut address = 0;
        // SAFETY: a context is current; freed once, when dropped.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free_bytes, total_bytes) = device.memory_bytes()?;
                Err(Error::OutOfMemory { what: what.to_owned(), asked_bytes: bytes as u64, free_bytes, total_bytes })
            }
            status => {
                check(status, || format!("allocate {bytes} bytes for {what}"))?;
                Ok(Self { slice: DeviceSlice { address, len, element: PhantomData }, device: device.clone() })
            }
        }
    }

    /// All of it.
    pub fn slice(&self) -> DeviceSlice<T> {
        self.slice
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.slice.address) };
        }
    }
}

/// Page-locked host memory, which copies can read while the program goes on. Dropping it waits
/// for the device, so that no copy reads freed memory.
#[derive(Debug)]
pub struct Pinned<T: Element> {
    pointer: *mut T,
    len: usize,
    device: Device,
}

// SAFETY: the memory belongs to this value alone; access follows the usual borrow rules.
unsafe impl<T: Element> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Pinned<T> {}

impl<T: Element> Pinned<T> {
    /// Allocates `len` elements, all zero.
    pub fn new(device: &Device, len: usize) -> Result<Self, Error> {
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(1);
        let mut pointer = std::ptr::null_mut();
        // SAFETY: a context is current; freed once, when dropped.
        let status = unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        check(status, || format!("pin {bytes} bytes of memory"))?;
        // SAFETY: the block is `bytes` long and page-aligned.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        Ok(Self { pointer: pointer.cast(), len, device: device.clone() })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn as_ptr(&self) -> *const T {
        self.pointer
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.pointer
    }

    /// The elements. Of a download, valid once the stream is past it.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: allocated for `len` elements and initialized; every bit pattern is a value.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// The elements, to write. The caller has waited for copies that read them.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T: Element> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: no copy can read the block after the context is idle; then it is freed, once.
            unsafe {
                let _ = sys::cuCtxSynchronize();
                let _ = sys::cuMemFreeHost(self.pointer.cast());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_rounds_adds_up_and_says_what_did_not_fit() {
        let mut ledger = Ledger::new(2048);
        assert_eq!(ledger.take("weights", 1).expect("fits"), 0);
        assert_eq!(ledger.take("kv cache", 256).expect("fits"), 256);
        assert_eq!(ledger.take("weights", 300).expect("fits"), 512);
        assert_eq!(ledger.free_bytes(), 1024);
        let regions: Vec<_> = ledger.regions().iter().map(|region| (region.name.as_str(), region.bytes)).collect();
        assert_eq!(regions, [("weights", 768), ("kv cache", 256)]);
        match ledger.take("graphs", 1025).expect_err("does not fit") {
            Error::OutOfMemory { what, asked_bytes, free_bytes, total_bytes } => {
                assert_eq!((what.as_str(), asked_bytes, free_bytes, total_bytes), ("graphs", 1280, 1024, 2048));
            }
            other => panic!("{other}"),
        }
        assert_eq!(ledger.take("last", 1024).expect("fits exactly"), 1024);
        assert!(ledger.take("huge", u64::MAX).is_err(), "a size that overflows is refused");
    }
}
