"""Checks deploy/ with the tools that read it: Helm, Kubernetes' schemas, hadolint, systemd and bash.

1. The chart passes `helm lint --strict`, and its schema refuses values that make no sense.
2. What it renders, with defaults and with each switch turned, is valid by the schemas of an old and a new Kubernetes.
3. The server runs with the arguments and variables of the rendered Deployment, answers its probes, and ends by SIGTERM
   within the grace period.
4. The container file, the unit and the Slurm job pass the checks of their own tools. A tool that is not here is named.
"""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/tensorhub"
KUBERNETES = ("1.25", "1.34")
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "a secret of one's own, no volume": {"existingSecret": "mine", "persistence": {"enabled": False}},
    "policies for workers": {"networkPolicy": {"workers": True}},
    "policies for workers without pages": {"networkPolicy": {"workers": True}, "workers": {"metricsPort": None}},
    "no policies": {"networkPolicy": {"enabled": False}},
    "placed": {
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"operator": "Exists"}],
        "env": {"TENSORHUB_LEASE_S": "20"},
    },
}
REFUSED: tuple[dict[str, Any], ...] = (
    {"port": 0},
    {"port": "7450"},
    {"replicas": 2},
    {"workers": {"dataPort": 65505}},
    {"env": {"TENSORHUB_LEASE_S": 20}},
)
START_S = 20.0


def say(text: str) -> None:
    print(f"check-deploy: {text}", flush=True)


def rendered(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The objects of the chart, by kind and name."""
    pages = chart.render(values, name="hub", namespace="rl")
    objects = [
        each for path, text in pages.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text) if each
    ]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}


def check_chart() -> dict[str, dict[str, Any]]:
    found = helm_python.lint(str(CHART), strict=True)
    problems = [each for each in found["messages"] if each["severity"] > 1] + found["errors"]
    assert not problems, problems
    chart = helm_python.Chart.load(str(CHART))
    for name, values in VALUES.items():
        for each in (objects := rendered(chart, values)).values():
            for version in KUBERNETES:
                kubernetes_validate.validate(each, version, strict=True)
        say(f"chart, {name}: {', '.join(sorted(objects))}")
    for values in REFUSED:
        try:
            helm_python.Chart.load(str(CHART)).validate_schema(chart.merge_values(values))
        except helm_python.HelmError:
            continue
        raise AssertionError(f"the schema accepts {values}")
    return rendered(chart, {})


def check_server(objects: dict[str, dict[str, Any]]) -> None:
    """Runs the server as the Deployment says, with its volume in a temporary directory."""
    pod = objects["Deployment/hub"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = objects["ConfigMap/hub-worker"]["data"]
    host, _, port = config["TENSORHUB_SERVER"].partition(":")
    with tempfile.TemporaryDirectory() as state:
        arguments = [
            each.replace("/var/lib/tensorhub", state).replace("0.0.0.0", "127.0.0.1") for each in container["args"]
        ]
        environ = {"PATH": os.environ["PATH"], "TENSORHUB_TOKEN": "x" * 48}  # no HOME, as in a container
        environ |= {each["name"]: each["value"] for each in container["env"]}
        server = subprocess.Popen([str(ROOT / ".venv/bin/tensorhub"), *arguments], env=environ)
        try:
            for probe in ("readinessProbe", "livenessProbe"):
                wait_for(int(port), container[probe]["httpGet"]["path"], "127.0.0.1", server)
            wait_for(int(port), "/healthz", host, server)
            assert (Path(state) / "journal").exists()
            server.send_signal(signal.SIGTERM)
            assert server.wait(pod["terminationGracePeriodSeconds"]) == 0
        finally:
            server.kill()
            server.wait()
    say(f"server: runs as the Deployment says, is called {host}, and ends by SIGTERM")


def wait_for(port: int, path: str, host: str, server: "subprocess.Popen[bytes]") -> None:
    """Until the server answers 200 to that name. Raises `AssertionError` for another answer, or after START_S."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path, headers={"Host": f"{host}:{port}"})
            status = connection.getresponse().status
        except OSError:
            time.sleep(0.05)
            continue
        finally:
            connection.close()
        assert status == 200, f"{path} for {host}: {status}"
        return
    raise AssertionError(f"nothing answers on port {port}")


def check_files() -> None:
    beside = Path(sys.executable).parent
    for tool, *arguments in (
        (str(beside / "hadolint"), "deploy/Containerfile"),
        ("systemd-analyze", "verify", "--man=no", str(unit())),
        ("bash", "-n", "deploy/slurm/job.sbatch"),
        ("shellcheck", "deploy/slurm/job.sbatch"),
    ):
        if shutil.which(tool) is None:
            say(f"left out: {Path(tool).name} is not installed here")
            continue
        done = subprocess.run([tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "tensorhub" not in done.stderr, done.stderr  # systemd warns and returns 0
        say(f"{Path(tool).name} {' '.join(arguments)}: good")


def unit() -> Path:
    """A copy of the unit whose program exists: systemd looks for it."""
    folder = ROOT / "out/deploy"
    folder.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "deploy/systemd/tensorhub.service").read_text(encoding="utf-8")
    path = folder / "tensorhub.service"
    path.write_text(text.replace("/opt/tensorhub/bin/", f"{ROOT}/.venv/bin/"), encoding="utf-8")
    return path


if __name__ == "__main__":
    check_server(check_chart())
    check_files()
    say("passed")
