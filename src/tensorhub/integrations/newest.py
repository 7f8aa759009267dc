"""Which version an engine is to take: the newest that there is, for which it waits at first."""

import logging
import time
from collections.abc import Mapping
from math import inf
from typing import Any

import tensorhub

SILENT_S = 5.0  # that it waits is said then

_log = logging.getLogger("vllm.tensorhub.newest")  # below vLLM's own, which writes it


def of_view(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options of `open` that `connect` takes too."""
    return {name: options[name] for name in ("server", "token", "insecure") if name in options}


def latest(view: "tensorhub.View", model: str) -> int | None:
    """The newest version that there is now."""
    return next((each.version for each in view.versions(model) if each.is_latest), None)


def newest_version(view: "tensorhub.View", model: str, deadline: float) -> int:
    """The newest version that there is. Waits for a first one. Raises `VersionUnavailable` at the deadline."""
    says_so_at = time.monotonic() + SILENT_S
    while True:
        found = latest(view, model)
        if found is not None:
            return found
        now = time.monotonic()
        if now >= deadline:
            raise tensorhub.VersionUnavailable(f"{model} has no version yet", hint="is the trainer there?")
        if now >= says_so_at:
            _log.warning("%s has no version yet: waiting for its trainer to publish one", model)
            says_so_at = inf
        time.sleep(0.2)
