//! Tensors and how their elements are stored.

/// How a tensor's elements are stored. Others than these are refused by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// Brain float.
    BF16,
    /// 32 elements of 5 bits with an f16 scale, 22 bytes.
    Q5_0,
    /// 32 elements of 8 bits with an f16 scale, 34 bytes.
    Q8_0,
    /// 256 elements of 4 bits, eight 6-bit scales and minima, 144 bytes.
    Q4K,
    /// 256 elements of 6 bits, sixteen 8-bit scales, 210 bytes.
    Q6K,
    /// A type that is known by number only: listed, but its data cannot be used.
    Other(u32),
}

/// One tensor of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Its name, for example `blk.0.attn_q.weight`.
    pub name: String,
    /// Dimensions, the fastest-varying first (the file's order).
    pub dims: Vec<u64>,
    /// Element type.
    pub ty: TensorType,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes; 0 for a type whose layout is not known.
    pub byte_len: u64,
}

impl TensorType {
    /// The type's name as others write it.
    pub fn name(self) -> String {
        match self {
            Self::F32 => "F32".into(),
            Self::F16 => "F16".into(),
            Self::BF16 => "BF16".into(),
            Self::Q5_0 => "Q5_0".into(),
            Self::Q8_0 => "Q8_0".into(),
            Self::Q4K => "Q4_K".into(),
            Self::Q6K => "Q6_K".into(),
            Self::Other(id) => other_name(id).map_or_else(|| format!("type {id}"), str::to_owned),
        }
    }

    /// Elements and bytes of a block.
    pub fn block(self) -> Option<(usize, usize)> {
        match self {
            Self::F32 => Some((1, 4)),
            Self::F16 | Self::BF16 => Some((1, 2)),
            Self::Q5_0 => Some((32, 22)),
            Self::Q8_0 => Some((32, 34)),
            Self::Q4K => Some((256, 144)),
            Self::Q6K => Some((256, 210)),
            Self::Other(_) => None,
        }
    }

    pub(super) fn from_id(id: u32) -> Self {
        match id {
            0 => Self::F32,
            1 => Self::F16,
            6 => Self::Q5_0,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            14 => Self::Q6K,
            30 => Self::BF16,
            other => Self::Other(other),
        }
    }
}

fn other_name(id: u32) -> Option<&'static str> {
    Some(match id {
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        13 => "Q5_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}
