"""Imports run one way, and each outside library is known to as few folders as possible.

    cli → lab → demo → integrations → api → runtime → memory → transport → core        sim → core

The modules that lie directly in the package (`tensorhub`, `api`, `aio`, …) are the layer `api`. `runtime` and `memory`
are neighbours: the worker's half of `runtime` hands the transports what `memory` has made of the tensors, and `memory`
knows nothing of it. That the server's half loads no torch is a test of its own.
"""

import sys

from .sources import PACKAGE, Source, imports_of

BELOW: dict[str, tuple[str, ...]] = {
    "core": (),
    "transport": ("core",),
    "memory": ("transport", "core"),
    "runtime": ("memory", "transport", "core"),
    "api": ("runtime", "memory", "transport", "core"),
    "integrations": ("api",),  # an engine's words over the user's view, and nothing past it
    "demo": ("integrations", "api", "core"),
    "lab": ("demo", "api", "runtime", "memory", "transport", "core"),  # the other strategies borrow the transport
    "sim": ("core",),
    "cli": ("lab", "demo", "integrations", "api", "runtime", "memory", "transport", "core", "sim"),
}

LIBRARIES: dict[str, tuple[str, ...]] = {
    "msgspec": ("core", "sim", "transport", "memory", "runtime", "api", "cli", "demo", "lab"),
    "xxhash": ("memory",),
    "cuda": ("memory",),
    "numpy": ("memory", "integrations", "demo", "lab"),
    "torch": ("memory", "integrations", "demo", "lab"),
    "aiohttp": ("runtime",),
    "uvloop": ("runtime",),
    "typer": ("cli",),
    "rich": ("cli", "demo", "lab"),
    "matplotlib": ("demo", "lab"),
    "vllm": ("integrations", "demo"),
    "safetensors": ("cli", "integrations", "demo"),
    "torchft": ("integrations",),
    "ray": ("integrations",),
    "verl": ("integrations",),
    "transformers": ("integrations", "demo"),
    "tokenizers": ("demo",),
}


def layer_of(module: str) -> str:
    """The layer that a module of the package belongs to."""
    first = module.removeprefix(PACKAGE).lstrip(".").split(".")[0]
    return first if first in BELOW else "api"


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
        elif top not in sys.stdlib_module_names and here not in LIBRARIES.get(top, ()):
            known = ", ".join(LIBRARIES.get(top, ())) or "nobody: add it to LIBRARIES with thought"
            wrong.append(f"{source.at(found.node)}: {here} may not import {top} (who may: {known})")
    return wrong
