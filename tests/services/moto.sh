#!/usr/bin/env bash
# moto, an S3 server in memory that keeps conditional writes and lists unfinished uploads.
# It checks no signature.
#   moto.sh start FOLDER     prints OVERNIGHT_TEST_S3_MOTO and the keys of all S3 servers
#   moto.sh stop FOLDER
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.bash"
verb=${1-} folder=${2-}
[ -n "$folder" ] || { echo "usage: $0 start|stop FOLDER" >&2; exit 2; }
folder=$(realpath "$folder")
server=${OVERNIGHT_TEST_MOTO_BIN-$here/../../target/moto/bin/moto_server}

start() {
  [ -x "$server" ] || { echo "services: moto is not installed (tests/setup.sh installs it)" >&2; exit 0; }
  launch moto "$folder" "$server" -H 127.0.0.1 -p '{port}'
  AWS_ACCESS_KEY_ID=$ACCESS_KEY AWS_SECRET_ACCESS_KEY=$SECRET_KEY "$(dirname "$server")/python" - "$PORT" "$BUCKET" <<'END'
import boto3, sys
boto3.client("s3", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}", region_name="us-east-1").create_bucket(Bucket=sys.argv[2])
END
  echo "export OVERNIGHT_TEST_S3_MOTO='http://127.0.0.1:$PORT'"
  echo "export OVERNIGHT_TEST_S3_ACCESS_KEY='$ACCESS_KEY' OVERNIGHT_TEST_S3_SECRET_KEY='$SECRET_KEY'"
}

case $verb in
  start) start ;;
  stop) end moto "$folder" ;;
  *) echo "usage: $0 start|stop FOLDER" >&2; exit 2 ;;
esac
