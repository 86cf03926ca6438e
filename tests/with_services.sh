#!/usr/bin/env bash
# Runs a command with every service that tests want, and ends them with it:
#   tests/with_services.sh cargo nextest run …
# Each executable tests/services/NAME.sh is called as `NAME.sh start FOLDER`: it starts its
# service in the background on loopback, keeps everything under FOLDER, and prints
# `export VAR=…` lines. At the end, also by a signal, `NAME.sh stop FOLDER` is called, a
# process named in FOLDER/NAME.pid is killed if it still runs, and the folder goes.
# SERVICES="postgres moto" starts only those; SERVICES= starts none.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENT]…" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d "${TMPDIR:-/tmp}/overnight-services.XXXXXX")
# A service that refuses to run as root runs as somebody else and must reach its folder.
chmod 711 "$folder"
started=() child=

finish() {
  local name pid
  trap '' INT TERM HUP
  if [ -n "$child" ] && kill -0 "$child" 2>/dev/null; then kill -TERM "$child" 2>/dev/null || true; wait "$child" || true; fi
  for name in ${started[@]+"${started[@]}"}; do
    "$here/services/$name.sh" stop "$folder" >&2 || echo "services: $name did not stop" >&2
    pid=$(cat "$folder/$name.pid" 2>/dev/null || true)
    [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null || true
  done
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

for service in "$here"/services/*.sh; do
  [ -x "$service" ] || continue
  name=$(basename "$service" .sh)
  case " ${SERVICES-$name} " in *" $name "*) ;; *) continue ;; esac
  started+=("$name")
  exports=$("$service" start "$folder") || { echo "services: $name could not be started" >&2; exit 1; }
  eval "$exports"
done

# In the background, so that a signal ends the wait at once; with the terminal's input, and
# with the signals that bash would have it ignore.
env --default-signal=INT,QUIT "$@" <&0 &
child=$!
status=0
wait "$child" || status=$?
child=
exit "$status"
