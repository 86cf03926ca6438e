//! Launching a kernel with checked arguments.
//!
//! ```text
//! // SAFETY: the shapes were checked above.
//! unsafe { Launch::new(&self.rms_norm).grid(rows).cta(256).arg(out).arg(x).arg(rows).run(stream) }
//! ```

use std::mem::MaybeUninit;

use cudarc::driver::sys::{self, CUresult};

use crate::driver::{is_sticky, status_text};
use crate::memory::{DeviceSlice, Element};
use crate::{Error, Function, Stream};

/// Arguments of a kernel, at most.
const ARGS_MAX: usize = 32;
/// Bytes of all of them, each rounded up to 16.
const BYTES_MAX: usize = 1024;

/// What can be handed to a kernel by value.
///
/// # Safety
/// `Value` must be laid out as the kernel's parameter is: a number, a pointer, or a `repr(C)`
/// struct without padding whose size both sides assert.
pub unsafe trait Arg {
    /// As it is laid out for the kernel.
    type Value: Copy;
    /// The value.
    fn value(self) -> Self::Value;
}

macro_rules! number {
    ($($type:ty),+) => {$(
        // SAFETY: a number is passed as it is.
        unsafe impl Arg for $type {
            type Value = Self;
            fn value(self) -> Self {
                self
            }
        }
    )+};
}
number!(u32, i32, f32, u64);

// SAFETY: a device pointer of 64 bits.
unsafe impl<T: Element> Arg for DeviceSlice<T> {
    type Value = u64;
    fn value(self) -> u64 {
        self.address()
    }
}

// SAFETY: a device pointer, null where there is none.
unsafe impl<T: Element> Arg for Option<DeviceSlice<T>> {
    type Value = u64;
    fn value(self) -> u64 {
        self.map_or(0, DeviceSlice::address)
    }
}

/// The bytes of the arguments.
#[repr(C, align(16))]
struct Bytes([MaybeUninit<u8>; BYTES_MAX]);

/// A launch in the making.
pub struct Launch<'a> {
    function: &'a Function,
    grid: [u32; 3],
    cta: [u32; 3],
    shared_bytes: u32,
    overlaps_previous: bool,
    bytes: Bytes,
    offsets: [u16; ARGS_MAX],
    num_args: usize,
    num_bytes: usize,
}

impl std::fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launch")
            .field("kernel", &self.function.name())
            .field("grid", &self.grid)
            .finish_non_exhaustive()
    }
}

impl<'a> Launch<'a> {
    /// One CTA of one thread until told otherwise.
    pub fn new(function: &'a Function) -> Self {
        Self {
            function,
            grid: [1; 3],
            cta: [1; 3],
            shared_bytes: 0,
            overlaps_previous: false,
            bytes: Bytes([MaybeUninit::uninit(); BYTES_MAX]),
            offsets: [0; ARGS_MAX],
            num_args: 0,
            num_bytes: 0,
        }
    }

    /// CTAs in x.
    pub fn grid(self, x: u32) -> Self {
        self.grid3(x, 1, 1)
    }

    /// CTAs.
    pub fn grid3(mut self, x: u32, y: u32, z: u32) -> Self {
        self.grid = [x, y, z];
        self
    }

    /// Threads of a CTA, in x.
    pub fn cta(self, x: u32) -> Self {
        self.cta3(x, 1, 1)
    }

    /// Threads of a CTA.
    pub fn cta3(mut self, x: u32, y: u32, z: u32) -> Self {
        self.cta = [x, y, z];
        self
    }

    /// Dynamic shared memory; above 48 KiB after [`Function::allow_shared`].
    pub fn shared(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// May start before the kernel ahead of it has ended (programmatic dependent launch): the
    /// kernel itself waits with `griddepcontrol.wait` before it reads what that one wrote. Before
    /// compute capability 9.0 it starts after it, as ever.
    pub fn overlaps_previous(mut self, overlaps: bool) -> Self {
        self.overlaps_previous = overlaps;
        self
    }

    /// The next argument. More than a kernel here has is a fault of the launcher.
    pub fn arg<A: Arg>(mut self, arg: A) -> Self {
        let value = arg.value();
        let size = size_of::<A::Value>();
        let start = self.num_bytes.next_multiple_of(align_of::<A::Value>());
        assert!(self.num_args < ARGS_MAX && start + size <= BYTES_MAX, "arguments of {}", self.function.name());
        assert!(align_of::<A::Value>() <= 16, "alignment of an argument of {}", self.function.name());
        // SAFETY: the range lies within the bytes (asserted) and is aligned for the type.
        unsafe { self.bytes.0.as_mut_ptr().add(start).cast::<A::Value>().write(value) };
        self.offsets[self.num_args] = start as u16;
        self.num_args += 1;
        self.num_bytes = start + size;
        self
    }

    /// Launches.
    ///
    /// # Safety
    /// Number, order and types of the arguments must be the kernel's, and every address it
    /// reads or writes for these dims must lie within the slices given.
    pub unsafe fn run(mut self, stream: &Stream) -> Result<(), Error> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        if self.shared_bytes > self.function.shared_bytes_max() {
            let what =
                format!("{} bytes of shared memory; {} allowed", self.shared_bytes, self.function.shared_bytes_max());
            return Err(Error::shape(self.function.name(), what));
        }
        let base = self.bytes.0.as_mut_ptr();
        let mut pointers = [std::ptr::null_mut(); ARGS_MAX];
        for (pointer, &offset) in pointers.iter_mut().zip(&self.offsets[..self.num_args]) {
            *pointer = base.wrapping_add(offset as usize).cast();
        }
        let status = if self.overlaps_previous && self.function.can_overlap() {
            self.launch_overlapping(stream, &mut pointers)
        } else {
            let ([gx, gy, gz], [cx, cy, cz]) = (self.grid, self.cta);
            // SAFETY: `pointers` name one initialized value per argument; the rest is the caller's promise.
            unsafe {
                sys::cuLaunchKernel(
                    self.function.raw(),
                    gx,
                    gy,
                    gz,
                    cx,
                    cy,
                    cz,
                    self.shared_bytes,
                    stream.raw(),
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
        };
        match status {
            CUresult::CUDA_SUCCESS => Ok(()),
            status if is_sticky(status) => Err(Error::Driver {
                what: format!("launch kernel {}", self.function.name()),
                status: status_text(status),
                is_sticky: true,
            }),
            status => Err(Error::Launch {
                kernel: self.function.name().to_owned(),
                dims: format!("grid {:?}, cta {:?}, {} shared bytes", self.grid, self.cta, self.shared_bytes),
                status: status_text(status),
            }),
        }
    }

    fn launch_overlapping(&self, stream: &Stream, pointers: &mut [*mut std::ffi::c_void; ARGS_MAX]) -> CUresult {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let ([gx, gy, gz], [cx, cy, cz]) = (self.grid, self.cta);
        let config = sys::CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: cx,
            blockDimY: cy,
            blockDimZ: cz,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.raw(),
            attrs: &mut attribute,
            numAttrs: 1,
        };
        // SAFETY: as in `run`; configuration and attribute live through the call.
        unsafe { sys::cuLaunchKernelEx(&config, self.function.raw(), pointers.as_mut_ptr(), std::ptr::null_mut()) }
    }
}
