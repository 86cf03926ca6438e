//! Failures of the device layer.

/// A call of CUDA, NVRTC or cuBLASLt failed, or would have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// NVRTC refuses a kernel; `log` is what it printed.
    #[error("could not compile kernel {kernel} for {arch}: {what}")]
    Compile {
        /// The family.
        kernel: String,
        /// For example `sm_90a`.
        arch: String,
        /// The status of NVRTC.
        what: String,
        /// Its log.
        log: String,
    },
    /// The driver refuses a launch.
    #[error("could not launch kernel {kernel} with {dims}: {status}")]
    Launch {
        /// The entry point.
        kernel: String,
        /// Grid, CTA size and shared memory.
        dims: String,
        /// By its name in the driver.
        status: String,
    },
    /// A driver call failed. After a sticky status the device context is of no use.
    #[error("could not {what}: {status}")]
    Driver {
        /// What was being done.
        what: String,
        /// By its name in the driver.
        status: String,
        /// Whether every later call of this process fails too.
        is_sticky: bool,
    },
    /// Sizes, alignment or types that a kernel cannot take.
    #[error("kernel {kernel} cannot take this: {what}")]
    Shape {
        /// The entry point.
        kernel: &'static str,
        /// The sizes, and what they must be.
        what: String,
    },
    /// No driver, no GPU, or a library that is missing or of the wrong version; says what was
    /// searched and what to do.
    #[error("{library} is not usable: {what}")]
    Library {
        /// For example `libcublasLt.so.13`.
        library: &'static str,
        /// What is wrong, where it was searched and how to install it.
        what: String,
    },
    /// The device has not enough memory.
    #[error("out of device memory for {what}: {asked_bytes} bytes asked, {free_bytes} free of {total_bytes}")]
    OutOfMemory {
        /// What it was for.
        what: String,
        /// Asked for.
        asked_bytes: u64,
        /// Free at that time.
        free_bytes: u64,
        /// Of the device, or of the region.
        total_bytes: u64,
    },
}

impl Error {
    /// A shape error of an entry point.
    pub fn shape(kernel: &'static str, what: impl Into<String>) -> Self {
        Self::Shape { kernel, what: what.into() }
    }

    /// Whether the context is gone, so that every later call fails too.
    pub fn is_sticky(&self) -> bool {
        matches!(self, Self::Driver { is_sticky: true, .. })
    }
}
