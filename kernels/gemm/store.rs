//! Timed algorithms on disk, for one card and one version of cuBLASLt.
//!
//! The bytes of an algorithm mean something to the library that made them only, so a file of
//! another version, another card or another format is passed over.

use std::path::{Path, PathBuf};

use super::{Algorithm, Shape};
use crate::compile::Dtype;

/// What a file is for.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// Rises when the format or the way of timing changes.
    pub format: u32,
    /// Name of the GPU.
    pub device: String,
    /// Of this very card.
    pub uuid: String,
    /// Of cuBLASLt.
    pub version: u64,
    /// Of the operands.
    pub dtype: Dtype,
}

/// The format written here. 2: only algorithms that add partial sums in f32. 3: short products
/// are timed as graphs.
pub const FORMAT: u32 = 3;

#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct File {
    identity: Identity,
    algorithms: Vec<(Shape, Algorithm)>,
}

impl Identity {
    /// The file in a cache folder.
    pub fn path(&self, folder: &Path) -> PathBuf {
        let uuid: String = self.uuid.chars().filter(char::is_ascii_alphanumeric).take(32).collect();
        folder.join(format!("gemm-{uuid}-{}-{}.json", self.version, self.dtype.name()))
    }

    /// The algorithms in the file, none when it is not there or not for this card and library.
    pub fn load(&self, folder: &Path) -> Vec<(Shape, Algorithm)> {
        let path = self.path(folder);
        let Ok(bytes) = std::fs::read(&path) else { return Vec::new() };
        match serde_json::from_slice::<File>(&bytes) {
            Ok(file) if file.identity == *self => file.algorithms,
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "timed algorithms are damaged and are timed again");
                Vec::new()
            }
        }
    }

    /// Replaces the file.
    pub fn save(&self, folder: &Path, mut algorithms: Vec<(Shape, Algorithm)>) -> std::io::Result<()> {
        algorithms.sort_by_key(|(shape, _)| *shape);
        std::fs::create_dir_all(folder)?;
        let path = self.path(folder);
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let bytes = serde_json::to_vec(&File { identity: self.clone(), algorithms })?;
        std::fs::write(&temporary, bytes)?;
        std::fs::rename(&temporary, &path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        let (device, uuid) = ("NVIDIA H200".to_owned(), "00ff".to_owned());
        Identity { format: FORMAT, device, uuid, version: 130_100, dtype: Dtype::Bf16 }
    }

    #[test]
    fn algorithms_come_back_for_the_same_card_and_library_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let shape = Shape { m: 64, n: 6144, k: 4096, accumulates: true };
        let algorithms = vec![(shape, [1, u64::MAX, 3, 4, 5, 6, 7, 8])];
        identity().save(folder.path(), algorithms.clone()).expect("saved");
        assert_eq!(identity().load(folder.path()), algorithms);
        let path = identity().path(folder.path());
        for other in [
            Identity { version: 130_200, ..identity() },
            Identity { uuid: "00fe".to_owned(), ..identity() },
            Identity { dtype: Dtype::F16, ..identity() },
            Identity { format: FORMAT + 1, ..identity() },
            Identity { device: "another".to_owned(), ..identity() },
        ] {
            // Even under the name that it looks for.
            let _ = std::fs::copy(&path, other.path(folder.path()));
            assert_eq!(other.load(folder.path()), [], "{other:?}");
        }
    }

    #[test]
    fn a_damaged_file_is_passed_over() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(identity().path(folder.path()), "{\"identity\":").expect("written");
        assert_eq!(identity().load(folder.path()), []);
    }
}
