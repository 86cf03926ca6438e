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

impl Role {
    /// The tensors of a layer.
    pub(crate) const LAYER: [Self; 13] = [
        Self::AttentionNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::QNorm,
        Self::KNorm,
        Self::PostAttentionNorm,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::PostFfnNorm,
    ];

    /// Whether models of this architecture have it.
    pub(crate) fn is_in(self, architecture: Architecture) -> bool {
        match self {
            Self::QNorm | Self::KNorm => architecture.qk_norm(),
            Self::PostAttentionNorm | Self::PostFfnNorm => architecture.post_norms(),
            _ => true,
        }
    }

    /// Rows and columns that the configuration asks for; a norm is one row.
    pub(crate) fn dims(self, config: &ModelConfig) -> [usize; 2] {
        let (hidden, ffn, dim) = (config.hidden, config.ffn, config.head_dim);
        let (q, kv) = (config.heads * dim, config.kv_heads * dim);
        match self {
            Self::Embedding | Self::Head => [config.vocab_rows, hidden],
            Self::FinalNorm | Self::AttentionNorm | Self::PostAttentionNorm | Self::FfnNorm | Self::PostFfnNorm => {
                [1, hidden]
            }
            Self::QNorm | Self::KNorm => [1, dim],
            Self::Q => [q, hidden],
            Self::K | Self::V => [kv, hidden],
            Self::O => [hidden, q],
            Self::Gate | Self::Up => [ffn, hidden],
            Self::Down => [hidden, ffn],
        }
    }
}

/// Takes all tensors. `tied`: the embedding is the head.
pub(crate) fn assemble(config: &ModelConfig, source: &mut dyn Source, tied: bool) -> Result<Weights, Error> {
    let offset = source.norm_offset();
    let embedding = source.take(None, Role::Embedding)?;
    let embedding_scale = embedding_scale(config, embedding.format);
    let mut take = Taker { config, source, offset };
    Ok(Weights {
        embedding: take.matrix(None, Role::Embedding)?,
        embedding_scale,
        layers: (0..config.layers.len()).map(|layer| take.layer(layer)).collect::<Result<_, _>>()?,
        final_norm: take.norm(None, Role::FinalNorm)?,
        head: if tied { None } else { Some(take.matrix(None, Role::Head)?) },
    })
}

/// What embeddings are multiplied with.
pub(crate) fn embedding_scale(config: &ModelConfig, format: Format) -> f32 {
    let scale = if config.architecture == Architecture::Gemma3 { (config.hidden as f32).sqrt() } else { 1.0 };
    // The reference multiplies in the type of the embedding.
    if format == Format::BF16 { bf16::from_f32(scale).to_f32() } else { scale }
}

type TwoNorms = (Vec<f32>, Vec<f32>);

struct Taker<'a> {
    config: &'a ModelConfig,
    source: &'a mut dyn Source,
    offset: f32,
}

impl Taker<'_> {
    fn layer(&mut self, layer: usize) -> Result<LayerWeights, Error> {
        let at = Some(layer);
        Ok(LayerWeights {
            attention_norm: self.norm(at, Role::AttentionNorm)?,
            q: self.matrix(at, Role::Q)?,
            k: self.matrix(at, Role::K)?,
            v: self.matrix(at, Role::V)?,
            o: self.matrix(at, Role::O)?,
            qk_norms: self.norms(at, [Role::QNorm, Role::KNorm])?,
            post_norms: self.norms(at, [Role::PostAttentionNorm, Role::PostFfnNorm])?,
            ffn_norm: self.norm(at, Role::FfnNorm)?,
            gate: self.matrix(at, Role::Gate)?,
            up: self.matrix(at, Role::Up)?,
            down: self.matrix(at, Role::Down)?,
        })
    }

    /// Two norms that an architecture has both or neither of.
    fn norms(&mut self, layer: Option<usize>, roles: [Role; 2]) -> Result<Option<TwoNorms>, Error> {
        if !roles[0].is_in(self.config.architecture) {
            return Ok(None);
        }
        Ok(Some((self.norm(layer, roles[0])?, self.norm(layer, roles[1])?)))
    }

    fn matrix(&mut self, layer: Option<usize>, role: Role) -> Result<Packed, Error> {
        let [rows, cols] = role.dims(self.config);
        let tensor = self.source.take(layer, role)?;
        if tensor.shape == [rows, cols] {
            return Ok(pack(&tensor, rows, cols));
        }
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Err(self.source.wrong(&name, format!("has the shape {shape:?}; the configuration asks for [{rows}, {cols}]")))
    }

    fn norm(&mut self, layer: Option<usize>, role: Role) -> Result<Vec<f32>, Error> {
        let [_, size] = role.dims(self.config);
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
