#!/usr/bin/env bash
# A PostgreSQL server of its own for tests, from the newest binaries that are installed
# (Debian: apt-get install -y postgresql): durable as in production, on loopback.
#   postgres.sh start FOLDER            starts it (again, on the same port, if it was stopped)
#   postgres.sh stop FOLDER [MODE]      MODE: fast (default), immediate (as a crash), smart
#   postgres.sh restart FOLDER [MODE]
# `start` prints OVERNIGHT_TEST_POSTGRES_URL, a superuser's URL, and OVERNIGHT_TEST_POSTGRES_BIN,
# where the server's programs are.
# Without binaries it says so and prints nothing: the tests decide whether they need it.
set -euo pipefail
verb=${1-} folder=${2-} mode=${3-fast}
[ -n "$folder" ] || { echo "usage: $0 start|stop|restart FOLDER [MODE]" >&2; exit 2; }
root=$folder/postgres
bin=${OVERNIGHT_TEST_POSTGRES_BIN-$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1)}
if [ ! -x "$bin/postgres" ] && command -v pg_config >/dev/null; then bin=$(pg_config --bindir); fi
if [ ! -x "$bin/postgres" ] || [ ! -x "$bin/initdb" ]; then
  echo "services: no PostgreSQL server found (Debian: apt-get install -y postgresql)" >&2
  exit 0
fi

# The server refuses to run as root.
as_user=()
if [ "$(id -u)" = 0 ]; then
  user=nobody
  if id -u postgres >/dev/null 2>&1; then user=postgres; fi
  as_user=(setpriv "--reuid=$(id -u "$user")" "--regid=$(id -g "$user")" --clear-groups)
fi
run() { (cd / && ${as_user[@]+"${as_user[@]}"} "$@"); }

free_port() {
  local port
  for _ in $(seq 100); do
    # Below the range from which the kernel draws ports for clients.
    port=$((10240 + RANDOM % 20000))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
  done
  return 1
}

create() {
  mkdir -p "$root"
  echo overnight-test-secret >"$root/password"
  if [ ${#as_user[@]} -gt 0 ]; then chown -R "$user" "$root"; fi
  # Passwords over TCP, so that a wrong one is refused; the socket trusts who may reach it.
  run "$bin/initdb" -D "$root/data" -U overnight --pwfile="$root/password" --auth-host=scram-sha-256 \
    --auth-local=trust -E UTF8 --locale=C --no-sync >"$root/initdb.log" 2>&1 || { cat "$root/initdb.log" >&2; return 1; }
  run tee -a "$root/data/postgresql.conf" >/dev/null <<END
listen_addresses = '127.0.0.1'
unix_socket_directories = '$root'
max_connections = 200
fsync = on
log_line_prefix = '%m [%p] %q%a@%d '
END
}

launch() {
  run "$bin/pg_ctl" start -w -t 60 -D "$root/data" -l "$root/log" -o "-p $1" >"$root/pg_ctl.log" 2>&1
}

start() {
  local port
  if [ -f "$root/port" ]; then
    port=$(cat "$root/port")
    launch "$port" || { tail -20 "$root/log" >&2; return 1; }
  else
    create
    for attempt in 1 2 3 4 5; do
      port=$(free_port)
      if launch "$port"; then break; fi
      # Somebody else may have taken the port in between.
      [ "$attempt" -lt 5 ] || { tail -20 "$root/log" >&2; return 1; }
    done
    echo "$port" >"$root/port"
  fi
  echo "export OVERNIGHT_TEST_POSTGRES_URL='postgres://overnight:overnight-test-secret@127.0.0.1:$port/postgres'"
  echo "export OVERNIGHT_TEST_POSTGRES_BIN='$bin'"
}

stop() {
  [ -f "$root/data/postmaster.pid" ] || return 0
  run "$bin/pg_ctl" stop -w -t 30 -m "$1" -D "$root/data" >>"$root/pg_ctl.log" 2>&1 ||
    run "$bin/pg_ctl" stop -w -t 30 -m immediate -D "$root/data" >>"$root/pg_ctl.log" 2>&1
}

case $verb in
  start) start ;;
  stop) stop "$mode" ;;
  restart) stop "$mode"; start ;;
  *) echo "usage: $0 start|stop|restart FOLDER [MODE]" >&2; exit 2 ;;
esac
