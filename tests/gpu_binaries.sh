#!/usr/bin/env bash
# Builds what tests/gpu.sh runs and puts it, stripped, into one folder that can be carried to a
# machine with a GPU: target/gpu, or the folder given.
set -euo pipefail
cd "$(dirname "$0")/.."
to=${1:-target/gpu}
mkdir -p "$to"
# The path of the one test executable of a package.
executable() {
  cargo test --no-run --message-format=json "$@" 2>/dev/null |
    python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        print(message["executable"])' | tail -1
}
put() {
  cp "$1" "$to/$2"
  strip "$to/$2"
  echo "$to/$2: $(du -h "$to/$2" | cut -f1)"
}
features=overnight-cli/failpoints
cargo build --workspace --all-targets --features "$features"
put "$(executable --workspace --features "$features" -p overnight-kernels --lib)" kernels
put "$(executable --workspace --features "$features" -p overnight-engine --lib)" engine
put "$(executable --workspace --features "$features" -p overnight-tests --test system)" system
put target/debug/batch batch-failpoints
put target/debug/examples/logits logits
cargo build --release -p overnight-cli
put target/release/batch batch
