//! Reads GGUF files, versions 2 and 3: a metadata map and a table of tensors over one memory map.
//!
//! Invariant: every offset, count and length in the file is checked against its size before
//! it is used, so a damaged file is an error that names the file and the fault, never a wild read.
//! Knows nothing of architectures or tokenizers; `load.rs` and `text` give the keys their meaning.
//! Layout: the GGUF specification (ggml-org/ggml, docs/gguf.md).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::weights::Mapped;

/// A GGUF file, open.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Mapped,
    metadata: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Unsigned, of any width.
    Unsigned(u64),
    /// Signed, of any width.
    Signed(i64),
    /// 32 or 64 bits wide.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// An array, by the type of its elements.
    Array(Array),
}

/// A metadata array; the long ones (vocabularies) are kept compact.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Integers of any width and sign; unsigned 64-bit values beyond `i64::MAX` are refused.
    Integers(Vec<i64>),
    /// 32- or 64-bit floats.
    Floats(Vec<f32>),
    /// Booleans.
    Bools(Vec<bool>),
    /// Strings.
    Strings(Vec<String>),
    /// Arrays of arrays.
    Arrays(Vec<Array>),
}

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

    fn from_id(id: u32) -> Self {
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

impl Value {
    /// The number as an unsigned one, when it is a whole number that fits.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(v) => Some(*v),
            Self::Signed(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// Any number as a float.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Unsigned(v) => Some(*v as f64),
            Self::Signed(v) => Some(*v as f64),
            Self::Float(v) => Some(*v),
            _ => None,
        }
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(s) => Some(s),
            _ => None,
        }
    }

    /// The value of a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// The elements of an array of strings.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Array(Array::Strings(v)) => Some(v),
            _ => None,
        }
    }

    /// The elements of an array of integers.
    pub fn as_integers(&self) -> Option<&[i64]> {
        match self {
            Self::Array(Array::Integers(v)) => Some(v),
            _ => None,
        }
    }

    /// The elements of an array of floats.
    pub fn as_floats(&self) -> Option<&[f32]> {
        match self {
            Self::Array(Array::Floats(v)) => Some(v),
            _ => None,
        }
    }
}

impl Gguf {
    /// Opens a file and reads its head. Errors with [`Error::Read`] when it cannot be read
    /// and with [`Error::Model`] when it is not a whole GGUF file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let map = Mapped::open(path)?;
        let damaged = |what: String| Error::Model { path: path.to_owned(), what };
        let head = read_head(map.bytes()).map_err(damaged)?;
        let mut by_name = HashMap::with_capacity(head.tensors.len());
        for (index, tensor) in head.tensors.iter().enumerate() {
            if by_name.insert(tensor.name.clone(), index).is_some() {
                return Err(damaged(format!("tensor {} is listed twice", tensor.name)));
            }
        }
        Ok(Self { path: path.to_owned(), map, metadata: head.metadata, tensors: head.tensors, by_name })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// The whole metadata map.
    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.metadata
    }

    /// A string that must be there.
    pub fn require_str(&self, key: &str) -> Result<&str, Error> {
        self.get(key)
            .and_then(Value::as_str)
            .ok_or_else(|| self.damaged(format!("metadata {key} (a string) is missing")))
    }

    /// An unsigned number that must be there.
    pub fn require_u64(&self, key: &str) -> Result<u64, Error> {
        self.get(key)
            .and_then(Value::as_u64)
            .ok_or_else(|| self.damaged(format!("metadata {key} (a number) is missing")))
    }

    /// All tensors in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// The bytes of a tensor; [`Error::Unsupported`] names a type whose layout is not known.
    pub fn tensor_bytes(&self, tensor: &TensorInfo) -> Result<&[u8], Error> {
        if let TensorType::Other(_) = tensor.ty {
            return Err(Error::Unsupported(format!(
                "tensor {} in {} is stored as {}; F32, F16, BF16, Q5_0, Q8_0, Q4_K and Q6_K are read",
                tensor.name,
                self.path.display(),
                tensor.ty.name()
            )));
        }
        let start = tensor.offset as usize;
        self.map
            .bytes()
            .get(start..start + tensor.byte_len as usize)
            .ok_or_else(|| self.damaged(format!("tensor {} lies outside the file", tensor.name)))
    }

    /// The memory map, to be shared by weights that stay in it.
    pub fn map(&self) -> &Mapped {
        &self.map
    }

    /// An [`Error::Model`] about this file.
    pub fn damaged(&self, what: String) -> Error {
        Error::Model { path: self.path.clone(), what }
    }
}

struct Head {
    metadata: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
}

fn read_head(bytes: &[u8]) -> Result<Head, String> {
    let mut cursor = Cursor { bytes, at: 0 };
    if cursor.take(4, "the magic")? != b"GGUF" {
        return Err("it does not start with GGUF".to_owned());
    }
    let version = cursor.u32("the version")?;
    if !(2..=3).contains(&version) {
        return Err(format!("it is GGUF version {version}; versions 2 and 3 are read"));
    }
    let num_tensors = cursor.count("the number of tensors", 24)?;
    let num_keys = cursor.count("the number of metadata keys", 13)?;
    let mut metadata = HashMap::with_capacity(num_keys);
    for _ in 0..num_keys {
        let key = cursor.string("a metadata key")?;
        let ty = cursor.u32(&key)?;
        let value = cursor.value(ty, &key, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("metadata key {key} is there twice"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(value) => value
            .as_u64()
            .filter(|a| a.is_power_of_two() && *a <= 1 << 20)
            .ok_or_else(|| "general.alignment is not a power of two".to_owned())?,
    };
    let mut tensors = Vec::with_capacity(num_tensors);
    for _ in 0..num_tensors {
        tensors.push(cursor.tensor()?);
    }
    let data = (cursor.at as u64).next_multiple_of(alignment);
    for tensor in &mut tensors {
        place_tensor(tensor, data, alignment, bytes.len() as u64)?;
    }
    Ok(Head { metadata, tensors })
}

/// Turns the offset within the data section into one within the file and checks both ends.
fn place_tensor(tensor: &mut TensorInfo, data: u64, alignment: u64, file_len: u64) -> Result<(), String> {
    let name = &tensor.name;
    if !tensor.offset.is_multiple_of(alignment) {
        return Err(format!("tensor {name} starts at {}, not a multiple of {alignment}", tensor.offset));
    }
    let elements = tensor
        .dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .ok_or_else(|| format!("tensor {name} has impossible dimensions {:?}", tensor.dims))?;
    if let Some((block, block_bytes)) = tensor.ty.block() {
        let row = tensor.dims.first().copied().unwrap_or(1);
        if !row.is_multiple_of(block as u64) {
            return Err(format!("tensor {name} has rows of {row}, not whole blocks of {block}"));
        }
        tensor.byte_len = (elements / block as u64)
            .checked_mul(block_bytes as u64)
            .ok_or_else(|| format!("tensor {name} has impossible dimensions {:?}", tensor.dims))?;
    }
    let end = data.checked_add(tensor.offset).and_then(|start| start.checked_add(tensor.byte_len));
    match end {
        Some(end) if end <= file_len => {
            tensor.offset += data;
            Ok(())
        }
        _ => Err(format!(
            "tensor {name} needs {} bytes from {} of the data section but the file ends at {file_len}; it was cut, fetch it again",
            tensor.byte_len, tensor.offset
        )),
    }
}

/// Arrays within arrays beyond this depth are refused.
const MAX_ARRAY_DEPTH: u32 = 4;

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let Some(end) = end else {
            return Err(format!("it ends at byte {} within {what}; it was cut, fetch it again", self.bytes.len()));
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        Ok(self.take(N, what)?.try_into().expect("take returns N bytes"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things that take at least `least` bytes each.
    fn count(&mut self, what: &str, least: usize) -> Result<usize, String> {
        let count = self.u64(what)?;
        let room = (self.bytes.len() - self.at) / least;
        usize::try_from(count)
            .ok()
            .filter(|&count| count <= room)
            .ok_or_else(|| format!("{what} is {count}, more than the file has room for"))
    }

    fn string(&mut self, what: &str) -> Result<String, String> {
        let len = self.count(what, 1)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| format!("{what} is not UTF-8"))
    }

    fn value(&mut self, ty: u32, key: &str, depth: u32) -> Result<Value, String> {
        Ok(match ty {
            0 => Value::Unsigned(self.array::<1>(key)?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Unsigned(self.u32(key)?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => Value::Bool(self.array::<1>(key)?[0] != 0),
            8 => Value::String(self.string(key)?),
            9 => Value::Array(self.list(key, depth)?),
            10 => Value::Unsigned(self.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return Err(format!("metadata {key} has the unknown type {other}")),
        })
    }

    fn list(&mut self, key: &str, depth: u32) -> Result<Array, String> {
        if depth >= MAX_ARRAY_DEPTH {
            return Err(format!("metadata {key} nests arrays deeper than {MAX_ARRAY_DEPTH}"));
        }
        let ty = self.u32(key)?;
        let least = match ty {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            other => return Err(format!("metadata {key} is an array of the unknown type {other}")),
        };
        let len = self.count(key, least)?;
        let mut elements = (0..len).map(|_| self.value(ty, key, depth + 1));
        Ok(match ty {
            6 | 12 => Array::Floats(
                elements.map(|v| v.map(|v| v.as_f64().unwrap_or(f64::NAN) as f32)).collect::<Result<_, _>>()?,
            ),
            7 => Array::Bools(elements.map(|v| v.map(|v| v == Value::Bool(true))).collect::<Result<_, _>>()?),
            8 => Array::Strings(
                elements
                    .map(|v| match v? {
                        Value::String(s) => Ok(s),
                        _ => Err(format!("metadata {key} mixes types")),
                    })
                    .collect::<Result<_, _>>()?,
            ),
            9 => {
                let mut arrays = Vec::with_capacity(len);
                for element in elements.by_ref() {
                    match element? {
                        Value::Array(array) => arrays.push(array),
                        _ => return Err(format!("metadata {key} mixes types")),
                    }
                }
                Array::Arrays(arrays)
            }
            _ => Array::Integers(
                elements
                    .map(|v| match v? {
                        Value::Signed(v) => Ok(v),
                        Value::Unsigned(v) => {
                            i64::try_from(v).map_err(|_| format!("metadata {key} holds {v}, beyond 2^63"))
                        }
                        _ => Err(format!("metadata {key} mixes types")),
                    })
                    .collect::<Result<_, _>>()?,
            ),
        })
    }

    fn tensor(&mut self) -> Result<TensorInfo, String> {
        let name = self.string("a tensor's name")?;
        let num_dims = self.u32(&name)?;
        if num_dims > 4 {
            return Err(format!("tensor {name} has {num_dims} dimensions; at most 4 are possible"));
        }
        let dims = (0..num_dims).map(|_| self.u64(&name)).collect::<Result<Vec<_>, _>>()?;
        if dims.contains(&0) {
            return Err(format!("tensor {name} has a dimension of 0"));
        }
        let ty = TensorType::from_id(self.u32(&name)?);
        let offset = self.u64(&name)?;
        Ok(TensorInfo { name, dims, ty, offset, byte_len: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one key, one array of strings and one F32 tensor of 4 elements.
    fn sample() -> Vec<u8> {
        let mut f = Vec::new();
        let string = |f: &mut Vec<u8>, s: &str| {
            f.extend((s.len() as u64).to_le_bytes());
            f.extend(s.as_bytes());
        };
        f.extend(b"GGUF");
        f.extend(3u32.to_le_bytes());
        f.extend(1u64.to_le_bytes());
        f.extend(2u64.to_le_bytes());
        string(&mut f, "general.architecture");
        f.extend(8u32.to_le_bytes());
        string(&mut f, "gemma3");
        string(&mut f, "tokenizer.ggml.tokens");
        f.extend(9u32.to_le_bytes());
        f.extend(8u32.to_le_bytes());
        f.extend(2u64.to_le_bytes());
        string(&mut f, "a");
        string(&mut f, "b");
        string(&mut f, "t");
        f.extend(1u32.to_le_bytes());
        f.extend(4u64.to_le_bytes());
        f.extend(0u32.to_le_bytes());
        f.extend(0u64.to_le_bytes());
        f.resize(f.len().next_multiple_of(32), 0);
        for x in [1f32, 2.0, 3.0, 4.0] {
            f.extend(x.to_le_bytes());
        }
        f
    }

    fn open(bytes: &[u8]) -> Result<Gguf, Error> {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, bytes).expect("write");
        Gguf::open(&path)
    }

    #[test]
    fn metadata_and_tensor_are_read() {
        let gguf = open(&sample()).expect("a whole file");
        assert_eq!(gguf.require_str("general.architecture").expect("key"), "gemma3");
        assert_eq!(gguf.get("tokenizer.ggml.tokens").and_then(Value::as_strings).expect("array"), ["a", "b"]);
        let tensor = gguf.tensor("t").expect("tensor");
        assert_eq!((tensor.dims.as_slice(), tensor.ty, tensor.byte_len), (&[4u64][..], TensorType::F32, 16));
        assert_eq!(gguf.tensor_bytes(tensor).expect("bytes")[4..8], 2f32.to_le_bytes());
    }

    // Field report 62 (a cut file).
    #[test]
    fn file_cut_anywhere_is_an_error_that_names_it() {
        let whole = sample();
        for len in 0..whole.len() {
            let error = open(&whole[..len]).expect_err("cut");
            assert!(error.to_string().contains("m.gguf"), "{error}");
        }
    }

    #[test]
    fn any_single_damaged_byte_never_panics_or_reads_outside() {
        let whole = sample();
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                if let Ok(gguf) = open(&bytes) {
                    for tensor in gguf.tensors() {
                        let _ = gguf.tensor_bytes(tensor);
                    }
                }
            }
        }
    }

    #[test]
    fn type_without_a_kernel_is_refused_by_name() {
        let mut bytes = sample();
        // One dimension (u32), its length (u64), then the type.
        let head = [1u8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0];
        let ty = bytes.windows(12).rposition(|w| w == head).expect("the tensor's dimensions") + 12;
        bytes[ty] = 13;
        let gguf = open(&bytes).expect("listed");
        let error = gguf.tensor_bytes(&gguf.tensors()[0]).expect_err("refused");
        assert!(error.to_string().contains("Q5_K"), "{error}");
    }
}
