//! Finds and opens NVRTC and cuBLASLt: a library of one exact major version, or a clear no.
//!
//! The loader's own search comes last but one: an older library on the path must not be
//! taken silently, so every candidate's version is compared before it is used.

use std::path::{Path, PathBuf};

use libloading::Library;

use crate::Error;

/// Major version of CUDA that everything here is written against.
pub const CUDA_MAJOR: u32 = 13;

/// Folders to look in, given by whoever knows the environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SearchPaths {
    /// Roots of CUDA toolkits: `CUDA_HOME`, `CUDA_PATH`.
    pub toolkits: Vec<PathBuf>,
    /// Roots of Python environments: `VIRTUAL_ENV` and the like.
    pub python: Vec<PathBuf>,
    /// Folders that hold the libraries themselves.
    pub folders: Vec<PathBuf>,
}

/// A library that this crate opens by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// File name with its major version.
    pub file: &'static str,
    /// The folder of its own wheel under `site-packages/nvidia`, before CUDA 13.
    wheel: &'static str,
    /// A command that installs it.
    pip: &'static str,
}

/// The compiler.
pub const NVRTC: Wanted =
    Wanted { file: "libnvrtc.so.13", wheel: "cuda_nvrtc", pip: "pip install 'nvidia-cuda-nvrtc==13.0.*'" };
/// Matrix products.
pub const CUBLASLT: Wanted =
    Wanted { file: "libcublasLt.so.13", wheel: "cublas", pip: "pip install 'nvidia-cublas==13.*'" };

impl Wanted {
    /// Files to try, the likeliest first. Only those that exist, then the bare name for the loader.
    pub fn candidates(&self, paths: &SearchPaths) -> Vec<PathBuf> {
        let found = self.folders(paths).into_iter().map(|folder| folder.join(self.file)).filter(|file| file.exists());
        found.chain([PathBuf::from(self.file)]).collect()
    }

    fn folders(&self, paths: &SearchPaths) -> Vec<PathBuf> {
        let mut folders = paths.folders.clone();
        let standard = ["/usr/local/cuda".to_owned(), format!("/usr/local/cuda-{CUDA_MAJOR}")];
        for root in paths.toolkits.iter().cloned().chain(standard.map(PathBuf::from)) {
            folders.extend([root.join("lib64"), root.join("targets/x86_64-linux/lib"), root.join("lib")]);
        }
        let standard = ["/usr/local", "/usr"].map(PathBuf::from);
        for root in paths.python.iter().cloned().chain(standard) {
            for packages in site_packages(&root) {
                let nvidia = packages.join("nvidia");
                folders.extend([nvidia.join(format!("cu{CUDA_MAJOR}/lib")), nvidia.join(self.wheel).join("lib")]);
            }
        }
        folders
    }

    /// Opens the first candidate that loads and that `check` accepts; `check` reads its version
    /// and says what is wrong with it. Errors with `Library`: what was tried, and the remedy.
    pub fn open<T>(
        &self,
        paths: &SearchPaths,
        check: impl Fn(&Library) -> Result<T, String>,
    ) -> Result<(Library, T, PathBuf), Error> {
        let mut tried = Vec::new();
        for candidate in self.candidates(paths) {
            preload_builtins(&candidate);
            // SAFETY: the file is NVIDIA's library of this name; its initializers are sound to run.
            let opened = unsafe { Library::new(&candidate) }.map_err(|error| error.to_string());
            match opened.and_then(|library| check(&library).map(|checked| (library, checked))) {
                Ok((library, checked)) => return Ok((library, checked, candidate)),
                Err(what) => tried.push(format!("{}: {what}", candidate.display())),
            }
        }
        let folders: Vec<_> = self.folders(paths).iter().map(|folder| folder.display().to_string()).collect();
        Err(Error::Library {
            library: self.file,
            what: format!(
                "tried {}; searched {} and the loader's own path (LD_LIBRARY_PATH): install the CUDA {CUDA_MAJOR} \
                 toolkit, or `{}` and name the environment in VIRTUAL_ENV",
                tried.join("; "),
                folders.join(", "),
                self.pip
            ),
        })
    }
}

/// NVRTC opens its builtins by bare name, which fails beside no search path; a copy that is
/// already open is found by that name.
fn preload_builtins(library: &Path) {
    let Some(folder) = library.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return };
    if !library.to_string_lossy().contains("nvrtc") {
        return;
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.13") {
            use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
            // SAFETY: NVIDIA's data library beside the one that is opened next; it stays open.
            if let Ok(builtins) = unsafe { Library::open(Some(entry.path()), RTLD_NOW | RTLD_GLOBAL) } {
                std::mem::forget(builtins);
            }
        }
    }
}

/// `site-packages` folders of a Python environment.
fn site_packages(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(root.join("lib")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .flat_map(|entry| ["site-packages", "dist-packages"].map(|name| entry.path().join(name)))
        .filter(|folder| folder.is_dir())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_of_a_named_environment_is_found_before_the_loaders_path() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&folder).expect("made");
        std::fs::write(folder.join(NVRTC.file), "").expect("written");
        let paths = SearchPaths { python: vec![root.path().to_owned()], ..SearchPaths::default() };
        let candidates = NVRTC.candidates(&paths);
        let wheel = candidates.iter().position(|file| *file == folder.join(NVRTC.file)).expect("found");
        let bare = candidates.iter().position(|file| file == Path::new(NVRTC.file)).expect("always tried");
        assert!(wheel < bare, "{candidates:?}");
    }

    #[test]
    fn what_is_advised_to_install_is_of_the_version_that_is_accepted() {
        for wanted in [NVRTC, CUBLASLT] {
            assert!(wanted.pip.contains(&format!("=={CUDA_MAJOR}.")), "{}: another would be refused", wanted.pip);
        }
    }

    #[test]
    fn a_missing_library_says_what_was_searched_and_how_to_install_it() {
        let wanted = Wanted { file: "libnowhere.so.13", wheel: "nowhere", pip: "pip install nowhere" };
        let paths = SearchPaths { toolkits: vec!["/opt/toolkit".into()], ..SearchPaths::default() };
        let error = wanted.open(&paths, |_| Ok(())).expect_err("is not there").to_string();
        for part in ["libnowhere.so.13", "/opt/toolkit/lib64", "LD_LIBRARY_PATH", "pip install nowhere"] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
    }

    #[test]
    fn a_library_of_another_version_is_refused_with_its_version() {
        // Any library that is there will do: the check decides.
        let wanted = Wanted { file: "libc.so.6", wheel: "none", pip: "pip install none" };
        let refused = wanted.open(&SearchPaths::default(), |_| Err::<(), _>("version 12.9; 13 is needed".to_owned()));
        assert!(refused.expect_err("refused").to_string().contains("version 12.9; 13 is needed"));
    }
}
