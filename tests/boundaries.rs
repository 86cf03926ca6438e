//! Crates depend on each other, and on the outside crates that have an owner,
//! only as listed here. A new arrow changes this file and needs a decision note.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Our crates and the ones of ours that each may depend on.
const ARROWS: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("store", &["types"]),
    ("store-postgres", &["types", "store"]),
    ("store-sqlite", &["types", "store"]),
    ("blobs", &["types"]),
    ("kernels", &[]),
    ("engine", &["kernels"]),
    ("worker", &["types", "store", "blobs", "engine"]),
    ("label", &["types", "store", "blobs", "worker"]),
    ("api", &["types", "store", "blobs", "worker", "label"]),
    ("web", &["types", "store", "blobs"]),
    (
        "cli",
        &[
            "types",
            "store",
            "store-postgres",
            "store-sqlite",
            "blobs",
            "kernels",
            "engine",
            "worker",
            "label",
            "api",
            "web",
        ],
    ),
    ("testing", &["types", "store", "store-postgres", "store-sqlite", "blobs", "kernels", "engine", "worker", "label"]),
    ("tests", &[]),
];

/// Outside crates with an owner: nobody else may depend on them.
const OWNERS: &[(&str, &[&str])] = &[
    ("sqlx", &["store-sqlite", "store-postgres"]),
    ("object_store", &["blobs"]),
    ("axum", &["api", "web"]),
    ("hyper", &["api"]),
    ("prometheus", &["api"]),
    ("hyper-util", &["api"]),
    ("askama", &["web"]),
    ("cudarc", &["kernels"]),
    ("libloading", &["kernels"]),
    ("tokenizers", &["engine"]),
    // Decision 0040 says why cli renders by itself.
    ("minijinja", &["engine", "cli"]),
    ("safetensors", &["engine"]),
    ("reqwest", &["worker", "cli"]),
    ("hf-hub", &["cli"]),
    ("clap", &["cli"]),
    ("apalis", &["worker"]),
    ("apalis-core", &["worker"]),
];

fn normal_dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let cargo = std::env!("CARGO");
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    packages
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"].as_array().expect("dependencies");
            let normal = dependencies.iter().filter(|dependency| dependency["kind"].is_null());
            let names = normal.map(|dependency| dependency["name"].as_str().expect("name").to_owned());
            (folder(package["name"].as_str().expect("name")).to_owned(), names.collect())
        })
        .collect()
}

fn folder(package: &str) -> &str {
    package.strip_prefix("overnight-").unwrap_or(package)
}

#[test]
fn crates_depend_only_as_listed() {
    let found = normal_dependencies();
    let listed: BTreeSet<&str> = ARROWS.iter().map(|(name, _)| *name).collect();
    let present: BTreeSet<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(present, listed, "the crates of the workspace are those of the table");
    for (name, allowed) in ARROWS {
        for dependency in found[*name].iter().filter(|dependency| dependency.starts_with("overnight-")) {
            assert!(
                allowed.contains(&folder(dependency)),
                "{name} may depend on {allowed:?} of ours, not on {dependency}; a new arrow needs a decision note"
            );
        }
    }
}

#[test]
fn outside_crates_stay_with_their_owners() {
    for (name, dependencies) in normal_dependencies() {
        for (outside, owners) in OWNERS {
            assert!(
                !dependencies.contains(*outside) || owners.contains(&name.as_str()),
                "{outside} belongs to {owners:?}; {name} must reach it through them"
            );
        }
    }
}
