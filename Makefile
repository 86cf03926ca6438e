# One word per job; each sets up what it needs and says what it installs with.
#   make demo    build, pull a small model, label a hundred reviews, show the table
#   make test    every gate and every test (starts the services it needs by itself)
#   make check   the gates on what is installed, minutes
#   make bench   figures of the durable path and of the engine
#   make chaos   crash and fault tests at scale, with seeds that can be replayed
#   make gpu     what only a GPU can show: tests, sanitizers, golden gate, kernel figures

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

# The test build carries fail points, so that a test can kill `batch` at a named line.
FEATURES := overnight-cli/failpoints
VENV := target/venv
export CARGO_TERM_COLOR ?= never

.PHONY: help demo test check bench chaos gpu setup gates clean-demo

help:
	@sed -n 's/^#   //p' Makefile

demo:
	@tests/demo.sh

setup:
	@tests/setup.sh

gates:
	@echo '== fmt'; cargo fmt --all --check
	echo '== clippy'; cargo clippy --quiet --workspace --all-targets --features $(FEATURES)
	echo '== doc'; cargo doc --quiet --workspace --no-deps --document-private-items

check: gates
	@cargo nextest run --workspace --features $(FEATURES) -E 'not binary(system)'
	cargo test --quiet --doc --workspace --features $(FEATURES)
	for tool in deny machete; do
	  if cargo $$tool --version >/dev/null 2>&1; then
	    case $$tool in deny) cargo deny check bans licenses sources;; machete) cargo machete;; esac
	  else echo "cargo $$tool is not installed: skipped"; fi
	done
	if command -v typos >/dev/null; then typos; else echo "typos is not installed: skipped"; fi

test: setup gates
	@echo '== doctests'; cargo test --quiet --doc --workspace --features $(FEATURES)
	echo '== build'; cargo build --quiet --workspace --all-targets --features $(FEATURES)
	echo '== model'
	export OVERNIGHT_MODEL_DIR="$$PWD/target/model-store"
	if target/debug/batch models pull gemma-3-270m; then
	  mkdir -p target/models
	  ln -f "$$OVERNIGHT_MODEL_DIR"/gemma-3-270m/gemma-3-270m-q4_k_m.gguf target/models/gemma-3-270m.gguf
	else echo 'the model could not be pulled: tests that require it fail' >&2; fi
	unset OVERNIGHT_MODEL_DIR
	echo '== tests'
	# Relaxed only on purpose, and then said: a test that passes over itself proves nothing.
	everything=azurite,clients,lint,model,nvrtc,postgres,s3,strace,tokenizers
	# Only a machine that gives tests a disk of their own can have it required of it.
	if unshare --map-root-user --mount sh -c 'mount -t tmpfs tmpfs /tmp' 2>/dev/null; then everything+=,mount
	else no_disk='no disk of its own for the test with ENOSPC on this machine (unshare, tmpfs): a full disk was tried by a limit on writes alone'; echo "$$no_disk" >&2; fi
	# And only one on which they may make hosts of their own.
	if ip netns add overnight-probe 2>/dev/null && ip netns del overnight-probe; then everything+=,netns
	else no_hosts='no hosts of their own for the test of a partition on this machine (root, ip netns)'; echo "$$no_hosts" >&2; fi
	export OVERNIGHT_TEST_REQUIRE="$${OVERNIGHT_TEST_REQUIRE-$$everything}"
	[ "$$OVERNIGHT_TEST_REQUIRE" = "$$everything" ] || echo "tests may be skipped: only '$$OVERNIGHT_TEST_REQUIRE' is required of $$everything" >&2
	export OVERNIGHT_TEST_PYTHON="$$PWD/$(VENV)/bin/python"
	export OVERNIGHT_TEST_MODELS="$$PWD/target/models"
	export OVERNIGHT_TEST_GGUF="$$PWD/target/models/gemma-3-270m.gguf"
	export OVERNIGHT_TEST_TOKENIZERS="$$PWD/target/tokenizers"
	tests/with_services.sh cargo nextest run --workspace --features $(FEATURES) --profile ci
	# Again where database and objects are others: what depends on them, with fewer random rounds.
	depends='binary(system) & test(/^(breakdown|clients|crash_points|full_disk|kill|late_commit|restore|roles|run|states|stops|sync_order)::/) - test(real_model)'
	for backend in postgres postgres-s3; do
	  echo "== system tests on $$backend"
	  OVERNIGHT_TEST_BACKEND=$$backend SERVICES='postgres s3s_fs' tests/with_services.sh cargo nextest run --workspace --features $(FEATURES) --profile ci -E "$$depends"
	done
	[ "$$OVERNIGHT_TEST_REQUIRE" = "$$everything" ] || echo "passed with tests skipped: only '$$OVERNIGHT_TEST_REQUIRE' was required of $$everything" >&2
	[ -z "$${no_disk-}" ] || echo "passed, but: $$no_disk" >&2
	[ -z "$${no_hosts-}" ] || echo "passed, but: $$no_hosts" >&2

bench:
	@tests/bench.sh

chaos:
	@tests/setup.sh chaos
	cargo build --quiet --workspace --all-targets --features $(FEATURES)
	export OVERNIGHT_TEST_GARAGE_BIN="$$PWD/target/tools/bin/garage"
	everything=azurite,garage,postgres,s3
	if ip netns add overnight-probe 2>/dev/null && ip netns del overnight-probe; then everything+=,netns; fi
	export OVERNIGHT_TEST_REQUIRE="$${OVERNIGHT_TEST_REQUIRE-$$everything}"
	# Uncaptured, so that each round says its seed when it is over. ROUNDS=n for another number,
	# OVERNIGHT_TEST_SEED=n for one round again.
	OVERNIGHT_TEST_ROUNDS="$${ROUNDS-200}" cargo nextest run --features $(FEATURES) --workspace --profile chaos --no-capture -E 'binary(system) & test(/^chaos::/)'
	OVERNIGHT_TEST_ROUNDS="$${KILL_ROUNDS-50}" tests/with_services.sh cargo nextest run --features $(FEATURES) --workspace --profile chaos -E 'binary(system) & test(kill) | package(overnight-blobs)'

gpu:
	@tests/gpu_binaries.sh target/gpu
	tests/gpu.sh target/gpu

clean-demo:
	@rm -rf target/demo
