//! Reads a file's head: the metadata and the table of tensors.

use std::collections::HashMap;

use super::tensor::{TensorInfo, TensorType};
use super::value::{Array, Value};

pub(super) struct Head {
    pub(super) metadata: HashMap<String, Value>,
    pub(super) tensors: Vec<TensorInfo>,
}

pub(super) fn read_head(bytes: &[u8]) -> Result<Head, String> {
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
