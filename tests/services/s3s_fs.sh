#!/usr/bin/env bash
# s3s-fs, an S3 server over a folder: it checks signatures, and what it took survives its
# own kill -9. Its folder is FOLDER/s3s_fs; a bucket is a folder in it.
#   s3s_fs.sh start FOLDER   starts it (again, on the same port and folder, if it was ended)
#   s3s_fs.sh stop FOLDER    s3s_fs.sh kill FOLDER
# `start` prints OVERNIGHT_TEST_S3_FS, the keys, and OVERNIGHT_TEST_S3_FS_BIN, with which a
# test starts one of its own to kill.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.bash"
verb=${1-} folder=${2-}
[ -n "$folder" ] || { echo "usage: $0 start|stop|kill FOLDER" >&2; exit 2; }
folder=$(realpath "$folder")
server=${OVERNIGHT_TEST_S3_FS_BIN-$here/../../target/tools/bin/s3s-fs}

start() {
  [ -x "$server" ] || { echo "services: s3s-fs is not installed (tests/setup.sh installs it)" >&2; exit 0; }
  mkdir -p "$folder/s3s_fs/$BUCKET"
  launch s3s_fs "$folder" "$server" --host 127.0.0.1 --port '{port}' --access-key "$ACCESS_KEY" --secret-key "$SECRET_KEY" "$folder/s3s_fs"
  echo "export OVERNIGHT_TEST_S3_FS='http://127.0.0.1:$PORT' OVERNIGHT_TEST_S3_FS_BIN='$(realpath "$server")'"
  echo "export OVERNIGHT_TEST_S3_ACCESS_KEY='$ACCESS_KEY' OVERNIGHT_TEST_S3_SECRET_KEY='$SECRET_KEY'"
}

case $verb in
  start) start ;;
  stop) end s3s_fs "$folder" ;;
  kill) end s3s_fs "$folder" KILL ;;
  *) echo "usage: $0 start|stop|kill FOLDER" >&2; exit 2 ;;
esac
