#!/usr/bin/env bash
# Azurite, Azure's own emulator of its blob storage, without telemetry: on loopback it
# calls nobody. Account and key are the ones that every emulator has.
#   azurite.sh start FOLDER     prints OVERNIGHT_TEST_AZURITE, the account's endpoint
#   azurite.sh stop FOLDER
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.bash"
verb=${1-} folder=${2-}
[ -n "$folder" ] || { echo "usage: $0 start|stop FOLDER" >&2; exit 2; }
folder=$(realpath "$folder")
server=$here/../../target/azurite/node_modules/azurite/dist/src/blob/main.js

start() {
  { command -v node >/dev/null && [ -f "$server" ]; } ||
    { echo "services: azurite is not installed (tests/setup.sh installs it with npm)" >&2; exit 0; }
  mkdir -p "$folder/azurite"
  launch azurite "$folder" node "$server" --silent --location "$folder/azurite" --skipApiVersionCheck \
    --disableTelemetry --blobHost 127.0.0.1 --blobPort '{port}'
  # A container is made by a signed PUT ("Authorize with Shared Key", Azure Storage REST).
  python3 - "$PORT" "$BUCKET" <<'END'
import base64, datetime, hashlib, hmac, http.client, sys
port, container = sys.argv[1:]
account = "devstoreaccount1"
key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
text = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
text += f"/{account}/{account}/{container}\nrestype:container"
signature = base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()
headers |= {"Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"}
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
connection.request("PUT", f"/{account}/{container}?restype=container", headers=headers)
answer = connection.getresponse()
if answer.status not in (201, 409):
    sys.exit(f"services: the container was not made: {answer.status} {answer.read()[:300]}")
END
  echo "export OVERNIGHT_TEST_AZURITE='http://127.0.0.1:$PORT/devstoreaccount1'"
}

case $verb in
  start) start ;;
  stop) end azurite "$folder" ;;
  *) echo "usage: $0 start|stop FOLDER" >&2; exit 2 ;;
esac
