#!/usr/bin/env bash
# The main job on real input, end to end: build, pull, serve, submit, results, table.
# Installs nothing outside target/; needs cargo, a C compiler and, when no other
# mirror of the model answers, python3 with pip. Run again, it only runs the job.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }
for tool in cargo cc; do
  command -v "$tool" >/dev/null || { echo "$tool is missing: install Rust with rustup and a C compiler (Debian: apt-get install -y gcc libc6-dev)" >&2; exit 1; }
done
model=gemma-3-270m
dir=target/demo
batch=target/release/batch
mkdir -p "$dir"

say "1/5 build (release; minutes the first time)"
cargo build --release --quiet -p overnight-cli

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
"$batch" status "$id" --wait --timeout 10m >/dev/null
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
