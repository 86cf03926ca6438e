#!/usr/bin/env bash
# Builds what tests/gpu.sh runs and puts it, stripped, into one folder that can be carried to a
# machine with a GPU: target/gpu, or the folder given.
set -euo pipefail
cd "$(dirname "$0")/.."
to=${1:-target/gpu}
mkdir -p "$to"
put() {
  cp "$1" "$to/$2"
  strip "$to/$2"
}
# Test executables have a hash in their names: cargo says which ones it has made.
cargo test --no-run --workspace --features overnight-cli/failpoints --message-format=json 2>/dev/null |
  python3 -c '
import json, sys
wanted = {("overnight_kernels", "lib", True): "kernels", ("overnight_engine", "lib", True): "engine",
          ("system", "test", True): "system", ("logits", "example", False): "logits", ("batch", "bin", False): "batch-failpoints"}
for line in sys.stdin:
    made = json.loads(line)
    if made.get("reason") == "compiler-artifact" and made.get("executable"):
        target = made["target"]
        name = wanted.get((target["name"], target["kind"][0], made["profile"]["test"]))
        if name:
            print(made["executable"], name)' |
  while read -r path name; do put "$path" "$name"; done
cargo build --release -p overnight-cli
put target/release/batch batch
du -ch "$to"/*
