//! Matrix products through cuBLASLt: y[m, n] = sum over k of x[m, k] * w[n, k], plus beta * y.
//!
//! shapes: x `[M, K]`, w `[N, K]`, y `[M, N]`, row-major, 16 bits; sums in f32.
//! Owns one descriptor, one layout set and one algorithm per (bucket of M, N, K, beta), and a
//! fixed workspace. Invariant: a product whose algorithm is known allocates nothing and asks
//! no heuristic, so that it can be recorded in a graph.
//! [`tune`] times candidates on this card; [`store`] keeps the winners on disk.

pub mod store;
mod sys;
pub mod tune;

use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::cublaslt::sys as lt;

use crate::compile::Dtype;
use crate::library::SearchPaths;
use crate::memory::DeviceSlice;
use crate::{Device, Error, Stream};
use sys::{Functions, Layout, Operation};

/// Bytes of the workspace of a stream.
pub const WORKSPACE_BYTES: u64 = 64 << 20;

/// Sizes of a product. `accumulates`: y is added to, else overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Shape {
    /// Rows of x and y.
    pub m: u32,
    /// Rows of w.
    pub n: u32,
    /// Columns of x and w.
    pub k: u32,
    /// Beta is 1 instead of 0.
    pub accumulates: bool,
}

/// The size of M that decides the algorithm: M rounded up to a multiple of 8 to 256, then to
/// a multiple of 64 to 1,024, then to a power of two. Exact sizes 1, 2 and 4 stand alone.
pub fn bucket(m: u32) -> u32 {
    match m {
        0 | 1 => 1,
        2 => 2,
        3 | 4 => 4,
        5..=256 => m.next_multiple_of(8),
        257..=1024 => m.next_multiple_of(64),
        _ => m.checked_next_power_of_two().unwrap_or(1 << 31),
    }
}

/// Version and file of the library that would be opened. Errors with `Library`.
pub fn find(paths: &SearchPaths) -> Result<(u64, std::path::PathBuf), Error> {
    let functions = Functions::open(paths)?;
    Ok((functions.version(), functions.path().to_owned()))
}

/// An algorithm of cuBLASLt as it may be stored; valid for one version of the library only.
pub type Algorithm = [u64; 8];

/// The library with a handle, for one type on one device.
#[derive(Debug)]
pub struct Gemm {
    functions: Functions,
    handle: lt::cublasLtHandle_t,
    dtype: Dtype,
    operation: Operation,
    workspace: DeviceSlice<u8>,
    layouts: HashMap<Shape, Layouts>,
    algorithms: HashMap<Shape, Algorithm>,
    device: Device,
}

// SAFETY: the handle and descriptors are used through `&mut self` or on one thread at a time.
unsafe impl Send for Gemm {}

#[derive(Debug)]
struct Layouts {
    w: Layout,
    x: Layout,
    y: Layout,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

impl Gemm {
    /// Opens cuBLASLt. `workspace` has [`WORKSPACE_BYTES`]. Errors with `Library`.
    pub fn open(device: &Device, dtype: Dtype, workspace: DeviceSlice<u8>, paths: &SearchPaths) -> Result<Self, Error> {
        device.bind()?;
        let functions = Functions::open(paths)?;
        let handle = functions.create()?;
        let operation = functions.operation()?;
        Ok(Self {
            functions,
            handle,
            dtype,
            operation,
            workspace,
            layouts: HashMap::new(),
            algorithms: HashMap::new(),
            device: device.clone(),
        })
    }

    /// Version of the library, for example `130100`.
    pub fn version(&self) -> u64 {
        self.functions.version()
    }

    /// The file that was opened.
    pub fn path(&self) -> &std::path::Path {
        self.functions.path()
    }

    /// Takes algorithms that were timed before, by [`Shape`] with `m` a bucket.
    pub fn set_algorithms(&mut self, algorithms: impl IntoIterator<Item = (Shape, Algorithm)>) {
        self.algorithms.extend(algorithms);
        self.layouts.clear();
    }

    /// The algorithms known, by bucket.
    pub fn algorithms(&self) -> impl Iterator<Item = (Shape, Algorithm)> + '_ {
        self.algorithms.iter().map(|(&shape, &algorithm)| (shape, algorithm))
    }

    /// Computes the product. Zero rows do nothing. Errors with `Shape` when a slice is too
    /// short, with `Launch` when the library refuses.
    pub fn run(
        &mut self,
        stream: &Stream,
        y: DeviceSlice<u16>,
        x: DeviceSlice<u16>,
        w: DeviceSlice<u16>,
        shape: Shape,
    ) -> Result<(), Error> {
        if shape.m == 0 {
            return Ok(());
        }
        check(y, x, w, shape)?;
        self.prepare(shape)?;
        let layouts = &self.layouts[&shape];
        self.launch(stream, y, x, w, shape, layouts, &layouts.algorithm)
    }

    /// Makes layouts and finds the algorithm of a shape, so that `run` only launches.
    pub fn prepare(&mut self, shape: Shape) -> Result<(), Error> {
        if self.layouts.contains_key(&shape) {
            return Ok(());
        }
        let [w, x, y] = self.make_layouts(shape)?;
        let known = self.algorithms.get(&Shape { m: bucket(shape.m), ..shape }).copied();
        // An algorithm of the bucket may not take this very size; the library says so.
        let known = known.map(|data| lt::cublasLtMatmulAlgo_t { data });
        let usable = known.filter(|algorithm| {
            let found = self.functions.check(self.handle, &self.operation, [&w, &x, &y], algorithm);
            found.is_some_and(|bytes| bytes <= self.workspace.len())
        });
        let algorithm = match usable {
            Some(algorithm) => algorithm,
            None => self.heuristics(shape, [&w, &x, &y], 1)?[0],
        };
        self.layouts.insert(shape, Layouts { w, x, y, algorithm });
        Ok(())
    }

    fn make_layouts(&self, shape: Shape) -> Result<[Layout; 3], Error> {
        let Shape { m, n, k, .. } = shape;
        let ty = match self.dtype {
            Dtype::Bf16 => lt::cudaDataType_t::CUDA_R_16BF,
            Dtype::F16 => lt::cudaDataType_t::CUDA_R_16F,
        };
        // cuBLASLt counts columns first: our row-major [N, K] is its [K, N].
        let layout = |rows: u32, cols: u32| self.functions.layout(ty, rows, cols);
        Ok([layout(k, n)?, layout(k, m)?, layout(n, m)?])
    }

    fn heuristics(
        &self,
        shape: Shape,
        layouts: [&Layout; 3],
        num: usize,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, Error> {
        let found = self.functions.heuristics(self.handle, &self.operation, layouts, self.workspace.len(), num)?;
        if found.is_empty() {
            let status = "no algorithm fits".to_owned();
            return Err(Error::Launch { kernel: "gemm".to_owned(), dims: format!("{shape:?}"), status });
        }
        Ok(found)
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of one product")]
    fn launch(
        &self,
        stream: &Stream,
        y: DeviceSlice<u16>,
        x: DeviceSlice<u16>,
        w: DeviceSlice<u16>,
        shape: Shape,
        layouts: &Layouts,
        algorithm: &lt::cublasLtMatmulAlgo_t,
    ) -> Result<(), Error> {
        let (one, zero) = (1.0f32, 0.0f32);
        let beta = if shape.accumulates { &one } else { &zero };
        let pointer = |slice: DeviceSlice<u16>| slice.address() as *const c_void;
        // SAFETY: descriptors and handle are alive; the slices hold what the layouts describe
        // (`check`), and the workspace is as long as the heuristic was told.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                self.operation.raw(),
                (&raw const one).cast(),
                pointer(w),
                layouts.w.raw(),
                pointer(x),
                layouts.x.raw(),
                std::ptr::from_ref(beta).cast(),
                pointer(y),
                layouts.y.raw(),
                pointer(y).cast_mut(),
                layouts.y.raw(),
                algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.len(),
                stream.raw().cast(),
            )
        };
        match status {
            lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
            status => Err(Error::Launch {
                kernel: "gemm".to_owned(),
                dims: format!("{shape:?}"),
                status: self.functions.status_text(status),
            }),
        }
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            self.layouts.clear();
            self.functions.destroy(self.handle);
        }
    }
}

/// The slices hold what the shape says, aligned for vector loads.
fn check(y: DeviceSlice<u16>, x: DeviceSlice<u16>, w: DeviceSlice<u16>, shape: Shape) -> Result<(), Error> {
    let [m, n, k] = [shape.m, shape.n, shape.k].map(|size| size as usize);
    if !k.is_multiple_of(8) || !n.is_multiple_of(8) {
        return Err(Error::shape("gemm", format!("N = {n} and K = {k} must be multiples of 8")));
    }
    y.expect_len("gemm", "y", m * n)?;
    x.expect_len("gemm", "x", m * k)?;
    w.expect_len("gemm", "w", n * k)
}

#[cfg(test)]
mod tests;
