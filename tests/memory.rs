//! The server's memory does not grow with the number of items, but for the custom ids
//! of one run, which are bounded.

use std::process::Command;

use serde_json::Value;

use crate::harness::batch_binary;

/// Enough that windows, segments, connections and the database's cache are as large as they get.
const FEW: u64 = 50_000;
const MANY: u64 = 300_000;
/// Between the two an item costs some 40 bytes: intake sorts the custom ids of a run, of at
/// most a million items, in memory. A further `Vec` per item does not fit, for with the
/// allocator's least it costs 56.
const BYTES_PER_ITEM_MAX: u64 = 64;

/// Peak memory of a server that ran a job of so many items on the instant engine.
fn peak_memory(items: u64) -> Option<u64> {
    let items = items.to_string();
    let mut command = Command::new(batch_binary());
    // With an arena per thread it is a matter of luck how much memory is held but not used.
    command.args(["--json", "bench", "durable", "--items", &items]).env("MALLOC_ARENA_MAX", "1");
    let output = command.output();
    let output = output.expect("batch starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    record["peak_memory_bytes"].as_u64()
}

#[test]
fn memory_does_not_grow_with_the_items_but_by_the_ids_of_one_run() {
    let (Some(few), Some(many)) = (peak_memory(FEW), peak_memory(MANY)) else {
        return eprintln!("skipped: this system does not tell a process's peak memory");
    };
    eprintln!("peak memory: {} KiB for {FEW} items, {} KiB for {MANY}", few >> 10, many >> 10);
    assert!(many < few + (MANY - FEW) * BYTES_PER_ITEM_MAX, "from {few} to {many} bytes");
}
