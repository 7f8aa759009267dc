"""Files of deploy/ and examples/ name only settings, options and ports that exist. `make check-deploy` does more."""

import re
import tomllib

from typer.main import get_command

from tensorhub.cli.main import app
from tensorhub.runtime.config import DEFAULT_PORT
from tensorhub.runtime.metrics import PORTS

from .sources import ROOT

FILES = [path for folder in ("deploy", "examples") for path in ROOT.glob(f"{folder}/**/*") if path.is_file()]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
TEXTS["docs/deploying.md"] = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
CHART = "deploy/helm/tensorhub"


def test_variables_and_options_exist() -> None:
    known = set(re.findall(r"`(TENSORHUB_[A-Z_]+)`", (ROOT / "docs/settings.md").read_text(encoding="utf-8")))
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for each in serve.params for name in each.opts}
    for name, text in TEXTS.items():
        assert set(re.findall(r"\bTENSORHUB_[A-Z_]*[A-Z]\b", text)) <= known, name
        command = re.sub(r"\\\n", " ", text)
        for line in re.findall(r"tensorhub serve([^\n`]*)|CMD \[\"serve\",([^\n]*)", command):
            assert set(re.findall(r"--[a-z-]+", "".join(line))) <= options, name
    assert set(re.findall(r"- (--[a-z-]+)=", TEXTS[f"{CHART}/templates/server.yaml"])) <= options


def test_ports_and_versions_are_the_same_everywhere() -> None:
    values, policy = TEXTS[f"{CHART}/values.yaml"], TEXTS[f"{CHART}/templates/networkpolicy.yaml"]
    assert f"\nport: {DEFAULT_PORT} " in values
    for name, variable in (("dataPort", "TENSORHUB_DATA_PORT"), ("metricsPort", "TENSORHUB_METRICS_PORT")):
        (first,) = {int(found) for text in TEXTS.values() for found in re.findall(rf"{variable}=(\d+)", text)}
        assert f"{name}: {first} " in values
        assert f"{first} to {first + PORTS - 1}" in TEXTS["docs/deploying.md"]
    assert len(re.findall(rf"endPort: {{{{ add [\w.]+ {PORTS - 1} }}}}", policy)) == 2
    for name in ("deploy/Containerfile", "deploy/systemd/tensorhub.service", "deploy/slurm/job.sbatch"):
        assert str(DEFAULT_PORT) in TEXTS[name]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = TEXTS[f"{CHART}/Chart.yaml"]
    assert f'appVersion: "{version}"' in chart
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
