//! The weights on the device: 16 bits each, q, k and v in one matrix, gate and up in one.
//!
//! Tensors are converted in parallel into pinned buffers while the one before is on its way.

use half::{bf16, f16};
use overnight_kernels::memory::Pinned;
use overnight_kernels::{Arena, Device, DeviceSlice, Dtype, Event, Stream};
use rayon::prelude::*;

use crate::Error;
use crate::cpu::packed::Packed;
use crate::cuda::during;
use crate::cuda::kernels::Kernels;
use crate::cuda::memory::{Purpose, out_of_memory};
use crate::load::assemble::{Format, RawTensor, Role, Source, embedding_scale};
use crate::model::config::ModelConfig;

/// Elements of a staging buffer.
const STAGE_LEN: usize = 16 << 20;
/// Staging buffers.
const NUM_STAGES: usize = 3;
/// Elements that a thread converts at a time.
const PIECE_LEN: usize = 1 << 18;

/// Elements of the arena's alignment.
const ALIGNED_LEN: usize = overnight_kernels::memory::ALIGNMENT as usize / 2;

/// A 16-bit tensor on the device.
pub(super) type Half = DeviceSlice<u16>;

/// The weights of a model. Norms are as in the file: `norm_offset` is what they are short of.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Half,
    pub(super) embedding_scale: f32,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: Half,
    /// `[head_rows, hidden]`.
    pub(super) head: Half,
    /// Rows of embedding and head, padded to a multiple of 8.
    pub(super) head_rows: usize,
    pub(super) norm_offset: f32,
    dtype: Dtype,
}

/// One layer.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: Half,
    pub(super) qkv: Half,
    pub(super) o: Half,
    pub(super) qk_norms: Option<(Half, Half)>,
    /// After attention, after feed-forward.
    pub(super) post_norms: Option<(Half, Half)>,
    pub(super) ffn_norm: Half,
    pub(super) gate_up: Half,
    pub(super) down: Half,
}

impl Weights {
    /// The number that bits of the weights' type stand for.
    pub(super) fn number(&self, bits: u16) -> f32 {
        match self.dtype {
            Dtype::Bf16 => bf16::from_bits(bits).to_f32(),
            Dtype::F16 => f16::from_bits(bits).to_f32(),
        }
    }
}

fn bits(dtype: Dtype, number: f32) -> u16 {
    match dtype {
        Dtype::Bf16 => bf16::from_f32(number).to_bits(),
        Dtype::F16 => f16::from_f32(number).to_bits(),
    }
}

/// Bytes that the weights take.
pub(super) fn bytes(config: &ModelConfig, tied: bool) -> u64 {
    // Each region is rounded up to the arena's alignment.
    let len = |role: Role| role.dims(config).iter().product::<usize>().next_multiple_of(ALIGNED_LEN) as u64;
    let has = |role: &&Role| role.is_in(config.architecture);
    let layer: u64 = Role::LAYER.iter().filter(has).map(|&role| len(role)).sum();
    let tables = if tied { 1 } else { 2 } * config.vocab_rows.next_multiple_of(8) as u64 * config.hidden as u64;
    2 * (layer * config.layers.len() as u64 + tables + len(Role::FinalNorm))
}

/// What loads them.
pub(super) struct Loader<'a, 's> {
    pub(super) config: &'a ModelConfig,
    pub(super) arena: &'a mut Arena,
    pub(super) stream: &'a Stream,
    pub(super) kernels: &'a Kernels,
    /// `None`: random ones.
    pub(super) source: Option<&'s mut (dyn Source + 's)>,
    pub(super) dtype: Dtype,
    pub(super) seed: u64,
    stages: Vec<(Pinned<u16>, Event)>,
    next_stage: usize,
    num_filled: u64,
}

impl<'a, 's> Loader<'a, 's> {
    pub(super) fn new(
        device: &Device,
        arena: &'a mut Arena,
        stream: &'a Stream,
        kernels: &'a Kernels,
        config: &'a ModelConfig,
        source: Option<&'s mut (dyn Source + 's)>,
        (dtype, seed): (Dtype, u64),
    ) -> Result<Self, Error> {
        let num_stages = if source.is_some() { NUM_STAGES } else { 0 };
        let stage = || Ok((Pinned::new(device, STAGE_LEN)?, Event::new(device)?));
        let stages =
            (0..num_stages).map(|_| stage()).collect::<Result<Vec<_>, _>>().map_err(during("could not pin memory"))?;
        Ok(Self { config, arena, stream, kernels, source, dtype, seed, stages, next_stage: 0, num_filled: 0 })
    }

    /// Takes all tensors.
    pub(super) fn load(mut self, tied: bool) -> Result<Weights, Error> {
        let config = self.config;
        let head_rows = config.vocab_rows.next_multiple_of(8);
        let norm_offset = self.source.as_ref().map_or(0.0, |source| source.norm_offset());
        let format = match &mut self.source {
            Some(source) => source.take(None, Role::Embedding)?.format,
            None => Format::BF16,
        };
        let embedding = self.table(Role::Embedding, head_rows)?;
        let layers = (0..config.layers.len()).map(|layer| self.layer(layer)).collect::<Result<_, _>>()?;
        let final_norm = self.norm(None, Role::FinalNorm)?;
        let head = if tied { embedding } else { self.table(Role::Head, head_rows)? };
        self.stream.synchronize().map_err(during("could not copy weights to the GPU"))?;
        Ok(Weights {
            embedding,
            embedding_scale: embedding_scale(config, format),
            layers,
            final_norm,
            head,
            head_rows,
            norm_offset,
            dtype: self.dtype,
        })
    }

    fn layer(&mut self, layer: usize) -> Result<LayerWeights, Error> {
        let at = Some(layer);
        Ok(LayerWeights {
            attention_norm: self.norm(at, Role::AttentionNorm)?,
            qkv: self.matrices(at, &[Role::Q, Role::K, Role::V])?,
            o: self.matrices(at, &[Role::O])?,
            qk_norms: self.norms(at, [Role::QNorm, Role::KNorm])?,
            post_norms: self.norms(at, [Role::PostAttentionNorm, Role::PostFfnNorm])?,
            ffn_norm: self.norm(at, Role::FfnNorm)?,
            gate_up: self.matrices(at, &[Role::Gate, Role::Up])?,
            down: self.matrices(at, &[Role::Down])?,
        })
    }

    /// Two norms that an architecture has both or neither of.
    fn norms(&mut self, layer: Option<usize>, roles: [Role; 2]) -> Result<Option<(Half, Half)>, Error> {
        if !roles[0].is_in(self.config.architecture) {
            return Ok(None);
        }
        Ok(Some((self.norm(layer, roles[0])?, self.norm(layer, roles[1])?)))
    }

    fn take(&mut self, len: usize) -> Result<Half, Error> {
        let taken = self.arena.take("weights", len);
        taken.map_err(|source| out_of_memory(self.arena.ledger().regions(), 0, Purpose::Weights, source))
    }

    /// Embedding or head, with rows of zeros up to `head_rows`.
    fn table(&mut self, role: Role, head_rows: usize) -> Result<Half, Error> {
        let [rows, cols] = role.dims(self.config);
        let table = self.take(head_rows * cols)?;
        let real = rows * cols;
        let padding = table.slice(real, table.len() - real);
        self.stream.fill_bytes(padding, 0).map_err(during("could not fill weights"))?;
        self.fill(table.slice(0, real), None, role)?;
        Ok(table)
    }

    /// Matrices of equal width, below each other.
    fn matrices(&mut self, layer: Option<usize>, parts: &[Role]) -> Result<Half, Error> {
        let lens: Vec<usize> = parts.iter().map(|role| role.dims(self.config).iter().product()).collect();
        let whole = self.take(lens.iter().sum())?;
        let mut start = 0;
        for (&role, len) in parts.iter().zip(lens) {
            self.fill(whole.slice(start, len), layer, role)?;
            start += len;
        }
        Ok(whole)
    }

    fn norm(&mut self, layer: Option<usize>, role: Role) -> Result<Half, Error> {
        let [_, size] = role.dims(self.config);
        let norm = self.take(size)?;
        match &mut self.source {
            Some(source) => {
                let tensor = source.take(layer, role)?;
                let wrong = if tensor.shape != [size] {
                    let shape = tensor.shape.clone();
                    Some(format!("has the shape {shape:?}; the configuration asks for [{size}]"))
                } else if matches!(tensor.format, Format::Blocks(_)) {
                    Some("is quantized, but a norm must not be".to_owned())
                } else {
                    None
                };
                if let Some(what) = wrong {
                    let name = tensor.name.clone();
                    return Err(source.wrong(&name, what));
                }
                let mut values = vec![0u16; size];
                convert(&tensor, 0, &mut values, self.dtype);
                self.stream.upload_now(norm, &values).map_err(during("could not copy weights to the GPU"))?;
            }
            None => {
                let ones = vec![bits(self.dtype, 1.0); size];
                self.stream.upload_now(norm, &ones).map_err(during("could not fill weights"))?;
            }
        }
        Ok(norm)
    }

    fn fill(&mut self, to: Half, layer: Option<usize>, role: Role) -> Result<(), Error> {
        let [rows, cols] = role.dims(self.config);
        let Some(source) = &mut self.source else {
            self.num_filled += 1;
            let seed = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (self.num_filled << 40);
            let std = (1.0 / cols as f32).sqrt();
            let filled = self.kernels.fill.fill_normal(self.stream, to, to.len() as u64, seed, std);
            return filled.map_err(during("could not fill weights"));
        };
        let tensor = source.take(layer, role)?;
        if tensor.shape != [rows, cols] {
            let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
            let what = format!("has the shape {shape:?}; the configuration asks for [{rows}, {cols}]");
            return Err(source.wrong(&name, what));
        }
        let copied = match tensor.format {
            Format::Blocks(blocks) => {
                let packed = Packed::from_blocks(blocks, rows, cols, tensor.bytes);
                let dtype = self.dtype;
                upload(self.stream, &mut self.stages, &mut self.next_stage, to, cols, |start, values| {
                    values.par_chunks_mut(cols).enumerate().for_each_init(
                        || vec![0.0; cols],
                        |row, (index, values)| {
                            packed.read_row(start / cols + index, row);
                            values.iter_mut().zip(row.iter()).for_each(|(value, &number)| *value = bits(dtype, number));
                        },
                    );
                })
            }
            _ => {
                let dtype = self.dtype;
                upload(self.stream, &mut self.stages, &mut self.next_stage, to, 1, |start, values| {
                    values.par_chunks_mut(PIECE_LEN).enumerate().for_each(|(piece, values)| {
                        convert(&tensor, start + piece * PIECE_LEN, values, dtype);
                    });
                })
            }
        };
        copied.map_err(during("could not copy weights to the GPU"))
    }
}

/// Fills `to` through the staging buffers in pieces of whole rows of `cols` elements.
fn upload(
    stream: &Stream,
    stages: &mut [(Pinned<u16>, Event)],
    next: &mut usize,
    to: Half,
    cols: usize,
    fill: impl Fn(usize, &mut [u16]),
) -> Result<(), overnight_kernels::Error> {
    let piece_len = (STAGE_LEN / cols).max(1) * cols;
    let mut start = 0;
    while start < to.len() {
        let len = piece_len.min(to.len() - start);
        let (stage, event) = &mut stages[*next];
        *next = (*next + 1) % NUM_STAGES;
        event.synchronize()?;
        fill(start, &mut stage.as_mut_slice()[..len]);
        stream.upload(to.slice(start, len), stage, len)?;
        event.record(stream)?;
        start += len;
    }
    Ok(())
}

/// Elements from `start` of a tensor that is not quantized.
fn convert(tensor: &RawTensor<'_>, start: usize, values: &mut [u16], dtype: Dtype) {
    let two = |index: usize| u16::from_le_bytes([tensor.bytes[2 * index], tensor.bytes[2 * index + 1]]);
    let each = |values: &mut [u16], read: &dyn Fn(usize) -> f32| {
        values.iter_mut().enumerate().for_each(|(at, value)| *value = bits(dtype, read(start + at)));
    };
    match (tensor.format, dtype) {
        (Format::BF16, Dtype::Bf16) | (Format::F16, Dtype::F16) => {
            let bytes = &tensor.bytes[2 * start..2 * (start + values.len())];
            let pairs = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
            values.iter_mut().zip(pairs).for_each(|(value, bits)| *value = bits);
        }
        (Format::BF16, Dtype::F16) => each(values, &|index| bf16::from_bits(two(index)).to_f32()),
        (Format::F16, Dtype::Bf16) => each(values, &|index| f16::from_bits(two(index)).to_f32()),
        (Format::F32, _) => each(values, &|index| {
            let at = 4 * index;
            f32::from_le_bytes([tensor.bytes[at], tensor.bytes[at + 1], tensor.bytes[at + 2], tensor.bytes[at + 3]])
        }),
        (Format::Blocks(_), _) => unreachable!("quantized tensors are unpacked by rows"),
    }
}
