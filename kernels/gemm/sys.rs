//! The few functions of cuBLASLt that are used, opened by path, with owned descriptors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::cublaslt::sys as lt;
use libloading::Library;
use lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS;

use crate::Error;
use crate::library::{CUBLASLT, CUDA_MAJOR, SearchPaths};

type Status = lt::cublasStatus_t;
type SetAttribute<D, A> = unsafe extern "C" fn(D, A, *const c_void, usize) -> Status;

/// Opened functions; signatures are those of cublasLt.h.
#[derive(Clone)]
pub(super) struct Functions {
    create: unsafe extern "C" fn(*mut lt::cublasLtHandle_t) -> Status,
    destroy: unsafe extern "C" fn(lt::cublasLtHandle_t) -> Status,
    pub(super) matmul: unsafe extern "C" fn(
        lt::cublasLtHandle_t,
        lt::cublasLtMatmulDesc_t,
        *const c_void,
        *const c_void,
        lt::cublasLtMatrixLayout_t,
        *const c_void,
        lt::cublasLtMatrixLayout_t,
        *const c_void,
        *const c_void,
        lt::cublasLtMatrixLayout_t,
        *mut c_void,
        lt::cublasLtMatrixLayout_t,
        *const lt::cublasLtMatmulAlgo_t,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> Status,
    heuristic: unsafe extern "C" fn(
        lt::cublasLtHandle_t,
        lt::cublasLtMatmulDesc_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatmulPreference_t,
        c_int,
        *mut lt::cublasLtMatmulHeuristicResult_t,
        *mut c_int,
    ) -> Status,
    check: unsafe extern "C" fn(
        lt::cublasLtHandle_t,
        lt::cublasLtMatmulDesc_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        lt::cublasLtMatrixLayout_t,
        *const lt::cublasLtMatmulAlgo_t,
        *mut lt::cublasLtMatmulHeuristicResult_t,
    ) -> Status,
    operation_create:
        unsafe extern "C" fn(*mut lt::cublasLtMatmulDesc_t, lt::cublasComputeType_t, lt::cudaDataType_t) -> Status,
    operation_destroy: unsafe extern "C" fn(lt::cublasLtMatmulDesc_t) -> Status,
    operation_set: SetAttribute<lt::cublasLtMatmulDesc_t, lt::cublasLtMatmulDescAttributes_t>,
    layout_create: unsafe extern "C" fn(*mut lt::cublasLtMatrixLayout_t, lt::cudaDataType_t, u64, u64, i64) -> Status,
    layout_destroy: unsafe extern "C" fn(lt::cublasLtMatrixLayout_t) -> Status,
    preference_create: unsafe extern "C" fn(*mut lt::cublasLtMatmulPreference_t) -> Status,
    preference_destroy: unsafe extern "C" fn(lt::cublasLtMatmulPreference_t) -> Status,
    preference_set: SetAttribute<lt::cublasLtMatmulPreference_t, lt::cublasLtMatmulPreferenceAttributes_t>,
    status_text: unsafe extern "C" fn(Status) -> *const c_char,
    version: u64,
    path: PathBuf,
    /// Keeps the functions where they are.
    library: Arc<Library>,
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Functions").field("path", &self.path).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Functions {
    pub(super) fn open(paths: &SearchPaths) -> Result<Self, Error> {
        let (library, version, path) = CUBLASLT.open(paths, |library| {
            let version = version(library)?;
            // From 13.0 on 130000; before, for example 120805.
            match version / 10_000 == u64::from(CUDA_MAJOR) {
                true => Ok(version),
                false => Err(format!("version {version}; {CUDA_MAJOR}xxxx is needed")),
            }
        })?;
        let library = Arc::new(library);
        let failed = |what: String| Error::Library { library: CUBLASLT.file, what };
        Self::get(&library, version, path).map_err(failed)
    }

    fn get(library: &Arc<Library>, version: u64, path: PathBuf) -> Result<Self, String> {
        macro_rules! get {
            ($name:literal) => {
                // SAFETY: the field's type is the signature of cublasLt.h, and the library stays
                // open as long as the functions.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|error| error.to_string())?
            };
        }
        Ok(Self {
            create: get!("cublasLtCreate"),
            destroy: get!("cublasLtDestroy"),
            matmul: get!("cublasLtMatmul"),
            heuristic: get!("cublasLtMatmulAlgoGetHeuristic"),
            check: get!("cublasLtMatmulAlgoCheck"),
            operation_create: get!("cublasLtMatmulDescCreate"),
            operation_destroy: get!("cublasLtMatmulDescDestroy"),
            operation_set: get!("cublasLtMatmulDescSetAttribute"),
            layout_create: get!("cublasLtMatrixLayoutCreate"),
            layout_destroy: get!("cublasLtMatrixLayoutDestroy"),
            preference_create: get!("cublasLtMatmulPreferenceCreate"),
            preference_destroy: get!("cublasLtMatmulPreferenceDestroy"),
            preference_set: get!("cublasLtMatmulPreferenceSetAttribute"),
            status_text: get!("cublasLtGetStatusString"),
            version,
            path,
            library: library.clone(),
        })
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn path(&self) -> &std::path::Path {
        &self.path
    }

    pub(super) fn status_text(&self, status: Status) -> String {
        // SAFETY: the library gives a static string for every status.
        unsafe { CStr::from_ptr((self.status_text)(status)) }.to_string_lossy().into_owned()
    }

    fn expect(&self, status: Status, what: &str) -> Result<(), Error> {
        if status == CUBLAS_STATUS_SUCCESS {
            return Ok(());
        }
        let status = self.status_text(status);
        Err(Error::Driver { what: format!("{what} with cuBLASLt"), status, is_sticky: false })
    }

    pub(super) fn create(&self) -> Result<lt::cublasLtHandle_t, Error> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current (the caller bound it); one handle is written.
        self.expect(unsafe { (self.create)(&mut handle) }, "make a handle")?;
        Ok(handle)
    }

    pub(super) fn destroy(&self, handle: lt::cublasLtHandle_t) {
        // SAFETY: made by `create`, destroyed once. A failure at the end has nobody to tell.
        let _ = unsafe { (self.destroy)(handle) };
    }

    /// A product with sums in f32 whose first operand is read transposed.
    pub(super) fn operation(&self) -> Result<Operation, Error> {
        let mut raw = std::ptr::null_mut();
        let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: one descriptor is written.
        let made = unsafe { (self.operation_create)(&mut raw, compute, lt::cudaDataType_t::CUDA_R_32F) };
        self.expect(made, "describe a product")?;
        let operation = Operation { raw, destroy: self.operation_destroy, _library: self.library.clone() };
        // CUBLAS_OP_T of cublas_api.h.
        let transposed: i32 = 1;
        let attribute = lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let value = (&raw const transposed).cast();
        // SAFETY: the attribute takes a value of this type and size.
        let set = unsafe { (self.operation_set)(raw, attribute, value, size_of_val(&transposed)) };
        self.expect(set, "describe a product")?;
        Ok(operation)
    }

    /// Column-major `[rows, cols]` without gaps.
    pub(super) fn layout(&self, ty: lt::cudaDataType_t, rows: u32, cols: u32) -> Result<Layout, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: one descriptor is written.
        let made = unsafe { (self.layout_create)(&mut raw, ty, rows.into(), cols.into(), rows.into()) };
        self.expect(made, "describe a matrix")?;
        Ok(Layout { raw, destroy: self.layout_destroy, _library: self.library.clone() })
    }

    /// The workspace bytes that an algorithm needs for these layouts; `None`: it cannot take them.
    pub(super) fn check(
        &self,
        handle: lt::cublasLtHandle_t,
        operation: &Operation,
        [w, x, y]: [&Layout; 3],
        algorithm: &lt::cublasLtMatmulAlgo_t,
    ) -> Option<usize> {
        let mut result = empty_result();
        // SAFETY: handle and descriptors are alive; one result is written.
        let status = unsafe { (self.check)(handle, operation.raw, w.raw, x.raw, y.raw, y.raw, algorithm, &mut result) };
        (status == CUBLAS_STATUS_SUCCESS).then_some(result.workspaceSize)
    }

    /// Up to `num` algorithms, the library's favourite first.
    pub(super) fn heuristics(
        &self,
        handle: lt::cublasLtHandle_t,
        operation: &Operation,
        [w, x, y]: [&Layout; 3],
        workspace_bytes: usize,
        num: usize,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: one descriptor is written, destroyed when `preference` drops.
        self.expect(unsafe { (self.preference_create)(&mut raw) }, "ask for algorithms")?;
        let preference = Preference { raw, destroy: self.preference_destroy };
        use lt::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as WORKSPACE, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK as SPLIT,
        };
        // Partial sums of a split inner dimension are added in f32: the other schemes round each
        // of them to the type of the result.
        let in_f32 = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let workspace = (WORKSPACE, (&raw const workspace_bytes).cast(), size_of::<usize>());
        let splits = (SPLIT, (&raw const in_f32).cast(), size_of::<u32>());
        for (attribute, value, len) in [workspace, splits] {
            // SAFETY: the one takes a size_t, the other a uint32_t.
            let set = unsafe { (self.preference_set)(preference.raw, attribute, value, len) };
            self.expect(set, "ask for algorithms")?;
        }
        let mut results = vec![empty_result(); num];
        let mut found = 0;
        // SAFETY: handle and descriptors are alive; at most `num` results are written.
        let status = unsafe {
            (self.heuristic)(
                handle,
                operation.raw,
                w.raw,
                x.raw,
                y.raw,
                y.raw,
                preference.raw,
                num as c_int,
                results.as_mut_ptr(),
                &mut found,
            )
        };
        if status == lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        self.expect(status, "ask for algorithms")?;
        results.truncate(found.unsigned_abs() as usize);
        Ok(results.iter().filter(|result| result.state == CUBLAS_STATUS_SUCCESS).map(|result| result.algo).collect())
    }
}

fn empty_result() -> lt::cublasLtMatmulHeuristicResult_t {
    lt::cublasLtMatmulHeuristicResult_t {
        algo: lt::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspaceSize: 0,
        state: CUBLAS_STATUS_SUCCESS,
        wavesCount: 0.0,
        reserved: [0; 4],
    }
}

fn version(library: &Library) -> Result<u64, String> {
    // SAFETY: the signature is that of cublasLt.h.
    let get = unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0") };
    // SAFETY: takes nothing, reads a constant.
    get.map(|get| unsafe { get() } as u64).map_err(|error| error.to_string())
}

macro_rules! descriptor {
    ($(#[$doc:meta])* $name:ident, $raw:ty) => {
        $(#[$doc])*
        pub(super) struct $name {
            raw: $raw,
            destroy: unsafe extern "C" fn($raw) -> Status,
            _library: Arc<Library>,
        }

        impl $name {
            pub(super) fn raw(&self) -> $raw {
                self.raw
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made once, destroyed once, while the library is open.
                let _ = unsafe { (self.destroy)(self.raw) };
            }
        }
    };
}

descriptor!(
    /// What is computed.
    Operation, lt::cublasLtMatmulDesc_t
);
descriptor!(
    /// A matrix in memory.
    Layout, lt::cublasLtMatrixLayout_t
);

struct Preference {
    raw: lt::cublasLtMatmulPreference_t,
    destroy: unsafe extern "C" fn(lt::cublasLtMatmulPreference_t) -> Status,
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}
