//! Streams and events: the order of work on the device.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::driver::check;
use crate::memory::{DeviceSlice, Element, Pinned};
use crate::{Device, Error};

/// Work on a stream runs in the order it was given. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: sys::CUstream,
    device: Device,
}

// SAFETY: the driver locks a stream's queue itself; handles may be used from any bound thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Stream {
    /// A stream that does not wait for the default one.
    pub fn new(device: &Device) -> Result<Self, Error> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; destroyed when `Inner` drops.
        check(unsafe { sys::cuStreamCreate(&mut raw, flags) }, || "make a stream".to_owned())?;
        Ok(Self { inner: Arc::new(Inner { raw, device: device.clone() }) })
    }

    /// The device it works on.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.inner.raw
    }

    /// Waits until everything given so far is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamSynchronize(self.raw()) }, || "finish the work on the GPU".to_owned())
    }

    /// Copies the first `len` elements of `from` to the device. The copy may still read `from`
    /// after the return: the caller records an event and waits for it before writing it again.
    pub fn upload<T: Element>(&self, to: DeviceSlice<T>, from: &Pinned<T>, len: usize) -> Result<(), Error> {
        if len > to.len() || len > from.len() {
            let what = format!("{len} elements from a buffer of {} to one of {}", from.len(), to.len());
            return Err(Error::shape("upload", what));
        }
        if len == 0 {
            return Ok(());
        }
        let bytes = len * size_of::<T>();
        // SAFETY: both sides hold `len` elements (checked above); pinned memory outlives the
        // stream's work because its owner keeps it until a synchronization (see `Pinned`).
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.as_ptr().cast(), bytes, self.raw()) };
        check(status, || format!("copy {bytes} bytes to the GPU"))
    }

    /// Copies ordinary memory to the device and waits for it; for the start and for tests.
    pub fn upload_now<T: Element>(&self, to: DeviceSlice<T>, from: &[T]) -> Result<(), Error> {
        if from.len() > to.len() {
            let what = format!("{} elements to a buffer of {}", from.len(), to.len());
            return Err(Error::shape("upload", what));
        }
        if from.is_empty() {
            return Ok(());
        }
        let bytes = size_of_val(from);
        // SAFETY: `to` holds as many elements (checked above); the wait below keeps `from` alive.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.as_ptr().cast(), bytes, self.raw()) };
        check(status, || format!("copy {bytes} bytes to the GPU"))?;
        self.synchronize()
    }

    /// Copies `from` into the first elements of `to`, which may be read once the stream is there.
    pub fn download<T: Element>(&self, to: &mut Pinned<T>, from: DeviceSlice<T>) -> Result<(), Error> {
        if from.len() > to.len() {
            let what = format!("{} elements to a buffer of {}", from.len(), to.len());
            return Err(Error::shape("download", what));
        }
        if from.is_empty() {
            return Ok(());
        }
        let bytes = from.len() * size_of::<T>();
        // SAFETY: `to` holds as many elements (checked above) and outlives the copy (see `Pinned`).
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address(), bytes, self.raw()) };
        check(status, || format!("copy {bytes} bytes from the GPU"))
    }

    /// Copies from the device into ordinary memory and waits for it.
    pub fn download_now<T: Element>(&self, from: DeviceSlice<T>) -> Result<Vec<T>, Error> {
        let mut to = vec![T::zeroed(); from.len()];
        if from.is_empty() {
            return Ok(to);
        }
        let bytes = from.len() * size_of::<T>();
        // SAFETY: `to` holds as many elements, and the wait below comes before its first use.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address(), bytes, self.raw()) };
        check(status, || format!("copy {bytes} bytes from the GPU"))?;
        self.synchronize()?;
        Ok(to)
    }

    /// Copies within the device.
    pub fn copy<T: Element>(&self, to: DeviceSlice<T>, from: DeviceSlice<T>) -> Result<(), Error> {
        if from.len() > to.len() {
            return Err(Error::shape("copy", format!("{} elements to a buffer of {}", from.len(), to.len())));
        }
        let bytes = from.len() * size_of::<T>();
        // SAFETY: `to` holds as many elements (checked above).
        let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, self.raw()) };
        check(status, || format!("copy {bytes} bytes on the GPU"))
    }

    /// Sets every byte.
    pub fn fill_bytes<T: Element>(&self, to: DeviceSlice<T>, byte: u8) -> Result<(), Error> {
        let bytes = to.len() * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the slice is that long, and every bit pattern is an `Element`.
        let status = unsafe { sys::cuMemsetD8Async(to.address(), byte, bytes, self.raw()) };
        check(status, || format!("fill {bytes} bytes on the GPU"))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once; the driver finishes its work first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    device: Device,
}

// SAFETY: event handles may be used from any bound thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that only orders; the cheap kind.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Self::with_flags(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// An event that [`Event::ms_since`] can measure with.
    pub fn timed(device: &Device) -> Result<Self, Error> {
        Self::with_flags(device, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with_flags(device: &Device, flags: u32) -> Result<Self, Error> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current; destroyed when dropped.
        check(unsafe { sys::cuEventCreate(&mut raw, flags) }, || "make an event".to_owned())?;
        Ok(Self { raw, device: device.clone() })
    }

    /// Stands for what was given to `stream` so far.
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        // SAFETY: both handles are alive.
        check(unsafe { sys::cuEventRecord(self.raw, stream.raw()) }, || "record an event".to_owned())
    }

    /// Waits for it. One that was never recorded is over.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the handle is alive.
        check(unsafe { sys::cuEventSynchronize(self.raw) }, || "wait for the GPU".to_owned())
    }

    /// Milliseconds from `start` to this event; both timed, recorded and over.
    pub fn ms_since(&self, start: &Event) -> Result<f32, Error> {
        let mut ms = 0.0;
        // SAFETY: both handles are alive; one number is written.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut ms, start.raw, self.raw) };
        check(status, || "measure between two events".to_owned())?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `with_flags`, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
