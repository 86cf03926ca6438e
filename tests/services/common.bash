# What the scripts of object stores share; sourced, never run.
#   launch NAME FOLDER COMMAND…   runs COMMAND with {port} replaced, waits until it answers
#   end NAME FOLDER               ends it
# A service keeps its port in FOLDER/NAME.port, so that a second start finds its clients again.

# One pair for every S3 server: of the form that the strictest of them wants.
ACCESS_KEY=GK6f7665726e696768742d7465
SECRET_KEY=6f7665726e696768742d746573742d7365637265742d6f7665726e696768742d
BUCKET=overnight

free_port() {
  local port
  for _ in $(seq 100); do
    # Below the range from which the kernel draws ports for clients.
    port=$((10240 + RANDOM % 20000))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
  done
  return 1
}

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# In a session of its own, so that a signal to the tests' terminal does not reach it, and in
# its folder, because the one it is started from may go before it.
launch() {
  local name=$1 folder=$2 port pid tries
  shift 2
  for tries in 1 2 3 4 5; do
    port=$(cat "$folder/$name.port" 2>/dev/null || free_port)
    (cd "$folder" && exec setsid "${@//'{port}'/$port}") >>"$folder/$name.log" 2>&1 </dev/null &
    pid=$!
    echo "$pid" >"$folder/$name.pid"
    for _ in $(seq 300); do
      kill -0 "$pid" 2>/dev/null || break
      if answers "$port"; then
        echo "$port" >"$folder/$name.port"
        PORT=$port
        return 0
      fi
      sleep 0.1
    done
    # Somebody else may have taken the port in between.
    kill -KILL "$pid" 2>/dev/null || true
  done
  tail -20 "$folder/$name.log" >&2
  return 1
}

end() {
  local name=$1 folder=$2 signal=${3-TERM} pid
  pid=$(cat "$folder/$name.pid" 2>/dev/null) || return 0
  kill "-$signal" "$pid" 2>/dev/null || return 0
  for _ in $(seq 100); do
    kill -0 "$pid" 2>/dev/null || { rm -f "$folder/$name.pid"; return 0; }
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
  rm -f "$folder/$name.pid"
}
