#!/usr/bin/env bash
# Our side of the figures in docs/performance.md, printed with the machine they were taken on.
# ITEMS sets the size of the durable job (default 1,000,000); MODEL names the engine's model.
# DATABASE and OBJECTS (URLs) take the durable figures there instead of on SQLite and a local folder.
# Of the build that is published, the `dist` profile (link-time optimization).
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --profile dist --quiet -p overnight-cli
batch=target/dist/batch
items=${ITEMS:-1000000}
model=${MODEL:-gemma-3-270m}
place=(${DATABASE:+--database "$DATABASE"} ${OBJECTS:+--objects "$OBJECTS"})
echo "machine: $(nproc) cores, $(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1), load $(cut -d' ' -f1 /proc/loadavg)"
echo "== durable path, $items items"
"$batch" bench durable --items "$items" "${place[@]}"
echo "== intake of 200 MB in 50,000 lines"
"$batch" bench durable --items 50000 --line-bytes 4000 "${place[@]}"
echo "== restart after kill -9 at half of $items items"
"$batch" bench durable --items "$items" --restart "${place[@]}"
echo "== API while a job of $items items runs"
"$batch" bench durable --items "$items" --looks "${place[@]}"
echo "== cancel at half of $items items"
"$batch" bench durable --items "$items" --cancel "${place[@]}"
echo "== two workers instead of one, and one of them killed"
"$batch" bench fleet "${place[@]}"
echo "== engine, $model, 32 x (128 in, 64 out)"
"$batch" models pull "$model" >/dev/null
"$batch" bench throughput --model "$model" --input-len 128 --output-len 64 --num-prompts 32
echo "== engine, $model, 1 x (128 in, 64 out)"
"$batch" bench throughput --model "$model" --input-len 128 --output-len 64 --num-prompts 1
