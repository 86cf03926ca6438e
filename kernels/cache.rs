//! Compiled kernels on disk: one file per (sources, options, architecture, NVRTC version).
//!
//! Invariant: an entry is whole or not taken; several processes may fill one folder at once.
//! A folder that cannot be written costs time, never a start.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use sha2::{Digest, Sha256};

use crate::Error;
use crate::compile::{Arch, Compiler, Program, SourceFolder, Texts};

const MAGIC: &[u8; 8] = b"ONCUBIN1";

/// A folder of compiled kernels; `None`: compile at every start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cache(pub Option<PathBuf>);

/// What an entry depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    name: String,
    hash: String,
}

impl Key {
    /// Of a program compiled by that version of NVRTC for that architecture.
    pub fn new(program: &Program, texts: &Texts, arch: Arch, version: (u32, u32)) -> Self {
        let mut hash = Sha256::new();
        // Every part is followed by its length, so that no two lists of parts hash alike.
        let mut part = |text: &str| {
            hash.update(text.as_bytes());
            hash.update((text.len() as u64).to_le_bytes());
        };
        part(&format!("nvrtc {}.{}", version.0, version.1));
        program.options(arch).iter().for_each(|option| part(option));
        part(&texts.source);
        for (name, text) in &texts.headers {
            part(name);
            part(text);
        }
        let hash = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Self { name: format!("{}_{}", program.name(), arch.name()), hash }
    }

    fn file(&self) -> String {
        format!("{}-{}.cubin", self.name, self.hash)
    }
}

impl Cache {
    /// The entry, or `None`: not there, unreadable or damaged.
    pub fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.0.as_ref()?.join(key.file());
        let bytes = std::fs::read(&path).ok()?;
        let whole = unwrap(&bytes);
        if whole.is_none() {
            tracing::warn!(path = %path.display(), "a compiled kernel is damaged and is compiled again");
        }
        whole.map(<[u8]>::to_vec)
    }

    /// Writes an entry, to a temporary name first. A failure is said once and changes nothing.
    pub fn save(&self, key: &Key, cubin: &[u8]) {
        let Some(folder) = &self.0 else { return };
        if let Err(error) = write(folder, &key.file(), cubin) {
            tracing::warn!(path = %folder.display(), %error, "a compiled kernel could not be kept");
        }
    }
}

/// Header, length and checksum before the code.
fn wrap(cubin: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(cubin.len() + 48);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&(cubin.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&Sha256::digest(cubin));
    bytes.extend_from_slice(cubin);
    bytes
}

fn unwrap(bytes: &[u8]) -> Option<&[u8]> {
    let rest = bytes.strip_prefix(MAGIC.as_slice())?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (digest, cubin) = rest.split_first_chunk::<32>()?;
    let is_whole = u64::from_le_bytes(*len) == cubin.len() as u64 && Sha256::digest(cubin)[..] == digest[..];
    is_whole.then_some(cubin)
}

fn write(folder: &Path, file: &str, cubin: &[u8]) -> std::io::Result<()> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    std::fs::create_dir_all(folder)?;
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(".{file}.{}.{number}", std::process::id()));
    let written = std::fs::File::create(&temporary)
        .and_then(|mut to| to.write_all(&wrap(cubin)))
        .and_then(|()| std::fs::rename(&temporary, folder.join(file)));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// What compiling took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompileCounts {
    /// Taken from the cache.
    pub num_cached: u32,
    /// Compiled.
    pub num_compiled: u32,
}

type Built = Result<Vec<u8>, Error>;

/// Cubins of all `programs`, in their order, from the cache or compiled on `num_threads` threads.
/// Errors with the first program's fault, `Compile`. A full cache needs NVRTC all the same: its
/// version is part of what entries are known by.
pub fn build(
    programs: &[Program],
    arch: Arch,
    compiler: &Compiler,
    folder: &SourceFolder,
    cache: &Cache,
    num_threads: usize,
) -> Result<(Vec<Vec<u8>>, CompileCounts), Error> {
    let next = AtomicUsize::new(0);
    let num_cached = AtomicU32::new(0);
    let results: Vec<Mutex<Option<Built>>> = programs.iter().map(|_| Mutex::new(None)).collect();
    let one = |program: &Program| {
        let texts = folder.texts(program.source)?;
        let key = Key::new(program, &texts, arch, compiler.version());
        if let Some(cubin) = cache.load(&key) {
            num_cached.fetch_add(1, Ordering::Relaxed);
            return Ok(cubin);
        }
        let cubin = compiler.compile(program, &texts, arch)?;
        cache.save(&key, &cubin);
        Ok(cubin)
    };
    std::thread::scope(|scope| {
        for _ in 0..num_threads.clamp(1, programs.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(program) = programs.get(index) else { break };
                    *results[index].lock().expect("set once") = Some(one(program));
                }
            });
        }
    });
    let cubins = results
        .into_iter()
        .map(|result| result.into_inner().expect("set once").expect("every program was taken by a thread"))
        .collect::<Result<Vec<_>, Error>>()?;
    let num_cached = num_cached.into_inner();
    let num_compiled = u32::try_from(programs.len()).expect("few programs") - num_cached;
    Ok((cubins, CompileCounts { num_cached, num_compiled }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::Dtype;
    use crate::sources::Source;

    static SOURCE: Source = Source { name: "toy", path: "toy/toy.cu", text: "" };
    const PROGRAM: Program = Program { source: &SOURCE, dtype: Dtype::Bf16 };
    const ARCH: Arch = Arch { number: 90, is_specific: true };

    fn texts(source: &str, header: &str) -> Texts {
        Texts { source: source.to_owned(), headers: vec![("types.cuh".to_owned(), header.to_owned())] }
    }

    #[test]
    fn an_entry_follows_source_headers_options_architecture_and_compiler() {
        let base = Key::new(&PROGRAM, &texts("a", "b"), ARCH, (13, 0));
        assert_eq!(base, Key::new(&PROGRAM, &texts("a", "b"), ARCH, (13, 0)));
        let f16 = Program { dtype: Dtype::F16, ..PROGRAM };
        let others = [
            Key::new(&PROGRAM, &texts("c", "b"), ARCH, (13, 0)),
            Key::new(&PROGRAM, &texts("a", "c"), ARCH, (13, 0)),
            Key::new(&PROGRAM, &texts("ab", ""), ARCH, (13, 0)),
            Key::new(&f16, &texts("a", "b"), ARCH, (13, 0)),
            Key::new(&PROGRAM, &texts("a", "b"), Arch { number: 80, is_specific: false }, (13, 0)),
            Key::new(&PROGRAM, &texts("a", "b"), ARCH, (13, 1)),
        ];
        for other in others {
            assert_ne!(base.hash, other.hash);
        }
    }

    #[test]
    fn a_damaged_entry_is_not_taken_and_a_new_one_replaces_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache(Some(folder.path().join("kernels")));
        let key = Key::new(&PROGRAM, &texts("a", "b"), ARCH, (13, 0));
        assert_eq!(cache.load(&key), None);
        cache.save(&key, b"machine code");
        assert_eq!(cache.load(&key).as_deref(), Some(b"machine code".as_slice()));
        let path = folder.path().join("kernels").join(key.file());
        let whole = std::fs::read(&path).expect("written");
        let mut flipped = whole.clone();
        *flipped.last_mut().expect("not empty") ^= 1;
        for damaged in [&whole[..whole.len() - 1], &whole[..10], &flipped, b""] {
            std::fs::write(&path, damaged).expect("written");
            assert_eq!(cache.load(&key), None, "{} bytes of {}", damaged.len(), whole.len());
        }
        cache.save(&key, b"machine code");
        assert_eq!(cache.load(&key).as_deref(), Some(b"machine code".as_slice()));
        let left: Vec<_> = std::fs::read_dir(folder.path().join("kernels")).expect("there").flatten().collect();
        assert_eq!(left.len(), 1, "no temporary file is left: {left:?}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_only_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a file");
        std::fs::write(&file, "").expect("written");
        let cache = Cache(Some(file));
        let key = Key::new(&PROGRAM, &texts("a", "b"), ARCH, (13, 0));
        cache.save(&key, b"machine code");
        assert_eq!(cache.load(&key), None);
    }
}
