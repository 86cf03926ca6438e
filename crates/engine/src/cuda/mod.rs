//! The CUDA back end: dense decoders over a paged KV cache on one GPU.
//!
//! Owns all device memory (one arena), the kernels, the decode graphs and the stream. Samples
//! on the device, so that a step brings back tokens and no logits.
//! Invariants: a row's result does not depend on the rows beside it beyond what another size
//! of a matrix product rounds; nothing is allocated on the device after the start.
//! Knows nothing of files (see `load`), requests or the scheduler.
//! `start` builds a model in stages; `layers` is the step, top down; `graphs` replays it.

mod buffers;
mod graphs;
mod kernels;
mod layers;
mod memory;
mod packing;
mod sampling;
mod settings;
mod start;
#[cfg(test)]
mod tests;
mod weights;

use overnight_kernels::gemm::Gemm;
use overnight_kernels::paged::PagedCache;
use overnight_kernels::{Arena, Device, Error as DeviceError, Stream};

pub use overnight_kernels::cache::Cache as KernelCache;
pub use overnight_kernels::compile::SourceFolder;
pub use overnight_kernels::device::Properties as DeviceProperties;
pub use overnight_kernels::library::SearchPaths;
pub use overnight_kernels::module::BuildOptions;

use crate::Error;
use crate::model::config::ModelConfig;
use crate::model::{DeviceDefaults, Forward, ModelShape, SampleSpec, StepInput, StepResults};
use crate::sampler::Sampler;
use buffers::Buffers;
use graphs::Graphs;
use kernels::Kernels;
use memory::Purpose;
use packing::Packing;
use sampling::Sampling;
use weights::Weights;

/// What a GPU needs to be known from outside of the engine's settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Which GPU, counted from 0.
    pub ordinal: u32,
    /// Where libraries lie and compiled kernels are kept.
    pub build: BuildOptions,
}

/// Opens the GPU. Errors with [`Error::Device`] and what is missing, and with [`Error::Busy`] when
/// others leave no memory to open it with.
pub fn open(options: &DeviceOptions) -> Result<Device, Error> {
    Device::open(options.ordinal).map_err(|source| match source {
        DeviceError::OutOfMemory { .. } => Error::Busy(
            "not even a context fits beside what other programs hold: end them (`nvidia-smi` lists them), or compute \
             on the CPU with --device cpu"
                .to_owned(),
        ),
        source => Error::Device { stage: "could not open the GPU".to_owned(), source },
    })
}

/// Whether the machine shows an NVIDIA GPU, usable or not.
pub fn is_there() -> bool {
    // The driver's kernel module makes it, whatever its libraries are.
    std::path::Path::new("/dev/nvidiactl").exists()
}

/// What the GPU side of this machine consists of; each part, or why it cannot be used.
#[derive(Debug)]
pub struct Parts {
    /// The card and its driver.
    pub device: Result<DeviceProperties, overnight_kernels::Error>,
    /// Version and file of the kernel compiler.
    pub nvrtc: Result<(String, std::path::PathBuf), overnight_kernels::Error>,
    /// Version and file of the library of matrix products.
    pub cublaslt: Result<(String, std::path::PathBuf), overnight_kernels::Error>,
}

/// Looks for the parts without starting anything on them.
pub fn find_parts(options: &DeviceOptions) -> Parts {
    let paths = &options.build.paths;
    Parts {
        device: Device::open(options.ordinal).map(|device| device.properties().clone()),
        nvrtc: overnight_kernels::compile::Compiler::open(paths).map(|compiler| {
            let (major, minor) = compiler.version();
            (format!("{major}.{minor}"), compiler.path().to_owned())
        }),
        cublaslt: overnight_kernels::gemm::find(paths)
            .map(|(version, path)| (format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100), path)),
    }
}

/// A model on a GPU.
pub struct CudaModel {
    config: ModelConfig,
    shape: ModelShape,
    defaults: DeviceDefaults,
    limits: StepLimits,
    enforce_eager: bool,
    /// In use on the card before the engine took its share.
    others_bytes: u64,
    /// What helps when the KV cache does not fit.
    cache_purpose: Purpose,
    /// What recording the graphs took of the card.
    graphs_bytes: u64,
    // Graphs go before the memory and the modules that they name.
    graphs: Graphs,
    weights: Weights,
    kernels: Kernels,
    gemm: Gemm,
    buffers: Buffers,
    cache: Option<KvCache>,
    packing: Packing,
    sampling: Sampling,
    logits: Vec<f32>,
    tiles: Vec<[u32; 2]>,
    stream: Stream,
    arena: Arena,
    dtype: overnight_kernels::Dtype,
    /// Where timed products are kept.
    cache_folder: Option<std::path::PathBuf>,
    device: Device,
}

impl std::fmt::Debug for CudaModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaModel").field("shape", &self.shape).field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// Bounds that memory was set aside for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StepLimits {
    num_rows: u32,
    num_tokens: u32,
    block_size: u32,
    /// Blocks of the longest sequence.
    blocks_per_row: u32,
    /// Rows of logits at once.
    logits_rows: u32,
}

/// K and V of every layer.
#[derive(Debug)]
struct KvCache {
    layers: Vec<(overnight_kernels::DeviceSlice<u16>, overnight_kernels::DeviceSlice<u16>)>,
    /// Less the one that padding rows use, which comes last.
    num_blocks: u32,
}

impl KvCache {
    fn layer(&self, layer: usize, block_size: u32) -> PagedCache {
        let (k, v) = self.layers[layer];
        PagedCache { k, v, num_blocks: self.num_blocks + 1, block_size }
    }
}

/// Turns a device failure into the engine's, with what was being done.
fn during(stage: &str) -> impl FnOnce(overnight_kernels::Error) -> Error + '_ {
    move |source| Error::Device { stage: stage.to_owned(), source }
}

impl Forward for CudaModel {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn defaults(&self) -> DeviceDefaults {
        self.defaults
    }

    fn allocate_kv_cache(&mut self, num_blocks: u32, block_size: u32) -> Result<(), Error> {
        self.finish_start(num_blocks, block_size)
    }

    fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error> {
        self.device.bind().map_err(during("could not compute a step"))?;
        let view = self.compute(&step)?;
        let width = self.shape.vocab_size as usize;
        self.logits.clear();
        let num_rows = step.logits_tokens.len() as u32;
        let mut start = 0;
        while start < num_rows {
            let num = (num_rows - start).min(self.limits.logits_rows);
            if !view.has_logits {
                self.head(&view, start, num).map_err(during("could not compute logits"))?;
            }
            let logits = self.buffers.logits.slice(0, num as usize * self.weights.head_rows);
            let bits = self.stream.download_now(logits).map_err(during("could not read logits"))?;
            for row in bits.chunks(self.weights.head_rows) {
                self.logits.extend(row[..width].iter().map(|&bits| self.weights.number(bits)));
            }
            start += num;
        }
        Ok(&self.logits)
    }

    fn run(
        &mut self,
        step: StepInput<'_>,
        specs: &[SampleSpec<'_>],
        vocab_size: u32,
        _: &mut Sampler,
    ) -> Result<StepResults, Error> {
        if specs.len() != step.logits_tokens.len() {
            let what = format!("{} rows of logits and {} choices", step.logits_tokens.len(), specs.len());
            return Err(Error::Step(what));
        }
        self.device.bind().map_err(during("could not compute a step"))?;
        let view = self.compute(&step)?;
        self.sample(&view, specs, vocab_size).map_err(during("could not choose tokens"))
    }

    fn depth(&self) -> usize {
        2
    }

    fn start(
        &mut self,
        step: StepInput<'_>,
        specs: &[SampleSpec<'_>],
        vocab_size: u32,
        sampler: &mut Sampler,
    ) -> Result<Option<StepResults>, Error> {
        // Where tests make a kernel read far beyond its table.
        fail::fail_point!("cuda::fault", |_| {
            let (b, w, stream, hidden) = (&self.buffers, &self.weights, &self.stream, self.config.hidden as u32);
            let wild = b.block_tables;
            let gather = &self.kernels.embedding;
            let fault = stream
                .fill_bytes(wild, 0x7f)
                .and_then(|()| gather.gather(stream, b.residual, w.embedding, wild, 1, hidden, 1.0))
                .and_then(|()| stream.synchronize());
            fault.map(|()| None).map_err(during("could not compute a step"))
        });
        // More rows than one chunk of logits are chosen for piece by piece, which waits.
        if specs.len() != step.logits_tokens.len() || !self.is_one_chunk(specs) {
            return self.run(step, specs, vocab_size, sampler).map(Some);
        }
        self.device.bind().map_err(during("could not compute a step"))?;
        let view = self.compute(&step)?;
        self.launch_choices(&view, specs, 0, vocab_size).map_err(during("could not choose tokens"))?;
        Ok(None)
    }

    fn collect(&mut self) -> Result<StepResults, Error> {
        self.device.bind().map_err(during("could not finish a step"))?;
        let results = self.collect_choices().map_err(during("could not finish a step"))?;
        results.ok_or_else(|| Error::Step("no step was started".to_owned()))
    }
}

impl CudaModel {
    /// Where the device memory went, bytes by name: the engine's own regions and what is free of
    /// its share, the decode graphs, what the driver, the kernels' code and other programs hold,
    /// and what is free on the card. All together they are the card's memory.
    pub fn memory_report(&self) -> Result<Vec<(String, u64)>, Error> {
        let (card_free, total) = self.device.memory_bytes().map_err(during("could not ask the GPU for its memory"))?;
        Ok(memory::report(self.arena.ledger(), self.graphs_bytes, card_free, total))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Decode steps launch their kernels one by one from here on, for tests that compare.
    pub fn set_enforce_eager(&mut self, enforce: bool) {
        self.enforce_eager = enforce;
    }
}
