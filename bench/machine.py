"""What the figures were measured on: machine, software, commit, and how busy the machine was with other things."""

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tensorhub", "numpy", "xxhash", "aiohttp", "msgspec", "uvloop", "torch")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 30


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)


class Idle:
    """Share of all cores' time that nobody used, from its making until asked."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        words = [int(word) for word in _read("/proc/stat").splitlines()[0].split()[1:9]]
        return words[3] + words[4], sum(words)

    def share(self) -> float:
        idle, total = self._now()
        return (idle - self._before[0]) / max(1, total - self._before[1])


def describe() -> dict[str, object]:
    """All of it, for the header and the JSON."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    idle = Idle()
    time.sleep(0.5)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "congestion": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "versions": versions,
        "commit": _git("rev-parse", "HEAD"),
        "has_changes": bool(_git("status", "--porcelain")),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": load_average(),
        "idle_share": round(idle.share(), 2),
    }
