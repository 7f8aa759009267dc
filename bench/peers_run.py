"""Finds a Python that has a peer's packages, and runs the peer's program with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .section import Options, Samples

FOLDER = Path(__file__).parent / "peers"
PATIENCE_S = 150.0
SEARCH = "import importlib.util as u, sys; sys.exit(not any(u.find_spec(n) for n in sys.argv[1:]))"


@dataclass(frozen=True)
class Peer:
    """One program of `peers/`; it needs one of `packages`."""

    name: str
    program: str
    packages: tuple[str, ...]


PEERS = (
    Peer("NIXL alone (UCX)", "nixl_agent.py", ("nixl", "nixl_cu12", "nixl_cu13")),
    Peer("torch.distributed gloo broadcast", "gloo.py", ("torch",)),
    Peer("Mooncake transfer engine, tcp", "mooncake_engine.py", ("mooncake",)),
    Peer("Ray object store", "ray_store.py", ("ray",)),
    Peer("torchstore", "torchstore_pair.py", ("torchstore",)),
    Peer("checkpoint-engine P2P", "checkpoint_engine_p2p.py", ("checkpoint_engine",)),
)

GATHERED_FIRST = Peer("full tensors first, by gloo", "gloo_gathered.py", ("torch",))  # beside pieces of other layouts


def _libraries(python: str) -> str:
    """Folders of native libraries that `peers.sh` has put beside the packages."""
    native = Path(python).parent.parent / "native"
    found = [*native.glob("lib/*-linux-gnu"), *native.glob("usr/lib/*-linux-gnu")]
    return ":".join([*(str(path) for path in found), os.environ.get("LD_LIBRARY_PATH", "")]).strip(":")


@cache
def _has(python: str, packages: tuple[str, ...]) -> bool:
    done = subprocess.run([python, "-c", SEARCH, *packages], capture_output=True, check=False, timeout=30)
    return done.returncode == 0


def python_for(peer: Peer, venvs: tuple[str, ...]) -> str | None:
    """The first Python that has its packages: of the peers' environments, then our own."""
    pythons = [str(Path(venv) / "bin" / "python") for venv in venvs] + [sys.executable]
    return next((python for python in pythons if Path(python).exists() and _has(python, peer.packages)), None)


def run_peer(peer: Peer, samples: Samples, options: Options, *arguments: str) -> None:
    """One round of a peer, in processes of its own, all of which end with it."""
    if samples.error:
        return
    python = python_for(peer, options.peers)
    if python is None:
        samples.error = f"package {peer.packages[0]} is not installed (bench/peers.sh, --peers-venv)"
        return
    command = [python, str(FOLDER / peer.program), "--size", str(samples.size_bytes), "--repeat", "1", *arguments]
    environ = {**os.environ, "LD_LIBRARY_PATH": _libraries(python)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    ) as process:
        try:
            output, complaint = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            samples.error = f"it has not ended within {PATIENCE_S:.0f} s"
            return
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    _take(samples, output, complaint)


def _take(samples: Samples, output: str, complaint: str) -> None:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = [line for line in complaint.splitlines() if line.strip()]
        samples.error = said[-1][:200] if said else "it ended without a word"
        return
    if "error" in found:
        samples.error = found["error"]
        return
    samples.note = found["note"]
    for each in zip(found["seconds"], found["reader_cpu_s"], found["source_cpu_s"], strict=True):
        samples.add(*each)
