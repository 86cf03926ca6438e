//! NVRTC: from our sources to machine code of one architecture.
//!
//! Compiles to a cubin, never to PTX, and with our own headers only: a start needs no toolkit,
//! and a driver older than the compiler still loads the result.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use libloading::Library;

use crate::Error;
use crate::library::{CUDA_MAJOR, NVRTC, SearchPaths};
use crate::sources::Source;

/// Options of every program, beside architecture and type. No fast math: a kernel that wants a
/// fast intrinsic calls it by name.
pub const OPTIONS: &[&str] = &["--std=c++17", "--device-as-default-execution-space", "-default-device"];

/// The 16-bit type that a program is compiled for: `T` in its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Dtype {
    /// bfloat16; needs compute capability 8.0.
    Bf16,
    /// IEEE half.
    F16,
}

impl Dtype {
    /// As `--dtype` names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    fn define(self) -> &'static str {
        match self {
            Self::Bf16 => "-DOVERNIGHT_T=0",
            Self::F16 => "-DOVERNIGHT_T=1",
        }
    }
}

/// A real architecture, for example 9.0 with its own instructions (`sm_90a`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arch {
    /// Major times ten plus minor.
    pub number: u32,
    /// With instructions that no later one has.
    pub is_specific: bool,
}

impl Arch {
    /// What the test suite compiles for.
    pub const TESTED: [Self; 6] = [
        Self { number: 75, is_specific: false },
        Self { number: 80, is_specific: false },
        Self { number: 86, is_specific: false },
        Self { number: 89, is_specific: false },
        Self { number: 90, is_specific: true },
        Self { number: 120, is_specific: false },
    ];

    /// Of a compute capability.
    pub fn of((major, minor): (u32, u32)) -> Self {
        let number = major * 10 + minor;
        Self { number, is_specific: number == 90 }
    }

    /// For example `sm_90a`.
    pub fn name(self) -> String {
        format!("sm_{}{}", self.number, if self.is_specific { "a" } else { "" })
    }

    /// Whether it computes with bf16.
    pub fn has_bf16(self) -> bool {
        self.number >= 80
    }
}

/// A source with the type to compile it for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program {
    /// The source.
    pub source: &'static Source,
    /// Its `T`.
    pub dtype: Dtype,
}

impl Program {
    /// For messages and file names: `rms_norm_bfloat16`.
    pub fn name(&self) -> String {
        format!("{}_{}", self.source.name, self.dtype.name())
    }

    /// The options, in order.
    pub fn options(&self, arch: Arch) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={}", arch.name()), self.dtype.define().to_owned()];
        options.extend(OPTIONS.iter().map(|&option| option.to_owned()));
        options
    }
}

/// Text of a program and its headers, as they are compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    /// The `.cu`.
    pub source: String,
    /// Name as included, and text.
    pub headers: Vec<(String, String)>,
}

/// Where sources come from: the binary, or a folder while developing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceFolder(pub Option<PathBuf>);

impl SourceFolder {
    /// The texts of a program. Errors with `Compile` when the folder lacks one.
    pub fn texts(&self, source: &Source) -> Result<Texts, Error> {
        let read = |path: PathBuf| {
            std::fs::read_to_string(&path).map_err(|error| Error::Compile {
                kernel: source.name.to_owned(),
                arch: "any".to_owned(),
                what: format!("could not read {}: {error}", path.display()),
                log: String::new(),
            })
        };
        match &self.0 {
            None => Ok(Texts {
                source: source.text.to_owned(),
                headers: crate::sources::HEADERS
                    .iter()
                    .map(|&(name, text)| (name.to_owned(), text.to_owned()))
                    .collect(),
            }),
            Some(folder) => Ok(Texts {
                source: read(folder.join(source.path))?,
                headers: crate::sources::HEADERS
                    .iter()
                    .map(|&(name, _)| Ok((name.to_owned(), read(folder.join("include").join(name))?)))
                    .collect::<Result<_, Error>>()?,
            }),
        }
    }
}

/// The functions of NVRTC that are used.
#[derive(Debug, Clone, Copy)]
struct Functions {
    create: unsafe extern "C" fn(
        *mut nvrtcProgram,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> nvrtcResult,
    destroy: unsafe extern "C" fn(*mut nvrtcProgram) -> nvrtcResult,
    compile: unsafe extern "C" fn(nvrtcProgram, c_int, *const *const c_char) -> nvrtcResult,
    log_size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> nvrtcResult,
    log: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> nvrtcResult,
    cubin_size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> nvrtcResult,
    cubin: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> nvrtcResult,
    error_text: unsafe extern "C" fn(nvrtcResult) -> *const c_char,
}

/// The compiler. Calls from several threads run side by side.
#[derive(Debug)]
pub struct Compiler {
    functions: Functions,
    version: (u32, u32),
    path: PathBuf,
    /// Keeps the functions where they are.
    _library: Library,
}

impl Compiler {
    /// Opens NVRTC. Errors with `Library`.
    pub fn open(paths: &SearchPaths) -> Result<Self, Error> {
        let (library, (functions, version), path) = NVRTC.open(paths, |library| {
            let version = version(library)?;
            if version.0 != CUDA_MAJOR {
                return Err(format!("version {}.{}; {CUDA_MAJOR} is needed", version.0, version.1));
            }
            Ok((functions(library)?, version))
        })?;
        Ok(Self { functions, version, path, _library: library })
    }

    /// Major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The file that was opened.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Compiles to a cubin. Errors with `Compile` and NVRTC's log.
    pub fn compile(&self, program: &Program, texts: &Texts, arch: Arch) -> Result<Vec<u8>, Error> {
        let failed = |what: String, log| Error::Compile { kernel: program.name(), arch: arch.name(), what, log };
        let c =
            |text: &str| CString::new(text).map_err(|_| failed("a source has a zero byte".to_owned(), String::new()));
        let source = c(&texts.source)?;
        let name = c(program.source.path)?;
        let headers = texts.headers.iter().map(|(_, text)| c(text)).collect::<Result<Vec<_>, _>>()?;
        let names = texts.headers.iter().map(|(name, _)| c(name)).collect::<Result<Vec<_>, _>>()?;
        let options = program.options(arch).iter().map(|option| c(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let f = &self.functions;
        let mut raw: nvrtcProgram = std::ptr::null_mut();
        // SAFETY: all texts end with zero and live through the call, which copies them; the
        // counts are those of the arrays.
        let created = unsafe {
            (f.create)(
                &mut raw,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                pointers(&headers).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        if created != nvrtcResult::NVRTC_SUCCESS {
            return Err(failed(self.text(created), String::new()));
        }
        let raw = Raw { raw, functions: f };
        // SAFETY: the program is alive; the options end with zero and their count is right.
        let compiled = unsafe { (f.compile)(raw.raw, options.len() as c_int, pointers(&options).as_ptr()) };
        if compiled != nvrtcResult::NVRTC_SUCCESS {
            return Err(failed(self.text(compiled), raw.log()));
        }
        let mut size = 0;
        // SAFETY: the program is compiled; one integer is written.
        let sized = unsafe { (f.cubin_size)(raw.raw, &mut size) };
        let mut cubin = vec![0u8; size];
        if sized == nvrtcResult::NVRTC_SUCCESS && size > 0 {
            // SAFETY: the buffer has the size that NVRTC asked for.
            let got = unsafe { (f.cubin)(raw.raw, cubin.as_mut_ptr().cast()) };
            if got == nvrtcResult::NVRTC_SUCCESS {
                return Ok(cubin);
            }
        }
        Err(failed("NVRTC gave no machine code".to_owned(), raw.log()))
    }

    fn text(&self, status: nvrtcResult) -> String {
        // SAFETY: NVRTC gives a static string for every status.
        unsafe { CStr::from_ptr((self.functions.error_text)(status)) }.to_string_lossy().into_owned()
    }
}

/// A program of NVRTC, destroyed when dropped.
struct Raw<'a> {
    raw: nvrtcProgram,
    functions: &'a Functions,
}

impl Raw<'_> {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive; one integer is written.
        if unsafe { (self.functions.log_size)(self.raw, &mut size) } != nvrtcResult::NVRTC_SUCCESS || size == 0 {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC asked for.
        if unsafe { (self.functions.log)(self.raw, log.as_mut_ptr().cast()) } != nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { (self.functions.destroy)(&mut self.raw) };
    }
}

fn version(library: &Library) -> Result<(u32, u32), String> {
    // SAFETY: the signature is that of nvrtc.h.
    let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> nvrtcResult>(b"nvrtcVersion\0") };
    let get = get.map_err(|error| error.to_string())?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers are written.
    match unsafe { get(&mut major, &mut minor) } {
        nvrtcResult::NVRTC_SUCCESS => Ok((major.unsigned_abs(), minor.unsigned_abs())),
        status => Err(format!("nvrtcVersion gives {status:?}")),
    }
}

fn functions(library: &Library) -> Result<Functions, String> {
    macro_rules! get {
        ($name:literal) => {
            // SAFETY: the field's type is the signature of nvrtc.h, and the library stays open
            // as long as the functions are used.
            *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|error| error.to_string())?
        };
    }
    Ok(Functions {
        create: get!("nvrtcCreateProgram"),
        destroy: get!("nvrtcDestroyProgram"),
        compile: get!("nvrtcCompileProgram"),
        log_size: get!("nvrtcGetProgramLogSize"),
        log: get!("nvrtcGetProgramLog"),
        cubin_size: get!("nvrtcGetCUBINSize"),
        cubin: get!("nvrtcGetCUBIN"),
        error_text: get!("nvrtcGetErrorString"),
    })
}

#[cfg(test)]
mod tests;
