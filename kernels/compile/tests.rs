//! Every kernel compiles for every architecture, on machines without a GPU too.

use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::sources::{HEADERS, SOURCES};
use crate::testing::{is_required, search_paths};

fn compiler(test: &str) -> Option<Compiler> {
    match Compiler::open(&search_paths()) {
        Ok(compiler) => Some(compiler),
        Err(error) if !is_required("nvrtc") => {
            eprintln!("{test} needs NVRTC and is skipped: {error}");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

static TOY: Source = Source { name: "toy", path: "toy/toy.cu", text: "" };

fn toy(source: &str) -> (Program, Texts) {
    (Program { source: &TOY, dtype: Dtype::F16 }, Texts { source: source.to_owned(), headers: Vec::new() })
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(compiler) = compiler("every_kernel_compiles_for_every_architecture") else { return };
    let mut jobs = Vec::new();
    for arch in Arch::TESTED {
        for &source in SOURCES {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                if dtype == Dtype::F16 || arch.has_bf16() {
                    jobs.push((arch, Program { source, dtype }));
                }
            }
        }
    }
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((arch, program)) = jobs.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    let texts = SourceFolder::default().texts(program.source).expect("embedded");
                    match compiler.compile(program, &texts, *arch) {
                        Ok(cubin) => assert!(cubin.starts_with(b"\x7fELF"), "{} is machine code", program.name()),
                        Err(Error::Compile { log, .. }) => panic!("{} for {}: {log}", program.name(), arch.name()),
                        Err(error) => panic!("{}: {error}", program.name()),
                    }
                }
            });
        }
    });
}

#[test]
fn a_source_that_does_not_compile_gives_the_compilers_log() {
    let Some(compiler) = compiler("a_source_that_does_not_compile_gives_the_compilers_log") else { return };
    let (program, texts) = toy("extern \"C\" __global__ void toy(float* out) { out[0] = nowhere; }");
    match compiler.compile(&program, &texts, Arch::of((8, 0))) {
        Err(Error::Compile { kernel, arch, log, .. }) => {
            assert_eq!((kernel.as_str(), arch.as_str()), ("toy_float16", "sm_80"));
            assert!(log.contains("nowhere") && log.contains("toy/toy.cu"), "{log}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_second_build_takes_everything_from_the_cache() {
    let Some(compiler) = compiler("the_second_build_takes_everything_from_the_cache") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let sources = SourceFolder(Some(folder.path().join("sources")));
    std::fs::create_dir_all(folder.path().join("sources/toy")).expect("made");
    std::fs::create_dir_all(folder.path().join("sources/include")).expect("made");
    for (name, text) in HEADERS {
        std::fs::write(folder.path().join("sources/include").join(name), text).expect("written");
    }
    let write = |value: &str| {
        let text = format!("extern \"C\" __global__ void toy(float* out) {{ out[0] = {value}; }}");
        std::fs::write(folder.path().join("sources/toy/toy.cu"), text).expect("written");
    };
    write("1.0f");
    let cache = crate::cache::Cache(Some(folder.path().join("cache")));
    let (program, _) = toy("");
    let arch = Arch::of((9, 0));
    let build = || crate::cache::build(&[program], arch, &compiler, &sources, &cache, 2).expect("built");
    let (first, counts) = build();
    assert_eq!((counts.num_compiled, counts.num_cached), (1, 0));
    let (second, counts) = build();
    assert_eq!((counts.num_compiled, counts.num_cached), (0, 1));
    assert_eq!(first, second);
    write("2.0f");
    let (changed, counts) = build();
    assert_eq!((counts.num_compiled, counts.num_cached), (1, 0), "the folder's source is what counts");
    assert_ne!(first, changed);
}

#[test]
fn every_source_and_header_on_disk_is_embedded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut on_disk = BTreeSet::new();
    for folder in std::fs::read_dir(root).expect("the crate's folder").flatten() {
        let Ok(entries) = std::fs::read_dir(folder.path()) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|ending| ending == "cu" || ending == "cuh") {
                on_disk.insert(path.strip_prefix(root).expect("below").to_string_lossy().into_owned());
            }
        }
    }
    let headers = HEADERS.iter().map(|(name, _)| format!("include/{name}"));
    let embedded: BTreeSet<String> = SOURCES.iter().map(|source| source.path.to_owned()).chain(headers).collect();
    assert_eq!(on_disk, embedded);
}
