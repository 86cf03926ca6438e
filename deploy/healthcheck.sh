#!/bin/bash
# Exit 0 when the `batch` process of this container can do its work: its /health says 200.
#   healthcheck [PORT]     8000 for `batch serve`; the port given to `batch worker --port`
# Without curl: the image has nothing that the binary does not need.
set -eu
port=${1:-8000}
exec 3<>"/dev/tcp/127.0.0.1/$port"
printf 'GET /health HTTP/1.1\r\nHost: 127.0.0.1:%s\r\nConnection: close\r\n\r\n' "$port" >&3
read -r -t 5 _ status _ <&3
[ "$status" = 200 ]
