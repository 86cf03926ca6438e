//! The one binary `batch`.

fn main() {}
