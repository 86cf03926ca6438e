//! A GPU for the tests of the families, where there is one.
//!
//! [`bed`] gives `None` on a machine without a GPU and says so on stderr; with `gpu` in
//! `OVERNIGHT_TEST_REQUIRE` that is a failure.

use crate::cache::Cache;
use crate::compile::Dtype;
use crate::library::SearchPaths;
use crate::memory::{Buffer, DeviceSlice, Element};
use crate::module::BuildOptions;
use crate::{Device, Error, Modules, Stream};

/// Elements around an output that must keep their poison.
pub(crate) const GUARD: usize = 64;

/// A device with every family compiled.
pub(crate) struct Bed {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) modules: Modules,
    pub(crate) dtype: Dtype,
}

/// Where tests look for NVRTC and cuBLASLt: as a user's process would, and in `target/venv`.
pub(crate) fn search_paths() -> SearchPaths {
    let target = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/venv");
    let mut python = vec![target.into()];
    python.extend(setting("VIRTUAL_ENV").map(Into::into));
    SearchPaths {
        toolkits: setting("CUDA_HOME").map(Into::into).into_iter().collect(),
        python,
        folders: setting("OVERNIGHT_TEST_CUDA_LIBRARIES").map(Into::into).into_iter().collect(),
    }
}

#[expect(clippy::disallowed_methods, reason = "tests read their own variables here")]
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a test that lacks `what` must fail.
pub(crate) fn is_required(what: &str) -> bool {
    setting("OVERNIGHT_TEST_REQUIRE").unwrap_or_default().split(',').any(|required| required == what)
}

/// The bed for a type, or `None` without a GPU.
pub(crate) fn bed(test: &str, dtype: Dtype) -> Option<Bed> {
    let made = (|| {
        let device = Device::open(0)?;
        let stream = Stream::new(&device)?;
        let cache = Cache(setting("OVERNIGHT_TEST_KERNEL_CACHE").map(Into::into));
        let options = BuildOptions { paths: search_paths(), cache, ..BuildOptions::default() };
        let modules = Modules::build(&device, dtype, &options)?;
        Ok::<_, Error>(Bed { device, stream, modules, dtype })
    })();
    match made {
        Ok(bed) => Some(bed),
        Err(Error::Library { library, what }) if !is_required("gpu") => {
            eprintln!("{test} needs a GPU and is skipped: {library}: {what}");
            None
        }
        Err(Error::Compile { log, kernel, .. }) => panic!("{kernel} does not compile: {log}"),
        Err(error) => panic!("{test}: {error}"),
    }
}

impl Bed {
    /// A buffer with these elements.
    pub(crate) fn upload<T: Element>(&self, elements: &[T]) -> Buffer<T> {
        let buffer = Buffer::new(&self.device, "a test", elements.len()).expect("room for a test");
        self.stream.upload_now(buffer.slice(), elements).expect("uploaded");
        buffer
    }

    /// Numbers as the bed's 16-bit type.
    pub(crate) fn upload_half(&self, numbers: &[f32]) -> Buffer<u16> {
        self.upload(&numbers.iter().map(|&number| self.to_bits(number)).collect::<Vec<_>>())
    }

    /// A number rounded to the bed's type, as bits.
    pub(crate) fn to_bits(&self, number: f32) -> u16 {
        match self.dtype {
            Dtype::Bf16 => half::bf16::from_f32(number).to_bits(),
            Dtype::F16 => half::f16::from_f32(number).to_bits(),
        }
    }

    /// The number that bits of the bed's type stand for.
    pub(crate) fn to_number(&self, bits: u16) -> f32 {
        match self.dtype {
            Dtype::Bf16 => half::bf16::from_bits(bits).to_f32(),
            Dtype::F16 => half::f16::from_bits(bits).to_f32(),
        }
    }

    /// An output full of NaN with a guard on either side.
    pub(crate) fn poisoned<T: Element>(&self, len: usize) -> Guarded<T> {
        let buffer = Buffer::new(&self.device, "a test", len + 2 * GUARD).expect("room for a test");
        self.stream.fill_bytes(buffer.slice(), 0xff).expect("filled");
        Guarded { buffer, len }
    }

    /// The elements of an output, after checking that nothing was written beside it.
    #[track_caller]
    pub(crate) fn download<T: Element + PartialEq>(&self, output: &Guarded<T>) -> Vec<T> {
        let all = self.stream.download_now(output.buffer.slice()).expect("downloaded");
        for (index, element) in all.iter().enumerate() {
            let is_guard = index < GUARD || index >= GUARD + output.len;
            // SAFETY: an `Element` has no padding, so all of its bytes can be looked at.
            let bytes = unsafe { std::slice::from_raw_parts((element as *const T).cast::<u8>(), size_of::<T>()) };
            assert!(!is_guard || bytes.iter().all(|&byte| byte == 0xff), "guard element {index} was written");
        }
        all[GUARD..GUARD + output.len].to_vec()
    }

    /// The numbers of a 16-bit output, guards checked.
    #[track_caller]
    pub(crate) fn download_half(&self, output: &Guarded<u16>) -> Vec<f32> {
        self.download(output).into_iter().map(|bits| self.to_number(bits)).collect()
    }
}

/// An output with guards around it.
pub(crate) struct Guarded<T: Element> {
    buffer: Buffer<T>,
    len: usize,
}

impl<T: Element> Guarded<T> {
    /// The output alone.
    pub(crate) fn slice(&self) -> DeviceSlice<T> {
        self.buffer.slice().slice(GUARD, self.len)
    }
}
