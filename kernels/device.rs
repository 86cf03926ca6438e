//! One GPU: found, opened, described.
//!
//! Owns the primary context of the device for as long as a [`Device`] lives. A thread that
//! makes driver calls must [`Device::bind`] first; the engine thread does so in every step.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};

use crate::Error;
use crate::compile::Arch;
use crate::driver::check;

/// Oldest driver interface that runs what NVRTC 13.0 compiles.
const DRIVER_MIN: i32 = 13_000;

unsafe extern "C" {
    /// POSIX, "_exit": no handler of the program or of a library runs.
    fn _exit(status: std::ffi::c_int) -> !;
}

/// Ends the process without the driver's own end, which would wait for a device that hangs, and
/// which another thread inside the driver would not survive. For the last line of a program, which
/// has written what it has to say. Here and not in the program, because this crate is the one that
/// may call into C.
pub fn exit_at_once(code: u8) -> ! {
    // SAFETY: takes any number and does not return; nothing of this process runs after it.
    unsafe { _exit(code.into()) }
}

/// A GPU with its context. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: sys::CUdevice,
    context: sys::CUcontext,
    properties: Properties,
}

// SAFETY: a context handle may be used from any thread that has made it current (CUDA driver
// API, "Context management"); the fields are never written after `open`.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What is known of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// For example `NVIDIA H200`.
    pub name: String,
    /// Hexadecimal, names this very card.
    pub uuid: String,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// Of the device.
    pub memory_bytes: u64,
    /// Most shared memory of a CTA.
    pub shared_bytes_max: u32,
    /// Of the second-level cache.
    pub l2_bytes: u64,
    /// Of the memory, kHz; 0 where the driver does not tell.
    pub memory_clock_khz: u32,
    /// Lines to the memory; 0 where the driver does not tell.
    pub memory_bus_bits: u32,
    /// Driver interface, `13000` for 13.0.
    pub driver_version: u32,
}

impl Properties {
    /// Bytes a second that the memory can move by its clock and width, two transfers a cycle.
    pub fn memory_bytes_per_s(&self) -> Option<u64> {
        let bytes = u64::from(self.memory_clock_khz) * 1000 * 2 * u64::from(self.memory_bus_bits) / 8;
        (bytes > 0).then_some(bytes)
    }
}

impl Device {
    /// How many GPUs the driver shows. Errors with `Library` without a driver.
    pub fn count() -> Result<u32, Error> {
        init()?;
        let mut count = 0;
        // SAFETY: the driver is loaded and initialized; it writes one integer.
        check(unsafe { sys::cuDeviceGetCount(&mut count) }, || "count the GPUs".to_owned())?;
        Ok(count.unsigned_abs())
    }

    /// Opens GPU `ordinal` and makes its context current on this thread. Errors with `Library`
    /// when there is no driver, no GPU, or one too old, in words that say which, and with
    /// `OutOfMemory` when its memory is held by others.
    pub fn open(ordinal: u32) -> Result<Self, Error> {
        let count = Self::count()?;
        if ordinal >= count {
            let what = format!("GPU {ordinal} was asked for and the driver shows {count}");
            return Err(Error::Library { library: "the CUDA device", what });
        }
        let mut device = 0;
        // SAFETY: the ordinal is below the count; the driver writes one integer.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) }, || format!("find GPU {ordinal}"))?;
        let properties = properties(device)?;
        let (major, minor) = properties.compute_capability;
        if (major, minor) < (7, 5) {
            let what = format!("{} has compute capability {major}.{minor}; 7.5 and up are supported", properties.name);
            return Err(Error::Library { library: "the CUDA device", what });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: `device` is valid; released when `Inner` drops.
        match unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (what, total_bytes) = (format!("the context of GPU {ordinal}"), properties.memory_bytes);
                return Err(Error::OutOfMemory { what, asked_bytes: 0, free_bytes: 0, total_bytes });
            }
            status => check(status, || format!("open GPU {ordinal}"))?,
        }
        let opened = Self { inner: Arc::new(Inner { device, context, properties }) };
        opened.bind()?;
        Ok(opened)
    }

    /// Makes the context current on this thread; every thread needs it once.
    pub fn bind(&self) -> Result<(), Error> {
        // SAFETY: the context lives as long as `self`.
        check(unsafe { sys::cuCtxSetCurrent(self.inner.context) }, || "bind the GPU to this thread".to_owned())
    }

    /// Name, sizes, versions.
    pub fn properties(&self) -> &Properties {
        &self.inner.properties
    }

    /// What kernels are compiled for.
    pub fn arch(&self) -> Arch {
        Arch::of(self.inner.properties.compute_capability)
    }

    /// Free and whole memory of the device now, bytes.
    pub fn memory_bytes(&self) -> Result<(u64, u64), Error> {
        let (mut free, mut total) = (0, 0);
        self.bind()?;
        // SAFETY: a context is current; two integers are written.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, || "ask for free memory".to_owned())?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A failure at the end has nobody to tell.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Loads and initializes the driver.
fn init() -> Result<(), Error> {
    let library = "libcuda (the NVIDIA driver)";
    // SAFETY: tries to load the driver's library by its usual names; its initializers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        let what = "it was not found under its usual names (libcuda.so, libcuda.so.1); install the NVIDIA driver, or \
                    use --device cpu";
        return Err(Error::Library { library, what: what.to_owned() });
    }
    // SAFETY: the library is there; the call may be repeated.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => {
            let what = "the driver is installed but shows no GPU; use --device cpu".to_owned();
            return Err(Error::Library { library, what });
        }
        status => {
            let what = format!("it does not start: {}", crate::driver::status_text(status));
            return Err(Error::Library { library, what });
        }
    }
    let mut version = 0;
    // SAFETY: one integer is written.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, || "ask for the driver's version".to_owned())?;
    if version < DRIVER_MIN {
        let what = format!(
            "it speaks CUDA {}.{}; 13.0 is needed: install driver 580 or newer, or use --device cpu",
            version / 1000,
            version % 1000 / 10
        );
        return Err(Error::Library { library, what });
    }
    Ok(())
}

fn properties(device: sys::CUdevice) -> Result<Properties, Error> {
    let attribute = |attribute: Attribute| {
        let mut value = 0;
        // SAFETY: `device` is valid; one integer is written.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) }, || {
            format!("ask the GPU for {attribute:?}")
        })?;
        Ok::<u32, Error>(value.unsigned_abs())
    };
    let mut name = [0; 256];
    // SAFETY: at most 256 bytes with a final zero are written.
    check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, device) }, || "ask for the GPU's name".to_owned())?;
    let name: Vec<u8> = name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: sixteen bytes are written.
    check(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) }, || "ask for the GPU's uuid".to_owned())?;
    let mut memory_bytes = 0;
    // SAFETY: one integer is written.
    check(unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) }, || "ask for the GPU's memory".to_owned())?;
    let mut driver_version = 0;
    // SAFETY: one integer is written.
    check(unsafe { sys::cuDriverGetVersion(&mut driver_version) }, || "ask for the driver's version".to_owned())?;
    Ok(Properties {
        name: String::from_utf8_lossy(&name).into_owned(),
        uuid: uuid.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect(),
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        num_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: memory_bytes as u64,
        shared_bytes_max: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: u64::from(attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        memory_clock_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0),
        memory_bus_bits: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0),
        driver_version: driver_version.unsigned_abs(),
    })
}
