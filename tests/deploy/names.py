"""Every flag, variable, key, port, path, metric, signal and column that deploy/ names exists.

usage: names.py ROOT BATCH PORT      a server that is ready listens on 127.0.0.1:PORT
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request

import yaml

ROOT, BATCH, PORT = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
DEPLOY = ROOT / "deploy"
# Of others: the object stores' usual names are told by object_store, the rest by their owners.
OTHERS = re.compile(r"^(AWS_[A-Z_]+|XDG_(CONFIG|CACHE)_HOME|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)|CUDA_VISIBLE_DEVICES)$")
SECOND = {"s": 1, "m": 60, "h": 3600}
# What comes after worker.shutdown_grace: handing back, the worker's row, open connections, the engine's last step.
AFTER_GRACE_S = 35


def documents(path):
    return [one for one in yaml.safe_load_all((DEPLOY / path).read_text()) if one]


def seconds(text):
    amount, unit = re.fullmatch(r"(\d+)\s*([a-z]+)", str(text)).groups()
    return int(amount) * SECOND[unit[0]]


def dockerfile():
    """Its stages with their instructions."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    stages, stage = {}, None
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.rsplit(" AS ", 1)[1]
            stages[stage] = {"FROM": [rest]}
        elif stage and word.isupper():
            stages[stage].setdefault(word, []).append(rest)
    return stages


def units():
    for path in (DEPLOY / "systemd").glob("*.service"):
        lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
        yield path.name, [line.split("=", 1) for line in lines]


class Used:
    """What the files use: commands, variables, ports, probes."""

    def __init__(self):
        self.commands, self.variables = [], {}
        self.stages = dockerfile()
        for name in ("cpu", "cuda"):
            stage = self.stages[name]
            self.commands.append((f"Dockerfile {name}", json.loads(stage["CMD"][0])))
            self.variables.update(pair.split("=", 1) for line in stage["ENV"] for pair in shlex.split(line))
        self.compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
        for name, service in self.compose["services"].items():
            if service["image"].startswith("overnight:"):
                self.commands.append((f"compose {name}", service["command"]))
                self.variables.update(service["environment"])
        self.pods = {}
        for path in ("api.yaml", "worker.yaml"):
            for one in documents(f"kubernetes/base/{path}"):
                pod = one["spec"]["template"]["spec"]
                self.pods[one["metadata"]["name"]] = pod
                for container in pod["initContainers"] + pod["containers"]:
                    self.commands.append((f"{path} {container['name']}", container["args"]))
                    self.variables.update((pair["name"], pair["value"]) for pair in container.get("env", []))
        for secret in documents("kubernetes/base/secret.example.yaml"):
            self.variables.update((key, value) for key, value in secret["stringData"].items() if key.isupper())
        for name, lines in units():
            for key, value in lines:
                if key == "ExecStart":
                    self.commands.append((name, value.split()[1:]))
                if key == "Environment":
                    self.variables.update(pair.split("=", 1) for pair in value.split())


def clean_environment(extra=()):
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR", "LANG")}
    return kept | dict(extra)


def batch(*words, **variables):
    with tempfile.TemporaryDirectory() as folder:
        environment = clean_environment({"XDG_CONFIG_HOME": folder} | variables)
        return subprocess.run([BATCH, *words], text=True, capture_output=True, cwd=folder, env=environment)


def commands_exist(used):
    assert len(used.commands) >= 11, used.commands
    for where, words in used.commands:
        said = batch(*words, "--help")
        assert said.returncode == 0, f"{where}: batch {shlex.join(words)}: {said.stderr}"


def variables_exist(used, folder):
    ours = {name: value for name, value in used.variables.items() if name.startswith("OVERNIGHT_")}
    # In comments too: what a person is told to set.
    told = re.findall(r"OVERNIGHT_[A-Z_]+", "".join(path.read_text() for path in DEPLOY.rglob("*") if path.is_file()))
    for name in set(told) - set(ours):
        ours[name] = {"OVERNIGHT_API__WORKER_PORT": "8001", "OVERNIGHT_OBJECTS__URL": f"file://{folder}/objects"}.get(name, "x")
    assert len(ours) >= 6, ours
    secret = folder / "secret"
    secret.write_text("postgres://u:p@db.example.com:5432/o")
    for name, value in ours.items():
        value = str(secret) if name.endswith("_FILE") else value
        said = batch("config", "show", **{name: value})
        assert said.returncode == 0, f"{name}={value}: {said.stderr}"
    others = set(used.variables) - set(ours)
    assert all(OTHERS.match(name) for name in others), others
    readme = (ROOT / "config/README.md").read_text()
    for name in ours:
        listed = f"`{name}`" in readme or re.fullmatch(r"OVERNIGHT_[A-Z]+(__[A-Z_]+)", name)
        assert listed, f"{name} is not one that config/README.md tells"


def keys_exist():
    said = batch("--config", str(DEPLOY / "kubernetes/base/config.toml"), "config", "show")
    assert said.returncode == 0, said.stderr
    # Dotted keys in comments and documents are keys, too.
    known = set(re.findall(r"^(?:# )?([a-z_]+) = ", (ROOT / "config/default.toml").read_text(), re.M))
    for path in [*DEPLOY.rglob("*"), ROOT / "docs/operations.md"]:
        if path.is_file():
            for section, key in re.findall(r"\b(worker|api|engine|log|database|objects|webhook)\.([a-z]+_[a-z_]+)\b", path.read_text()):
                assert key in known or f"{section}.{key}" == "objects.id", f"{path.name}: {section}.{key} is no key of default.toml"


def ports_and_probes(used):
    config = tomllib.loads((DEPLOY / "kubernetes/base/config.toml").read_text())
    listens = {"overnight-api": 8000, "overnight-worker": config["api"]["worker_port"]}
    assert config["api"]["host"] == "0.0.0.0"
    for name, pod in used.pods.items():
        [container] = pod["containers"]
        [port] = container["ports"]
        assert port["containerPort"] == listens[name], name
        words = container["args"]
        assert "--port" not in words or int(words[words.index("--port") + 1]) == listens[name], words
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            what = probe.get("httpGet") or probe["tcpSocket"]
            assert what["port"] == port["name"], (name, kind)
            if path := what.get("path"):
                assert status(path) == 200, f"{name}: {kind}: {path}"
        assert "path" in container["readinessProbe"]["httpGet"]
    [service] = documents("kubernetes/base/api-service.yaml")
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    allowed = {port["port"] for one in documents("kubernetes/base/network-policies.yaml")
               for rule in one["spec"].get("ingress", []) for port in rule["ports"]}
    assert allowed == set(listens.values()), allowed
    assert used.stages["cpu"]["EXPOSE"] == ["8000"] and used.stages["cuda"]["EXPOSE"] == ["8000 8001"]
    for name, service in used.compose["services"].items():
        words = service.get("command", [])
        if "--port" in words:
            assert service["healthcheck"]["test"] == ["CMD", "healthcheck", words[words.index("--port") + 1]], name


def status(path):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code


def health_check_asks():
    script = DEPLOY / "healthcheck.sh"
    assert subprocess.run([script, str(PORT)], capture_output=True).returncode == 0, "a ready server is healthy"
    assert subprocess.run([script, "1"], capture_output=True).returncode != 0, "nobody listens on port 1"


def metrics_exist():
    page = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=20).read().decode()
    names = set(re.findall(r"^# TYPE (\S+)", page, re.M))
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    operations = (ROOT / "docs/operations.md").read_text()
    for rule in alerts:
        found = re.findall(r"\b((?:batch|vllm|http|build)[a-z_:]*[a-z])(?:\{([^}]*)\})?", rule["expr"])
        assert found or rule["expr"].startswith("up{"), rule["expr"]
        for name, labels in found:
            metric = re.sub(r"_bucket$", "", name)
            assert metric in names, f"{rule['alert']}: {metric} is not on /metrics"
            for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
                # `job` is Prometheus's own; outcomes appear with the first one.
                if label != "job" and (label, value) != ("outcome", "failed"):
                    assert re.search(rf'^{metric}\{{[^}}]*{label}="{value}"', page, re.M), f'{rule["alert"]}: {metric}{{{label}="{value}"}}'
        assert f"`{rule['alert']}`" in operations, f"docs/operations.md says nothing of {rule['alert']}"
    for job in yaml.safe_load((DEPLOY / "prometheus/scrape.yml").read_text())["scrape_configs"]:
        assert status(job["metrics_path"]) == 200


def signals_and_graces(used):
    """SIGTERM everywhere, and more time than a drain takes."""
    default = re.search(r'^shutdown_grace = "(.*)"', (ROOT / "config/default.toml").read_text(), re.M).group(1)
    for stage in ("cpu", "cuda"):
        assert used.stages[stage]["STOPSIGNAL"] == ["SIGTERM"]
    graces = [(f"compose {name}", seconds(service["stop_grace_period"]), default) for name, service
              in used.compose["services"].items() if service["image"].startswith("overnight:")]
    for name, lines in units():
        lines = dict(lines)
        assert lines["KillSignal"] == "SIGTERM"
        graces.append((name, seconds(lines["TimeoutStopSec"]), default))
    config = tomllib.loads((DEPLOY / "kubernetes/base/config.toml").read_text())
    for name, pod in used.pods.items():
        pre_stop = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        graces.append((name, pod["terminationGracePeriodSeconds"] - pre_stop, config["worker"]["shutdown_grace"]))
    assert len(graces) >= 8, graces
    for where, given, grace in graces:
        assert given >= seconds(grace) + AFTER_GRACE_S, f"{where}: {given}s for a grace of {grace}"


def scaler_asks_what_there_is(folder):
    """Its query is one of both databases."""
    [scaled, _] = documents("kubernetes/keda/scaled-object.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "overnight-worker"
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    said = batch("db", "migrate", "--data-dir", str(folder / "data"))
    assert said.returncode == 0, said.stderr
    with sqlite3.connect(folder / "data/overnight.db") as database:
        assert database.execute(query).fetchall() == [(0,)]
    words = set(re.findall(r"'([a-z_]+)'", query)) - {"gemma-3-270m"}
    schema = (ROOT / "migrations/sqlite/schema.snapshot").read_text()
    assert words == {"in_progress", "done"} and all(f"'{word}'" in schema for word in words), words
    url, psql = os.environ.get("OVERNIGHT_TEST_POSTGRES_URL"), shutil.which("psql")
    if url and psql:
        schema = "deploy_names"
        base, _, options = url.partition("?")
        subprocess.run([psql, url, "-qc", f"drop schema if exists {schema} cascade; create schema {schema}"], check=True)
        within = f"{base}?{options + '&' if options else ''}options=-csearch_path%3D{schema}"
        said = batch("db", "migrate", OVERNIGHT_DATABASE__URL=within)
        assert said.returncode == 0, said.stderr
        answer = subprocess.run([psql, within, "-Atqc", query], text=True, capture_output=True, check=True).stdout
        assert answer.strip() == "0", answer
        subprocess.run([psql, url, "-qc", f"drop schema {schema} cascade"], check=True, stderr=subprocess.DEVNULL)


def images_are_pinned(used):
    channel = re.search(r'channel = "(.*)"', (ROOT / "rust-toolchain.toml").read_text()).group(1)
    assert used.stages["build"]["FROM"][0].startswith(f"rust:{channel}-"), "the toolchain's version"
    images = [stage["FROM"][0].split()[0] for stage in used.stages.values()]
    images += [service["image"] for service in used.compose["services"].values()]
    for image in images:
        assert re.fullmatch(r"[a-z/]+:[a-z0-9.-]*", image) and not image.endswith(":latest"), image
        assert re.search(r"\d+\.\d+", image) or image in ("overnight:cpu", "overnight:cuda"), image
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())
    named = {container["image"] for pod in used.pods.values() for container in pod["initContainers"] + pod["containers"]}
    assert named == {image["name"] for image in kustomization["images"]}


def context_is_enough(folder):
    """What .dockerignore lets through is a workspace that cargo can read, and has every COPY."""
    context = folder / "context"
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], context / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("target"))
            else:
                shutil.copy(source, target)
    assert (context / "deploy/healthcheck.sh").is_file()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARGO_TARGET")}
    # Of this platform: what others need was never downloaded here.
    host = re.search("host: (.*)", subprocess.run(["rustc", "-vV"], capture_output=True, text=True).stdout)[1]
    read = subprocess.run(["cargo", "metadata", "--locked", "--offline", "--format-version=1",
                           f"--filter-platform={host}"], cwd=context, capture_output=True, text=True, env=environment)
    assert read.returncode == 0, read.stderr
    outside = [path for path in re.findall(r'include_(?:str|bytes)!\("((?:\.\./)+[^"]+)"\)', "".join(
        path.read_text() for path in (ROOT / "crates").rglob("src/**/*.rs")))]
    assert any("config/models.toml" in path for path in outside) and (context / "config/models.toml").is_file()


def main():
    used = Used()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        commands_exist(used)
        variables_exist(used, folder)
        keys_exist()
        ports_and_probes(used)
        health_check_asks()
        metrics_exist()
        signals_and_graces(used)
        scaler_asks_what_there_is(folder)
        images_are_pinned(used)
        context_is_enough(folder)


main()
