"""Imports run one way, and each outside library is known to as few folders as possible.

    cli → integrations → api → runtime → reshard → memory → transport → protocol
    tests/sim, runtime → server, worker → protocol

The modules that lie directly in the package (`tensorhub`, `api`, `aio`, …) are the layer `api`. `runtime` and `memory`
are neighbours: the worker's half of `runtime` hands the transports what `memory` has made of the tensors, and `memory`
knows nothing of it. That the server's half loads no torch is a test of its own.
"""

import sys
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from .sources import PACKAGE, Source, imports_of

BELOW: dict[str, tuple[str, ...]] = {
    "protocol": (),
    "server": ("protocol",),
    "worker": ("protocol",),
    "transport": ("protocol",),
    "memory": ("reshard", "transport", "protocol"),
    "reshard": ("memory", "transport", "protocol"),
    "runtime": ("reshard", "memory", "transport", "server", "worker", "protocol"),
    "api": ("runtime", "reshard", "memory", "transport", "server", "worker", "protocol"),
    "integrations": ("api",),  # an engine's words over the user's view, and nothing past it
    "sim": ("server", "worker", "protocol"),
    "cli": ("integrations", "api", "runtime", "reshard", "memory", "transport", "server", "worker", "protocol"),
}

LIBRARIES: dict[str, tuple[str, ...]] = {
    "msgspec": ("protocol", "server", "worker", "sim", "transport", "memory", "reshard", "runtime", "api", "cli"),
    "xxhash": ("memory", "reshard"),
    "cuda": ("memory",),
    "numpy": ("memory", "reshard", "integrations"),
    "torch": ("memory", "reshard", "integrations"),
    "aiohttp": ("runtime",),
    "uvloop": ("runtime",),
    "prometheus_client": ("runtime",),
    "opentelemetry": ("runtime",),
    "tqdm": ("api",),
    "typer": ("cli",),
    "rich": ("cli",),
    "vllm": ("integrations",),
    "safetensors": ("api", "integrations"),
    "obstore": ("api",),
    "torchft": ("integrations",),
    "ray": ("integrations",),
    "verl": ("integrations",),
    "transformers": ("integrations",),
}


def layer_of(module: str) -> str:
    """The layer that a module of the package belongs to."""
    if module.startswith("tests.sim"):
        return "sim"
    first = module.removeprefix(PACKAGE).lstrip(".").split(".")[0]
    return "cli" if first == "__main__" else first if first in BELOW else "api"


def layer_violations(source: Source) -> list[str]:
    """Imports that run the wrong way, or bring a library where it is not wanted."""
    here = layer_of(source.module)
    wrong = []
    for found in imports_of(source):
        top = found.module.split(".")[0]
        if top == PACKAGE:
            # `from tensorhub import core` names a layer too; `from tensorhub import open` is the api
            deep = f"{found.module}.{found.name}" if found.name and found.module == PACKAGE else found.module
            there = layer_of(deep)
            if there != here and there not in BELOW[here]:
                wrong.append(f"{source.at(found.node)}: {here} may not import {there} ({deep})")
        elif top not in sys.stdlib_module_names and top != "tests" and here not in LIBRARIES.get(top, ()):
            known = ", ".join(LIBRARIES.get(top, ())) or "nobody: add it to LIBRARIES with thought"
            wrong.append(f"{source.at(found.node)}: {here} may not import {top} (who may: {known})")
    return wrong


def circle_imports(files: Sequence[Source]) -> list[str]:
    """No imports run in a circle; at most the first that is found."""
    known = {source.module for source in files}
    imported: dict[str, list[str]] = {}
    for source in files:
        names = [(found.module, f"{found.module}.{found.name}") for found in imports_of(source)]
        modules = [deep if deep in known else module for module, deep in names]
        imported[source.module] = [module for module in modules if module in known and module != source.module]
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return [f"imports run in a circle: {' → '.join(reversed(error.args[1]))}"]
    return []
