//! Reads GGUF files, versions 2 and 3: a metadata map and a table of tensors over one memory map.
//!
//! Invariant: every offset, count and length in the file is checked against its size before
//! it is used, so a damaged file is an error that names the file and the fault, never a wild read.
//! Knows nothing of architectures or tokenizers; `load.rs` and `text` give the keys their meaning.
//! Layout: the GGUF specification (ggml-org/ggml, docs/gguf.md).

mod head;
mod tensor;
#[cfg(test)]
mod tests;
mod value;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::weights::Mapped;
use head::read_head;

pub use tensor::{TensorInfo, TensorType};
pub use value::{Array, Value};

/// A GGUF file, open.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Mapped,
    metadata: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
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
