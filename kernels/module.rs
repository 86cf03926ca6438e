//! Loaded kernels: modules of machine code and the functions in them.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use crate::cache::{self, Cache, CompileCounts};
use crate::compile::{Compiler, Dtype, Program, SourceFolder};
use crate::driver::check;
use crate::library::SearchPaths;
use crate::sources::{SOURCES, Source};
use crate::{Device, Error};

/// All families, compiled for a device and a type, and loaded.
#[derive(Debug)]
pub struct Modules {
    modules: Vec<(&'static str, Arc<Module>)>,
    counts: CompileCounts,
}

/// How kernels are built.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BuildOptions {
    /// Where NVRTC and cuBLASLt lie.
    pub paths: SearchPaths,
    /// Sources to read instead of the embedded ones (`OVERNIGHT_KERNEL_DIR`).
    pub sources: SourceFolder,
    /// Where compiled kernels are kept.
    pub cache: Cache,
    /// Threads that compile; 0: the cores at hand.
    pub num_threads: usize,
}

impl Modules {
    /// Compiles (or takes from the cache) and loads every family. Errors with `Library`,
    /// `Compile` or `Driver`.
    pub fn build(device: &Device, dtype: Dtype, options: &BuildOptions) -> Result<Self, Error> {
        let arch = device.arch();
        if dtype == Dtype::Bf16 && !arch.has_bf16() {
            let what = format!(
                "{} ({}) does not compute with bfloat16: use --dtype float16",
                device.properties().name,
                arch.name()
            );
            return Err(Error::Library { library: "the CUDA device", what });
        }
        let compiler = Compiler::open(&options.paths)?;
        let programs: Vec<Program> = SOURCES.iter().map(|&source| Program { source, dtype }).collect();
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if options.num_threads == 0 { cores() } else { options.num_threads };
        let (cubins, counts) = cache::build(&programs, arch, &compiler, &options.sources, &options.cache, threads)?;
        let modules = programs
            .iter()
            .zip(cubins)
            .map(|(program, cubin)| Ok((program.source.name, Arc::new(Module::load(device, program.source, &cubin)?))))
            .collect::<Result<_, Error>>()?;
        Ok(Self { modules, counts })
    }

    /// How many were compiled, and how many found.
    pub fn counts(&self) -> CompileCounts {
        self.counts
    }

    /// An entry point of a family. Errors with `Driver` when it is not there.
    pub fn function(&self, family: &'static str, entry: &'static str) -> Result<Function, Error> {
        let module = self.modules.iter().find(|(name, _)| *name == family).map(|(_, module)| module);
        let Some(module) = module else {
            let status = "no such family is embedded".to_owned();
            return Err(Error::Driver { what: format!("find kernel family {family}"), status, is_sticky: false });
        };
        module.function(entry)
    }
}

/// Machine code on a device.
#[derive(Debug)]
struct Module {
    raw: sys::CUmodule,
    device: Device,
    name: &'static str,
}

// SAFETY: modules and functions may be used from any thread that has the context bound.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    fn load(device: &Device, source: &'static Source, cubin: &[u8]) -> Result<Self, Error> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin of NVRTC (its checksum was compared), which the
        // driver copies; it refuses one of another architecture.
        let status = unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) };
        check(status, || format!("load the kernels of {}", source.name))?;
        Ok(Self { raw, device: device.clone(), name: source.name })
    }

    fn function(self: &Arc<Self>, entry: &'static str) -> Result<Function, Error> {
        let name = CString::new(entry).expect("entry points are identifiers");
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is alive; the name ends with zero.
        let status = unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()) };
        check(status, || format!("find kernel {entry} in {}", self.name))?;
        Ok(Function { raw, name: entry, module: self.clone(), shared_bytes_max: 48 << 10 })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: loaded once; unloaded once, after every function that holds it is gone.
            let _ = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// An entry point.
#[derive(Debug, Clone)]
pub struct Function {
    raw: sys::CUfunction,
    name: &'static str,
    module: Arc<Module>,
    shared_bytes_max: u32,
}

// SAFETY: see `Module`.
unsafe impl Send for Function {}
// SAFETY: see `Module`.
unsafe impl Sync for Function {}

impl Function {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Whether its device starts a kernel before the one ahead of it has ended.
    pub(crate) fn can_overlap(&self) -> bool {
        self.module.device.arch().number >= 90
    }

    /// Dynamic shared memory that a launch may ask for.
    pub fn shared_bytes_max(&self) -> u32 {
        self.shared_bytes_max
    }

    /// Allows up to `bytes` of dynamic shared memory; above 48 KiB a kernel must be told once.
    pub fn allow_shared(&mut self, bytes: u32) -> Result<(), Error> {
        let max = self.module.device.properties().shared_bytes_max;
        if bytes > max {
            return Err(Error::shape(self.name, format!("{bytes} bytes of shared memory asked; the GPU has {max}")));
        }
        if bytes > self.shared_bytes_max {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is alive.
            let status = unsafe { sys::cuFuncSetAttribute(self.raw, attribute, bytes as i32) };
            check(status, || format!("allow {bytes} bytes of shared memory to {}", self.name))?;
            self.shared_bytes_max = bytes;
        }
        Ok(())
    }

    /// CTAs of `num_threads` with so much dynamic shared memory that fit an SM at once.
    pub fn ctas_per_sm(&self, num_threads: u32, shared_bytes: u32) -> Result<u32, Error> {
        let mut num = 0;
        // SAFETY: the function is alive; one integer is written.
        let status = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut num,
                self.raw,
                num_threads as i32,
                shared_bytes as usize,
            )
        };
        check(status, || format!("ask for the occupancy of {}", self.name))?;
        Ok(num.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bed;

    #[test]
    fn an_unknown_kernel_is_refused_by_its_name() {
        let Some(bed) = bed("an_unknown_kernel_is_refused_by_its_name", Dtype::F16) else { return };
        let error = bed.modules.function("nowhere", "nothing").expect_err("not there").to_string();
        assert!(error.contains("nowhere"), "{error}");
    }
}
