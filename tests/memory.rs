//! The server's memory does not grow with the number of items.

use std::process::Command;

use serde_json::Value;

use crate::harness::batch_binary;

/// Between the two jobs: what a bounded number of shards, segments and connections
/// takes, with room for the allocator. A record of a hundred bytes kept per item
/// would pass it.
const GROWTH_MAX_BYTES: u64 = 64 << 20;

/// Peak memory of a server that ran a job of so many items on the instant engine.
fn peak_memory(items: &str) -> Option<u64> {
    let output = Command::new(batch_binary()).args(["--json", "bench", "durable", "--items", items]).output();
    let output = output.expect("batch starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    record["peak_memory_bytes"].as_u64()
}

#[test]
fn memory_stays_flat_from_a_thousand_to_two_hundred_thousand_items() {
    let (Some(few), Some(many)) = (peak_memory("1000"), peak_memory("200k")) else {
        return eprintln!("skipped: this system does not tell a process's peak memory");
    };
    eprintln!("peak memory: {} KiB for 1,000 items, {} KiB for 200,000", few >> 10, many >> 10);
    assert!(many < few + GROWTH_MAX_BYTES, "from {few} to {many} bytes");
}
