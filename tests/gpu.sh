#!/usr/bin/env bash
# What only a GPU can show, on a machine with one and without cargo: engine and kernel tests on the
# card, compute-sanitizer over the kernel tests, the golden gate against transformers, and the
# kernels' figures. A summary comes last; nothing new is started after LIMIT seconds (default 470).
#
#   tests/gpu.sh [BIN]
#
# BIN (default target/gpu) is a folder made by tests/gpu_binaries.sh: kernels and engine (tests of
# these packages), logits (an example of the engine), batch, and for the failure of a device
# batch-failpoints and system. What is missing fails its part by name; with OVERNIGHT_TEST_REQUIRE
# set to nothing it is passed over.
# PARTS: some of "engine fault kernels memcheck racecheck initcheck goldens doctor bench", in that order.
# OUT: gets summary.txt, kernels.txt, kernels.json and logs.tar.gz (default target/gpu-out).
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath -m "${1:-target/gpu}")
out=$(realpath -m "${OUT:-target/gpu-out}")
parts=${PARTS:-engine fault kernels memcheck racecheck initcheck goldens doctor bench}
limit=${LIMIT:-470}
begun=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/logs"
summary=$out/summary.txt
: >"$summary"

export OVERNIGHT_TEST_REQUIRE=${OVERNIGHT_TEST_REQUIRE-gpu}
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$work/cache}
# One cache of compiled kernels for the tests and for batch.
export OVERNIGHT_TEST_KERNEL_CACHE=${OVERNIGHT_TEST_KERNEL_CACHE:-$XDG_CACHE_HOME/overnight/kernels}
# NVRTC and cuBLASLt of CUDA 13: the toolkit's, else those beside python3's torch.
if [ -z "${CUDA_HOME:-}" ]; then
  for folder in /usr/local/cuda-13* /usr/local/cuda; do
    if [ -d "$folder" ]; then export CUDA_HOME=$folder; break; fi
  done
fi
if [ -z "${VIRTUAL_ENV:-}" ]; then
  prefix=$(python3 -c 'import sys; print(sys.prefix)' 2>/dev/null) && export VIRTUAL_ENV=$prefix
fi
sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)

failed=0
note() { printf '%s\n' "$*" | tee -a "$summary"; }
fail() { failed=1; note "FAIL  $*"; }

# missing PART WHAT: a part that cannot run.
missing() {
  case "$OVERNIGHT_TEST_REQUIRE" in
    ?*) fail "$1: $2 (leave it out by PARTS, or set OVERNIGHT_TEST_REQUIRE= )" ;;
    *) note "SKIP  $1: $2" ;;
  esac
}

has() {
  [ -x "$bin/$1" ] && return 0
  missing "$2" "$bin/$1 is not there"
  return 1
}

# What libtest or compute-sanitizer counted.
counts() {
  sed -nE 's/^test result: ok\. ([0-9]+ passed).*/, \1/p; s/^=+ ((ERROR|RACECHECK) SUMMARY: .*)/, \1/p' "$1" | tr -d '\n'
}

# part NAME SECONDS COMMAND...: runs it with a limit, keeps its log and notes how it ended.
part() {
  local name=$1 most=$2 start=$SECONDS left=$((limit - (SECONDS - begun))) log rc
  shift 2
  log=$work/logs/$name.log
  if [ "$left" -lt 10 ]; then fail "$name: not begun, $limit s are over"; return; fi
  [ "$most" -lt "$left" ] || most=$left
  timeout -k 5 "$most" "$@" >"$log" 2>&1
  rc=$?
  # A filter that matches no test proves nothing.
  if [ "$rc" = 0 ] && grep -q '^test result: ok\. 0 passed' "$log"; then rc='0, and no test ran,'; fi
  case $rc in
    0) note "PASS  $name in $((SECONDS - start)) s$(counts "$log")" ;;
    124) fail "$name: not done within $most s"; tail -5 "$log" ;;
    *) fail "$name: exit $rc after $((SECONDS - start)) s"; tail -30 "$log" ;;
  esac
}

# sanitize TOOL SECONDS NAME FAMILY...: the device tests of families under a tool, in one process.
# Left to the plain run: the test of a cache beyond 2^31 elements, which fills gigabytes, and the one
# whose kernel must fail.
sanitize() {
  local tool=$1 most=$2 name=$1-$3
  shift 3
  if [ -z "$sanitizer" ]; then missing "$name" "no compute-sanitizer on PATH or in CUDA_HOME"; return; fi
  has kernels "$name" || return
  part "$name" "$most" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
    "$bin/kernels" --test-threads 1 --skip blocks_beyond --skip a_run_over_a_plan_without_room "${@/%/::tests::}"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit --format=csv,noheader 2>/dev/null |
  tee -a "$summary"
light=(activation block_tables embedding fill rms_norm rope token_feedback)
for name in $parts; do
  case $name in
    engine) has engine engine && part engine 150 "$bin/engine" --test-threads 1 cuda:: ;;
    fault)
      if has system fault && has batch-failpoints fault; then
        part fault 120 env OVERNIGHT_TEST_BATCH="$bin/batch-failpoints" "$bin/system" device::
      fi
      ;;
    kernels) has kernels kernels && part kernels 90 "$bin/kernels" --test-threads 4 --skip compile:: ;;
    memcheck | initcheck)
      sanitize "$name" 40 light "${light[@]}"
      for family in attention_decode attention_prefill sampling; do sanitize "$name" 40 "$family" "$family"; done
      ;;
    # Races are looked for in shared memory: in the families that use it.
    racecheck)
      for family in rms_norm attention_decode attention_prefill sampling; do sanitize racecheck 60 "$family" "$family"; done
      ;;
    goldens) has logits goldens && part goldens 120 python3 tests/goldens/compare_cuda.py "$bin/logits" ;;
    doctor) has batch doctor && part doctor 60 env OVERNIGHT_ENGINE__DEVICE=cuda "$bin/batch" doctor --data-dir "$work/doctor" ;;
    bench)
      if has batch bench; then
        part bench 180 "$bin/batch" bench kernels --output-json "$out/kernels.json"
        cp "$work/logs/bench.log" "$out/kernels.txt" 2>/dev/null
      fi
      ;;
    *) fail "$name: no such part" ;;
  esac
done
word=good
[ "$failed" = 0 ] || word='NOT GOOD'
note "total $((SECONDS - begun)) s: $word"
tar -C "$work" -czf "$out/logs.tar.gz" logs
exit "$failed"
