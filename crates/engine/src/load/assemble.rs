//! Packs tensors of a checkpoint into the weights of a model, whatever file they come from.

use half::bf16;

use crate::Error;
use crate::cpu::packed::{Blocks, Packed};
use crate::cpu::{LayerWeights, Weights};
use crate::model::config::{Architecture, ModelConfig};

/// A tensor's bytes as the file has them.
#[derive(Debug, Clone)]
pub(crate) struct RawTensor<'a> {
    pub(crate) name: String,
    /// Slowest-varying dimension first.
    pub(crate) shape: Vec<usize>,
    pub(crate) format: Format,
    pub(crate) bytes: &'a [u8],
}

/// How elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    F16,
    BF16,
    Blocks(Blocks),
}

/// A file, or files, that tensors are taken from by their role.
pub(crate) trait Source {
    /// Takes a tensor; `layer` is `None` for those outside of layers.
    fn take(&mut self, layer: Option<usize>, role: Role) -> Result<RawTensor<'_>, Error>;
    /// An error about a tensor, naming its file.
    fn wrong(&self, tensor: &str, what: String) -> Error;
    /// What norm weights are short of.
    fn norm_offset(&self) -> f32;
}

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Embedding,
    Head,
    FinalNorm,
    AttentionNorm,
    Q,
    K,
    V,
    O,
    QNorm,
    KNorm,
    PostAttentionNorm,
    FfnNorm,
    Gate,
    Up,
    Down,
    PostFfnNorm,
}

/// Takes all tensors. `tied`: the embedding is the head.
pub(crate) fn assemble(config: &ModelConfig, source: &mut dyn Source, tied: bool) -> Result<Weights, Error> {
    let (hidden, vocab) = (config.hidden, config.vocab_rows);
    let offset = source.norm_offset();
    let embedding = source.take(None, Role::Embedding)?;
    let embedding_scale = embedding_scale(config, embedding.format);
    let mut take = Taker { source, offset };
    Ok(Weights {
        embedding: take.matrix(None, Role::Embedding, vocab, hidden)?,
        embedding_scale,
        layers: (0..config.layers.len()).map(|layer| take.layer(config, layer)).collect::<Result<_, _>>()?,
        final_norm: take.norm(None, Role::FinalNorm, hidden)?,
        head: if tied { None } else { Some(take.matrix(None, Role::Head, vocab, hidden)?) },
    })
}

/// What embeddings are multiplied with.
pub(crate) fn embedding_scale(config: &ModelConfig, format: Format) -> f32 {
    let scale = if config.architecture == Architecture::Gemma3 { (config.hidden as f32).sqrt() } else { 1.0 };
    // The reference multiplies in the type of the embedding.
    if format == Format::BF16 { bf16::from_f32(scale).to_f32() } else { scale }
}

struct Taker<'a> {
    source: &'a mut dyn Source,
    offset: f32,
}

impl Taker<'_> {
    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<LayerWeights, Error> {
        let (hidden, ffn, dim) = (config.hidden, config.ffn, config.head_dim);
        let (q, kv) = (config.heads * dim, config.kv_heads * dim);
        let at = Some(layer);
        let qk_norms = match config.architecture.qk_norm() {
            true => Some((self.norm(at, Role::QNorm, dim)?, self.norm(at, Role::KNorm, dim)?)),
            false => None,
        };
        let post_norms = match config.architecture {
            Architecture::Gemma3 => {
                Some((self.norm(at, Role::PostAttentionNorm, hidden)?, self.norm(at, Role::PostFfnNorm, hidden)?))
            }
            _ => None,
        };
        Ok(LayerWeights {
            attention_norm: self.norm(at, Role::AttentionNorm, hidden)?,
            q: self.matrix(at, Role::Q, q, hidden)?,
            k: self.matrix(at, Role::K, kv, hidden)?,
            v: self.matrix(at, Role::V, kv, hidden)?,
            o: self.matrix(at, Role::O, hidden, q)?,
            qk_norms,
            post_norms,
            ffn_norm: self.norm(at, Role::FfnNorm, hidden)?,
            gate: self.matrix(at, Role::Gate, ffn, hidden)?,
            up: self.matrix(at, Role::Up, ffn, hidden)?,
            down: self.matrix(at, Role::Down, hidden, ffn)?,
        })
    }

    fn matrix(&mut self, layer: Option<usize>, role: Role, rows: usize, cols: usize) -> Result<Packed, Error> {
        let tensor = self.source.take(layer, role)?;
        if tensor.shape == [rows, cols] {
            return Ok(pack(&tensor, rows, cols));
        }
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Err(self.source.wrong(&name, format!("has the shape {shape:?}; the configuration asks for [{rows}, {cols}]")))
    }

    fn norm(&mut self, layer: Option<usize>, role: Role, size: usize) -> Result<Vec<f32>, Error> {
        let offset = self.offset;
        let tensor = self.source.take(layer, role)?;
        let name = tensor.name.clone();
        if tensor.shape != [size] {
            let shape = tensor.shape.clone();
            return Err(self
                .source
                .wrong(&name, format!("has the shape {shape:?}; the configuration asks for [{size}]")));
        }
        if let Format::Blocks(_) = tensor.format {
            return Err(self.source.wrong(&name, "is quantized, but a norm must not be".to_owned()));
        }
        let packed = pack(&tensor, 1, size);
        let mut values = vec![0.0; size];
        packed.read_row(0, &mut values);
        values.iter_mut().for_each(|value| *value += offset);
        Ok(values)
    }
}

/// `bytes` hold `rows * cols` elements: the caller has checked the shape, the file its length.
fn pack(tensor: &RawTensor<'_>, rows: usize, cols: usize) -> Packed {
    let bytes = tensor.bytes;
    let two = |row: usize, col: usize| {
        let at = (row * cols + col) * 2;
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    };
    match tensor.format {
        Format::F32 => Packed::from_f32(rows, cols, |row, col| {
            let at = (row * cols + col) * 4;
            f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        }),
        Format::F16 => Packed::from_f16(rows, cols, two),
        Format::BF16 => Packed::from_bf16(rows, cols, two),
        Format::Blocks(blocks) => Packed::from_blocks(blocks, rows, cols, bytes),
    }
}
