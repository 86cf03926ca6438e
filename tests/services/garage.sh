#!/usr/bin/env bash
# garage, an S3 server that takes conditional writes and does not keep them: whoever needs
# them loses data here. Started only where OVERNIGHT_TEST_GARAGE_BIN names its binary, as
# `make chaos` does, because it takes minutes to build.
#   garage.sh start FOLDER     prints OVERNIGHT_TEST_GARAGE and the keys of all S3 servers
#   garage.sh stop FOLDER
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.bash"
verb=${1-} folder=${2-}
[ -n "$folder" ] || { echo "usage: $0 start|stop FOLDER" >&2; exit 2; }
folder=$(realpath "$folder")

start() {
  local rpc_port
  [ -x "${OVERNIGHT_TEST_GARAGE_BIN-}" ] || exit 0
  rpc_port=$(free_port)
  mkdir -p "$folder/garage"
  # The port of its API is filled in by whoever launches it.
  cat >"$folder/garage/template.toml" <<END
metadata_dir = "$folder/garage/meta"
data_dir = "$folder/garage/data"
db_engine = "sqlite"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:$rpc_port"
rpc_public_addr = "127.0.0.1:$rpc_port"
rpc_secret = "$SECRET_KEY"

[s3_api]
s3_region = "us-east-1"
api_bind_addr = "127.0.0.1:{port}"
END
  GARAGE_DEFAULT_ACCESS_KEY=$ACCESS_KEY GARAGE_DEFAULT_SECRET_KEY=$SECRET_KEY GARAGE_DEFAULT_BUCKET=$BUCKET \
    launch garage "$folder" bash -c 'sed "s/{[p]ort}/$1/" "$2/template.toml" >"$2/garage.toml"; exec "$3" -c "$2/garage.toml" server --single-node --default-bucket' \
    garage '{port}' "$folder/garage" "$OVERNIGHT_TEST_GARAGE_BIN"
  echo "export OVERNIGHT_TEST_GARAGE='http://127.0.0.1:$PORT'"
  echo "export OVERNIGHT_TEST_S3_ACCESS_KEY='$ACCESS_KEY' OVERNIGHT_TEST_S3_SECRET_KEY='$SECRET_KEY'"
}

case $verb in
  start) start ;;
  stop) end garage "$folder" ;;
  *) echo "usage: $0 start|stop FOLDER" >&2; exit 2 ;;
esac
