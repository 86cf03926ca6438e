//! Rebuilds when a migration file is added; the macro alone sees only changed ones.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations/postgres");
}
